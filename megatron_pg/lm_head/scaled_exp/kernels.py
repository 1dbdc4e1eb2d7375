"""The steps of mode "scaled_exp" as kernels: a product that ends in exponentials, and the steps on rows around it.

The target and padding are masked in the few tiles that hold any.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_pg.kernels import Vocabulary
from megatron_pg.kernels.triton.tiles import FUSED, LN2, softcapped, through_cap
from megatron_pg.lm_head.scaled_exp.head import HEADROOM, LIMIT, Part, ScaledExp, ScaledExpOutput
from megatron_pg.lm_head.tiled_product import Tiles, launch, store_tile

_HEADROOM, _LIMIT, _MOST = tl.constexpr(HEADROOM), tl.constexpr(LIMIT), tl.constexpr(2.0**LIMIT)
ROWS = 128  # of a program that reads one number of each
WIDTH = 1024  # of a row that one program reads at a time


class TritonScaledExp(ScaledExp):
    """`ScaledExp` by kernels."""

    def __init__(self, weight: Tensor, vocabulary: Vocabulary):
        super().__init__(weight, vocabulary)
        self._tiles = Tiles.of_width(weight.shape[1], is_capped=vocabulary.softcap is not None)

    def target_logits(self, hidden: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
        """By a kernel, a program per row."""
        logits = torch.empty(len(rows), dtype=torch.float32, device=hidden.device)
        where = self._vocabulary.valid, self._vocabulary.first
        width, options = hidden.shape[1], {"CAP": self._vocabulary.softcap, "BLOCK": WIDTH} | FUSED
        target_kernel[(len(rows),)](hidden, self._weight, rows, targets, logits, *where, width, self._scale, **options)
        return logits

    def product(self, rows: Part) -> Tensor:
        """By a kernel; the sums of its tiles' sums in a fixed order."""
        states, scaled, targets, target_logits = rows
        tiles = triton.cdiv(scaled.shape[1], self._tiles.columns)
        sums = torch.empty(tiles, len(states), dtype=torch.float32, device=states.device)
        of_rows = target_logits, targets, sums
        launch(self._tiles, scaled_exp_tile, of_rows, states, self._weight, scaled, self._vocabulary)
        return sums.sum(dim=0)

    def logprobs(self, shares: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """By a kernel."""
        sums, logprobs = torch.empty(2, shares.shape[1], dtype=torch.float32, device=shares.device)
        grid = (triton.cdiv(len(sums), ROWS),)
        logprob_kernel[grid](
            shares, targets, sums, logprobs, len(shares), len(sums), self._vocabulary.size, BLOCK=ROWS, **FUSED
        )
        return sums, logprobs

    def weigh(self, rows: Part, sums: Tensor, slopes: Tensor, v: Tensor, output: ScaledExpOutput) -> None:
        """By a kernel, a program per row."""
        states, scaled, targets, target_logits = rows
        where = self._vocabulary.valid, self._vocabulary.first
        scalars = scaled.stride(0), states.shape[1], 1.0 / self._vocabulary.temperature
        tensors = states, scaled, targets, target_logits, sums, slopes, v, *output
        weigh_kernel[(len(states),)](*tensors, *where, *scalars, self._cap, BLOCK=WIDTH, **FUSED)

    def scatter(self, product: Tensor, v: Tensor, rows: Tensor, of_hidden: Tensor) -> None:
        """By a kernel, a program per row."""
        scatter_kernel[(len(product),)](product, v, rows, of_hidden, product.shape[1], BLOCK=WIDTH, **FUSED)

    def add_lost(self, hidden: Tensor, rows: Tensor, targets: Tensor, v: Tensor, e: Tensor, total: Tensor) -> None:
        """By a kernel that adds up the rows of one target, because atomic sums would depend on their order."""
        ordered, order = torch.sort(targets, stable=True)
        tensors = hidden, rows[order], ordered, torch.searchsorted(ordered, ordered, right=True), v[order], e[order]
        sizes = self._vocabulary.valid, self._vocabulary.first, hidden.shape[1], *total.stride()
        grid = (len(rows) * triton.cdiv(hidden.shape[1], WIDTH),)
        lost_kernel[grid](*tensors, total, *sizes, BLOCK=WIDTH, **FUSED)


@triton.jit(do_not_specialize=["first"])
def target_kernel(
    hidden, weight, rows, targets, target_logits, valid, first, width, c, CAP: tl.constexpr, BLOCK: tl.constexpr
):
    """One row per program: c x·W[y], capped before c, 0 where the target is not here."""
    at = tl.program_id(0)
    row = tl.load(rows + at).to(tl.int64)
    local = tl.load(targets + at) - first
    owned = (local >= 0) & (local < valid)
    end = tl.where(owned, width, 0)  # not `& owned` below: Triton 3.9's interpreter refuses such a mask
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        here = column < end
        x = tl.load(hidden + row * width + column, here, 0.0).to(tl.float32)
        products = tl.fma(x, tl.load(weight + local * width + column, here, 0.0).to(tl.float32), products)
    tl.store(target_logits + at, softcapped(tl.sum(products, 0), CAP) * c)


@triton.jit
def _exponential(z, c, offset):
    """2^(c z - offset), bounded; NaN must come through."""
    return tl.exp2(tl.minimum(tl.fma(z, c, -offset[:, None]), _LIMIT, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def scaled_exp_tile(z, scaled, of_rows, i, j, rows, valid, first, c, PARTS: tl.constexpr, CAP: tl.constexpr):
    """scaled[i, j] = 2^(c z_ij - target_logits[i] - 60), 0 at targets and padding, and unrounded sums of them.

    The sums are [tiles of columns, rows]. With a softcap what is stored is multiplied by dz/dx.
    """
    target_logits, targets, sums = of_rows
    M: tl.constexpr = z.shape[0]
    N: tl.constexpr = z.shape[1]
    row = i + tl.arange(0, M)
    here = row < rows
    offset = tl.load(target_logits + row, here, 0.0) + _HEADROOM
    target = (tl.load(targets + row, here, -1) - first - j * N).to(tl.int32)
    if CAP is None:
        e = _exponential(z, c, offset)
    else:  # of z and e only one fits in the registers
        z = softcapped(z, CAP)
    holds_target = tl.max(((target >= 0) & (target < N)).to(tl.int32), 0) != 0
    if holds_target | (j * N + N > valid):
        column = tl.arange(0, N)[None, :]
        here_too = (column != target[:, None]) & (column < valid - j * N)
        if CAP is None:
            e = tl.where(here_too, e, 0.0)
        else:
            z = tl.where(here_too, z, float("-inf"))
    if CAP is not None:
        e = _exponential(z, c, offset)
    tl.store(sums + j.to(tl.int64) * rows + row, tl.sum(e, 1), here)
    store_tile(scaled, i, j * N, through_cap(e, z, CAP), PARTS)


@triton.jit(do_not_specialize=["rows"])
def logprob_kernel(shares, targets, sums, logprobs, ranks, rows, vocab_size, BLOCK: tl.constexpr):
    """The ranks' sums of each row, in rank order, to S and log π(y)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = row < rows
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in range(ranks):
        total += tl.load(shares + rank * rows + row, here, 0.0)
    target = tl.load(targets + row, here, 0)
    total = tl.where((target >= 0) & (target < vocab_size), total, float("nan"))
    tl.store(sums + row, total, here)
    x = tl.where(total < 1, total * 2.0**60, 1.0)
    series = 1.0 / 9  # near 0, where the logarithm of 1 + x is exact only in absolute terms
    for k in tl.static_range(8, 0, -1):
        series = 1.0 / k - x * series
    near = tl.where(x < 0.0625, x * series, tl.log(1 + x))
    far = tl.log(total) + 60 * LN2
    tl.store(logprobs + row, tl.where(total >= 1, -far, tl.where(total < 1, -near, total)), here)


@triton.jit(do_not_specialize=["first"])
def weigh_kernel(
    states,
    scaled,
    targets,
    target_logits,
    sums,
    slopes,
    v,
    loss,
    logprobs,
    log_ratios,
    valid,
    first,
    scaled_stride,
    width,
    inverse_temperature,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row per program: v, E at the target and for s_y, v x for x; NaN if the loss depends on more than S tells."""
    row = tl.program_id(0).to(tl.int64)
    total, slope = tl.load(sums + row), tl.load(slopes + row)
    factor = -slope / (total + 2.0**-60) * inverse_temperature
    if (total >= _MOST) & ((slope != 0) | (tl.load(log_ratios + row) > 0)):
        factor = float("nan")
        tl.store(loss, float("nan"))
        tl.store(logprobs + row, float("nan"))
        tl.store(log_ratios + row, float("nan"))
    tl.store(v + row, factor)
    local = tl.load(targets + row) - first
    owned = (local >= 0) & (local < valid)
    of_target = -total
    if CAP is not None:
        of_target = through_cap(of_target, tl.load(target_logits + row), CAP)
    tl.store(target_logits + row, of_target)
    tl.store(scaled + row * scaled_stride + local, of_target.to(scaled.dtype.element_ty), owned)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(states + row * width + column, column < width, 0.0).to(tl.float32)
        tl.store(states + row * width + column, (factor * x).to(states.dtype.element_ty), column < width)


@triton.jit
def scatter_kernel(products, v, rows, of_hidden, width, BLOCK: tl.constexpr):
    """One row per program: v times the product, into its row of the gradient."""
    at = tl.program_id(0).to(tl.int64)
    factor, row = tl.load(v + at), tl.load(rows + at).to(tl.int64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(products + at * width + column, column < width, 0.0) * factor
        tl.store(of_hidden + row * width + column, value.to(of_hidden.dtype.element_ty), column < width)


@triton.jit(do_not_specialize=["first"])
def lost_kernel(hidden, rows, targets, ends, v, e, total, valid, first, width, stride, step, BLOCK: tl.constexpr):
    """One target, of rows in the order of targets, and some columns per program: their v E x, less what was added."""
    blocks = tl.cdiv(width, BLOCK)
    at, column = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    target, end = tl.load(targets + at), tl.load(ends + at)
    is_first = (at == 0) | (tl.load(targets + at - 1, at > 0, 0) != target)
    local = target - first
    if is_first & (local >= 0) & (local < valid):
        gradient = total + local * stride + column * step
        lost = tl.load(gradient, column < width, 0.0).to(tl.float32)
        dtype: tl.constexpr = hidden.dtype.element_ty
        for start in range(0, end - at, 4):
            row = at + start + tl.arange(0, 4)[:, None]
            factor, exact = tl.load(v + row, row < end, 0.0), tl.load(e + row, row < end, 0.0)
            states = hidden + tl.load(rows + row, row < end, 0) * width
            x = tl.load(states + column, (row < end) & (column < width), 0.0).to(tl.float32)
            rounded = exact.to(dtype).to(tl.float32) * (factor * x).to(dtype).to(tl.float32)
            lost += tl.sum(factor * exact * x - rounded, 0, keep_dims=True)
        tl.store(gradient, lost.to(total.dtype.element_ty), column < width)
