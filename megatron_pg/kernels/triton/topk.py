"""`topk` by kernels: ids are hidden in the logits while `vocab_parallel` reads them; `topk_rows` works on [T, K]."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from megatron_pg.kernels.readers import ALL, Slopes, filled
from megatron_pg.kernels.topk import TopKReader, TopKRowStatistics
from megatron_pg.kernels.triton import topk_rows, vocab_parallel
from megatron_pg.kernels.triton.tiles import FLOOR, FUSED, LOWEST
from megatron_pg.kernels.triton.topk_rows import block_of
from megatron_pg.kernels.triton.vocab_parallel import TritonReader, log2_scale
from megatron_pg.kernels.vocabulary import Vocabulary


class TritonTopKReader(TritonReader[TopKRowStatistics]):
    """`TopKReader` by kernels, which hide the ids in the logits while the others are reduced."""

    record = TopKRowStatistics
    empty = TopKReader.empty

    def __init__(self, vocabulary: Vocabulary, targets: Tensor, ids: Tensor, mask: Tensor | None = None):
        super().__init__(vocabulary, targets, mask)
        self._ids = ids.contiguous()

    @override
    def read(self, logits: Tensor, *, may_hide: bool = False) -> TopKRowStatistics:
        """The ids stay hidden only with `may_hide`."""
        shares = self.statistics(logits, ALL)
        hides = self._vocabulary.softcap is None  # else they are back
        if hides and may_hide:  # other readers of the saved logits get an error, not the gradient of -inf
            torch.autograd.graph.increment_version(logits)
        elif hides:
            put(logits, self._ids, self._mask, shares[:, 4:], self._vocabulary)
        return self.combine(self._vocabulary.gather(shares), logits, ALL)

    @override
    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        """[c, 4 + K] float32: m, s, t of `tiles` without the ids, then the logits of target and ids, 0 if not here.

        The ids are left hidden in the logits; `put` brings them back, at once where a softcap's gradient needs them.
        """
        targets, mask = self._where(chunk)
        shares = take_and_hide(z, targets, mask, self._ids[chunk], self._vocabulary)
        shares[:, :3] = vocab_parallel.statistics(z, targets, mask, self._vocabulary)[:, :3]
        if self._vocabulary.softcap is not None:
            put(z, self._ids[chunk], mask, shares[:, 4:], self._vocabulary)
            shares[:, 3:] = self._vocabulary.capped(shares[:, 3:])
        return shares

    @override
    def combine(self, shares: Tensor, z: Tensor, chunk: slice) -> TopKRowStatistics:
        """0 where masked."""
        return topk_rows.combine(shares, *self._where(chunk), self._ids[chunk], self._vocabulary)

    @override
    def write_gradient(self, z: Tensor, out: Tensor, chunk: slice, rows: TopKRowStatistics, slopes: Slopes) -> None:
        """The ids may be hidden in the logits or not."""
        (targets, mask), ids, vocabulary = self._where(chunk), self._ids[chunk], self._vocabulary
        factors, named = topk_rows.coefficients(targets, mask, ids, rows, filled(slopes, rows), vocabulary)
        if vocabulary.softcap is not None:
            logits = z.gather(1, vocabulary.owned(ids)[0].long())
            named = vocabulary.through_cap(named, torch.where(mask[:, None], logits, 0))
        of_rows = vocab_parallel.OfRows(rows.tail_peaks, factors=factors)
        vocab_parallel.launch_gradient(z, out, (targets, mask), of_rows, vocabulary)
        put(out, ids, mask, named, vocabulary)


def take_and_hide(logits: Tensor, targets: Tensor, mask: Tensor, ids: Tensor, vocabulary: Vocabulary) -> Tensor:
    """[T, 4 + K] float32: m, s, t of `tiles` of the ids alone, then the logits of target and ids, 0 if not here.

    The logits of the ids become -inf.
    """
    taken = torch.empty(len(ids), 4 + ids.shape[1], dtype=torch.float32, device=logits.device)
    sizes = ids.shape[1], vocabulary.valid, vocabulary.first, logits.stride(0), log2_scale(vocabulary)
    take_and_hide_kernel[(len(ids),)](logits, targets, mask, ids, taken, *sizes, **block_of(ids), **FUSED)
    return taken


def put(table: Tensor, ids: Tensor, mask: Tensor, values: Tensor, vocabulary: Vocabulary) -> None:
    """Writes values [T, K] into the columns of the ids that are here, in the rows that are not masked."""
    where = vocabulary.valid, vocabulary.first, table.stride(0), *values.stride()
    put_kernel[(len(ids),)](table, mask, None, None, ids, values, ids.shape[1], *where, **block_of(ids), **FUSED)


@triton.jit(do_not_specialize=["K"])
def take_and_hide_kernel(logits, targets, mask, ids, taken, K, valid, first, stride, c, BLOCK: tl.constexpr):
    """One row per program: taken [rows, 4 + K] of `take_and_hide`, and -inf at the ids that are here."""
    row = tl.program_id(0).to(tl.int64)
    live = tl.load(mask + row) != 0
    k = tl.arange(0, BLOCK)
    column = tl.load(ids + row * K + k, k < K, -1) - first
    owned = (column >= 0) & (column < valid) & live
    z_row = logits + row * stride
    value = tl.load(z_row + column, mask=owned, other=0.0).to(tl.float32)
    target = tl.load(targets + row) - first
    of_target = tl.load(z_row + target, mask=(target >= 0) & (target < valid) & live, other=0.0).to(tl.float32)
    tl.debug_barrier()  # the target may be one of the ids
    tl.store(z_row + column, tl.full((BLOCK,), float("-inf"), tl.float32).to(logits.dtype.element_ty), owned)
    peak = tl.max(tl.where(owned, value, float("-inf")), 0) * c
    peak = tl.where(peak < FLOOR, FLOOR, peak)
    shifted = tl.where(owned, tl.fma(value, c, -peak), LOWEST)
    power = tl.exp2(shifted)
    share = taken + row * (K + 4)
    tl.store(share, peak)
    tl.store(share + 1, tl.sum(power, 0))
    tl.store(share + 2, tl.sum(power * tl.maximum(shifted, LOWEST), 0))
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
