"""`support` by kernels: of a row with a support only its ids are read, and its gradient is zeros and as many values.

Rows without one, and with `whole_entropy` all of them, are `vocab_parallel`'s.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_pg.kernels.support import Restriction, SupportRows
from megatron_pg.kernels.triton import vocab_parallel
from megatron_pg.kernels.triton.tiles import FLOOR, FUSED, LN2, LOWEST, accumulate, merge
from megatron_pg.kernels.triton.vocab_parallel import log2_scale
from megatron_pg.kernels.vocabulary import Vocabulary

BLOCK = 256  # ids at a time
WARPS = 4


def support_rows_of(
    logits: Tensor, targets: Tensor, mask: Tensor, restriction: Restriction, vocabulary: Vocabulary, *, inplace: bool
) -> tuple[Tensor, Tensor]:
    """`SupportRows.outputs`, [T] float32, 0 where masked; differentiable. With `inplace` the backward writes the gradient over the logits."""
    return _SupportRows.apply(logits, targets, mask, restriction, vocabulary, inplace)


class _SupportRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, mask, restriction, vocabulary, inplace):
        shares = vocabulary.gather(statistics(logits, targets, mask, restriction, vocabulary))
        rows = combine(shares, targets, mask, restriction, vocabulary)
        ctx.save_for_backward(logits, targets, mask, *rows)
        ctx.restriction, ctx.vocabulary, ctx.inplace = restriction, vocabulary, inplace
        return tuple(values.clone() for values in rows.outputs)  # what is saved must not be an output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *slopes):
        logits, targets, mask, *rows = ctx.saved_tensors
        gradient = logits.detach() if ctx.inplace else torch.empty_like(logits)
        where = targets, mask, ctx.restriction
        write_gradient(logits, gradient, *where, SupportRows(*rows), slopes, ctx.vocabulary)
        if ctx.inplace:
            torch.autograd.graph.increment_version(logits)
        return gradient, None, None, None, None, None


def statistics(
    logits: Tensor, targets: Tensor, mask: Tensor, restriction: Restriction, vocabulary: Vocabulary
) -> Tensor:
    """[T, 4] float32 as `vocab_parallel.statistics`, over the support; with `whole_entropy` [2 T, 4], over all columns behind them."""
    support = restriction.support
    is_read = mask if restriction.whole_entropy else mask & (support.counts == 0)
    whole = vocab_parallel.statistics(logits, targets, is_read, vocabulary)
    shares = whole.clone() if restriction.whole_entropy else whole
    support_statistics_kernel[(len(logits),)](
        logits,
        targets,
        mask,
        *_sets(restriction),
        shares,
        vocabulary.valid,
        vocabulary.first,
        logits.stride(0),
        log2_scale(vocabulary),
        BLOCK=BLOCK,
        num_warps=WARPS,
        **FUSED,
    )
    return torch.cat([shares, whole]) if restriction.whole_entropy else shares


def combine(
    shares: Tensor, targets: Tensor, mask: Tensor, restriction: Restriction, vocabulary: Vocabulary
) -> SupportRows:
    """The ranks' shares [tp, T or 2 T, 4], in rank order, to the distributions; 0 where masked."""
    parts = shares.chunk(2, dim=1) if restriction.whole_entropy else (shares,)
    found = [vocab_parallel.combine(part.contiguous(), targets, mask, vocabulary) for part in parts]
    return SupportRows.of(found[0], found[-1])


def write_gradient(
    logits: Tensor,
    gradient: Tensor,
    targets: Tensor,
    mask: Tensor,
    restriction: Restriction,
    rows: SupportRows,
    slopes: tuple[Tensor, ...],
    vocabulary: Vocabulary,
) -> None:
    """Fills `gradient` [T, V / tp], any floating dtype, which may be the logits; `slopes`: by `outputs`."""
    of_logprob, of_entropy = slopes
    is_whole, values = restriction.support.counts == 0, _values(restriction)
    where = vocabulary.valid, vocabulary.first
    support_gradient_kernel[(len(logits),)](  # before the logits are written over
        logits,
        targets,
        mask,
        *_sets(restriction),
        values,
        rows.peaks,
        rows.totals,
        rows.support_entropy,
        rows.whole_peaks,
        rows.whole_totals,
        rows.entropy,
        of_logprob.contiguous(),
        of_entropy.contiguous(),
        *where,
        vocabulary.size,
        logits.stride(0),
        log2_scale(vocabulary),
        WHOLE_ENTROPY=restriction.whole_entropy,
        BLOCK=BLOCK,
        num_warps=WARPS,
        **FUSED,
    )
    if restriction.whole_entropy:
        is_read, of_rows, of_logprob = mask, rows.of_all, torch.where(is_whole, of_logprob, 0)
    else:
        is_read, of_rows = mask & is_whole, rows.of_support
    slopes = of_logprob, of_entropy
    vocab_parallel.write_gradient(logits, gradient, targets, is_read, of_rows, slopes, vocabulary)
    support_put_kernel[(len(logits),)](
        gradient, mask, *_sets(restriction), values, *where, gradient.stride(0), BLOCK=BLOCK, num_warps=WARPS, **FUSED
    )


def _sets(restriction: Restriction) -> tuple[Tensor, ...]:
    """As kernels take them, which have no strides."""
    support = restriction.support
    return support.starts.contiguous(), support.counts.contiguous(), support.ids.contiguous()


def _values(restriction: Restriction) -> Tensor:
    """One per id."""
    return torch.empty(restriction.support.ids.shape, dtype=torch.float32, device=restriction.support.ids.device)


@triton.jit
def support_statistics_kernel(
    logits, targets, mask, starts, counts, ids, shares, valid, first, stride, c, BLOCK: tl.constexpr
):
    """One row per program, of those with a support: shares[row] as `statistics_kernel`; -inf is the logit of a target outside it."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    if (tl.load(mask + row) != 0) & (count > 0):
        start = tl.load(starts + row)
        target = tl.load(targets + row)
        lanes = tl.arange(0, BLOCK)
        z_row = logits + row * stride
        m = tl.full((BLOCK,), FLOOR, tl.float32)
        s = tl.zeros((BLOCK,), tl.float32)
        t = tl.zeros((BLOCK,), tl.float32)
        hits = tl.zeros((BLOCK,), tl.int32)
        for k in range(0, count, BLOCK):
            token = tl.load(ids + start + k + lanes, lanes < count - k, -1)
            column = token - first
            owned = (column >= 0) & (column < valid)
            tile = tl.load(z_row + column, owned, float("-inf"))
            m, s, t = accumulate(m, s, t, (tile[:, None],), c, "plain", True)
            hits += (token == target).to(tl.int32)
        peak, total, shifted = tl.reduce((m, s, t), 0, merge)
        column = target - first
        owned = (column >= 0) & (column < valid)
        target_logit = tl.load(z_row + column, owned, 0.0).to(tl.float32)
        outside = owned & (tl.sum(hits, 0) == 0)
        tl.store(shares + row * 4, peak)
        tl.store(shares + row * 4 + 1, total)
        tl.store(shares + row * 4 + 2, shifted)
        tl.store(shares + row * 4 + 3, tl.where(outside, float("-inf"), target_logit))


@triton.jit
def _slope(z, c, peak, total, entropy, a, e):
    """q (-a - e (log q + H)) of logits z."""
    x = tl.fma(z, c, -peak)
    constant = -(a + e * (entropy - LN2 * tl.log2(total))) / total
    return tl.exp2(x) * tl.fma(tl.maximum(x, LOWEST), -e * LN2 / total, constant)


@triton.jit
def support_gradient_kernel(
    logits,
    targets,
    mask,
    starts,
    counts,
    ids,
    values,
    peaks,
    totals,
    support_entropies,
    whole_peaks,
    whole_totals,
    entropies,
    grad_logprobs,
    grad_entropies,
    valid,
    first,
    vocab_size,
    stride,
    c,
    WHOLE_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row per program: the gradient of the logits of the ids that are here, into their places of values [n]."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    if (tl.load(mask + row) != 0) & (count > 0):
        start = tl.load(starts + row)
        target = tl.load(targets + row)
        total = tl.load(totals + row)
        exists = (target >= 0) & (target < vocab_size) & (total > 0) & (total < float("inf"))
        a = tl.where(exists, tl.load(grad_logprobs + row), float("nan")) * (c * LN2)
        e = tl.load(grad_entropies + row) * (c * LN2)
        peak = tl.load(peaks + row)
        support_entropy = tl.load(support_entropies + row)
        whole_peak = tl.load(whole_peaks + row)
        whole_total = tl.load(whole_totals + row)
        entropy = tl.load(entropies + row)
        zero = (row * 0).to(tl.float32)  # of a constant, the interpreter of Triton 3.7 cannot take a quotient
        lanes = tl.arange(0, BLOCK)
        for k in range(0, count, BLOCK):
            here = lanes < count - k
            token = tl.load(ids + start + k + lanes, here, -1)
            column = token - first
            owned = (column >= 0) & (column < valid)
            z = tl.load(logits + row * stride + column, owned, 0.0).to(tl.float32)
            if WHOLE_ENTROPY:
                slope = _slope(z, c, peak, total, support_entropy, a, zero)
                slope += _slope(z, c, whole_peak, whole_total, entropy, zero, e)
            else:
                slope = _slope(z, c, peak, total, support_entropy, a, e)
            slope = tl.where(token == target, slope + a, slope)
            tl.store(values + start + k + lanes, slope, owned)


@triton.jit
def support_put_kernel(gradients, mask, starts, counts, ids, values, valid, first, stride, BLOCK: tl.constexpr):
    """One row per program: values [n] into the columns of the ids that are here."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    if (tl.load(mask + row) != 0) & (count > 0):
        start = tl.load(starts + row)
        lanes = tl.arange(0, BLOCK)
        for k in range(0, count, BLOCK):
            column = tl.load(ids + start + k + lanes, lanes < count - k, -1) - first
            owned = (column >= 0) & (column < valid)
            value = tl.load(values + start + k + lanes, owned, 0.0)
            tl.store(gradients + row * stride + column, value.to(gradients.dtype.element_ty), owned)
