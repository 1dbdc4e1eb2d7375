"""REINFORCE inside a trust region by the KL divergence of the sampled token against the rest."""

import torch
from torch import Tensor

from megatron_pg.objectives.dppo_tv import kept_reinforce
from megatron_pg.objectives.interface.tokens import Parameters, Tokens


def dppo_kl(tokens: Tokens, parameters: Parameters) -> Tensor:
    """Loss of each token, with the KL divergence of the sampled token against the rest as distance.

        D = π_old log(π_old / π) + (1 - π_old) log((1 - π_old) / (1 - π))
        loss = -sg[min(r, cap)] A log π,   0 where
            A > 0, π > π_old and D > delta_high,   or   A < 0, π < π_old and D > delta_low

    Source: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv 2602.04879.
    """
    return kept_reinforce(tokens, parameters, *outside(tokens, parameters))


def outside(tokens: Tokens, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """[T] bool each: π above and below its trust region."""
    new, old = tokens.logprobs.detach().clamp(max=0), tokens.old_logprobs  # rounding may lift log π above 0
    divergence = token_divergence(old, new)
    return ((new > old) & (divergence > parameters.delta_high), (new < old) & (divergence > parameters.delta_low))


def token_divergence(old: Tensor, new: Tensor) -> Tensor:
    """KL over the token and all others, p log(p / q) + (1 - p) log((1 - p) / (1 - q)), from log p and log q."""
    rest = -torch.expm1(old)  # 1 - p
    # a rest of 0 contributes 0, although its logarithm is infinite
    return old.exp() * (old - new) + torch.where(rest > 0, rest * (_log1mexp(old) - _log1mexp(new)), 0)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x <= 0, to full precision near 0 and far below."""
    return torch.where(x > -0.6931471805599453, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))
