"""Statistics and gradient of logits that are never stored: the product that makes them ends in either.

Both are those of `kernels.triton.vocab_parallel`, of a tile in registers instead of a row in memory. A tile of columns
leaves three statistics of each of its rows and the target's logit, if the tile holds it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from megatron_pg.kernels import Vocabulary
from megatron_pg.kernels.logprobs import RowStatistics
from megatron_pg.kernels.readers import Slopes
from megatron_pg.kernels.triton.tiles import FLOOR, FUSED, LN2, merge, softcapped, through_cap
from megatron_pg.kernels.triton.vocab_parallel import OfRows, TritonPlainReader, row_factors, row_slopes, slope_of
from megatron_pg.lm_head.tiled_product import Tiles, launch, store_tile

PADDING = tl.constexpr(-(2.0**64))  # below every logit, and finite: 0 times it is 0
MERGED = 4  # rows of a program that merges the statistics of all tiles of columns


class TiledReader(TritonPlainReader):
    """`TritonPlainReader` of the logits z W^T of hidden states z [c, H], which takes the place of logits.

    Args:
        vocabulary, targets: as in `Reader`.
        weight: [V / tp, H] that `chunks.supports_tiles` accepts.
    """

    def __init__(self, vocabulary: Vocabulary, targets: Tensor, weight: Tensor):
        super().__init__(vocabulary, targets)
        self._weight = weight
        self._tiles = Tiles.of_width(weight.shape[1], is_capped=vocabulary.softcap is not None)

    @override
    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        tiles, rows = triton.cdiv(len(self._weight), self._tiles.columns), len(z)
        parts = torch.empty(tiles, rows, 4, dtype=torch.float32, device=z.device)
        launch(self._tiles, statistics_tile, (self._targets[chunk], parts), z, self._weight, None, self._vocabulary)
        shares = torch.empty(rows, 4, dtype=torch.float32, device=z.device)
        options = {"ROWS": MERGED, "TILES": triton.next_power_of_2(tiles), "num_warps": 8} | FUSED
        merge_kernel[(triton.cdiv(rows, MERGED),)](parts, shares, rows, tiles, **options)
        return shares

    @override
    def write_gradient(self, z: Tensor, out: Tensor, chunk: slice, rows: RowStatistics, slopes: Slopes) -> None:
        of_rows = rows.logprobs, *OfRows.of(rows, slopes)[:5], self._vocabulary.size
        launch(self._tiles, gradient_tile, (self._targets[chunk], *of_rows), z, self._weight, out, self._vocabulary)


@triton.jit
def statistics_tile(z, out, of_rows, i, j, rows, valid, first, c, PARTS: tl.constexpr, CAP: tl.constexpr):
    """parts[j] = m, s, t of `kernels.triton.tiles` and the target's logit of each row, 0 where the tile lacks it."""
    targets, parts = of_rows
    M: tl.constexpr = z.shape[0]
    N: tl.constexpr = z.shape[1]
    row = i + tl.arange(0, M)
    here = row < rows
    target = (tl.load(targets + row, here, -1) - first - j * N).to(tl.int32)
    target = tl.where(target < valid - j * N, target, -1)  # another rank's may lie in the part without columns
    column = tl.arange(0, N)[None, :]
    # never in a branch: products wait for each other where their own registers are used in one
    z = tl.where(column < valid - j * N, softcapped(z, CAP), PADDING)
    target_logit = tl.zeros((M,), tl.float32)
    if tl.max(((target >= 0) & (target < N)).to(tl.int32), 0) != 0:
        target_logit = tl.sum(tl.where(column == target[:, None], z, 0.0), 1)
    m = tl.maximum(tl.max(z, 1) * c, FLOOR)
    shifted = tl.fma(z, c, -m[:, None])
    power = tl.exp2(shifted)
    part = parts + (j.to(tl.int64) * rows + row) * 4
    tl.store(part, m, here)
    tl.store(part + 1, tl.sum(power, 1), here)
    tl.store(part + 2, tl.sum(power * shifted, 1), here)
    tl.store(part + 3, target_logit, here)


@triton.jit
def gradient_tile(z, out, of_rows, i, j, rows, valid, first, c, PARTS: tl.constexpr, CAP: tl.constexpr):
    """out = 2^x (constant + bend x) with x = z c - peak, and a more at the target, as `gradient_kernel` has it."""
    targets, logprobs, peaks, totals, entropies, by_logprobs, by_entropies, vocab_size = of_rows
    N: tl.constexpr = z.shape[1]
    row = tl.minimum(i + tl.arange(0, z.shape[0]), rows - 1)
    target, peak = tl.load(targets + row), tl.load(peaks + row)
    a, e, total = row_slopes(row, target, c, totals, vocab_size, by_logprobs, by_entropies, None)
    constant, bend = row_factors(a, e, tl.load(entropies + row), total)
    target = (target - first - j * N).to(tl.int32)
    z = softcapped(z, CAP)
    gradient = slope_of(tl.fma(z, c, -peak[:, None]), constant[:, None], bend[:, None], by_entropies is not None)
    gradient = through_cap(gradient, z, CAP)
    holds_target = tl.max(((target >= 0) & (target < N)).to(tl.int32), 0) != 0
    if holds_target | (j * N + N > valid):
        if CAP is not None:
            a = through_cap(a, (tl.load(logprobs + row) / LN2 + tl.log2(total) + peak) / c, CAP)
        column = tl.arange(0, N)[None, :]
        gradient = tl.where(column == target[:, None], gradient + a[:, None], gradient)
        gradient = tl.where(column < valid - j * N, gradient, 0.0)
    store_tile(out, i, j * N, gradient, PARTS)


@triton.jit(do_not_specialize=["rows"])
def merge_kernel(parts, shares, rows, tiles, ROWS: tl.constexpr, TILES: tl.constexpr):
    """shares [rows, 4] of the parts [tiles, rows, 4] of all tiles, in a fixed order; `ROWS` rows per program."""
    tile, at = tl.arange(0, TILES)[:, None], tl.program_id(0).to(tl.int64) * ROWS * 4 + tl.arange(0, ROWS * 4)
    here = (tile < tiles) & (at < rows * 4)[None, :]
    part = tl.load(parts + tile.to(tl.int64) * rows * 4 + at[None, :], here, 0.0)
    of_even, of_odd = tl.split(tl.reshape(part, (TILES, ROWS, 2, 2)))
    m, t = tl.split(of_even)
    s, target_logit = tl.split(of_odd)
    m, s, t = tl.reduce((tl.where(tile < tiles, m, FLOOR), s, t), 0, merge)
    share = tl.join(tl.join(m, t), tl.join(s, tl.sum(target_logit, 0)))
    tl.store(shares + at, tl.reshape(share, (ROWS * 4,)), at < rows * 4)
