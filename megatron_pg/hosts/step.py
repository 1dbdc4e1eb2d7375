"""One optimizer step in a host's loop: planned before the forwards, checked and measured before the optimizer moves.

The host decides which samples form a micro-batch and how they are laid out, and scales the returned loss. This module
returns S, the sum of w·ℓ over this rank's tokens of a micro-batch, with denominators of the whole step.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.batch import LocalBatch, pack, pack_row
from megatron_pg.declarations.corrections import CORRECTIONS
from megatron_pg.plan.plan import StepPlan
from megatron_pg.plan.planned_step import PlannedStep
from megatron_pg.plan.settings import LossSettings
from megatron_pg.rollouts.sample import Sample
from megatron_pg.step.findings import StepReport, gather_found, report_of
from megatron_pg.step.loss import Diagnostics
from megatron_pg.step.lost_peers import lost_peer_named


class HostLossError(ValueError):
    """A host has trained a step without this loss or with a part of it, or its data have an unsupported form."""

    def __init__(self, problem: str, fix: str = "Use a release of the trainer that docs/hosts lists."):
        super().__init__(problem, fix)  # as Ray makes it again in the driver

    def __str__(self) -> str:
        return " ".join(self.args)


class HostStep:
    """A step, planned by one exchange over the data-parallel group, every rank of which must make one.

    Args:
        settings: the loss settings, the same on every rank.
        samples_of: makes this rank's samples of the whole step, the same on tensor- and context-parallel peers; None on
            pipeline stages without the loss, which have no samples and plan nothing.
        data: the data-parallel group, without context-parallel ranks.
        context: context-parallel group that splits the rows; None: this rank has whole samples.
        on_policy: the model being trained has sampled; `old_logprobs` of the samples are not read.

    Raises:
        StepPlanError: on every rank, for an error of any kind on any of them.
        LostPeerError: on the ranks that survive one that was killed, failed or hangs.
    """

    def __init__(
        self,
        settings: LossSettings,
        samples_of: Callable[[], Sequence[Sample]] | None = None,
        *,
        data: ProcessGroup | None = None,
        context: ProcessGroup | None = None,
        on_policy: bool = False,
    ):
        self._settings, self._on_policy = settings, on_policy
        self._context = context if context is not None and context.size() > 1 else None
        self._data_rank = 0 if data is None else data.rank()
        self._planned = None if samples_of is None else self._plan(samples_of, data)
        batches = () if self._planned is None else self._planned.batches
        self.samples = [sample for batch in batches for sample in batch.samples]  # of this rank
        self._diagnostics: dict[LocalBatch, Diagnostics] = {}

    def _plan(self, samples_of: Callable[[], Sequence[Sample]], data: ProcessGroup | None) -> PlannedStep:
        """The step as one micro-batch."""
        settings, on_policy = self._settings, self._on_policy
        # the trainer has numbered all samples, and may have scored each sample of a rollout
        rule = replace(settings.plan_rule, numbers_may_repeat=False, one_per_rollout=("environment",))
        with lost_peer_named(lambda: "while its step was planned, before the optimizer moved"):
            return PlannedStep.of(
                lambda: [pack(samples_of(), qkv_format="thd")],
                settings,
                group=data,
                rule=rule,
                check=lambda _: _check_anchor(settings) if on_policy else None,
            )

    @property
    def plan(self) -> StepPlan | None:
        """The step's plan; None on pipeline stages without the loss."""
        return None if self._planned is None else self._planned.plan

    def weigh(self, factors: Sequence[Tensor]) -> None:
        """Multiply the weights of the objective by factors of the host, [R] for each sample's response."""
        if self._planned is not None and factors:
            self._planned.fields[0]["corrections"] = torch.cat([*factors]).double()

    def slice(
        self,
        members: Sequence[int],  # the index of each of its samples among the step's
        padded_lengths: Sequence[int],  # positions of the whole row for each sample, and for further padding
        device: torch.device | str = "cpu",  # where the loss is computed
        *,
        side_by_side: bool = False,
    ) -> LocalBatch:
        """This rank's part of a micro-batch.

        With `side_by_side`, each sample has its own row, all of one length, and the loss takes positions [s, b] in the
        order of Megatron's layers: the first of every row, then the second of every row.
        """
        if self._planned is None:
            raise HostLossError("this pipeline stage has no loss, so it has no micro-batch.", "Call on the last stage.")
        samples, size = [self.samples[i] for i in members], self._context.size() if self._context else 1
        if side_by_side:
            batch = pack(samples, qkv_format="bshd", cp_size=size, max_seq_len=padded_lengths[0])
        else:
            batch = pack_row(samples, padded_lengths)
        local = self._planned.slice(batch, members, self._context, device)
        if self._on_policy:
            local = replace(local, fields=replace(local.fields, old_logprobs=None))
        return local

    def keep(self, local: LocalBatch, computed: tuple[Tensor, Diagnostics]) -> Tensor:
        """S of a micro-batch, computed by a function of `megatron_pg.step.loss`, whose diagnostics `finish` reads.

        The gradient scale of that function is the gradient of S in the host's backward, without a loss scale.
        """
        total, self._diagnostics[local] = computed
        return total

    def finish(self, *, reports: bool, has_loss: bool = True) -> StepReport | None:
        """Check the losses and combine the metrics, by one all-gather; every rank must call before the optimizer moves.

        Args:
            reports: whether this rank's sums count; the sums of a rank that holds copies of another's do not.
            has_loss: whether the loss is computed on this rank's pipeline stage.

        Returns:
            The report of the step; None where nothing was planned.

        Raises:
            NonFiniteLossError: on every rank.
            HostLossError: on every rank; the loss was not computed exactly once for every sample.
        """
        expected = len(self.samples) if has_loss else 0
        astray = abs(expected - sum(len(local.whole.samples) for local in self._diagnostics))
        with lost_peer_named(lambda: "after its forwards, before the optimizer moved"):
            gathered = gather_found(
                self._diagnostics, self._settings.metrics, reports=reports, data_rank=self._data_rank, returned=astray
            )
        if gathered.returned:
            raise HostLossError(
                f"megatron_pg's loss was not computed exactly once for every sample of the step ({gathered.returned} "
                "samples too few or too many over all ranks), so the trainer computes another loss. The optimizer has "
                "not moved.",
                "Use a release of the trainer that docs/hosts lists, without plugins that replace its loss.",
            )
        self._diagnostics = {}
        return None if self.plan is None else report_of(self.plan, self._settings.metrics, gathered)


def _check_anchor(settings: LossSettings) -> None:
    """Refuse a correction that reads log-probabilities which are known only after the forward."""
    declared = CORRECTIONS[settings.correction.name]
    chooses = declared.selection is not None and "old_logprobs" in declared.selection.reads
    if chooses or declared.factors is not None:
        raise ValueError(
            f"--pg-correction {settings.correction.name} reads old_logprobs before the forward, and the trainer has "
            "skipped the pass that computes them. Enable that pass, or remove the flag."
        )
