"""What every kernel computes of a tile of logits: running statistics, and the log-probability of a row.

Statistics are in the log2 domain with c = log2(e) / temperature, so that every exponent is one fused multiply-add:

    m = max_j z_j c,   s = sum_j 2^(z_j c - m),   t = sum_j 2^(z_j c - m) (z_j c - m)

m and s stay apart: m + log2 s would round s away at large logits. A tile is [threads, words], the words that a thread
loads in one go; each thread keeps its own m, s, t and the threads of a row are combined once, in `merge`. A `KIND` is
the type of a word. With a softcap z is the capped logit.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

# start of a running maximum: -inf would make a row that begins with -inf NaN, and lower values are rounded too coarsely
FLOOR = tl.constexpr(-(2.0**31))
LOWEST = tl.constexpr(-1000.0)  # 2^-1000 is 0, and 0 * -1000 is 0 where 0 * -inf would be NaN
LN2 = tl.constexpr(0.6931471805599453)
FUSED = {"enable_fp_fusion": True}  # of every launch: the default changes between releases of Triton
GROWTH = tl.constexpr(2 * math.log2(math.e))
MOST = tl.constexpr((2 - 2**-23) * 2.0**127)  # finite float32
EVERY = tl.constexpr(tl.PropagateNan.ALL)


class Kind(NamedTuple):
    """What a word of logits is. Part of what a kernel is compiled for."""

    is_pair: bool = False  # two bfloat16 logits in 32 bits, else one logit
    cap: float | None = None  # of `Vocabulary.softcap`; None: no code for it


@triton.jit
def minus_infinity(KIND: tl.constexpr):
    """A word whose logits are -inf."""
    if KIND.is_pair:
        return -8323200  # 0xFF80FF80
    else:
        return float("-inf")


@triton.jit
def softcapped(x, CAP: tl.constexpr):
    """c tanh(x / c) to 3e-7 c, -inf of -inf; x itself without a softcap.

    tanh u = (e^2u - 1) / (e^2u + 1), because the tanh of the hardware has an error of 2^-11.
    """
    if CAP is None:
        return x
    else:
        power = tl.exp2(tl.minimum(x * (GROWTH / CAP), 64.0, propagate_nan=EVERY))
        z = tl.fma(power, CAP, -CAP) / (power + 1.0)
        return tl.minimum(z, x + MOST, propagate_nan=EVERY)  # z of every finite x: a comparison costs more


@triton.jit
def through_cap(gradient, z, CAP: tl.constexpr):
    """The gradient by x from the gradient by the capped logits z: times 1 - (z / c)^2, 0 of -inf."""
    if CAP is None:
        return gradient
    else:
        t = z * (1 / CAP)
        return gradient * tl.maximum(tl.fma(-t, t, 1.0), 0.0)


@triton.jit
def values(words, KIND: tl.constexpr):
    """The logits z of a tile as float32: a tuple of one tile, or of two for paired words, the first logit first."""
    if KIND.is_pair:
        low, high = (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
        return softcapped(low, KIND.cap), softcapped(high, KIND.cap)
    else:
        return (softcapped(words.to(tl.float32), KIND.cap),)


@triton.jit
def times(probability, value):
    """Their product; 0 where the probability is 0, however far the value."""
    return tl.where(probability == 0, 0.0, probability * value)


@triton.jit
def no_statistics(SIZE: tl.constexpr):
    """m, s, t of no column, `SIZE` of each."""
    zeros = tl.zeros((SIZE,), tl.float32)
    return tl.full((SIZE,), FLOOR, tl.float32), zeros, zeros


@triton.jit
def accumulate(m, s, t, tiles, c, KIND: tl.constexpr, ENTROPY: tl.constexpr):
    """Adds a tuple of tiles to each thread's statistics; the maximum over all of them is taken first."""
    peak = m
    for k in tl.static_range(len(tiles)):
        logits = values(tiles[k], KIND)
        for i in tl.static_range(len(logits)):
            peak = tl.maximum(peak, tl.max(logits[i], axis=1) * c)
    scale = tl.exp2(m - peak)
    if ENTROPY:
        t = (t + s * (m - peak)) * scale
    s = s * scale
    for k in tl.static_range(len(tiles)):
        logits = values(tiles[k], KIND)
        for i in tl.static_range(len(logits)):
            shifted = tl.fma(logits[i], c, -peak[:, None])
            power = tl.exp2(shifted)
            s += tl.sum(power, axis=1)
            if ENTROPY:
                t += tl.sum(power * tl.maximum(shifted, LOWEST), axis=1)
    return peak, s, t


@triton.jit
def merge(m1, s1, t1, m2, s2, t2):
    """Statistics of the union of two disjoint sets of columns."""
    m = tl.maximum(m1, m2)
    d1 = m1 - m
    d2 = m2 - m
    f1 = tl.exp2(d1)
    f2 = tl.exp2(d2)
    return m, s1 * f1 + s2 * f2, (t1 + s1 * d1) * f1 + (t2 + s2 * d2) * f2


@triton.jit
def logprob_and_entropy(m, s, t, target_logit, c):
    """Log-probability of the target and entropy of the row, nats; NaN if the largest logit is out of range (2^31 / c).

    The last product is its own fused multiply-add: fused with a caller's subtraction it would not be the rounded
    value that is stored, and a ratio of equal policies not exactly 1.
    """
    log_sum = tl.log2(s)
    logprob = tl.fma(tl.fma(target_logit, c, -m) - log_sum, LN2, 0.0)
    in_range = (s > 0) & (s < float("inf"))
    return tl.where(in_range, logprob, float("nan")), tl.where(in_range, LN2 * (log_sum - t / s), float("nan"))


@triton.jit
def store_each(at, step, values, here):
    """Stores a tuple of values from `at` on, each `step` numbers after the previous one."""
    for k in tl.static_range(len(values)):
        tl.store(at + k * step, values[k], here)
