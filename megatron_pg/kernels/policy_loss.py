"""From log-probabilities to the loss, in torch: what every implementation that ends in log-probabilities shares."""

import torch
from torch import Tensor

from megatron_pg.objectives import grpo


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    mask: Tensor,
    clip_eps_low: float,
    clip_eps_high: float,
    grad_divisor: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, token losses and log-ratios from [T] `logprobs`, whose dtype is computed in; masked tokens are selected away."""

    def select(values: Tensor) -> Tensor:
        return torch.where(mask, values.to(logprobs.dtype), 0)

    log_ratios = torch.where(mask, logprobs - select(old_logprobs), 0)
    token_losses = grpo(log_ratios, select(advantages), clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high)
    loss = (select(weights) * token_losses).sum()
    if grad_divisor != 1.0:
        loss = loss.detach() + (loss - loss.detach()) / grad_divisor
    return loss, token_losses.detach(), log_ratios.detach()
