"""The loss of one micro-batch on this rank, from logits, by the fused head or from log-probabilities, with its diagnostics; no host sync."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.batch import LocalBatch
from megatron_pg.kernels import PolicyGradientLoss, PolicyLoss, Vocabulary, may_be_overwritten, policy_gradient_loss
from megatron_pg.lm_head import Head, policy_gradient_head_loss
from megatron_pg.lm_head.output_layer import HeadCall
from megatron_pg.metrics import TokenValues
from megatron_pg.plan.settings import LossSettings

Totals = Mapping[str, Tensor]
NONE: Totals = MappingProxyType({})


class Diagnostics(NamedTuple):
    """What is kept of one micro-batch's loss until the end of the step, without its graph."""

    policy: Tensor  # [] the policy term of S
    partial: Tensor  # [width] float64 metrics of this rank and micro-batch
    nonfinite: Tensor  # [3] float64: trained tokens whose loss is not finite, first of them (inf: none), further losses that are not
    is_changed: Tensor | bool = False  # of `HeadCall`
    is_bypassed: bool = False  # whether the logits were made without the head that is in the output layer


def microbatch_loss(
    logits: Tensor,
    local: LocalBatch,
    settings: LossSettings,
    tp_group: ProcessGroup | None,
    *,
    grad_scale: float = 1.0,
    totals: Totals = NONE,
) -> tuple[Tensor, Diagnostics]:
    """S (0-d, differentiable) and diagnostics from logits; with terms of whole sequences every context-parallel rank must call.

    Args:
        logits: [T, V / tp]. The Triton kernels write the gradient over them.
        local: this rank's slice of the micro-batch.
        settings: the loss settings.
        tp_group: tensor-parallel group.
        grad_scale: the contract's, so that the gradient is made in its final scale.
        totals: [] each, of the losses that S has further, by metric.
    """
    vocabulary = _vocabulary(logits.shape[1], settings, tp_group)
    found = policy_gradient_loss(
        logits,
        PolicyLoss(settings.terms, local.fields),
        vocabulary,
        grad_scale=grad_scale,
        entropy=settings.metrics.needs_entropy,
        inplace=settings.impl == "triton" and may_be_overwritten(logits),
        impl=settings.impl,
    )
    return _with_diagnostics(found, local, settings, totals, vocabulary.size)


def microbatch_head_loss(
    call: HeadCall,
    local: LocalBatch,
    settings: LossSettings,
    *,
    grad_scale: float = 1.0,
    totals: Totals = NONE,
    teacher_weight: Tensor | None = None,
) -> tuple[Tensor, Diagnostics]:
    """The same from what the output layer was called with, by the fused head.

    Args:
        call: hidden states and weight.
        local: this rank's slice of the micro-batch.
        settings: the loss settings.
        grad_scale: the contract's; the modes "forward" and "odds" make the weight gradient for it.
        totals: as in `microbatch_loss`.
        teacher_weight: as in `policy_gradient_head_loss`.
    """
    vocabulary = _vocabulary(len(call.weight), settings, call.tp_group)
    found = policy_gradient_head_loss(
        call.hidden,
        call.weight,
        PolicyLoss(settings.terms, local.fields),
        vocabulary,
        head_of(call, settings),
        rows=local.trained,
        grad_scale=grad_scale,
        entropy=settings.metrics.needs_entropy,
        teacher_weight=teacher_weight,
    )
    total, diagnostics = _with_diagnostics(found, local, settings, totals, vocabulary.size)
    return total, diagnostics._replace(is_changed=call.is_changed)


def microbatch_logprobs_loss(
    logprobs: Tensor, entropy: Tensor | None, local: LocalBatch, settings: LossSettings
) -> tuple[Tensor, Diagnostics]:
    """The same from log-probabilities that the caller has made.

    Args:
        logprobs: [T] nats, differentiable, at the settings' temperature.
        entropy: [T] nats; differentiable where it is in the loss, None where nothing reads it.
        local: this rank's slice of the micro-batch.
        settings: the loss settings.
    """
    return _with_diagnostics(PolicyLoss(settings.terms, local.fields)(logprobs, entropy), local, settings, NONE)


def _vocabulary(columns: int, settings: LossSettings, tp_group: ProcessGroup | None) -> Vocabulary:
    return Vocabulary.of(columns, temperature=settings.temperature, vocab_size=settings.vocab_size, tp_group=tp_group)


def head_of(call: HeadCall, settings: LossSettings) -> Head:
    """How the fused head takes a call of the output layer."""
    return Head(
        mode=settings.head_mode,
        backward=settings.head_backward,
        impl=settings.impl,
        sequence_parallel=call.sequence_parallel,
    )


def _with_diagnostics(
    found: PolicyGradientLoss, local: LocalBatch, settings: LossSettings, totals: Totals, vocab_size: int | None = None
) -> tuple[Tensor, Diagnostics]:
    with torch.no_grad():
        fields, policy = local.fields, found.loss.detach()
        fields = replace(fields, old_logprobs=found.logprobs) if fields.old_logprobs is None else fields
        values = TokenValues(fields, found, settings.terms, totals, vocab_size)
        if settings.terms.further:
            policy = torch.where(fields.of_policy.mask, fields.weights * values.token_losses, 0).sum()
        return found.loss, Diagnostics(policy, settings.metrics.partial(values), _count_nonfinite(values))


def _count_nonfinite(values: TokenValues) -> Tensor:
    # the log-ratio too: its clamp would hide an infinite one from the loss
    looked_at = [values.token_losses[None], values.result.log_ratios[None], values.result.term_losses]
    bad = values.fields.mask & ~torch.isfinite(torch.cat([v for v in looked_at if v is not None])).all(dim=0)
    position = torch.arange(len(bad), dtype=torch.float64, device=bad.device)
    none = torch.full((1,), torch.inf, dtype=torch.float64, device=bad.device)
    further = [~torch.isfinite(total) for total in values.totals.values()]
    counted = torch.stack(further).sum() if further else bad.new_zeros(())
    first = torch.cat([torch.where(bad, position, none), none]).amin()
    return torch.stack([bad.sum().double(), first, counted.double()])
