"""The loss from log-probabilities and entropies in one launch, where `PolicyLoss`, its specification, takes 30 to 100.

So many small launches cost the host more time than the device needs for a shard of logits. A loss that reads whole sequences
takes another launch before it, `segments`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_pg.kernels.policy_loss import PolicyGradientLoss, PolicyLoss
from megatron_pg.kernels.triton.segments import (
    ADVANTAGE,
    DRIFT,
    LOG_RATIO,
    OWN,
    WEIGHT,
    SequenceFields,
    sequence_fields,
)
from megatron_pg.kernels.triton.terms import loss_terms, stream_losses, term_constants, term_fields, term_numbers
from megatron_pg.kernels.triton.tiles import FUSED

BLOCK = 256


class _PerToken(NamedTuple):
    """[T] float32 each; None where there is no such term."""

    losses: Tensor  # weighted, of all terms
    policy: Tensor
    log_ratios: Tensor
    slope: Tensor  # derivatives by log π
    bend: Tensor | None  # and by H
    kl: Tensor | None
    sequence_log_ratios: Tensor | None
    sequence_advantages: Tensor | None
    kept: Tensor | None


def surrogate_loss(policy_loss: PolicyLoss, logprobs: Tensor, entropy: Tensor) -> PolicyGradientLoss:
    """What `policy_loss(logprobs, entropy)` is, for one that has a row and for [T] float32 each, 0 where masked."""
    return PolicyGradientLoss(*_Surrogate.apply(logprobs, entropy, policy_loss))


def surrogate_and_slopes(
    policy_loss: PolicyLoss, logprobs: Tensor, entropy: Tensor
) -> tuple[PolicyGradientLoss, tuple[Tensor, Tensor]]:
    """The same without autograd, and the derivatives of the loss by each log-probability and entropy."""
    found, slope, bend = loss_and_slopes(policy_loss, logprobs, entropy)
    return found, (slope, torch.zeros_like(slope) if bend is None else bend)


class _Surrogate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logprobs, entropy, policy_loss):
        found, slope, bend = loss_and_slopes(policy_loss, logprobs, entropy)
        ctx.save_for_backward(slope, bend)
        ctx.set_materialize_grads(False)  # zeros for what has no gradient would be a launch each
        ctx.mark_non_differentiable(*(values for values in found.per_token if values is not None))
        return found.loss, *found.per_token

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, *_):
        slope, bend = ctx.saved_tensors
        return slope * grad_loss, None if bend is None else bend * grad_loss, None


def loss_and_slopes(
    policy_loss: PolicyLoss, logprobs: Tensor, entropy: Tensor
) -> tuple[PolicyGradientLoss, Tensor, Tensor | None]:
    """The loss and its derivatives by log π and by H, [T] each; None: no term reads the entropy."""
    found = _evaluate(policy_loss, logprobs, entropy)
    streams = stream_losses(policy_loss, found.kl, entropy)
    kept = None if found.kept is None else found.kept != 0
    of_sequences = found.sequence_log_ratios, found.sequence_advantages
    loss = PolicyGradientLoss(
        found.losses.sum(), found.policy, logprobs, found.log_ratios, entropy, streams, kept, *of_sequences
    )
    return loss, found.slope, found.bend


def _evaluate(policy_loss: PolicyLoss, logprobs: Tensor, entropy: Tensor) -> _PerToken:
    """All that one launch finds, or two."""
    constants, terms = term_constants(policy_loss), policy_loss.terms
    mask, of_objective = policy_loss.fields.mask, terms.objective.reads_sequences
    if terms.reads_sequences:
        sequences = sequence_fields(policy_loss, logprobs)
    else:
        sequences = SequenceFields(mask, mask, mask, {"OPSM": False, "ONE_WEIGHT": False})
    is_found = [True, True, True, True, constants["BONUS"], constants["KL"] is not None]
    is_found += [of_objective, of_objective, terms.opsm_anchor is not None]
    out = torch.empty(len(is_found), len(logprobs), dtype=torch.float32, device=logprobs.device)
    if len(logprobs):
        surrogate_kernel[(triton.cdiv(len(logprobs), BLOCK),)](
            logprobs,
            entropy,
            *term_fields(policy_loss),
            sequences.slots,
            sequences.counts,
            sequences.sums,
            out,
            len(logprobs),
            sequences.sums.shape[-1],
            *term_numbers(policy_loss),
            1.0 / terms.grad_divisor,
            terms.opsm_threshold or 0.0,
            **constants,
            SEQUENCES=terms.reads_sequences,
            **sequences.constants,
            BLOCK=BLOCK,
            **FUSED,
        )
    return _PerToken(*(values if known else None for values, known in zip(out.unbind(), is_found, strict=True)))


@triton.jit
def _average(sums, slot, known, count, sequences, KIND: tl.constexpr):
    """Of the token's sequence; 0 where there is none."""
    return (tl.load(sums + KIND * sequences + slot, known, 0.0) / count).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "sequences"])
def surrogate_kernel(
    logprobs,
    entropies,
    old_logprobs,
    advantages,
    weights,
    mask,
    other_logprobs,
    kl_weights,
    bonus_weights,
    slots,
    counts,
    sums,
    results,
    rows,
    sequences,
    p0,
    p1,
    p2,
    p3,
    kl_coef,
    entropy_coef,
    slope_scale,
    opsm_threshold,
    ROW: tl.constexpr,
    KL: tl.constexpr,
    BONUS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    OPSM: tl.constexpr,
    ONE_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Results [9, rows] in the order of `_PerToken`, with slope_scale times the derivatives."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = row < rows
    live = here & (tl.load(mask + row, here, 0) != 0)
    weight = tl.load(weights + row, live, 0.0).to(tl.float32)
    advantage = tl.load(advantages + row, live, 0.0).to(tl.float32)
    logprob = tl.load(logprobs + row, live, 0.0)
    old_logprob = tl.load(old_logprobs + row, live, 0.0).to(tl.float32)
    other_logprob = 0.0
    kl_weight = 0.0
    bonus_weight = 0.0
    entropy = 0.0
    if KL is not None:
        other_logprob = tl.load(other_logprobs + row, live, 0.0).to(tl.float32)
        kl_weight = tl.load(kl_weights + row, live, 0.0).to(tl.float32)
    if BONUS:
        entropy = tl.load(entropies + row, live, 0.0)
        bonus_weight = tl.load(bonus_weights + row, live, 0.0).to(tl.float32)
    if SEQUENCES:
        slot = tl.load(slots + row, here, sequences)
        known = slot < sequences
        count = tl.load(counts + slot, known, 1.0)
        log_ratio = _average(sums, slot, known, count, sequences, LOG_RATIO)
        reward = _average(sums, slot, known, count, sequences, ADVANTAGE)
        own = _average(sums, slot, known, count, sequences, OWN)
        of_sequence = (p0, p1, p2, p3, log_ratio, reward, count.to(tl.float32), own)
        policy, slope = ROW(logprob, old_logprob, advantage, of_sequence)
        policy = tl.where(live, policy, 0.0)  # a token that is not trained has a sequence, too
        slope = tl.where(live, slope, 0.0)
        tl.store(results + 6 * rows + row, log_ratio, here)
        tl.store(results + 7 * rows + row, reward, here)
        if OPSM:
            drift = _average(sums, slot, known, count, sequences, DRIFT)
            kept = ((advantage < 0) & (drift > opsm_threshold)) == 0
            policy = tl.where(kept, policy, 0.0)
            slope = tl.where(kept, slope, 0.0)
            tl.store(results + 8 * rows + row, kept.to(tl.float32), here)
        if ONE_WEIGHT:
            weight = tl.where(live, _average(sums, slot, known, count, sequences, WEIGHT), 0.0)
    else:
        policy, slope = ROW(logprob, old_logprob, advantage, (p0, p1, p2, p3))
    loss, slope, bend, kl = loss_terms(
        policy,
        slope,
        logprob,
        entropy,
        old_logprob,
        weight,
        other_logprob,
        kl_weight,
        bonus_weight,
        kl_coef,
        entropy_coef,
        KL,
        BONUS,
    )
    tl.store(results + row, loss, here)
    tl.store(results + rows + row, policy, here)
    tl.store(results + 2 * rows + row, logprob - old_logprob, here)
    tl.store(results + 3 * rows + row, slope * slope_scale, here)
    if BONUS:
        tl.store(results + 4 * rows + row, bend * slope_scale, here)
    if KL is not None:
        tl.store(results + 5 * rows + row, kl, here)
