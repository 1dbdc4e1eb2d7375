"""The clipped surrogate from log-probabilities in one launch, where `PolicyLoss`, its specification, takes thirty.

Thirty small launches cost the host more time than the device needs for a shard of logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_pg.kernels.policy_loss import PolicyGradientLoss, PolicyLoss, clip_bounds, surrogate_fields
from megatron_pg.kernels.tiles import grpo_row

BLOCK = 256


def surrogate_loss(policy_loss: PolicyLoss, logprobs: Tensor, entropy: Tensor) -> PolicyGradientLoss:
    """What `policy_loss(logprobs, entropy)` is, for a plain clipped surrogate and [T] float32 `logprobs`, 0 where masked."""
    loss, token_losses, log_ratios = _Surrogate.apply(logprobs, policy_loss)
    return PolicyGradientLoss(loss, token_losses, logprobs.detach(), log_ratios, entropy.detach())


def surrogate_and_slope(
    policy_loss: PolicyLoss, logprobs: Tensor, entropy: Tensor
) -> tuple[PolicyGradientLoss, Tensor]:
    """The same without autograd, and the derivative of the loss by each log-probability."""
    token_losses, weighted, log_ratios, slope = _evaluate(logprobs, policy_loss)
    return PolicyGradientLoss(weighted.sum(), token_losses, logprobs, log_ratios, entropy), slope


class _Surrogate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logprobs, policy_loss):
        token_losses, weighted, log_ratios, slope = _evaluate(logprobs, policy_loss)
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(token_losses, log_ratios)
        return weighted.sum(), token_losses, log_ratios

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, *_):
        (slope,) = ctx.saved_tensors
        return slope * grad_loss, None


def _evaluate(logprobs: Tensor, policy_loss: PolicyLoss) -> tuple[Tensor, ...]:
    out = torch.empty(4, len(logprobs), dtype=torch.float32, device=logprobs.device)
    surrogate_kernel[(triton.cdiv(len(logprobs), BLOCK),)](
        logprobs,
        *surrogate_fields(policy_loss),
        out,
        len(logprobs),
        *clip_bounds(policy_loss),
        -1.0 / policy_loss.terms.grad_divisor,
        BLOCK=BLOCK,
    )
    return out.unbind()


@triton.jit(do_not_specialize=["rows"])
def surrogate_kernel(
    logprobs,
    old_logprobs,
    advantages,
    weights,
    mask,
    results,
    rows,
    clip_low,
    clip_high,
    slope_scale,
    BLOCK: tl.constexpr,
):
    """results [4, rows]: loss, weight * loss, log-ratio and slope_scale * slope of each row, 0 where masked."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = row < rows
    live = here & (tl.load(mask + row, here, 0) != 0)
    weight = tl.load(weights + row, live, 0.0).to(tl.float32)
    advantage = tl.load(advantages + row, live, 0.0).to(tl.float32)
    log_ratio = tl.load(logprobs + row, live, 0.0) - tl.load(old_logprobs + row, live, 0.0).to(tl.float32)
    loss, slope = grpo_row(log_ratio, advantage, weight, clip_low, clip_high)
    tl.store(results + row, loss, here)
    tl.store(results + rows + row, weight * loss, here)
    tl.store(results + 2 * rows + row, log_ratio, here)
    tl.store(results + 3 * rows + row, slope * slope_scale, here)
