"""The loss of one micro-batch on this rank, from logits or by the fused head, with its diagnostics; no host sync."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.batch import LocalBatch
from megatron_pg.kernels import PolicyGradientLoss, PolicyLoss, Vocabulary, may_be_overwritten, policy_gradient_loss
from megatron_pg.lm_head import Head, policy_gradient_head_loss
from megatron_pg.lm_head.output_layer import HeadCall
from megatron_pg.metrics import TokenValues
from megatron_pg.step.settings import LossSettings


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchLoss:
    """What the model returns on the last stage for one micro-batch."""

    total: Tensor  # [] S, differentiable
    policy: Tensor  # [] its policy term
    partial: Tensor  # [width] float64 metrics of this rank and micro-batch
    nonfinite: Tensor  # [2] float64: number of trained tokens whose loss is not finite, first of them (inf: none)


def microbatch_loss(
    logits: Tensor, local: LocalBatch, settings: LossSettings, tp_group: ProcessGroup | None, *, grad_scale: float = 1.0
) -> MicrobatchLoss:
    """Loss and diagnostics from logits; with terms of whole sequences every context-parallel rank must call.

    Args:
        logits: [T, V / tp]. The Triton kernels write the gradient over them.
        local: this rank's slice of the micro-batch.
        settings: the loss settings.
        tp_group: tensor-parallel group.
        grad_scale: the contract's, so that the gradient is made in its final scale.
    """
    found = policy_gradient_loss(
        logits,
        PolicyLoss(settings.terms, local.fields),
        _vocabulary(logits.shape[1], settings, tp_group),
        grad_scale=grad_scale,
        entropy=settings.metrics.needs_entropy,
        inplace=settings.impl == "triton" and may_be_overwritten(logits),
        impl=settings.impl,
    )
    return _with_diagnostics(found, local, settings)


def microbatch_head_loss(
    call: HeadCall, local: LocalBatch, settings: LossSettings, *, grad_scale: float = 1.0
) -> MicrobatchLoss:
    """The same from what the output layer was called with, by the fused head.

    Args:
        call: hidden states and weight.
        local: this rank's slice of the micro-batch.
        settings: the loss settings.
        grad_scale: the contract's; the mode "forward" makes the weight gradient for it.
    """
    found = policy_gradient_head_loss(
        call.hidden,
        call.weight,
        PolicyLoss(settings.terms, local.fields),
        _vocabulary(len(call.weight), settings, call.tp_group),
        Head(
            mode=settings.head_mode,
            backward=settings.head_backward,
            impl=settings.impl,
            sequence_parallel=call.sequence_parallel,
        ),
        rows=local.trained,
        grad_scale=grad_scale,
        entropy=settings.metrics.needs_entropy,
    )
    return _with_diagnostics(found, local, settings)


def _vocabulary(columns: int, settings: LossSettings, tp_group: ProcessGroup | None) -> Vocabulary:
    return Vocabulary.of(columns, temperature=settings.temperature, vocab_size=settings.vocab_size, tp_group=tp_group)


def _with_diagnostics(found: PolicyGradientLoss, local: LocalBatch, settings: LossSettings) -> MicrobatchLoss:
    with torch.no_grad():
        values = TokenValues(local.fields, found, settings.terms)
        fields, policy = local.fields, found.loss.detach()
        if found.kl is not None or settings.terms.entropy_coef:
            policy = torch.where(fields.mask, fields.weights * values.token_losses, 0).sum()
        return MicrobatchLoss(found.loss, policy, settings.metrics.partial(values), _count_nonfinite(values))


def _count_nonfinite(values: TokenValues) -> Tensor:
    # the log-ratio too: its clamp would hide an infinite one from the loss
    looked_at = [values.token_losses, values.result.log_ratios, values.result.kl]
    bad = values.fields.mask & ~torch.stack([torch.isfinite(v) for v in looked_at if v is not None]).all(dim=0)
    position = torch.arange(len(bad), dtype=torch.float64, device=bad.device)
    none = torch.full((1,), torch.inf, dtype=torch.float64, device=bad.device)
    return torch.stack([bad.sum().double(), torch.cat([torch.where(bad, position, none), none]).amin()])
