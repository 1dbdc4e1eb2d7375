"""The loss from log-probabilities and entropies in one launch, where `PolicyLoss`, its specification, takes 30 to 100.

So many small launches cost the host more time than the device needs for a shard of logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_pg.kernels.policy_loss import PolicyGradientLoss, PolicyLoss
from megatron_pg.kernels.terms import loss_terms, stream_losses, term_constants, term_fields, term_numbers

BLOCK = 256


def surrogate_loss(policy_loss: PolicyLoss, logprobs: Tensor, entropy: Tensor) -> PolicyGradientLoss:
    """What `policy_loss(logprobs, entropy)` is, for one that has a row and for [T] float32 each, 0 where masked."""
    loss, token_losses, log_ratios, kl = _Surrogate.apply(logprobs, entropy, policy_loss)
    streams = stream_losses(policy_loss, kl, entropy.detach())
    return PolicyGradientLoss(loss, token_losses, logprobs.detach(), log_ratios, entropy.detach(), streams)


def surrogate_and_slopes(
    policy_loss: PolicyLoss, logprobs: Tensor, entropy: Tensor
) -> tuple[PolicyGradientLoss, tuple[Tensor, Tensor]]:
    """The same without autograd, and the derivatives of the loss by each log-probability and entropy."""
    losses, token_losses, log_ratios, slope, bend, kl = _evaluate(policy_loss, logprobs, entropy)
    bend = torch.zeros_like(slope) if bend is None else bend
    streams = stream_losses(policy_loss, kl, entropy)
    return PolicyGradientLoss(losses.sum(), token_losses, logprobs, log_ratios, entropy, streams), (slope, bend)


class _Surrogate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logprobs, entropy, policy_loss):
        losses, token_losses, log_ratios, slope, bend, kl = _evaluate(policy_loss, logprobs, entropy)
        ctx.save_for_backward(slope, bend)
        ctx.mark_non_differentiable(*(values for values in (token_losses, log_ratios, kl) if values is not None))
        return losses.sum(), token_losses, log_ratios, kl

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, *_):
        slope, bend = ctx.saved_tensors
        return slope * grad_loss, None if bend is None else bend * grad_loss, None


def _evaluate(policy_loss: PolicyLoss, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor | None, ...]:
    """[T] each: weighted loss, policy term, log-ratio, the two derivatives, KL; None where there is no such term."""
    constants = term_constants(policy_loss)
    found = [True, True, True, True, constants["BONUS"], constants["KL"] is not None]
    out = torch.empty(len(found), len(logprobs), dtype=torch.float32, device=logprobs.device)
    surrogate_kernel[(triton.cdiv(len(logprobs), BLOCK),)](
        logprobs,
        entropy,
        *term_fields(policy_loss),
        out,
        len(logprobs),
        *term_numbers(policy_loss),
        1.0 / policy_loss.terms.grad_divisor,
        **constants,
        BLOCK=BLOCK,
    )
    return tuple(values if is_found else None for values, is_found in zip(out, found, strict=True))


@triton.jit(do_not_specialize=["rows"])
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
    results,
    rows,
    p0,
    p1,
    p2,
    p3,
    kl_coef,
    entropy_coef,
    slope_scale,
    ROW: tl.constexpr,
    KL: tl.constexpr,
    BONUS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Results [6, rows]: loss, policy term, log-ratio, slope_scale times the derivatives by log π and H, and KL."""
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
    policy, loss, slope, bend, kl = loss_terms(
        logprob,
        entropy,
        old_logprob,
        advantage,
        weight,
        other_logprob,
        kl_weight,
        bonus_weight,
        (p0, p1, p2, p3),
        kl_coef,
        entropy_coef,
        ROW,
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
