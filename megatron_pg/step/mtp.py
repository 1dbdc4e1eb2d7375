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

from megatron_pg.batch.slicing import DepthFields, Remote
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
from megatron_pg.plan.plan import StepPlan
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


class Policy(NamedTuple):
    """The policy's own rows of a micro-batch, before its loss may overwrite them; detached."""

    values: Tensor  # [T, V / tp] logits, or [T, H] hidden states
    remote: Tensor  # of other context-parallel ranks, as in `Remote`

    @classmethod
    def of(cls, values: Tensor, remote: Remote) -> "Policy":
        """Every context-parallel rank must call."""
        return cls(values.detach(), remote.exchange(values.detach()))

    def at(self, sources: Tensor) -> Tensor:
        """A copy of the rows [n] of `DepthFields.sources`."""
        is_here = sources < len(self.values)
        here = self.values.index_select(0, torch.where(is_here, sources, 0))
        if not len(self.remote):
            return here
        there = self.remote.index_select(0, torch.where(is_here, 0, sources - len(self.values)))
        return torch.where(is_here[:, None], here, there)


@dataclass(slots=True, eq=False)
class _PolicyLogits:
    """A teacher whose logits are stored."""

    logits: Tensor  # [n, V / tp], capped and with padding hidden
    form: Form = FORWARD

    def of(self, chunk: slice, student: Tensor) -> Tensor:
        return self.logits[chunk]


def depth_divergence(
    logits: Tensor, policy: Policy, depth: DepthFields, settings: LossSettings, tp_group: ProcessGroup | None
) -> DepthLoss:
    """One depth's divergence from the policy, from logits [T, V / tp]."""
    vocabulary = replace(vocabulary_of(logits.shape[1], settings, tp_group), temperature=1.0)
    student, targets = logits.index_select(0, depth.trained), depth.targets.index_select(0, depth.trained)
    if not len(student):  # nothing to launch, and parameters with a gradient of 0
        nothing = student.sum(dim=1)
        return _weighted(CrossEntropy(nothing, nothing > 0), depth)
    teacher = policy.at(depth.sources)
    teacher = teacher if vocabulary.softcap is None else vocabulary.capped(compute_dtype(teacher))
    reader = reader_of(settings.impl, vocabulary, targets, _PolicyLogits(vocabulary.hide_padding(teacher)))
    with torch.cuda.device_of(student):
        outputs = read(student, reader, inplace=settings.impl == "triton")
    return _weighted(_of_outputs(*outputs), depth)


def depth_head_divergence(call: HeadCall, policy: Policy, depth: DepthFields, settings: LossSettings) -> DepthLoss:
    """One depth's divergence from the policy by the fused head; both make their logits with the weight of `call`."""
    vocabulary = replace(vocabulary_of(len(call.weight), settings, call.tp_group, call.softcap), temperature=1.0)
    hidden = enter(call.hidden, call.tp_group, call.sequence_parallel).flatten(0, -2)
    states, rows = policy.at(depth.sources), depth.trained
    slots = torch.arange(len(rows), device=rows.device)
    weight, cap = call.weight.detach(), vocabulary.softcap
    teacher = Teacher(form=FORWARD, slots=slots, states=states, weight=weight, softcap=cap)
    targets, head = depth.targets.index_select(0, rows), head_of(call, settings)
    return _weighted(_of_outputs(*rows_of(hidden, call.weight, targets, rows, vocabulary, head, teacher)), depth)


def _of_outputs(logprobs: Tensor, entropy: Tensor, divergence: Tensor, totals: Tensor) -> CrossEntropy:
    return CrossEntropy(divergence, CrossEntropy.of(logprobs, totals).is_likeliest)


def _weighted(cross_entropies: CrossEntropy, depth: DepthFields) -> DepthLoss:
    losses, rows = cross_entropies.losses.detach(), depth.trained
    return DepthLoss(
        (depth.weights.index_select(0, rows).to(losses.dtype) * cross_entropies.losses).sum(),
        losses.new_zeros(len(depth.targets)).index_copy_(0, rows, losses),
        cross_entropies.is_likeliest.sum(),
    )


def totals_of(depths: Sequence[DepthLoss], plan: StepPlan, factor: float) -> dict[str, Tensor]:
    """This micro-batch's part of the loss and of the fraction of accepted tokens, for the metrics; `factor` is λ."""
    if not depths:
        return {}
    accepted = torch.stack([depth.accepted for depth in depths]).sum().double()
    loss = torch.stack([depth.total.detach() for depth in depths]).sum()
    return {"mtp_loss": loss, "loss": factor * loss, "mtp_acceptance": accepted / max(sum(plan.depth_counts), 1)}
