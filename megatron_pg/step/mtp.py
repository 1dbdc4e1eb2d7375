"""Multi-token prediction: its cross-entropies are added to S with their own weights.

    S += λ Σ_d Σ_t v_t ce_d(t),   v = mask / (N n_d),   n_d: tokens of the whole step that depth d of N can predict

With the policy as target, ce_d is Σ p log(p/q) instead. q is the distribution of the depth, and p that of the policy
for the same token, without gradient. No sampled label then sharpens the output layer, which both share.

Megatron itself divides by the count of the micro-batch and context-parallel slice, which is a mean of means. Depth d
predicts a response token from d positions before the position of the policy's prediction, if the sample has that
position.
Source: Better & Faster Large Language Models via Multi-token Prediction, arXiv 2404.19737; DeepSeek-V3, arXiv
2412.19437.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.batch import LocalBatch
from megatron_pg.batch.slicing import DepthFields
from megatron_pg.kernels import CrossEntropy, cross_entropy
from megatron_pg.kernels.logprobs import compute_dtype
from megatron_pg.kernels.losses import reader_of
from megatron_pg.kernels.readers import read
from megatron_pg.kernels.teacher import Form
from megatron_pg.lm_head import head_cross_entropy
from megatron_pg.lm_head.heads import rows_of
from megatron_pg.lm_head.inputs import enter
from megatron_pg.lm_head.output_layer import HeadCall
from megatron_pg.lm_head.teacher import Teacher
from megatron_pg.plan.settings import LossSettings
from megatron_pg.step.loss import head_of, vocabulary_of

FORWARD = Form("forward_kl")


class DepthLoss(NamedTuple):
    """One depth in one micro-batch on this rank."""

    total: Tensor  # [] Σ v·ce, or of the divergences, differentiable
    losses: Tensor  # [T] of the tokens, detached, 0 where nothing is trained
    accepted: Tensor  # [] int64, targets that are the most likely token


def depth_loss(logits: Tensor, depth: DepthFields, settings: LossSettings, tp_group: ProcessGroup | None) -> DepthLoss:
    """One depth from its logits [T, V / tp], over which the Triton kernels write the gradient.

    Its distribution is softmax(z) at every temperature of the rollouts.
    """
    vocabulary = replace(vocabulary_of(logits.shape[1], settings, tp_group), temperature=1.0)
    return _weighted(cross_entropy(logits, depth.targets, depth.trained, vocabulary, impl=settings.impl), depth)


def depth_head_loss(call: HeadCall, depth: DepthFields, settings: LossSettings) -> DepthLoss:
    """One depth by the fused head, from a call of the output layer; the backward recomputes the logits."""
    vocabulary = replace(vocabulary_of(len(call.weight), settings, call.tp_group, call.softcap), temperature=1.0)
    targets, rows, head = depth.targets, depth.trained, head_of(call, settings)
    return _weighted(head_cross_entropy(call.hidden, call.weight, targets, rows, vocabulary, head), depth)


@dataclass(slots=True, eq=False)
class _PolicyLogits:
    """A teacher whose logits are stored."""

    logits: Tensor  # [n, V / tp], capped and with padding hidden
    form: Form = FORWARD

    def of(self, chunk: slice, student: Tensor) -> Tensor:
        return self.logits[chunk]


def divergences(
    waiting: Sequence[Tensor | HeadCall],
    policy: Tensor | HeadCall,
    local: LocalBatch,
    settings: LossSettings,
    tp_group: ProcessGroup | None,
) -> list[DepthLoss]:
    """Every depth's divergence from the policy, before the policy's loss may overwrite its logits.

    `waiting` and `policy` are logits [T, V / tp] or calls of the output layer. Every context-parallel rank must call.
    """
    if not waiting or local.remote is None:
        return []
    with torch.no_grad():
        values = _states(policy) if isinstance(policy, HeadCall) else policy.detach()
        table = local.remote.exchange(values)
    found = []
    for made, depth in zip(waiting, local.depths, strict=True):
        is_here = depth.sources < len(values)
        rows = values.index_select(0, torch.where(is_here, depth.sources, 0))
        if len(table):
            there = table.index_select(0, torch.where(is_here, 0, depth.sources - len(values)))
            rows = torch.where(is_here[:, None], rows, there)
        if isinstance(made, HeadCall):
            logprobs, _, divergence, totals = _of_call(made, rows, depth, settings)
        else:
            logprobs, _, divergence, totals = _of_logits(made, rows, depth, settings, tp_group)
        likeliest = CrossEntropy.of(logprobs, totals).is_likeliest
        found.append(_weighted(CrossEntropy(divergence, likeliest), depth))
    return found


def _states(call: HeadCall) -> Tensor:
    return enter(call.hidden, call.tp_group, call.sequence_parallel).flatten(0, -2)


def _of_logits(
    logits: Tensor, policy: Tensor, depth: DepthFields, settings: LossSettings, tp_group: ProcessGroup | None
) -> tuple[Tensor, ...]:
    """`outputs` and `totals` of the trained rows, from the policy's logits [n, V / tp] of the same tokens."""
    vocabulary = replace(vocabulary_of(logits.shape[1], settings, tp_group), temperature=1.0)
    student, targets = logits.index_select(0, depth.trained), depth.targets.index_select(0, depth.trained)
    if not len(student):  # nothing to launch, and parameters with a gradient of 0
        return (student.sum(dim=1),) * 4
    policy = policy if vocabulary.softcap is None else vocabulary.capped(compute_dtype(policy))
    reader = reader_of(settings.impl, vocabulary, targets, _PolicyLogits(vocabulary.hide_padding(policy)))
    with torch.cuda.device_of(student):
        return read(student, reader, inplace=settings.impl == "triton")


def _of_call(call: HeadCall, policy: Tensor, depth: DepthFields, settings: LossSettings) -> tuple[Tensor, ...]:
    """`outputs` and `totals` by the fused head, from the policy's hidden states [n, H] and the weight of `call`."""
    vocabulary = replace(vocabulary_of(len(call.weight), settings, call.tp_group, call.softcap), temperature=1.0)
    slots, targets = torch.arange(len(policy), device=policy.device), depth.targets.index_select(0, depth.trained)
    teacher = Teacher(form=FORWARD, slots=slots, states=policy, weight=call.weight.detach())
    known = targets, depth.trained, vocabulary, head_of(call, settings), teacher
    return rows_of(_states(call), call.weight, *known)


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
