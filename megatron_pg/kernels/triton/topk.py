"""`topk` by kernels: the ids are hidden in the logits while `vocab_parallel`'s kernel reads them; what is on [T, K] is `topk_rows`'."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_pg.kernels.topk import Slopes, TopKRows
from megatron_pg.kernels.triton import vocab_parallel
from megatron_pg.kernels.triton.tiles import FLOOR, FUSED, LOWEST
from megatron_pg.kernels.triton.topk_rows import block_of, coefficients, combine
from megatron_pg.kernels.triton.vocab_parallel import WRITE, log2_scale
from megatron_pg.kernels.vocabulary import Vocabulary


def topk_rows_of(
    logits: Tensor, targets: Tensor, mask: Tensor, ids: Tensor, vocabulary: Vocabulary, *, inplace: bool
) -> tuple[Tensor, ...]:
    """`TopKRows.outputs`, 0 where masked; differentiable. With `inplace` the backward writes the gradient over the logits."""
    stays_hidden = inplace and torch.is_grad_enabled() and logits.requires_grad
    return _TopKRows.apply(logits, targets, mask, ids, vocabulary, inplace, stays_hidden)


class _TopKRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, mask, ids, vocabulary, inplace, stays_hidden):
        table = logits.detach()
        shares = statistics(table, targets, mask, ids, vocabulary)
        if stays_hidden:  # whoever saved the logits gets an error, not the gradient of -inf
            torch.autograd.graph.increment_version(logits)
        else:
            put(table, ids, mask, shares[:, 4:], vocabulary)
        rows = combine(vocabulary.gather(shares), targets, mask, ids, vocabulary)
        ctx.save_for_backward(logits, targets, mask, ids, *rows)
        ctx.vocabulary, ctx.inplace = vocabulary, inplace
        return rows.outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *slopes):
        logits, targets, mask, ids, *rows = ctx.saved_tensors
        gradient = logits.detach() if ctx.inplace else torch.empty_like(logits)
        write_gradient(logits, gradient, targets, mask, ids, TopKRows(*rows), Slopes(*slopes), ctx.vocabulary)
        if ctx.inplace:
            torch.autograd.graph.increment_version(logits)
        return gradient, None, None, None, None, None, None


def statistics(logits: Tensor, targets: Tensor, mask: Tensor, ids: Tensor, vocabulary: Vocabulary) -> Tensor:
    """[T, 4 + K] float32 of this rank's columns: m, s, t of `tiles` without the ids, then the logits of target and ids, 0 if not here.

    The ids are left hidden in the logits; `put` brings them back.
    """
    shares = take_and_hide(logits, targets, mask, ids, vocabulary)
    shares[:, :3] = vocab_parallel.statistics(logits, targets, mask, vocabulary)[:, :3]
    return shares


def write_gradient(
    logits: Tensor,
    gradient: Tensor,
    targets: Tensor,
    mask: Tensor,
    ids: Tensor,
    rows: TopKRows,
    slopes: Slopes,
    vocabulary: Vocabulary,
) -> None:
    """Fills `gradient` [T, V / tp], any floating dtype, which may be the logits, whether the ids are hidden in those or not."""
    factors, named = coefficients(targets, mask, ids, rows, slopes, vocabulary)
    blocks = WRITE.blocks(logits, logits.shape[1])
    tail_gradient_kernel[(len(logits) * blocks,)](
        logits,
        gradient,
        targets,
        mask,
        rows.tail_peaks,
        factors,
        logits.shape[1],
        vocabulary.valid,
        vocabulary.first,
        blocks,
        logits.stride(0),
        gradient.stride(0),
        log2_scale(vocabulary),
        **WRITE.options(logits),
    )
    put(gradient, ids, mask, named, vocabulary)


def take_and_hide(logits: Tensor, targets: Tensor, mask: Tensor, ids: Tensor, vocabulary: Vocabulary) -> Tensor:
    """[T, 4 + K] float32: m, s, t of `tiles` of the ids alone, then the logits of target and ids, 0 if not here; the ids' become -inf."""
    found = torch.empty(len(ids), 4 + ids.shape[1], dtype=torch.float32, device=logits.device)
    take_and_hide_kernel[(len(ids),)](
        logits,
        targets,
        mask,
        ids,
        found,
        ids.shape[1],
        vocabulary.valid,
        vocabulary.first,
        logits.stride(0),
        log2_scale(vocabulary),
        **block_of(ids),
        **FUSED,
    )
    return found


def put(table: Tensor, ids: Tensor, mask: Tensor, values: Tensor, vocabulary: Vocabulary) -> None:
    """Writes values [T, K] into the columns of the ids that are here, in the rows that are not masked."""
    put_kernel[(len(ids),)](
        table,
        ids,
        mask,
        values,
        ids.shape[1],
        vocabulary.valid,
        vocabulary.first,
        table.stride(0),
        *values.stride(),
        **block_of(ids),
        **FUSED,
    )


@triton.jit(do_not_specialize=["K"])
def take_and_hide_kernel(logits, targets, mask, ids, found, K, valid, first, stride, c, BLOCK: tl.constexpr):
    """One row per program: found [rows, 4 + K] of `take_and_hide`, and -inf at the ids that are here."""
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
    share = found + row * (K + 4)
    tl.store(share, peak)
    tl.store(share + 1, tl.sum(power, 0))
    tl.store(share + 2, tl.sum(power * tl.maximum(shifted, LOWEST), 0))
    tl.store(share + 3, of_target)
    tl.store(share + 4 + k, value, k < K)


@triton.jit(do_not_specialize=["K"])
def put_kernel(table, ids, mask, values, K, valid, first, stride, row_stride, id_stride, BLOCK: tl.constexpr):
    """One row per program: values [rows, K] into the columns of the ids that are here."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    column = tl.load(ids + row * K + k, k < K, -1) - first
    owned = (column >= 0) & (column < valid) & (tl.load(mask + row) != 0)
    value = tl.load(values + row * row_stride + k * id_stride, owned, 0.0)
    tl.store(table + row * stride + column, value.to(table.dtype.element_ty), owned)


@triton.jit
def tail_gradient_kernel(
    logits,
    gradients,
    targets,
    mask,
    peaks,
    factors,
    columns,
    valid,
    first,
    blocks,
    logits_stride,
    gradients_stride,
    c,
    THREADS: tl.constexpr,
    WORDS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """One block of one row: 2^x (factors[0] + factors[1] x), x = z c - peak, and factors[2] more at the target."""
    TILE: tl.constexpr = THREADS * WORDS
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks) * (TILE * UNROLL)
    offsets = tl.arange(0, THREADS)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    g_row = gradients + row * gradients_stride + offsets
    dtype: tl.constexpr = gradients.dtype.element_ty
    if tl.load(mask + row) != 0:
        target = tl.load(targets + row) - first
        peak = tl.load(peaks + row)
        outside = tl.load(factors + row * 3)
        by_x = tl.load(factors + row * 3 + 1)
        at_target = tl.load(factors + row * 3 + 2)
        z_row = logits + row * logits_stride + offsets
        tiles = ()
        for k in tl.static_range(UNROLL):
            at = start + k * TILE
            tile = tl.load(z_row + at, mask=offsets < valid - at, other=float("-inf"))
            tiles = tiles + (tile,)
        for k in tl.static_range(UNROLL):
            at = start + k * TILE
            x = tl.fma(tiles[k].to(tl.float32), c, -peak)
            gradient = tl.exp2(x) * tl.fma(tl.maximum(x, LOWEST), by_x, outside)
            gradient = tl.where(offsets + at == target, gradient + at_target, gradient)
            gradient = tl.where(offsets + at < valid, gradient, 0.0)
            tl.store(g_row + at, gradient.to(dtype), mask=offsets < columns - at)
    else:
        zeros = tl.zeros((THREADS, WORDS), dtype)
        for k in tl.static_range(UNROLL):
            at = start + k * TILE
            tl.store(g_row + at, zeros, mask=offsets < columns - at)
