"""The clipped surrogate of PPO, which GRPO and DAPO share."""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # beyond it the ratio is meaningless (e^20 = 5e8): value clamped, gradient 0, counted as a metric


def grpo(log_ratios: Tensor, advantages: Tensor, *, clip_eps_low: float, clip_eps_high: float) -> Tensor:
    """Loss of each token.

        r = exp(log pi - log pi_old)
        loss = -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)

    The bounds are inclusive: a token exactly on one keeps its gradient.

    Args:
        log_ratios: [T] float32 or float64, new minus old log-probability in nats, differentiable.
        advantages: [T] same dtype, never differentiated.
        clip_eps_low: distance of the lower bound from 1, in [0, 1].
        clip_eps_high: distance of the upper bound from 1, >= 0.

    Source: PPO, arXiv 1707.06347; GRPO, arXiv 2402.03300; unequal bounds: DAPO, arXiv 2503.14476.
    """
    ratios = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratios.clamp(1.0 - clip_eps_low, 1.0 + clip_eps_high)
    return -torch.minimum(ratios * advantages, clipped * advantages)
