"""REINFORCE inside a trust region: a token is dropped when its probability itself, not the ratio, has moved too far."""

import torch
from torch import Tensor

from megatron_pg.objectives.interface.tokens import Parameters, Tokens


def dppo_tv(tokens: Tokens, parameters: Parameters) -> Tensor:
    """Loss of each token, with the total variation of the sampled token against the rest as distance.

        loss = -sg[min(r, cap)] A log π,   0 where
            A > 0 and π - π_old > delta_high,   or   A < 0 and π_old - π > delta_low

    Source: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv 2602.04879.
    """
    return kept_reinforce(tokens, parameters, *outside(tokens, parameters))


def outside(tokens: Tokens, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """[T] bool each: π above and below its trust region."""
    moved = tokens.logprobs.detach().exp() - tokens.old_logprobs.exp()
    return moved > parameters.delta_high, moved < -parameters.delta_low


def kept_reinforce(tokens: Tokens, parameters: Parameters, above: Tensor, below: Tensor) -> Tensor:
    """REINFORCE with the weight min(r, cap), 0 where A pushes a token further out of its trust region."""
    dropped = above & (tokens.advantages > 0) | below & (tokens.advantages < 0)
    weights = tokens.ratios.detach().clamp(max=parameters.cap)
    loss = -weights * tokens.advantages * tokens.weighable_logprobs
    return torch.where(dropped, 0, loss)
