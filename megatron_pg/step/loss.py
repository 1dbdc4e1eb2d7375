"""The loss of one micro-batch on this rank, with its diagnostics and without a host sync.

It is computed from logits, by the fused head, or from log-probabilities.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.batch import TokenFields
from megatron_pg.batch.sequences import Sequences
from megatron_pg.declarations.aggregations import AGGREGATIONS
from megatron_pg.kernels import PolicyGradientLoss, PolicyLoss, Vocabulary, may_be_overwritten, policy_gradient_loss
from megatron_pg.lm_head import Head, policy_gradient_head_loss
from megatron_pg.lm_head.output_layer import HeadCall
from megatron_pg.metrics import TokenValues
from megatron_pg.plan.settings import LossSettings

Totals = Mapping[str, Tensor]
NONE: Totals = MappingProxyType({})


class Diagnostics(NamedTuple):
    """The diagnostics of one micro-batch's loss, kept without its graph until the end of the step."""

    policy: Tensor  # [] the policy term of S
    partial: Tensor  # [width] float64 metrics of this rank and micro-batch
    nonfinite: Tensor  # [3] float64: non-finite losses of tokens, index of the first (inf: none), other losses
    is_changed: Tensor | bool = False  # of `HeadCall`
    is_bypassed: bool = False  # whether the logits were made without the head in the output layer
    kept: Tensor | None = None  # [S] float64 tokens of each sample that the model keeps, if denominators count them


def microbatch_loss(
    logits: Tensor,
    fields: TokenFields,
    settings: LossSettings,
    tp_group: ProcessGroup | None,
    *,
    grad_scale: float = 1.0,
    totals: Totals = NONE,
) -> tuple[Tensor, Diagnostics]:
    """S (0-d, differentiable) and diagnostics from logits.

    With sequence-level terms every context-parallel rank must call. `logits` are [T, V / tp], and the Triton kernels
    write the gradient over them; of a critic they are its values [T, 1]. `grad_scale` is `LossScaling.grad_scale`, so
    that the gradient is made in its final scale. `totals` are [] each, of the other losses in S, by metric.
    """
    if settings.is_critic:
        return _with_diagnostics(PolicyLoss(settings.terms, fields)(logits[:, 0]), fields, settings, totals)
    vocabulary = vocabulary_of(logits.shape[1], settings, tp_group)
    computed = policy_gradient_loss(
        logits,
        PolicyLoss(settings.terms, fields),
        vocabulary,
        grad_scale=grad_scale,
        entropy=settings.metrics.needs_entropy,
        inplace=settings.impl == "triton" and may_be_overwritten(logits),
        impl=settings.impl,
    )
    return _with_diagnostics(computed, fields, settings, totals, vocabulary.size)


def microbatch_head_loss(
    call: HeadCall,
    fields: TokenFields,
    rows: Tensor,
    settings: LossSettings,
    *,
    grad_scale: float = 1.0,
    totals: Totals = NONE,
    teacher_weight: Tensor | None = None,
) -> tuple[Tensor, Diagnostics]:
    """S and diagnostics by the fused head, from a call of the output layer; as `microbatch_loss`.

    `rows` are [n] int64, the trained rows of the fields (`LocalBatch.trained`). The modes "forward" and "scaled_exp"
    make the weight gradient for `grad_scale`. `teacher_weight` is that of `policy_gradient_head_loss`.
    """
    vocabulary = vocabulary_of(len(call.weight), settings, call.tp_group, call.softcap)
    computed = policy_gradient_head_loss(
        call.hidden,
        call.weight,
        PolicyLoss(settings.terms, fields),
        vocabulary,
        head_of(call, settings, has_sampling_mask=fields.sampling_mask is not None),
        rows=rows,
        grad_scale=grad_scale,
        entropy=settings.metrics.needs_entropy,
        teacher_weight=teacher_weight,
    )
    total, diagnostics = _with_diagnostics(computed, fields, settings, totals, vocabulary.size)
    return total, diagnostics._replace(is_changed=call.is_changed)


def microbatch_logprobs_loss(
    logprobs: Tensor, entropy: Tensor | None, fields: TokenFields, settings: LossSettings
) -> tuple[Tensor, Diagnostics]:
    """S and diagnostics from log-probabilities [T], in nats and at the settings' temperature, both differentiable.

    Of a critic they are its values. The entropy is [T] nats, differentiable where it is in the loss; None where nothing
    reads it.
    """
    return _with_diagnostics(PolicyLoss(settings.terms, fields)(logprobs, entropy), fields, settings, NONE)


def vocabulary_of(
    columns: int, settings: LossSettings, tp_group: ProcessGroup | None, softcap: float | None = None
) -> Vocabulary:
    """The columns of the logits; `softcap`: of the output layer, whose product alone made them."""
    known = Vocabulary.of(columns, temperature=settings.temperature, vocab_size=settings.vocab_size, tp_group=tp_group)
    return replace(known, softcap=softcap or settings.softcap)


def head_of(call: HeadCall, settings: LossSettings, *, has_sampling_mask: bool = False) -> Head:
    """The options of the fused head for a call of the output layer."""
    mode = settings.masked_head_mode if has_sampling_mask else settings.head_mode
    return Head(
        mode=mode or "forward",
        backward=settings.head_backward,
        impl=settings.impl,
        sequence_parallel=call.sequence_parallel,
    )


def _with_diagnostics(
    computed: PolicyGradientLoss,
    fields: TokenFields,
    settings: LossSettings,
    totals: Totals,
    vocab_size: int | None = None,
) -> tuple[Tensor, Diagnostics]:
    with torch.no_grad():
        policy = computed.loss.detach()
        fields = replace(fields, old_logprobs=computed.logprobs) if fields.old_logprobs is None else fields
        values = TokenValues(fields, computed, settings.terms, totals, vocab_size)
        if settings.terms.further:
            policy = torch.where(fields.objective_mask, fields.weights * values.token_losses, 0).sum()
        kept = None
        if settings.counts_after_forward:
            kept = _count_kept(values)
            if AGGREGATIONS[settings.aggregation].unit != "token":  # a rollout that is rejected whole has no weight
                fields = replace(fields, weights=torch.where(values.corrections == 0, 0, fields.weights))
                values = replace(values, fields=fields)
        return computed.loss, Diagnostics(policy, settings.metrics.partial(values), _count_nonfinite(values), kept=kept)


def _count_kept(values: TokenValues) -> Tensor:
    """[S] the objective's tokens of each sample that its correction keeps; a collective under context parallelism."""
    sequences, kept = cast(Sequences, values.fields.sequences), values.fields.objective_mask & (values.corrections != 0)
    counts = torch.zeros(len(sequences.lengths), dtype=torch.float64, device=kept.device)
    return sequences.over_ranks(counts.index_add_(0, sequences.slots, kept.double())[:-1].clone())


def _count_nonfinite(values: TokenValues) -> Tensor:
    # the log-ratio too: its clamp hides an infinite value from the loss
    values_of_tokens = [values.token_losses[None], values.result.log_ratios[None], values.result.term_losses]
    bad = values.fields.mask & ~torch.isfinite(torch.cat([v for v in values_of_tokens if v is not None])).all(dim=0)
    position = torch.arange(len(bad), dtype=torch.float64, device=bad.device)
    none = torch.full((1,), torch.inf, dtype=torch.float64, device=bad.device)
    further = [~torch.isfinite(total) for total in values.totals.values()]
    counted = torch.stack(further).sum() if further else bad.new_zeros(())
    first = torch.cat([torch.where(bad, position, none), none]).amin()
    return torch.stack([bad.sum().double(), first, counted.double()])
