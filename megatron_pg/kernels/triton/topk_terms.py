"""One token's divergence over a teacher's likeliest tokens, for the kernel that has the whole row: float32, ids beside one another.

Between the two functions stand the sums over the ids. m, s, t are of `tiles`: peak and total of the whole row, tail_peak and
tail_total of what is not named. Logarithms are nats. `topk.coefficients` has the equations.
"""

import triton
import triton.language as tl

from megatron_pg.kernels.triton.tiles import LN2, LOWEST


@triton.jit
def named_terms(token, target, logit, log_p, peak, log_total, columns, c, FORM: tl.constexpr, NUMBERS: tl.constexpr):
    """Of each id: log q, and what is summed up: the divergence, its derivative by log q, q, 1, and 1 for the target; 0 where none is."""
    is_there = token >= 0
    head = LN2 * (tl.fma(logit, c, -peak) - log_total)
    head = tl.where(is_there, tl.where(token < columns, head, float("nan")), 0.0)
    value, slope = FORM(head, log_p, NUMBERS)
    sums = (
        tl.where(is_there, value, 0.0),
        tl.where(is_there, slope, 0.0),
        tl.where(is_there, tl.exp(head), 0.0),
        tl.where(is_there, 1.0, 0.0),
        tl.where(token == target, 1.0, 0.0),
    )
    return head, sums


@triton.jit
def add_terms(a1, b1, c1, d1, e1, a2, b2, c2, d2, e2):
    """Two sets of them, together."""
    return a1 + a2, b1 + b2, c1 + c2, d1 + d2, e1 + e2


@triton.jit
def tail_terms(
    teacher_tail,
    peak,
    log_total,
    tail_peak,
    tail_total,
    count,
    columns,
    FORM: tl.constexpr,
    NUMBERS: tl.constexpr,
    TAIL_FLOOR: tl.constexpr,
):
    """The divergence of the tail and its derivative by log Q_tail, 0 where all columns are named."""
    exists = count < columns
    raised = tl.where(teacher_tail < TAIL_FLOOR, TAIL_FLOOR, teacher_tail)  # NaN stays
    log_q = LN2 * (tail_peak - peak + tl.log2(tail_total) - log_total)
    value, slope = FORM(tl.where(exists, log_q, 0.0), tl.where(exists, tl.log(raised), 0.0), NUMBERS)
    return tl.where(exists, value, 0.0), tl.where(exists, slope, 0.0)


@triton.jit
def gradient_terms(
    head,
    q,
    by_head,
    by_heads,
    by_tail,
    is_target,
    slope,
    bend,
    entropy,
    peak,
    total,
    tail_peak,
    tail_total,
    BONUS: tl.constexpr,
):
    """The gradient at the ids, and elsewhere: 2^x (factor + bend x), x = z c - tail_peak.

    `slope` and `bend` are minus the derivatives by log π and H; `by_head` [K], their sum `by_heads` and `by_tail` the derivatives
    by log q and log Q_tail; all times what the gradient of the logits has before it.
    """
    common = slope - (by_heads + by_tail)
    decay = tl.exp2(tail_peak - peak) / total  # e^x of the tail is q over this
    factor = decay * common
    named = q * common + by_head
    if BONUS:
        factor += decay * bend * (entropy + LN2 * (tail_peak - peak - tl.log2(total)))
        named += q * bend * (tl.where(head < LOWEST, LOWEST, head) + entropy)
        bend = bend * LN2 * decay
    named -= is_target * slope
    factor += tl.where(tail_total == 0, 0.0, by_tail / tl.where(tail_total == 0, 1.0, tail_total))
    return named, factor, bend
