"""Open steps: rollouts are trained as they arrive, and the sum is divided once, when the step's numbers are known.

    add      forward and backward of what has arrived on this rank: no data-parallel rank waits for another
    close    the metadata exchange, the factor c/N, checks, the reduction of gradients, finalize, metrics
    abandon  as if the step had not begun

`megatron_pg.plan.open_plan` explains the weights.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from torch.distributed import ProcessGroup

from megatron_pg.batch import LocalBatch, PackedBatch
from megatron_pg.plan.collectives import broadcast_text
from megatron_pg.plan.errors import ScheduleError, message_of
from megatron_pg.plan.open_plan import OpenPlan
from megatron_pg.plan.planned_step import PlannedStep
from megatron_pg.plan.settings import LossSettings
from megatron_pg.step.checks import planned_alike
from megatron_pg.step.findings import StepReport, gather_found, report_of
from megatron_pg.step.loss import Diagnostics
from megatron_pg.step.lost_peers import lost_peer_named
from megatron_pg.step.model_loss import ModelLoss
from megatron_pg.step.schedule import ScheduleCall
from megatron_pg.step.synchronization import begin_gradients, discard_gradients, held_back, reduce_gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """What an open step uses of its PolicyGradientStep."""

    settings: LossSettings
    loss: ModelLoss
    group: ProcessGroup  # the ranks that contribute their own samples
    check: Callable[[Sequence[PackedBatch]], None]
    slices: Callable[[PlannedStep], list[LocalBatch]]
    run: Callable[[list[LocalBatch]], object]  # the schedule over them
    on_report: Callable[[StepReport], None]
    place: str  # the progress of the run, for messages


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Stands for a micro-batch that has run: the name of its first token with a non-finite loss."""

    name: str

    def locate(self, flat: int) -> str:
        return self.name


class OpenStep:
    """An optimizer step that trains rollouts while others still arrive; `PolicyGradientStep.open_step` makes it.

        gradient = c/N · Σ_adds Σ_t ∇ℓ_t / (c·m),   1/(N·m): the weight of the token in a closed step

    A rollout is added with all its samples, and with a mean over prompts a group with all its rollouts. Weights must
    not change before `close`.
    """

    def __init__(self, parts: StepParts, call: ScheduleCall, expected: int):
        self._parts, self._call = parts, call
        self._plan = OpenPlan(parts.settings, expected, call.weight_version)
        self._error: BaseException | None = None  # of an add
        self._is_open, self.has_ended = True, False  # a step that has failed to close has not ended
        self._digests: list[bytes] = []  # of all micro-batches and their adds, in order
        self._found: dict[_Place, Diagnostics] = {}
        begin_gradients(call.chunks)

    def agree(self, arrived: Sequence[int | str]) -> list[int | str]:
        """The ids that the first of this rank's tensor-, context- and pipeline-parallel peers has; all peers must call.

        What has arrived is a matter of timing, so one rank decides, and its peers wait for these rollouts.
        """
        chosen = json.dumps([*arrived])
        with lost_peer_named(lambda: self._parts.place):  # each group's first rank reaches the next one's
            chosen = broadcast_text(chosen, 0, parallel_state.get_tensor_model_parallel_group())
            chosen = broadcast_text(chosen, 0, parallel_state.get_context_parallel_group())
            return json.loads(broadcast_text(chosen, 0, parallel_state.get_pipeline_model_parallel_group()))

    def add(self, batches: Sequence[PackedBatch]) -> None:
        """Forward and backward of these micro-batches, now; data-parallel ranks may call at different times, or never.

        Args:
            batches: whole rollouts; the same on tensor-, context- and pipeline-parallel peers, which call together.

        Raises:
            StepPlanError: the samples are not valid, or a rollout was added before; `close` then raises on every rank.
            ScheduleError: the step has ended, or an earlier add failed.
        """
        if not self._is_open or self._error is not None:
            raise ScheduleError("add: this open step has ended or failed. Call close() or abandon() on every rank.")
        if not batches:
            return
        try:
            with lost_peer_named(lambda: self._parts.place):
                planned = self._plan.add(batches, self._check)
                self._digests += [b"add", *(batch.digest for batch in planned.batches)]
                self._train(planned)
        except BaseException as error:
            self._error = error
            raise

    def close(self, rest: Sequence[PackedBatch] = ()) -> StepReport:
        """End the step: exchange, checks, one division, the reduction and finalize; every rank must call.

        Args:
            rest: micro-batches that run after the exchange, so their tokens may be of any loss term; as in `add`.

        Returns:
            The report, also given to `on_report`; its plan has this rank's denominators, of the adds first.

        Raises:
            StepPlanError, ScheduleError, NonFiniteLossError: on every rank, which must then call `abandon`.
            LostPeerError: on the ranks that survive one that was killed, failed or hangs.
        """
        if not self._is_open:
            raise ScheduleError("close: this open step has ended. Open another one.")
        self._is_open, metrics, chunks = False, self._parts.settings.metrics, self._call.chunks
        with lost_peer_named(lambda: self._parts.place):
            planned = self._agreed(rest)
            factor = self._plan.expected / planned.plan.number if planned.plan.number else 0.0
            for chunk in chunks:
                chunk.scale_gradients(factor)
            for place, one in self._found.items():
                self._found[place] = one._replace(partial=metrics.rescaled(one.partial, factor))
            if rest:
                self._train(planned)
            reports = parallel_state.get_tensor_model_parallel_rank() == 0  # other ranks hold copies of its sums
            gathered = gather_found(self._found, metrics, reports=reports, data_rank=self._parts.group.rank())
            reduce_gradients(chunks)
        report = report_of(planned.plan, metrics, gathered)
        self.has_ended = True
        self._parts.on_report(report)
        return report

    def abandon(self) -> None:
        """Leave buffers, configuration and the next step as if this one had not begun; every rank must call.

        No collective; also after an exception of `add` or `close`. Random states of dropout stay.

        Raises:
            ScheduleError: the step has ended.
        """
        if self.has_ended:
            raise ScheduleError("abandon: this open step has ended, and its gradients may be in use.")
        self._is_open, self.has_ended = False, True
        self._parts.loss.take()
        self._error, self._found = None, {}  # a traceback holds tensors
        discard_gradients(self._call.chunks)

    def _check(self, batches: Sequence[PackedBatch]) -> None:
        self._parts.check(batches)
        schedulable = self._call.schedulable(parallel_state.get_pipeline_model_parallel_world_size())
        if batches and (needed := schedulable(len(batches))) != len(batches):
            raise ScheduleError(
                f"{len(batches)} micro-batches are too few for the virtual pipeline stages, which need {needed}. Add "
                "more, or empty ones."
            )

    def _train(self, planned: PlannedStep) -> None:
        """Forward and backward of planned micro-batches. No LocalBatch outlives it; waits for the device."""
        local = self._parts.slices(planned)
        with held_back(self._call.chunks), torch.enable_grad():
            self._parts.run(local)
        found = self._parts.loss.take()
        for batch in (each for each in local if each in found):  # none on pipeline stages without the loss
            first = float(found[batch].nonfinite[1])
            self._found[_Place(batch.locate(int(first)) if math.isfinite(first) else "")] = found[batch]

    def _agreed(self, rest: Sequence[PackedBatch]) -> PlannedStep:
        """The step's plan, after the exchange and the comparison of peers."""
        group = self._parts.group
        if self._parts.settings.counts_after_forward:
            self._count_kept()

        def rest_of() -> Sequence[PackedBatch]:
            if self._error is not None:
                raise ScheduleError(f"an add of the open step failed: {message_of(self._error)}") from self._error
            return rest

        return planned_alike(lambda: self._plan.close(rest_of, self._check, group), group, [*self._digests, b"rest"])

    def _count_kept(self) -> None:
        """Tell the plan, from the last pipeline stage, how many tokens of each added sample the model has kept."""
        group = parallel_state.get_pipeline_model_parallel_group()
        mine = [int(n) for one in self._found.values() if one.kept is not None for n in one.kept.tolist()]
        counts = json.loads(broadcast_text(json.dumps(mine), group.size() - 1, group))
        if len(counts) == sum(self._plan.sizes):
            self._plan.count_kept(torch.tensor(counts, dtype=torch.int64))
        elif self._error is None:
            self._error = ScheduleError("pipeline stages have added different numbers of samples. Add the same on all.")
