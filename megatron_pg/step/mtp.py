"""Multi-token prediction: its cross-entropies are added to S with their own weights.

    S += λ Σ_d Σ_t v_t ce_d(t),   v = mask / (N n_d),   n_d: tokens of the whole step that depth d of N can predict

Megatron itself divides by the count of the micro-batch and context-parallel slice, which is a mean of means. Depth d
predicts a response token from d positions before the position of the policy's prediction, if the sample has that
position.
Source: Better & Faster Large Language Models via Multi-token Prediction, arXiv 2404.19737; DeepSeek-V3, arXiv
2412.19437.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.batch.slicing import DepthFields
from megatron_pg.kernels import CrossEntropy, Vocabulary, cross_entropy
from megatron_pg.lm_head import head_cross_entropy
from megatron_pg.lm_head.output_layer import HeadCall
from megatron_pg.plan.settings import LossSettings
from megatron_pg.step.loss import head_of


class DepthLoss(NamedTuple):
    """One depth in one micro-batch on this rank."""

    total: Tensor  # [] Σ v·ce, differentiable
    losses: Tensor  # [T] ce, detached, 0 where nothing is trained
    accepted: Tensor  # [] int64, targets that are the most likely token


def depth_loss(logits: Tensor, depth: DepthFields, settings: LossSettings, tp_group: ProcessGroup | None) -> DepthLoss:
    """One depth from its logits [T, V / tp], over which the Triton kernels write the gradient.

    Its distribution is softmax(z) at every temperature of the rollouts.
    """
    vocabulary = Vocabulary.of(logits.shape[1], vocab_size=settings.vocab_size, tp_group=tp_group)
    return _weighted(cross_entropy(logits, depth.targets, depth.trained, vocabulary, impl=settings.impl), depth)


def depth_head_loss(call: HeadCall, depth: DepthFields, settings: LossSettings) -> DepthLoss:
    """One depth by the fused head, from a call of the output layer; the backward recomputes the logits."""
    vocabulary = Vocabulary.of(len(call.weight), vocab_size=settings.vocab_size, tp_group=call.tp_group)
    targets, rows, head = depth.targets, depth.trained, head_of(call, settings)
    return _weighted(head_cross_entropy(call.hidden, call.weight, targets, rows, vocabulary, head), depth)


def _weighted(cross_entropies: CrossEntropy, depth: DepthFields) -> DepthLoss:
    losses, rows = cross_entropies.losses.detach(), depth.trained
    return DepthLoss(
        (depth.weights.index_select(0, rows).to(losses.dtype) * cross_entropies.losses).sum(),
        losses.new_zeros(len(depth.targets)).index_copy_(0, rows, losses),
        cross_entropies.is_likeliest.sum(),
    )


def totals_of(depths: Sequence[DepthLoss], factor: float) -> dict[str, Tensor]:
    """This micro-batch's part of the loss and of the number of accepted tokens, for the metrics; `factor` is λ."""
    if not depths:
        return {}
    accepted = torch.stack([depth.accepted for depth in depths]).sum().double()
    loss = torch.stack([depth.total.detach() for depth in depths]).sum()
    return {"mtp_loss": loss, "loss": factor * loss, "mtp_accepted": accepted}
