"""The product of hidden states and weight, a tile at a time, with an epilogue: what is made of a tile in registers.

The product is persistent: a program takes one tile of rows and columns after the other, and the next tile is copied
while a tile ends. `GROUP` tiles of rows are taken for each tile of columns, so that repeated reads hit the L2 cache.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_pg.kernels import Vocabulary
from megatron_pg.kernels.device import multiprocessors
from megatron_pg.kernels.triton.tiles import FUSED
from megatron_pg.kernels.triton.vocab_parallel import log2_scale


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the product is cut into tiles."""

    rows: int = 128
    columns: int = 256
    depth: int = 64
    group: int = 8
    parts: int = 2  # that a tile is stored in; each takes its columns of shared memory
    warps: int = 8
    stages: int = 3
    programs: int = 1  # per multiprocessor: while one of two ends its tile, the other one multiplies

    @classmethod
    def of_width(cls, width: int, *, is_capped: bool = False) -> "Tiles":
        """The fastest measured on an H200 (docs/benchmarks.md): the end of a tile costs less the wider its sums are.

        Only the narrow tile has registers for a softcap.
        """
        if width < 4096 or is_capped:
            return cls(columns=128, warps=4, programs=2)
        return cls() if width < 8192 else cls(group=16)

    @property
    def constants(self) -> dict[str, int]:
        """The kernel's compile-time constants."""
        return {"M": self.rows, "N": self.columns, "K": self.depth, "GROUP": self.group, "PARTS": self.parts}


def launch(
    tiles: Tiles,
    epilogue: Any,
    of_rows: tuple,
    states: Tensor,
    weight: Tensor,
    out: Tensor | None,
    vocabulary: Vocabulary,
) -> None:
    """Runs `epilogue` on every tile of states [c, H] @ weight.T [H, V / tp]; it reads `of_rows` and may write `out`.

    States and weight are contiguous; their rows and those of `out` start at multiples of 16 bytes.
    """
    t, count, columns = tiles, len(states), len(weight)
    described = (
        TensorDescriptor.from_tensor(states, [t.rows, t.depth]),
        TensorDescriptor.from_tensor(weight.detach(), [t.columns, t.depth]),
        None if out is None else TensorDescriptor.from_tensor(out, [t.rows, t.columns // t.parts]),
    )
    sizes = count, columns, vocabulary.valid, states.shape[1], vocabulary.first, log2_scale(vocabulary)
    options = t.constants | {"num_warps": t.warps, "num_stages": t.stages, "CAP": vocabulary.softcap} | FUSED
    number = triton.cdiv(count, t.rows) * triton.cdiv(columns, t.columns)
    programs = min(number, t.programs * multiprocessors(states.device))
    product_kernel[(programs,)](*described, of_rows, *sizes, EPILOGUE=epilogue, **options)


@triton.jit(do_not_specialize=["rows", "first"])
def product_kernel(
    hidden,
    weight,
    out,
    of_rows,
    rows,
    columns,
    valid,
    width,
    first,
    c,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    CAP: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """EPILOGUE of every tile z [M, N] of the product, whose rows begin at i and columns at the j-th tile."""
    tiles_m, tiles_n = tl.cdiv(rows, M), tl.cdiv(columns, N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        group = tile // (GROUP * tiles_n)
        size = tl.minimum(tiles_m - group * GROUP, GROUP)
        i = (group * GROUP + tile % (GROUP * tiles_n) % size) * M
        j = tile % (GROUP * tiles_n) // size
        z = tl.zeros((M, N), tl.float32)
        for k in range(0, width, K):
            z = tl.dot(hidden.load([i, k]), weight.load([j * N, k]).T, z)
        EPILOGUE(z, out, of_rows, i, j, rows, valid, first, c, PARTS, CAP)


@triton.jit
def store_tile(out, i, column, tile, PARTS: tl.constexpr):
    """Writes a tile, rounded, in `PARTS` of its columns."""
    dtype: tl.constexpr = out.dtype
    if PARTS == 1:
        out.store([i, column], tile.to(dtype))
    else:
        M: tl.constexpr = tile.shape[0]
        N: tl.constexpr = tile.shape[1]
        left, right = tl.split(tl.permute(tl.reshape(tile, (M, 2, N // 2)), (0, 2, 1)))
        out.store([i, column], left.to(dtype))
        out.store([i, column + N // 2], right.to(dtype))
