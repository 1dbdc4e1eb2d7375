"""The clipped surrogate of a whole sequence by the geometric mean of its tokens' clipped ratios."""

from typing import cast

import torch
from torch import Tensor

from megatron_pg.objectives.interface.tokens import Parameters, Tokens, bounded, ratio


def gmpo(tokens: Tokens, parameters: Parameters) -> Tensor:
    """Loss of each token, the same for all tokens of a sequence, which has one advantage.

        loss = -G A,   G = exp(average of clipped(log r) over the trained tokens of the whole sequence)
        clipped(d) = min(d, eps_high) where A >= 0,   else max(d, -eps_low)

    Each token's gradient is -G A times the average of its sequence's weights, where it is not clipped; the bounds are
    inclusive. The logarithm of G is clamped to ±20, and beyond there is no gradient.

    Source: Geometric-Mean Policy Optimization, arXiv 2507.20673.
    """
    return -ratio(cast(Tensor, tokens.sequence_average)) * cast(Tensor, tokens.sequence_advantages)


def averaged(tokens: Tokens, parameters: Parameters) -> Tensor:
    """[T] log r of each token, clipped on the side towards which A moves it: what is averaged over its sequence."""
    raised, lowered = (
        bounded(tokens.log_ratios, high=parameters.eps_high),
        bounded(tokens.log_ratios, low=-parameters.eps_low),
    )
    return torch.where(tokens.advantages < 0, lowered, raised)


def outside(tokens: Tokens, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """[T] bool each: log r above and below its bounds, for both signs of A."""
    return tokens.log_ratios > parameters.eps_high, tokens.log_ratios < -parameters.eps_low
