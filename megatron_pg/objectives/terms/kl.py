"""Estimators of KL(π‖π_ref) per token, from x = log π - log π_ref.

A right value does not make a right gradient: E[k1] and E[k3] are KL(π‖π_ref), but the expected gradient of k1 is 0 and
that of k3 is KL(π_ref‖π)'s. The weighted forms multiply by r = π / π_old, with its gradient, which makes both right,
whichever policy sampled the tokens; where r is clamped they have no gradient. k2 needs no weight on-policy.

Source: A Comedy of Estimators, arXiv 2512.21852; On a few pitfalls in KL divergence gradient estimation for RL,
arXiv 2506.09477.
"""

import torch
from torch import Tensor

from megatron_pg.objectives.interface.tokens import MAX_LOG_RATIO, ratio, unclamped


def k1(x: Tensor, log_ratios: Tensor) -> Tensor:
    """Value x; gradient 1, whose expectation under the policy's score is 0."""
    return x


def k2(x: Tensor, log_ratios: Tensor) -> Tensor:
    """Value x² / 2, biased; gradient x, that of KL(π‖π_ref) on-policy."""
    return x.square() / 2


def k3(x: Tensor, log_ratios: Tensor) -> Tensor:
    """Value e^-x - 1 + x >= 0; gradient 1 - e^-x, that of KL(π_ref‖π)."""
    # only the exponent is clamped, and keeps its gradient: where π << π_ref the penalty must still push
    exponent = -x + ((-x).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) + x).detach()
    return torch.expm1(exponent) + x


def absolute(x: Tensor, log_ratios: Tensor) -> Tensor:
    """Value |x|; gradient sign(x)."""
    return x.abs()


def k1_weighted(x: Tensor, log_ratios: Tensor) -> Tensor:
    """Value r x; gradient r (x + 1)."""
    return ratio(log_ratios) * unclamped(x, log_ratios)


def k3_weighted(x: Tensor, log_ratios: Tensor) -> Tensor:
    """Value r (e^-x - 1 + x); gradient r x, written down as it is: by the product rule two large terms would cancel."""
    ratios = ratio(log_ratios).detach()
    value = ratios * k3(x, log_ratios).detach()
    return value + ratios * x.detach() * unclamped(x - x.detach(), log_ratios)
