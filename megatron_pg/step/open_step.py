"""Open steps: rollouts are trained as they arrive, and the sum is divided once, when the step's numbers are known.

    add      forward and backward of what has arrived on this rank: no data-parallel rank waits for another
    close    the metadata exchange, the factor c/N, checks, the reduction of gradients, finalize, metrics
    abandon  as if the step had not begun

`megatron_pg.plan.open_plan` explains the weights.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from megatron_pg.batch import LocalBatch, PackedBatch
from megatron_pg.plan.collectives import all_gather_rows, all_reduced, broadcast_bytes
from megatron_pg.plan.documents import schedulable_count
from megatron_pg.plan.errors import ScheduleError, StepPlanError, lost_peer_named, message_of
from megatron_pg.plan.open_plan import OpenPlan
from megatron_pg.plan.planned_step import PlannedStep
from megatron_pg.plan.settings import LossSettings
from megatron_pg.rollouts.fields import Id
from megatron_pg.step.checks import check_agreement
from megatron_pg.step.findings import StepReport, Summary, gather, report_of
from megatron_pg.step.loss_scaling import LossScaling
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
    run: Callable[[list[LocalBatch], LossScaling], object]  # the schedule over them
    end: Callable[[StepReport | None], None]  # called with the report, None if the step was abandoned


class OpenStep:
    """An optimizer step that trains rollouts while others still arrive; `PolicyGradientStep.open_step` makes it.

        gradient = c/N · Σ_adds Σ_t ∇ℓ_t / (c·m),   1/(N·m): the weight of the token in a closed step

    A rollout is added with all its samples, and with a mean over prompts a group with all its rollouts. Weights must
    not change between `open_step` and `close`. Numbers of adds and micro-batches are each data-parallel rank's own.
    """

    def __init__(self, parts: StepParts, call: ScheduleCall, expected: int):
        self._parts, self._call = parts, call
        self._plan = OpenPlan(parts.settings, expected)
        self._error: BaseException | None = None  # of an add
        self._is_open, self._has_ended = True, False
        self._digests: list[bytes] = []  # of all micro-batches and their adds, in order
        self._kept: list[Tensor] = []  # of the adds, on the last pipeline stage
        metrics = parts.settings.metrics
        self._found = Summary.of({}, metrics, reports=self._reports)
        begin_gradients(call.chunks)

    def agree(self, arrived: Sequence[Id]) -> list[Id]:
        """The ids that the first of this rank's tensor-, context- and pipeline-parallel peers has; all peers must call.

        What has arrived is a matter of timing, so one rank decides, and its peers wait for these rollouts.

        Args:
            arrived: the ids of what has arrived on this rank; only the first peer's are used.
        """
        text = json.dumps(list(arrived)).encode()
        with lost_peer_named(lambda: "while it agreed on what has arrived"):
            for group in _peers():
                text = broadcast_bytes(text, group)
        return json.loads(text)

    def add(self, batches: Sequence[PackedBatch]) -> None:
        """Forward and backward of these micro-batches, now; data-parallel ranks may call at different times, or never.

        Args:
            batches: whole rollouts; the same on tensor-, context- and pipeline-parallel peers, which call together.

        Raises:
            StepPlanError: the samples are not valid, or a rollout was added before. `close` then raises on every rank.
            ScheduleError: the step has ended, or an earlier add failed.
            LostPeerError: another rank was lost.
        """
        if not self._is_open or self._error is not None:
            raise ScheduleError("add: this open step has ended or failed. Call close() or abandon() on every rank.")
        if not batches:
            return
        try:
            with lost_peer_named(lambda: "in an add of its open step"):
                planned = self._plan.add(batches, self._check)
                self._digests += [b"add", *(batch.digest for batch in planned.batches)]
                self._found = self._found.plus(self._train(planned), self._parts.settings.metrics)
        except BaseException as error:
            self._error = error
            raise

    def close(self, rest: Sequence[PackedBatch] = ()) -> StepReport:
        """End the step: exchange, checks, one division, the reduction and finalize; every rank must call.

        Args:
            rest: micro-batches that run after the exchange, so their tokens may be of any loss term; the same on
                tensor-, context- and pipeline-parallel peers. The other ranks may have other numbers of them.

        Returns:
            The report, also given to `on_report`; its plan has this rank's denominators, of the adds first.

        Raises:
            StepPlanError, ScheduleError, NonFiniteLossError: on every rank; the gradients are not valid. Call
                `abandon` on every rank.
            LostPeerError: on the ranks that survive one that was killed, failed or hangs.
        """
        if not self._is_open:
            raise ScheduleError("close: this open step has ended. Open another one.")
        self._is_open, metrics, chunks = False, self._parts.settings.metrics, self._call.chunks
        with lost_peer_named(lambda: "when its open step closed, before the optimizer moved"):
            planned = self._agreed(rest)
            factor = self._plan.expected / planned.plan.number if planned.plan.number else 0.0
            for chunk in chunks:
                chunk.scale_gradients(factor)
            found = self._found._replace(partial=metrics.rescaled(self._found.partial, factor))
            if rest:
                found = found.plus(self._train(planned), metrics)
            gathered = gather(found, data_rank=self._parts.group.rank())
            reduce_gradients(chunks)
        report = report_of(planned.plan, metrics, gathered)
        self._has_ended = True
        self._parts.end(report)
        return report

    def abandon(self) -> None:
        """Leave buffers, configuration and the next step as if this one had not begun; every rank must call.

        No collective. It is allowed after an exception, and after `close` has raised one. Random states of dropout
        stay.

        Raises:
            ScheduleError: the step has ended.
        """
        if self._has_ended:
            raise ScheduleError("abandon: this open step has ended, and its gradients may be in use.")
        self._is_open, self._has_ended = False, True
        self._parts.loss.take()
        discard_gradients(self._call.chunks)
        self._parts.end(None)

    @property
    def _reports(self) -> bool:
        return parallel_state.get_tensor_model_parallel_rank() == 0  # other ranks hold copies of its sums

    def _check(self, batches: Sequence[PackedBatch]) -> None:
        self._parts.check(batches)
        chunks = self._call.chunks
        size = chunks[0].config.microbatch_group_size_per_vp_stage if len(chunks) > 1 else None
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        if batches and (needed := schedulable_count(len(batches), num_stages=stages, group_size=size)) != len(batches):
            raise ScheduleError(
                f"{len(batches)} micro-batches are too few for the virtual pipeline stages, which need {needed}. Add "
                "more, or empty ones."
            )

    def _train(self, planned: PlannedStep) -> Summary:
        """Forward and backward of planned micro-batches. No LocalBatch outlives it."""
        local = self._parts.slices(planned)
        scaling = LossScaling(
            per_token=self._parts.settings.per_token,
            num_microbatches=len(local),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            context_parallel_size=parallel_state.get_context_parallel_world_size(),
            is_open=True,
        )
        with held_back(self._call.chunks), torch.enable_grad():
            self._parts.run(local, scaling)
        found = self._parts.loss.take()
        self._kept += [kept for each in local if each in found and (kept := found[each].kept) is not None]
        return Summary.of(found, self._parts.settings.metrics, reports=self._reports).alone()

    def _agreed(self, rest: Sequence[PackedBatch]) -> PlannedStep:
        """The step's plan, after the exchange and the comparison of peers."""
        group = self._parts.group
        try:
            if self._parts.settings.counts_after_forward:
                self._plan.kept = self._kept_on_every_stage()
        except ScheduleError as error:
            self._error = self._error or error

        def rest_of() -> Sequence[PackedBatch]:
            if self._error is not None:
                raise ScheduleError(f"an add of the open step failed: {message_of(self._error)}") from self._error
            return rest

        try:
            planned = self._plan.close(rest_of, self._check, group)
        except StepPlanError as failure:
            check_agreement([], None, failure, group)
            raise
        digests = [*self._digests, b"rest", *(batch.digest for batch in planned.batches)]
        check_agreement(digests, planned.plan, None, group)
        return planned

    def _kept_on_every_stage(self) -> Tensor:
        """[S] int64: the tokens of each added sample that the model has kept, from the last pipeline stage."""
        group, counts = parallel_state.get_pipeline_model_parallel_group(), torch.zeros_like(self._plan.kept)
        sizes = all_gather_rows(torch.tensor([len(counts)]), group).flatten().tolist()
        if len(set(sizes)) > 1:
            raise ScheduleError(f"the pipeline stages of one rank have added {sizes} samples. Add the same on all.")
        if self._kept and self._error is None:
            counts = torch.cat(self._kept).long().cpu()
        return all_reduced(counts, ReduceOp.SUM, group)


def _peers() -> tuple[ProcessGroup, ...]:
    """The groups over which the first peer's value reaches every peer, one after another."""
    return (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
