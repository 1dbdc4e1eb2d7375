"""The value loss of PPO's critic, clipped or not."""

import torch
from torch import Tensor

from megatron_pg.objectives.interface.tokens import Parameters, Tokens, bounded


def value_loss(tokens: Tokens, parameters: Parameters) -> Tensor:
    """Loss of each token; where the clipped square is the larger one, v has no gradient.

        loss = 1/2 max((v - R)^2, (v_c - R)^2),   v_c = v held to [v_old - clip, v_old + clip]

    Source: PPO, arXiv 1707.06347; the clip is of its authors' code.
    """
    plain, clipped = _squares(tokens, parameters)
    return torch.where(clipped > plain, clipped.detach(), plain) / 2


def outside(tokens: Tokens, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """[T] bool each: tokens without gradient, whose value has risen and fallen."""
    plain, clipped = _squares(tokens, parameters)
    return (clipped > plain) & (tokens.log_ratios > 0), (clipped > plain) & (tokens.log_ratios < 0)


def _squares(tokens: Tokens, parameters: Parameters) -> tuple[Tensor, Tensor]:
    values, old, returns = tokens.logprobs, tokens.old_logprobs, tokens.advantages
    held = bounded(values, old - parameters.clip, old + parameters.clip)
    return (values - returns).square(), (held - returns).square()
