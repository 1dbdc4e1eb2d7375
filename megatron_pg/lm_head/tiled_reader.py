"""Statistics and gradient of logits that are never stored: the product that makes them ends in either.

Both are those of `kernels.triton.vocab_parallel`, of a tile in registers instead of a row in memory. A tile of columns
leaves three statistics of each of its rows and the target's logit, if the tile holds it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from megatron_pg.kernels import Vocabulary
from megatron_pg.kernels.logprobs import RowStatistics
from megatron_pg.kernels.readers import Slopes
from megatron_pg.kernels.triton.tiles import FLOOR, FUSED, LOWEST
from megatron_pg.kernels.triton.vocab_parallel import TritonPlainReader, row_factors, row_slopes, slope_of
from megatron_pg.lm_head.tiled_product import Tiles, launch, store_tile

MERGE = {"ROWS": 16, "TILES": 64}  # of one program at a time


class TiledReader(TritonPlainReader):
    """`TritonPlainReader` of the logits z W^T of hidden states z [c, H], which takes the place of logits.

    Args:
        vocabulary, targets: as in `Reader`.
        weight: [V / tp, H] that `chunks.supports_tiles` accepts.
    """

    def __init__(self, vocabulary: Vocabulary, targets: Tensor, weight: Tensor):
        super().__init__(vocabulary, targets)
        self._weight = weight
        self._tiles = Tiles.of_width(weight.shape[1])

    @override
    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        tiles, rows = triton.cdiv(len(self._weight), self._tiles.columns), len(z)
        parts = torch.empty(tiles, 4, rows, dtype=torch.float32, device=z.device)
        self._launch(statistics_tile, (self._targets[chunk], parts), z, None)
        shares = torch.empty(rows, 4, dtype=torch.float32, device=z.device)
        merge_kernel[(triton.cdiv(rows, MERGE["ROWS"]),)](parts, shares, rows, tiles, **MERGE, **FUSED)
        return shares

    @override
    def write_gradient(self, z: Tensor, out: Tensor, chunk: slice, rows: RowStatistics, slopes: Slopes) -> None:
        by_logprob, by_entropy = (None if slope is None else slope.contiguous() for slope in slopes)
        by_logprob = torch.zeros_like(rows.logprobs) if by_logprob is None else by_logprob
        of_rows = self._targets[chunk], rows.peaks, rows.totals, rows.entropy, by_logprob, by_entropy
        self._launch(gradient_tile, (*of_rows, self._vocabulary.size), z, out)

    def _launch(self, epilogue: Any, of_rows: tuple, states: Tensor, out: Tensor | None) -> None:
        launch(self._tiles, epilogue, of_rows, states, self._weight, out, self._vocabulary)


@triton.jit
def statistics_tile(z, out, of_rows, i, j, rows, valid, first, c, PARTS: tl.constexpr, CAP: tl.constexpr):
    """parts[j] = m, s, t of `kernels.triton.tiles` and the target's logit of each row, 0 where it is not in the tile."""
    targets, parts = of_rows
    M: tl.constexpr = z.shape[0]
    N: tl.constexpr = z.shape[1]
    row = i + tl.arange(0, M)
    here = row < rows
    target = (tl.load(targets + row, here, -1) - first - j * N).to(tl.int32)
    target_logit = tl.zeros((M,), tl.float32)
    holds_target = tl.max(((target >= 0) & (target < N)).to(tl.int32), 0) != 0
    if holds_target | (j * N + N > valid):
        column = tl.arange(0, N)[None, :]
        z = tl.where(column < valid - j * N, z, float("-inf"))
        target_logit = tl.sum(tl.where(column == target[:, None], z, 0.0), 1)
    peak = tl.maximum(tl.max(z, 1) * c, FLOOR)
    shifted = tl.fma(z, c, -peak[:, None])
    power = tl.exp2(shifted)
    at = parts + j.to(tl.int64) * 4 * rows + row
    tl.store(at, peak, here)
    tl.store(at + rows, tl.sum(power, 1), here)
    tl.store(at + 2 * rows, tl.sum(power * tl.maximum(shifted, LOWEST), 1), here)
    tl.store(at + 3 * rows, target_logit, here)


@triton.jit
def gradient_tile(z, out, of_rows, i, j, rows, valid, first, c, PARTS: tl.constexpr, CAP: tl.constexpr):
    """out = 2^x (constant + bend x) with x = z c - peak, and a more at the target, as `gradient_kernel` has it."""
    targets, peaks, totals, entropies, by_logprobs, by_entropies, vocab_size = of_rows
    N: tl.constexpr = z.shape[1]
    row = tl.minimum(i + tl.arange(0, z.shape[0]), rows - 1)
    target = tl.load(targets + row)
    a, e, total = row_slopes(row, target, c, totals, vocab_size, by_logprobs, by_entropies, None)
    constant, bend = row_factors(a, e, tl.load(entropies + row), total)
    target = (target - first - j * N).to(tl.int32)
    shifted = tl.fma(z, c, -tl.load(peaks + row)[:, None])
    gradient = slope_of(shifted, constant[:, None], bend[:, None], by_entropies is not None)
    holds_target = tl.max(((target >= 0) & (target < N)).to(tl.int32), 0) != 0
    if holds_target | (j * N + N > valid):
        column = tl.arange(0, N)[None, :]
        gradient = tl.where(column == target[:, None], gradient + a[:, None], gradient)
        gradient = tl.where(column < valid - j * N, gradient, 0.0)
    store_tile(out, i, j * N, gradient, PARTS)


@triton.jit(do_not_specialize=["rows"])
def merge_kernel(parts, shares, rows, tiles, ROWS: tl.constexpr, TILES: tl.constexpr):
    """shares [rows, 4] of the tiles' statistics, `TILES` tiles of `ROWS` rows at a time, in a fixed order."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.full((ROWS,), FLOOR, tl.float32)
    s = tl.zeros((ROWS,), tl.float32)
    t = tl.zeros((ROWS,), tl.float32)
    target_logit = tl.zeros((ROWS,), tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        here = (tile < tiles)[:, None] & (row < rows)[None, :]
        at = parts + tile[:, None].to(tl.int64) * 4 * rows + row[None, :]
        of_tiles = tl.load(at, here, FLOOR)
        peak = tl.maximum(m, tl.max(of_tiles, 0))
        scale, scales = tl.exp2(m - peak), tl.exp2(of_tiles - peak[None, :])
        sums = tl.load(at + rows, here, 0.0)
        moments = tl.load(at + 2 * rows, here, 0.0) + sums * (of_tiles - peak[None, :])
        t = (t + s * (m - peak)) * scale + tl.sum(moments * scales, 0)
        s = s * scale + tl.sum(sums * scales, 0)
        m = peak
        target_logit += tl.sum(tl.load(at + 3 * rows, here, 0.0), 0)
    share = shares + row.to(tl.int64) * 4
    tl.store(share, m, row < rows)
    tl.store(share + 1, s, row < rows)
    tl.store(share + 2, t, row < rows)
    tl.store(share + 3, target_logit, row < rows)
