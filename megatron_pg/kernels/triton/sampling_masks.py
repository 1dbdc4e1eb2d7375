"""`sampling_masks` by kernels: of a row with a sampling mask only its ids are read, and only their gradient is not 0.

Rows without one, and with `whole_entropy` all of them, are `vocab_parallel`'s.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from megatron_pg.kernels.readers import Slopes, filled
from megatron_pg.kernels.sampling_masks import Restriction, SamplingMaskRowStatistics
from megatron_pg.kernels.triton import vocab_parallel
from megatron_pg.kernels.triton.tiles import (
    FUSED,
    Kind,
    accumulate,
    merge,
    no_statistics,
    softcapped,
    store_each,
    through_cap,
)
from megatron_pg.kernels.triton.topk import put_kernel
from megatron_pg.kernels.triton.vocab_parallel import TritonReader, log2_scale, row_factors, row_slopes, slope_of

BLOCK = 256  # ids at a time
WARPS = 4


class TritonSamplingMaskReader(TritonReader[SamplingMaskRowStatistics, Restriction]):
    """`SamplingMaskReader` by kernels."""

    record = SamplingMaskRowStatistics

    @override
    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        (targets, mask), restriction = self._where(chunk), self._detail.at(chunk)
        is_read = mask if restriction.whole_entropy else mask & (restriction.sampling_mask.counts == 0)
        whole = vocab_parallel.statistics(z, (targets, is_read), self._vocabulary)
        shares = whole.clone() if restriction.whole_entropy else whole
        sizes = self._vocabulary.valid, self._vocabulary.first, z.stride(0), log2_scale(self._vocabulary)
        options = {"KIND": Kind(cap=self._vocabulary.softcap), "BLOCK": BLOCK, "num_warps": WARPS} | FUSED
        sampling_mask_statistics_kernel[(len(z),)](z, targets, mask, _sets(restriction), shares, *sizes, **options)
        return torch.cat([shares, whole]) if restriction.whole_entropy else shares

    @override
    def combine(self, shares: Tensor, z: Tensor, chunk: slice) -> SamplingMaskRowStatistics:
        """0 where masked."""
        parts = shares.chunk(2, dim=1) if self._detail.whole_entropy else (shares,)
        where = self._where(chunk), self._vocabulary
        return SamplingMaskRowStatistics.of(*(vocab_parallel.combine(part.contiguous(), *where) for part in parts))

    @override
    def write_gradient(
        self, z: Tensor, out: Tensor, chunk: slice, rows: SamplingMaskRowStatistics, slopes: Slopes
    ) -> None:
        (targets, mask), restriction, vocabulary = self._where(chunk), self._detail.at(chunk), self._vocabulary
        by_outputs = by_logprob, by_entropy = filled(slopes, rows)
        is_whole, ids = restriction.sampling_mask.counts == 0, restriction.sampling_mask.ids
        values = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
        options = {"BLOCK": BLOCK, "num_warps": WARPS} | FUSED
        sizes = vocab_parallel.Columns.of(vocabulary, z), z.stride(0), log2_scale(vocabulary)
        read = z, targets, mask, _sets(restriction), values, rows, by_outputs
        constants = {"KIND": Kind(cap=vocabulary.softcap), "WHOLE_ENTROPY": restriction.whole_entropy}
        # before the logits are overwritten
        sampling_mask_gradient_kernel[(len(z),)](*read, *sizes, **constants, **options)
        if restriction.whole_entropy:
            is_read, statistics, by_logprob = mask, rows.of_all, torch.where(is_whole, by_logprob, 0)
        else:
            is_read, statistics = mask & is_whole, rows.of_sampling_mask
        of_rows = vocab_parallel.OfRows.of(statistics, (by_logprob, by_entropy))
        vocab_parallel.write_gradient(z, out, (targets, is_read), of_rows, vocabulary)
        where = vocabulary.valid, vocabulary.first, out.stride(0), 0, 1
        put_kernel[(len(z),)](out, mask, *_sets(restriction), values, 0, *where, **options)


def _sets(restriction: Restriction) -> tuple[Tensor, ...]:
    """Starts, counts and ids; kernels have no strides."""
    sampling_mask = restriction.sampling_mask
    return sampling_mask.starts.contiguous(), sampling_mask.counts.contiguous(), sampling_mask.ids.contiguous()


@triton.jit
def sampling_mask_statistics_kernel(
    logits, targets, mask, sets, shares, valid, first, stride, c, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """One row per program, if it has a sampling mask: shares[row] as `statistics_kernel`.

    The logit of a target outside the mask is -inf.
    """
    starts, counts, ids = sets
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    if (tl.load(mask + row) != 0) & (count > 0):
        start = tl.load(starts + row)
        target = tl.load(targets + row)
        lanes = tl.arange(0, BLOCK)
        z_row = logits + row * stride
        m, s, t = no_statistics(BLOCK)
        hits = tl.zeros((BLOCK,), tl.int32)
        for k in range(0, count, BLOCK):
            token = tl.load(ids + start + k + lanes, lanes < count - k, -1)
            column = token - first
            owned = (column >= 0) & (column < valid)
            tile = tl.load(z_row + column, owned, float("-inf"))
            m, s, t = accumulate(m, s, t, (tile[:, None],), c, KIND, True)
            hits += (token == target).to(tl.int32)
        peak, total, shifted = tl.reduce((m, s, t), 0, merge)
        column = target - first
        owned = (column >= 0) & (column < valid)
        target_logit = softcapped(tl.load(z_row + column, owned, 0.0).to(tl.float32), KIND.cap)
        outside = owned & (tl.sum(hits, 0) == 0)
        target_logit = tl.where(outside, float("-inf"), target_logit)
        store_each(shares + row * 4, 1, (peak, total, shifted, target_logit), True)


@triton.jit
def _slope(z, c, peak, total, entropy, a, e):
    """q (-a - e (log q + H)) of logits z."""
    constant, bend = row_factors(a, e, entropy, total)
    return slope_of(tl.fma(z, c, -peak), constant, bend, True)


@triton.jit
def sampling_mask_gradient_kernel(
    logits,
    targets,
    mask,
    sets,
    values,
    of_rows,
    slopes,
    columns,
    stride,
    c,
    KIND: tl.constexpr,
    WHOLE_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row per program: the gradient of the logits of the ids that are here, into their places of values [n]."""
    starts, counts, ids = sets
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    if (tl.load(mask + row) != 0) & (count > 0):
        start = tl.load(starts + row)
        target = tl.load(targets + row)
        a, e, total = row_slopes(row, target, c, of_rows.totals, columns.size, slopes[0], slopes[1], None)
        peak = tl.load(of_rows.peaks + row)
        sampling_mask_entropy = tl.load(of_rows.sampling_mask_entropy + row)
        whole_peak = tl.load(of_rows.whole_peaks + row)
        whole_total = tl.load(of_rows.whole_totals + row)
        entropy = tl.load(of_rows.entropy + row)
        zero = (row * 0).to(tl.float32)  # of a constant, the interpreter of Triton 3.7 cannot take a quotient
        lanes = tl.arange(0, BLOCK)
        for k in range(0, count, BLOCK):
            here = lanes < count - k
            token = tl.load(ids + start + k + lanes, here, -1)
            column = token - columns.first
            owned = (column >= 0) & (column < columns.valid)
            z = softcapped(tl.load(logits + row * stride + column, owned, 0.0).to(tl.float32), KIND.cap)
            if WHOLE_ENTROPY:
                slope = _slope(z, c, peak, total, sampling_mask_entropy, a, zero)
                slope += _slope(z, c, whole_peak, whole_total, entropy, zero, e)
            else:
                slope = _slope(z, c, peak, total, sampling_mask_entropy, a, e)
            slope = tl.where(token == target, slope + a, slope)
            tl.store(values + start + k + lanes, through_cap(slope, z, KIND.cap), owned)
