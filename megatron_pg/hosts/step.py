"""One optimizer step in a host's loop: planned before its forwards, checked and measured before its optimizer moves.

The host decides which samples make a micro-batch, and lays them out; it multiplies what the loss function returns. What
comes from here is S, the sum of w·ℓ over this rank's tokens of a micro-batch, whose denominators count the whole step.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.batch import LocalBatch, pack, pack_row, slice_batch
from megatron_pg.declarations.corrections import CORRECTIONS
from megatron_pg.lm_head.output_layer import HeadCall
from megatron_pg.plan.errors import lost_peer_named
from megatron_pg.plan.microbatches import count
from megatron_pg.plan.plan import StepPlan, plan_from_table
from megatron_pg.plan.selection import select
from megatron_pg.plan.settings import LossSettings
from megatron_pg.plan.support import without_missing
from megatron_pg.plan.weights import token_weights
from megatron_pg.rollouts.sample import Sample
from megatron_pg.step.findings import StepReport, gather_found, report_of
from megatron_pg.step.loss import Diagnostics, microbatch_head_loss, microbatch_logprobs_loss, microbatch_loss


class HostLossError(ValueError):
    """A host has trained a step without this loss, or with only a part of it."""


class HostStep:
    """A planned step.

    Args:
        settings: the loss settings, the same on every rank.
        samples: [S] this rank's of the whole step, the same on tensor- and context-parallel peers.
        plan: the step's plan; None on pipeline stages without the loss, which have no samples.
        fields: [sum of R] each, what the step adds to the samples' own fields.
        context: context-parallel group over which rows are cut; None: this rank has whole samples.
        on_policy: the model being trained has sampled; `old_logprobs` of the samples are not read.
        data_rank: this rank's number in the data-parallel group.
    """

    def __init__(
        self,
        settings: LossSettings,
        samples: Sequence[Sample] = (),
        plan: StepPlan | None = None,
        fields: dict[str, Tensor | None] | None = None,
        context: ProcessGroup | None = None,
        *,
        on_policy: bool = False,
        data_rank: int = 0,
    ):
        lengths = [sample.response_length for sample in samples]
        self._settings, self._samples, self.plan = settings, samples, plan
        self._context = context if context is not None and context.size() > 1 else None
        known = {name: values for name, values in (fields or {}).items() if values is not None}
        self._fields = {
            name: [values[:0], *values.split(lengths)] for name, values in known.items()
        }  # nothing, then by sample
        self._on_policy, self._data_rank = on_policy, data_rank
        self._found: dict[LocalBatch, Diagnostics] = {}
        self._sizes: dict[LocalBatch, int] = {}  # samples of each micro-batch

    @classmethod
    def planned(
        cls,
        settings: LossSettings,
        samples_of: Callable[[], Sequence[Sample]],
        *,
        data: ProcessGroup,
        context: ProcessGroup | None = None,
        on_policy: bool = False,
    ) -> "HostStep":
        """Plan a step, by one exchange over the data-parallel group, every rank of which must call.

        Args:
            settings: the loss settings.
            samples_of: makes this rank's samples; its error is raised on every rank.
            data: the data-parallel group, without context-parallel ranks.
            context: as above.
            on_policy: as above.

        Raises:
            StepPlanError: on every rank.
            LostPeerError: on the ranks that survive one that was killed, failed or hangs.
        """
        whole, counted, error = pack([], qkv_format="thd"), None, None
        try:
            whole = without_missing(pack(samples_of(), qkv_format="thd"), settings)
            counted = count([whole], settings, data)
            if on_policy:
                _check_anchor(settings)
        except Exception as failure:  # travels to the other ranks, so that all of them stop
            error = failure
        with lost_peer_named(lambda: "while its step was planned, before the optimizer moved"):
            table, factors = select([whole], counted, settings, data, error)
            # the trainer has numbered all samples, and may have scored those of a rollout one by one
            rule = replace(settings.plan_rule, numbers_may_repeat=False, one_per_rollout=("environment",))
            plan = plan_from_table(table, rule, error=error, group=data)
        fields = token_weights(whole, plan, 0, factors=factors[0], settings=settings)
        return cls(settings, whole.samples, plan, fields, context, on_policy=on_policy, data_rank=data.rank())

    def slice(
        self,
        members: Sequence[int],
        padded_lengths: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        side_by_side: bool = False,
    ) -> LocalBatch:
        """This rank's part of a micro-batch.

        Args:
            members: its samples, by their places among the step's.
            padded_lengths: positions of the whole row that each takes, and what further padding there is.
            device: where the loss is computed.
            side_by_side: each sample has a row of its own, all of one length, and the loss takes positions [s, b] as Megatron's
                layers have them: the first of every row, then the second of every row.
        """
        samples, size = [self._samples[i] for i in members], self._context.size() if self._context else 1
        if side_by_side:
            batch = pack(samples, qkv_format="bshd", cp_size=size, max_seq_len=padded_lengths[0])
        else:
            batch = pack_row(samples, padded_lengths)
        local = slice_batch(
            batch,
            {name: torch.cat([parts[0], *(parts[1 + i] for i in members)]) for name, parts in self._fields.items()},
            cp_rank=self._context.rank() if self._context else 0,
            cp_size=size,
            device=device,
            sequences=self._settings.terms.reads_sequences,
            cp_group=self._context,
        )
        if self._on_policy:
            local = replace(local, fields=replace(local.fields, old_logprobs=None))
        self._sizes[local] = len(members)
        return local

    def loss(
        self,
        local: LocalBatch,
        logits: Tensor,
        tp_group: ProcessGroup | None,
        grad_scale: float,
        *,
        is_bypassed: bool = False,
    ) -> Tensor:
        """S from logits [T, V / tp], which the Triton kernels may overwrite; with terms of whole sequences every
        context-parallel rank must call.

        `grad_scale`: the gradient that the host's backward will bring to S, but for a loss scale. `is_bypassed`: whether the logits were
        made without the head that is in the output layer, an error of `finish`.
        """
        tp_group = tp_group if tp_group is not None and tp_group.size() > 1 else None
        total, found = microbatch_loss(logits, local, self._settings, tp_group, grad_scale=grad_scale)
        self._found[local] = found._replace(is_bypassed=is_bypassed)
        return total

    def head_loss(self, local: LocalBatch, call: HeadCall, grad_scale: float) -> Tensor:
        """S from what the output layer was called with, by the fused head."""
        total, self._found[local] = microbatch_head_loss(call, local, self._settings, grad_scale=grad_scale)
        return total

    def logprobs_loss(self, local: LocalBatch, logprobs: Tensor, entropy: Tensor | None = None) -> Tensor:
        """S from log-probabilities [T] that the host has made."""
        total, self._found[local] = microbatch_logprobs_loss(logprobs, entropy, local, self._settings)
        return total

    def finish(self, *, reports: bool, has_loss: bool = True) -> StepReport | None:
        """Check the losses and combine the metrics, by one all-gather over all ranks, every one of which must call before the
        optimizer moves; None on stages without the loss.

        `reports`: whether this rank's sums count, because no other rank holds copies that do. `has_loss`: whether the loss is computed
        on this rank's pipeline stage.

        Raises:
            NonFiniteLossError: on every rank.
            HostLossError: on every rank; the loss was not computed once for every sample of every rank.
        """
        expected = len(self._samples) if has_loss else 0
        astray = abs(expected - sum(self._sizes[local] for local in self._found))
        with lost_peer_named(lambda: "behind its forwards, before the optimizer moved"):
            found = gather_found(
                self._found, self._settings.metrics, reports=reports, data_rank=self._data_rank, returned=astray
            )
        if found.returned:
            raise HostLossError(
                f"megatron_pg's loss was not computed once for every sample of the step ({found.returned} samples too few or too many over "
                "all ranks), so the trainer computes another loss. The optimizer has not moved. Use a release of the trainer that "
                "docs/hosts lists, without plugins that replace its loss."
            )
        self._found, self._sizes = {}, {}
        return None if self.plan is None else report_of(self.plan, self._settings.metrics, found)


def _check_anchor(settings: LossSettings) -> None:
    """Refuse a correction that is made from log-probabilities that are known only after the forward."""
    declared = CORRECTIONS[settings.correction.name]
    chooses = declared.selection is not None and "old_logprobs" in declared.selection.reads
    if chooses or declared.factors is not None:
        raise ValueError(
            f"--pg-correction {settings.correction.name} reads old_logprobs before the forward, and the trainer has left out "
            "the pass that makes them. Let it make them, or remove the flag."
        )
