"""A category's summand of each divergence over a teacher's top-k tokens, for the kernels.

    value, slope = form(log Q, log P, numbers),   slope = d value / d log Q, up to what cancels

The forms of `megatron_pg.objectives.terms.topk` are the specification. `numbers` are the share α or β of a mixture, its
logarithm and log(1 - share). As in `token_kernels`, what is not finite stays visible: comparisons choose.
"""

import math

import triton
import triton.language as tl

from megatron_pg.kernels.triton.tiles import times
from megatron_pg.kernels.triton.token_kernels import log1p


def numbers_of(share: float | None) -> tuple[float, float, float]:
    """What a form reads of its mixture; one without reads none."""
    return (0.0, 0.0, 0.0) if share is None else (share, math.log(share), math.log1p(-share))


@triton.jit
def _log_mixture(log_a, log_b, numbers):
    """log(share a + (1 - share) b)."""
    a = log_a + numbers[1]
    b = log_b + numbers[2]
    higher = tl.where(a > b, a, b)
    gap = tl.where(a == b, 0.0, tl.where(a > b, b - a, a - b))  # -inf - -inf would be NaN
    return higher + log1p(tl.exp(gap))


@triton.jit
def forward_kl(log_q, log_p, numbers):
    """P log(P/Q)."""
    p = tl.exp(log_p)
    return p * (log_p - log_q), -p


@triton.jit
def reverse_kl(log_q, log_p, numbers):
    """Q log(Q/P)."""
    value = times(tl.exp(log_q), log_q - log_p)
    return value, value


@triton.jit
def jsd(log_q, log_p, numbers):
    """β P log(P/m) + (1 - β) Q log(Q/m), m = βP + (1 - β)Q."""
    log_m = _log_mixture(log_p, log_q, numbers)
    of_q = (1.0 - numbers[0]) * times(tl.exp(log_q), log_q - log_m)
    return numbers[0] * tl.exp(log_p) * (log_p - log_m) + of_q, of_q


@triton.jit
def skew_forward(log_q, log_p, numbers):
    """P log(P/m), m = αP + (1 - α)Q."""
    log_m = _log_mixture(log_p, log_q, numbers)
    p = tl.exp(log_p)
    return p * (log_p - log_m), (numbers[0] - 1.0) * p * tl.exp(log_q - log_m)


@triton.jit
def skew_reverse(log_q, log_p, numbers):
    """Q log(Q/m), m = αQ + (1 - α)P."""
    log_m = _log_mixture(log_q, log_p, numbers)
    q = tl.exp(log_q)
    value = times(q, log_q - log_m)
    return value, value - numbers[0] * q * tl.exp(log_q - log_m)


@triton.jit
def generalised_reverse(log_q, log_p, numbers):
    """Q log(Q/P) - Q + P."""
    q = tl.exp(log_q)
    slope = times(q, log_q - log_p)
    return slope - q + tl.exp(log_p), slope
