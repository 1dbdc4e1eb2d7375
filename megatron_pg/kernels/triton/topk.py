"""`topk` by kernels: ids are hidden in the logits while `vocab_parallel` reads them.

The steps on [T, K] are one launch each: the distributions of the rows, and the coefficients of their gradient. They
take one row per program, in float64, from statistics in the log2 domain of `tiles`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from megatron_pg.kernels import logprobs
from megatron_pg.kernels.readers import ALL, Slopes, filled
from megatron_pg.kernels.topk import TopKReader, TopKRowStatistics
from megatron_pg.kernels.triton import vocab_parallel
from megatron_pg.kernels.triton.tiles import FUSED, LN2
from megatron_pg.kernels.triton.vocab_parallel import TritonReader, Where, log2_scale
from megatron_pg.kernels.vocabulary import Vocabulary

NATS = tl.constexpr(logprobs.FLOOR)


class TritonTopKReader(TritonReader[TopKRowStatistics, Tensor]):
    """`TopKReader` by kernels, which hide the ids in the logits while the others are reduced."""

    record = TopKRowStatistics
    empty = TopKReader.empty

    @override
    def read(self, logits: Tensor, *, may_hide: bool = False) -> TopKRowStatistics:
        """The ids stay hidden only with `may_hide`."""
        shares = self.statistics(logits, ALL)
        hides = self._vocabulary.softcap is None  # else they are back
        if hides and may_hide:  # other readers of the saved logits get an error, not the gradient of -inf
            torch.autograd.graph.increment_version(logits)
        elif hides:
            put(logits, self._detail, self._mask, shares[:, 4:], self._vocabulary)
        return self.combine(self._vocabulary.gather(shares), logits, ALL)

    @override
    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        """[c, 4 + K] float32: m, s, t of `tiles` without the ids, then the logits of target and ids, 0 if not here.

        The ids are left hidden in the logits; `put` brings them back, at once where a softcap's gradient needs them.
        """
        where, ids, vocabulary = self._where(chunk), self._detail[chunk], self._vocabulary
        shares = torch.empty(len(ids), 4 + ids.shape[1], dtype=torch.float32, device=z.device)
        sizes = ids.shape[1], vocabulary.valid, vocabulary.first, z.stride(0)
        take_and_hide_kernel[(len(ids),)](z, *where, ids, shares, *sizes, **block_of(ids), **FUSED)
        shares[:, :3] = vocab_parallel.statistics(z, where, vocabulary)[:, :3]
        if self._vocabulary.softcap is not None:
            put(z, ids, where[1], shares[:, 4:], vocabulary)
            shares[:, 3:] = vocabulary.capped(shares[:, 3:])
        return shares

    @override
    def combine(self, shares: Tensor, z: Tensor, chunk: slice) -> TopKRowStatistics:
        """0 where masked."""
        return combine(shares, self._where(chunk), self._detail[chunk], self._vocabulary)

    @override
    def write_gradient(self, z: Tensor, out: Tensor, chunk: slice, rows: TopKRowStatistics, slopes: Slopes) -> None:
        """The ids may be hidden in the logits or not."""
        where, ids, vocabulary = self._where(chunk), self._detail[chunk], self._vocabulary
        factors, named = coefficients(where, ids, rows, filled(slopes, rows), vocabulary)
        if vocabulary.softcap is not None:
            logits = z.gather(1, vocabulary.owned(ids)[0].long())
            named = vocabulary.through_cap(named, torch.where(where[1][:, None], logits, 0))
        of_rows = vocab_parallel.OfRows(rows.tail_peaks, factors=factors)
        vocab_parallel.write_gradient(z, out, where, of_rows, vocabulary)
        put(out, ids, where[1], named, vocabulary)


def put(table: Tensor, ids: Tensor, mask: Tensor, values: Tensor, vocabulary: Vocabulary) -> None:
    """Writes values [T, K] into the columns of the ids that are here, in the rows that are not masked."""
    where = vocabulary.valid, vocabulary.first, table.stride(0), *values.stride()
    put_kernel[(len(ids),)](table, mask, None, None, ids, values, ids.shape[1], *where, **block_of(ids), **FUSED)


def block_of(ids: Tensor) -> dict[str, int]:
    """How a kernel is launched whose programs have all ids [T, K] of a row."""
    block = triton.next_power_of_2(ids.shape[1])
    return {"BLOCK": block, "num_warps": max(min(block // 32, 16), 1)}


def combine(shares: Tensor, where: Where, ids: Tensor, vocabulary: Vocabulary) -> TopKRowStatistics:
    """The ranks' shares [tp, T, 4 + K], in rank order, to the distributions of the whole vocabulary; 0 where masked."""
    ranks, rows, _ = shares.shape
    single, double = (shares.new_empty(n, rows, dtype=dtype) for n, dtype in ((4, torch.float32), (2, torch.float64)))
    head = torch.empty(ids.shape, dtype=torch.float64, device=shares.device)
    sizes = ranks, rows, ids.shape[1], vocabulary.size, log2_scale(vocabulary)
    combine_kernel[(rows,)](shares, *where, ids, single, double, head, *sizes, **block_of(ids), **FUSED)
    logprob, entropy, total, peak = single
    tail, tail_total = double
    return TopKRowStatistics(logprob, entropy, total, head, tail, peak, tail_total)


def coefficients(
    where: Where, ids: Tensor, rows: TopKRowStatistics, slopes: Sequence[Tensor], vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """`Coefficients` in float32: [T, 3] outside, by_x in the log2 domain and at_target, and [T, K] named.

    Masked rows are left unset.
    """
    factors = torch.empty(len(ids), 3, dtype=torch.float32, device=ids.device)
    named = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
    tensors = *where, ids, rows, tuple(slopes), factors, named
    sizes = ids.shape[1], vocabulary.size, log2_scale(vocabulary)
    coefficients_kernel[(len(ids),)](*tensors, *sizes, **block_of(ids), **FUSED)
    return factors, named


@triton.jit(do_not_specialize=["K"])
def take_and_hide_kernel(logits, targets, mask, ids, shares, K, valid, first, stride, BLOCK: tl.constexpr):
    """One row per program: shares[row, 3:] are the logits of target and ids, 0 if not here; the ids' become -inf."""
    row = tl.program_id(0).to(tl.int64)
    live = tl.load(mask + row) != 0
    k = tl.arange(0, BLOCK)
    column = tl.load(ids + row * K + k, k < K, -1) - first
    end = tl.where(live, valid, 0)  # not `& live`: Triton 3.9's interpreter refuses a number's comparison in a mask
    owned = (column >= 0) & (column < end)
    z_row = logits + row * stride
    value = tl.load(z_row + column, mask=owned, other=0.0).to(tl.float32)
    target = tl.load(targets + row) - first
    of_target = tl.load(z_row + target, mask=(target >= 0) & (target < end), other=0.0).to(tl.float32)
    tl.debug_barrier()  # the target may be one of the ids
    tl.store(z_row + column, tl.full((BLOCK,), float("-inf"), tl.float32).to(logits.dtype.element_ty), owned)
    share = shares + row * (K + 4)
    tl.store(share + 3, of_target)
    tl.store(share + 4 + k, value, k < K)


@triton.jit(do_not_specialize=["K"])
def put_kernel(
    table, mask, starts, counts, ids, values, K, valid, first, stride, row_stride, id_stride, BLOCK: tl.constexpr
):
    """One row per program: values into the columns of the ids that are here.

    Ids and values are [rows, K], or without K concatenated: row t has `counts[t]` of them from `starts[t]` on.
    """
    row = tl.program_id(0).to(tl.int64)
    if starts is None:
        start = row * K
        from_row = values + row * row_stride
        count = K
    else:
        start = tl.load(starts + row)
        from_row = values + start
        count = tl.load(counts + row)
    if tl.load(mask + row) != 0:
        for begin in range(0, count, BLOCK):
            k = begin + tl.arange(0, BLOCK)
            column = tl.load(ids + start + k, k < count, -1) - first
            owned = (column >= 0) & (column < valid)
            value = tl.load(from_row + k * id_stride, owned, 0.0)
            tl.store(table + row * stride + column, value.to(table.dtype.element_ty), owned)


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
        tail_moment += (moment + total * _at_least(offset, NATS)) * scale
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
    moment = (tail_moment + tail_total * _at_least(offset, NATS)) * scale
    moment += tl.sum(weights * _at_least(head, NATS), 0)
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
        head = _at_least(tl.load(of_rows.head + row * K + k, k < K, 0.0), NATS)
        value = tl.exp(head) * (common - by_entropy * (head + entropy)) + by_head
        value += tl.where(token == target, by_target, 0.0)
        tl.store(factors + row * 3, (outside * scale).to(tl.float32))
        tl.store(factors + row * 3 + 1, (-factor * by_entropy * scale * LN2).to(tl.float32))
        tl.store(factors + row * 3 + 2, (by_target * scale).to(tl.float32))
        tl.store(named + row * K + k, (value * scale).to(tl.float32), k < K)
