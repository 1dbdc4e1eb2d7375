"""The steps of `topk` on [T, K], in one launch each: the distributions of the rows, the coefficients of their gradient.

One row per program, in float64, from statistics in the log2 domain of `tiles`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_pg.kernels import logprobs
from megatron_pg.kernels.topk import TopKRowStatistics
from megatron_pg.kernels.triton.tiles import FUSED, LN2
from megatron_pg.kernels.triton.vocab_parallel import log2_scale
from megatron_pg.kernels.vocabulary import Vocabulary

FLOOR = tl.constexpr(logprobs.FLOOR)


def block_of(ids: Tensor) -> dict[str, int]:
    """How a kernel is launched whose programs have all ids [T, K] of a row."""
    block = triton.next_power_of_2(ids.shape[1])
    return {"BLOCK": block, "num_warps": max(min(block // 32, 16), 1)}


def combine(shares: Tensor, targets: Tensor, mask: Tensor, ids: Tensor, vocabulary: Vocabulary) -> TopKRowStatistics:
    """The ranks' shares [tp, T, 4 + K], in rank order, to the distributions of the whole vocabulary; 0 where masked."""
    ranks, rows, _ = shares.shape
    single, double = (shares.new_empty(n, rows, dtype=dtype) for n, dtype in ((4, torch.float32), (2, torch.float64)))
    head = torch.empty(ids.shape, dtype=torch.float64, device=shares.device)
    sizes = ranks, rows, ids.shape[1], vocabulary.size, log2_scale(vocabulary)
    combine_kernel[(rows,)](shares, targets, mask, ids, single, double, head, *sizes, **block_of(ids), **FUSED)
    logprob, entropy, total, peak = single
    tail, tail_total = double
    return TopKRowStatistics(logprob, entropy, total, head, tail, peak, tail_total)


def coefficients(
    targets: Tensor,
    mask: Tensor,
    ids: Tensor,
    rows: TopKRowStatistics,
    slopes: Sequence[Tensor],
    vocabulary: Vocabulary,
) -> tuple[Tensor, Tensor]:
    """`Coefficients` in float32: [T, 3] outside, by_x in the log2 domain and at_target, and [T, K] named.

    Masked rows are left unset.
    """
    factors = torch.empty(len(ids), 3, dtype=torch.float32, device=ids.device)
    named = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
    tensors = targets, mask, ids, rows, tuple(slope.contiguous() for slope in slopes), factors, named
    sizes = ids.shape[1], vocabulary.size, log2_scale(vocabulary)
    coefficients_kernel[(len(ids),)](*tensors, *sizes, **block_of(ids), **FUSED)
    return factors, named


@triton.jit
def _at_least(value, bound):
    """The value, or the bound where it is lower; NaN stays."""
    return tl.where(value < bound, bound, value)


@triton.jit(do_not_specialize=["rows", "K"])
def combine_kernel(
    shares, targets, mask, ids, singles, doubles, heads, ranks, rows, K, vocab_size, c, BLOCK: tl.constexpr
):
    """One row: singles [4, rows] are log-probability, entropy, total and m of the tail, doubles log Q_tail and S."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    token = tl.load(ids + row * K + k, k < K, -1)
    width = K + 4
    peak = tl.load(shares + row * width)
    for rank in range(1, ranks):
        other = tl.load(shares + (rank * rows + row) * width)
        peak = tl.where(other > peak, other, peak)
    tail_total = tl.full([], 0.0, tl.float64)
    tail_moment = tl.full([], 0.0, tl.float64)
    target_logit = tl.full([], 0.0, tl.float64)
    logits = tl.zeros((BLOCK,), tl.float64)
    for rank in range(ranks):
        share = shares + (rank * rows + row) * width
        offset = (tl.load(share).to(tl.float64) - peak.to(tl.float64)) * LN2
        total = tl.load(share + 1).to(tl.float64)
        moment = tl.load(share + 2).to(tl.float64) * LN2
        scale = tl.exp(offset)
        tail_moment += (moment + total * _at_least(offset, FLOOR)) * scale
        tail_total += total * scale
        target_logit += tl.load(share + 3).to(tl.float64)  # a sum: a maximum would drop NaN
        logits += tl.load(share + 4 + k, k < K, 0.0).to(tl.float64)
    nats = tl.cast(tl.cast(c, tl.float32), tl.float64) * LN2
    tail_peak = peak.to(tl.float64) * LN2
    head = tl.where(token >= 0, logits * nats, float("-inf"))
    highest = tl.max(head, 0)
    top = tl.where(highest > tail_peak, highest, tail_peak)
    head -= top
    offset = tail_peak - top
    weights = tl.exp(head)
    scale = tl.exp(offset)
    total = tail_total * scale + tl.sum(weights, 0)
    moment = (tail_moment + tail_total * _at_least(offset, FLOOR)) * scale
    moment += tl.sum(weights * _at_least(head, FLOOR), 0)
    log_total = tl.log(total)
    target = tl.load(targets + row)
    exists = (target >= 0) & (target < vocab_size)
    logprob = tl.where(exists, target_logit * nats - top - log_total, float("nan"))
    head = tl.where(token < vocab_size, head - log_total, float("nan"))
    trained = tl.load(mask + row) != 0
    tl.store(singles + row, tl.where(trained, logprob, 0.0).to(tl.float32))
    tl.store(singles + rows + row, tl.where(trained, log_total - moment / total, 0.0).to(tl.float32))
    tl.store(singles + 2 * rows + row, tl.where(trained, total, 0.0).to(tl.float32))
    tl.store(singles + 3 * rows + row, peak)
    tl.store(doubles + row, tl.where(trained, offset + tl.log(tail_total) - log_total, 0.0))
    tl.store(doubles + rows + row, tl.where(trained, tail_total, 0.0))
    tl.store(heads + row * K + k, tl.where(trained, head, 0.0), k < K)


@triton.jit(do_not_specialize=["K"])
def coefficients_kernel(targets, mask, ids, of_rows, slopes, factors, named, K, vocab_size, c, BLOCK: tl.constexpr):
    """One row: factors [rows, 3] and named [rows, K] of `coefficients`."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(mask + row) != 0:
        k = tl.arange(0, BLOCK)
        token = tl.load(ids + row * K + k, k < K, -1)
        target = tl.load(targets + row)
        scale = tl.cast(tl.cast(c, tl.float32), tl.float64) * LN2  # 1 / temperature
        by_logprobs, by_entropies, by_heads, by_tails = slopes
        by_head = tl.load(by_heads + row * K + k, k < K, 0.0)
        by_tail = tl.load(by_tails + row)
        by_entropy = tl.load(by_entropies + row).to(tl.float64)
        entropy = tl.load(of_rows.entropy + row).to(tl.float64)
        # where the log-probability is NaN, so is the gradient
        by_target = tl.load(by_logprobs + row).to(tl.float64)
        by_target = tl.where((target >= 0) & (target < vocab_size), by_target, float("nan"))
        common = -(tl.sum(by_head, 0) + by_tail + by_target)
        # e^x of the tail is q over this; where there is no tail nothing is multiplied by it
        tail_total = tl.load(of_rows.tail_totals + row)
        is_there = tail_total != 0
        log_factor = tl.where(is_there, tl.load(of_rows.tail + row) - tl.log(tl.where(is_there, tail_total, 1.0)), 0.0)
        factor = tl.where(is_there, tl.exp(log_factor), 0.0)
        of_tail = tl.where(is_there, by_tail / tl.where(is_there, tail_total, 1.0), 0.0)
        outside = factor * (common - by_entropy * (log_factor + entropy)) + of_tail
        head = _at_least(tl.load(of_rows.head + row * K + k, k < K, 0.0), FLOOR)
        value = tl.exp(head) * (common - by_entropy * (head + entropy)) + by_head
        value += tl.where(token == target, by_target, 0.0)
        tl.store(factors + row * 3, (outside * scale).to(tl.float32))
        tl.store(factors + row * 3 + 1, (-factor * by_entropy * scale * LN2).to(tl.float32))
        tl.store(factors + row * 3 + 2, (by_target * scale).to(tl.float32))
        tl.store(named + row * K + k, (value * scale).to(tl.float32), k < K)
