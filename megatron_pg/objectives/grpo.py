"""The clipped surrogate of PPO, which GRPO and DAPO share."""

import torch
from torch import Tensor

from megatron_pg.objectives.interface.tokens import Parameters, Tokens, bounded


def grpo(tokens: Tokens, parameters: Parameters) -> Tensor:
    """Loss of each token; the bounds are inclusive, so a token exactly on one keeps its gradient.

        loss = -min(r A, clip(r, 1 - clip_eps_low, 1 + clip_eps_high) A)

    Source: PPO, arXiv 1707.06347; GRPO, arXiv 2402.03300; unequal bounds: DAPO, arXiv 2503.14476.
    """
    return clipped_surrogate(tokens.ratios, tokens.advantages, parameters)


def clipped_surrogate(ratios: Tensor, advantages: Tensor, parameters: Parameters) -> Tensor:
    """-min(r A, clip(r) A), for ratios of tokens or of sequences."""
    clipped = bounded(ratios, 1.0 - parameters.clip_eps_low, 1.0 + parameters.clip_eps_high)
    return -torch.minimum(ratios * advantages, clipped * advantages)


def outside(tokens: Tokens, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """[T] bool each: r above and below the clip interval, for both signs of A."""
    return tokens.ratios > 1 + parameters.clip_eps_high, tokens.ratios < 1 - parameters.clip_eps_low
