"""Divergences of two policies over a few named tokens and one category for all others, which is exact and coarse.

    D(P, Q),   Q_c, P_c over c in S ∪ {tail},   Q_tail = Σ_{j∉S} q_j

Each form gives the summand of every category and its derivative by log Q_c, up to a multiple of Q_c that is the same
for all categories and cancels in the gradient of the logits.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import cast

import torch
from torch import Tensor

from megatron_pg.objectives.terms.losses import Categories, TermTokens

Form = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]  # log Q, log P, how it mixes; [T, C] each


def over_categories(form: Form) -> Callable[[TermTokens], Tensor]:
    """The divergence of a form: from `TermTokens` to [T]."""

    @wraps(form)
    def divergence(tokens: TermTokens) -> Tensor:
        known = cast(Categories, tokens.categories)
        return _Divergence.apply(known.log_q, known.log_p, known.exist, form, tokens.mixture).to(tokens.logprobs.dtype)

    return divergence


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_q, log_p, exist, form, mixture):
        values, slopes = form(log_q, log_p, mixture)
        ctx.save_for_backward(torch.where(exist, slopes, 0))
        return torch.where(exist, values, 0).sum(dim=1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (slopes,) = ctx.saved_tensors
        return grad[:, None] * slopes, None, None, None, None


def _times(probabilities: Tensor, values: Tensor) -> Tensor:
    """Their product, 0 where the probability is, however far the value."""
    return torch.where(probabilities == 0, 0, probabilities * values)


def _log_mixture(log_a: Tensor, log_b: Tensor, share: float) -> Tensor:
    """log(share·a + (1 - share)·b)."""
    return torch.logaddexp(log_a + math.log(share), log_b + math.log1p(-share))


@over_categories
def forward_kl(log_q: Tensor, log_p: Tensor, _: float | None) -> tuple[Tensor, Tensor]:
    """Σ P log(P/Q)."""
    p = log_p.exp()
    return p * (log_p - log_q), -p


@over_categories
def reverse_kl(log_q: Tensor, log_p: Tensor, _: float | None) -> tuple[Tensor, Tensor]:
    """Σ Q log(Q/P)."""
    values = _times(log_q.exp(), log_q - log_p)
    return values, values


@over_categories
def jsd(log_q: Tensor, log_p: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """β Σ P log(P/m) + (1 - β) Σ Q log(Q/m), m = βP + (1 - β)Q (2306.13649)."""
    log_m = _log_mixture(log_p, log_q, beta)
    of_q = (1 - beta) * _times(log_q.exp(), log_q - log_m)
    return beta * log_p.exp() * (log_p - log_m) + of_q, of_q


@over_categories
def skew_forward(log_q: Tensor, log_p: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Σ P log(P/m), m = αP + (1 - α)Q (2402.03898)."""
    log_m, p = _log_mixture(log_p, log_q, alpha), log_p.exp()
    return p * (log_p - log_m), (alpha - 1) * p * (log_q - log_m).exp()


@over_categories
def skew_reverse(log_q: Tensor, log_p: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Σ Q log(Q/m), m = αQ + (1 - α)P (2402.03898)."""
    log_m, q = _log_mixture(log_q, log_p, alpha), log_q.exp()
    values = _times(q, log_q - log_m)
    return values, values - alpha * q * (log_q - log_m).exp()


@over_categories
def generalised_reverse(log_q: Tensor, log_p: Tensor, _: float | None) -> tuple[Tensor, Tensor]:
    """Σ q log(q/p) - q + p over the named tokens alone, which is 0 where q = p and above it elsewhere (2606.30406)."""
    q = log_q.exp()
    slopes = _times(q, log_q - log_p)
    return slopes - q + log_p.exp(), slopes
