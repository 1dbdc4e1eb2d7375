"""Log-probabilities and entropy from vocabulary-parallel logits in Triton.

`megatron_pg.kernels.logprobs` is the specification. The forward reads the logits once and keeps four numbers per token.
The backward makes the gradient, over the logits themselves on request. Rows that are masked, or whose upstream gradient
is zero, are not read.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from megatron_pg.kernels.logprobs import RowStatistics
from megatron_pg.kernels.readers import ALL, D, R, Reader, Slopes
from megatron_pg.kernels.triton.tiles import (
    FUSED,
    LN2,
    LOWEST,
    Kind,
    accumulate,
    logprob_and_entropy,
    merge,
    minus_infinity,
    no_statistics,
    softcapped,
    store_each,
    through_cap,
)
from megatron_pg.kernels.vocabulary import Vocabulary

VECTOR_BYTES = 16  # of one load of one thread
COMBINE_ROWS = 128
ENTROPY, PEAK, TOTAL, SLOPE = (tl.constexpr(i) for i in (1, 2, 3, 7))  # in the results of `token_loss_kernel`


class Steps(NamedTuple):
    """How the threads of a program read a row: one constant of a kernel, because Triton binds each at every launch."""

    threads: int
    words: int  # numbers in a vector
    unroll: int  # tiles in flight, a vector of each thread in each
    shifted: bool  # see `_is_shifted`
    kind: Kind


class Walk(NamedTuple):
    """How a program reads a row: enough loads in flight to cover the memory's latency, few enough to fit at its end."""

    warps: int
    unroll: int

    @property
    def threads(self) -> int:
        """Of a program."""
        return 32 * self.warps

    def options(self, logits: Tensor, cap: float | None, *, shifted: bool = False) -> dict[str, Any]:
        """How a kernel that walks over these logits is launched."""
        steps = _steps(self.threads, words_of(logits), self.unroll, shifted, cap)
        return {"WALK": steps, "num_warps": self.warps, **FUSED}

    def blocks(self, logits: Tensor, columns: int) -> int:
        """Programs per row of `columns`: each takes the tiles that are in flight at once."""
        return -(-columns // (self.threads * self.unroll * words_of(logits)))


@lru_cache
def _steps(threads: int, words: int, unroll: int, shifted: bool, cap: float | None) -> Steps:
    return Steps(threads, words, unroll, shifted, Kind(cap=cap))


def words_of(logits: Tensor) -> int:
    """Numbers in a vector."""
    return VECTOR_BYTES // logits.element_size()


READ, WRITE = Walk(warps=4, unroll=4), Walk(warps=2, unroll=8)


class TritonReader(Reader[R, D]):
    """Reads logits by kernels.

    Args:
        vocabulary, targets, detail: as in `Reader`.
        mask: [n] bool, the rows that are read; statistics of others are 0. None: all rows.
    """

    def __init__(self, vocabulary: Vocabulary, targets: Tensor, detail: D | None = None, *, mask: Tensor | None = None):
        super().__init__(vocabulary, targets, detail)
        self._mask = torch.ones_like(self._targets, dtype=torch.bool) if mask is None else mask.contiguous()

    def _where(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """Targets and mask of a chunk."""
        return self._targets[chunk], self._mask[chunk]


class TritonPlainReader(TritonReader[RowStatistics, None]):
    """`PlainReader` by kernels."""

    record = RowStatistics

    @override
    def read(self, logits: Tensor, *, may_hide: bool = False) -> RowStatistics:
        if self._vocabulary.ranks > 1:
            return super().read(logits)
        return RowStatistics(*statistics(logits, self._where(ALL), self._vocabulary, whole=True).unbind())

    @override
    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        return statistics(z, self._where(chunk), self._vocabulary)

    @override
    def combine(self, shares: Tensor, z: Tensor, chunk: slice) -> RowStatistics:
        return combine(shares, self._where(chunk), self._vocabulary)

    @override
    def write_gradient(self, z: Tensor, out: Tensor, chunk: slice, rows: RowStatistics, slopes: Slopes) -> None:
        write_gradient(z, out, self._where(chunk), OfRows.of(rows, slopes), self._vocabulary)


def _is_shifted(*matrices: Tensor) -> bool:
    """Whether the rows of all matrices start at the same offset from a multiple of a vector, and the first row at one.

    Kernels then read from the multiple before each row, and mask the columns before the row.
    """
    stride, dtype = matrices[0].stride(0), matrices[0].dtype
    return stride % words_of(matrices[0]) != 0 and all(
        each.stride(0) == stride and each.dtype == dtype and each.data_ptr() % VECTOR_BYTES == 0 for each in matrices
    )


def log2_scale(vocabulary: Vocabulary) -> float:
    """c of `tiles`."""
    return math.log2(math.e) / vocabulary.temperature


class Columns(NamedTuple):
    """The columns of a matrix, for kernels."""

    count: int  # of a row, with padding
    valid: int  # that are not padding
    first: int  # global id of the first one
    size: int  # valid ones of all ranks

    @classmethod
    def of(cls, vocabulary: Vocabulary, matrix: Tensor) -> "Columns":
        """Those of the logits on this rank."""
        return cls(matrix.shape[1], vocabulary.valid, vocabulary.first, vocabulary.size)


Where = tuple[Tensor, Tensor]  # targets [T] and mask [T] of rows, contiguous


def statistics(logits: Tensor, where: Where, vocabulary: Vocabulary, *, whole: bool = False) -> Tensor:
    """[T, 4] float32 of this rank's columns: m, s, t of `tiles`, and the target's logit, 0 if it is not here.

    With `whole`, for one rank, `RowStatistics` [4, T].
    """
    rows = logits.shape[0]
    results = torch.empty((4, rows) if whole else (rows, 4), dtype=torch.float32, device=logits.device)
    sizes = rows, vocabulary.valid, vocabulary.first, logits.stride(0), log2_scale(vocabulary)
    statistics_kernel[(rows,)](logits, *where, results, *sizes, **reading(logits, vocabulary), WHOLE=whole)
    return results


def reading(logits: Tensor, vocabulary: Vocabulary) -> dict[str, Any]:
    """What a kernel is compiled for that reads a row per program."""
    return READ.options(logits, vocabulary.softcap, shifted=_is_shifted(logits))


def combine(shares: Tensor, where: Where, vocabulary: Vocabulary) -> RowStatistics:
    """The ranks' shares [tp, T, 4], in rank order, to log-probabilities and entropy of the whole vocabulary."""
    ranks, rows, _ = shares.shape
    out = torch.empty(4, rows, dtype=torch.float32, device=shares.device)
    sizes, grid = (ranks, rows, vocabulary.size, log2_scale(vocabulary)), (triton.cdiv(rows, COMBINE_ROWS),)
    combine_kernel[grid](shares, *where, out, *sizes, BLOCK=COMBINE_ROWS, **FUSED)
    return RowStatistics(*out.unbind())


class OfRows(NamedTuple):
    """What `gradient_kernel` reads of rows: tensors, in the kernel pointers."""

    peaks: Any  # [T]; without `totals` and `factors` the results of `token_loss_kernel`, one pointer instead of four
    totals: Any = None  # [T], like the next three
    entropies: Any = None
    by_logprobs: Any = None
    by_entropies: Any = None  # None: no loss reads the entropy
    grad_loss: Any = None  # [] factor of both; None: 1
    factors: Any = None  # [T, 3] constant, bend and a, instead of all but the peaks

    @classmethod
    def of(cls, rows: RowStatistics, slopes: Slopes) -> "OfRows":
        """From a loss's derivatives by log-probability and entropy [T], None: the loss does not read it."""
        by_logprob, by_entropy = (None if slope is None else slope.contiguous() for slope in slopes)
        by_logprob = torch.zeros_like(rows.logprobs) if by_logprob is None else by_logprob
        return cls(rows.peaks, rows.totals, rows.entropy, by_logprob, by_entropy)


def write_gradient(logits: Tensor, gradient: Tensor, where: Where, of_rows: OfRows, vocabulary: Vocabulary) -> None:
    """Fills `gradient` [T, V / tp], any floating dtype, which may be the logits."""
    shifted = _is_shifted(logits, gradient)
    rows, columns = logits.shape[0], Columns.of(vocabulary, logits)
    ahead = words_of(logits) - 1 if shifted else 0  # words before a row, at most
    blocks = WRITE.blocks(logits, columns.count + ahead)
    sizes = rows, columns, blocks, (logits.stride(0), gradient.stride(0)), log2_scale(vocabulary)
    options = WRITE.options(logits, vocabulary.softcap, shifted=shifted)
    gradient_kernel[(rows * blocks,)](logits, gradient, *where, of_rows, *sizes, **options)


@triton.jit
def in_tile(WALK: tl.constexpr):
    """Offsets of the words of a tile."""
    return tl.arange(0, WALK.threads)[:, None] * WALK.words + tl.arange(0, WALK.words)[None, :]


@triton.jit
def _row_start(row, stride, WALK: tl.constexpr):
    """Where reading starts, a multiple of a vector if `shifted`, and the words from there to the row."""
    start = row * stride
    lead = 0
    if WALK.shifted:
        lead = (start % WALK.words).to(tl.int32)
        start = start // WALK.words * WALK.words
    return start, lead


@triton.jit
def _read_row(m, s, t, z_row, offsets, lead, valid, c, WALK: tl.constexpr):
    """Adds the valid columns of a row to each thread's statistics; the row begins `lead` words after `z_row`."""
    TILE: tl.constexpr = WALK.threads * WALK.words
    UNROLL: tl.constexpr = WALK.unroll
    KIND: tl.constexpr = WALK.kind
    end = valid + lead
    begin = 0
    if WALK.shifted:
        tile = tl.load(z_row, mask=(offsets >= lead) & (offsets < end), other=minus_infinity(KIND))
        m, s, t = accumulate(m, s, t, (tile,), c, KIND, True)
        begin = TILE
    full = (end - begin) // (TILE * UNROLL)
    for group in range(full):
        tiles = ()
        for k in tl.static_range(UNROLL):
            at = begin + (group * UNROLL + k) * TILE
            tiles = tiles + (tl.load(z_row + at),)
        m, s, t = accumulate(m, s, t, tiles, c, KIND, True)
    if begin + full * (TILE * UNROLL) < end:
        # whole tiles have one mask for all: one that no vector shares would make the loads scalar
        whole = (end - begin) // TILE
        at = begin + whole * TILE
        tiles = (tl.load(z_row + at, mask=offsets < end - at, other=minus_infinity(KIND)),)
        for k in tl.static_range(UNROLL - 1):
            i = full * UNROLL + k
            # 0 * offsets: Triton 3.9's interpreter refuses a comparison of two numbers as the mask of a tile
            here = i + 0 * offsets < whole
            tiles = tiles + (tl.load(z_row + begin + i * TILE, mask=here, other=minus_infinity(KIND)),)
        m, s, t = accumulate(m, s, t, tiles, c, KIND, True)
    return m, s, t


@triton.jit
def row_statistics(logits, targets, row, live, valid, first, stride, c, WALK: tl.constexpr):
    """m, s, t of a row, those of no column if it is not live; the target's logit, and whether it is a column here."""
    THREADS: tl.constexpr = WALK.threads
    offsets = in_tile(WALK)
    m, s, t = no_statistics(THREADS)
    target_logit = 0.0
    owned = False
    if live:
        target = tl.load(targets + row) - first
        owned = (target >= 0) & (target < valid)
        target_logit = tl.load(logits + row * stride + target, mask=owned, other=0.0).to(tl.float32)
        target_logit = softcapped(target_logit, WALK.kind.cap)
        origin, lead = _row_start(row, stride, WALK)
        z_row = logits + origin + offsets
        m, s, t = _read_row(m, s, t, z_row, offsets, lead, valid, c, WALK)
    peak, total, shifted = tl.reduce((m, s, t), 0, merge)
    return peak, tl.where(live, total, 1.0), shifted, target_logit, owned


@triton.jit(do_not_specialize=["rows"])
def statistics_kernel(
    logits, targets, mask, results, rows, valid, first, stride, c, WALK: tl.constexpr, WHOLE: tl.constexpr
):
    """One row per program: its statistics, or with `WHOLE` the results of `store_row`; `first` is then 0.

    Statistics are results[row] = m, s, t and the target's logit, 0 where another rank owns the target.
    """
    row = tl.program_id(0).to(tl.int64)
    live = tl.load(mask + row) != 0
    of_row = (logits, targets, row, live, valid, first, stride, c)
    peak, total, shifted, target_logit, owned = row_statistics(*of_row, WALK)
    if WHOLE:
        store_row(results + row, rows, peak, total, shifted, target_logit, c, owned, live, True)
    else:
        store_each(results + row * 4, 1, (peak, total, shifted, target_logit), True)


@triton.jit
def store_row(result, rows, m, s, t, target_logit, c, exists, trained, here):
    """Stores log-probability, entropy, m and s of rows, each `rows` numbers after the previous one; the first two."""
    logprob, entropy = logprob_and_entropy(m, s, t, target_logit, c)
    logprob = tl.where(trained, tl.where(exists, logprob, float("nan")), 0.0)
    entropy = tl.where(trained, entropy, 0.0)
    store_each(result, rows, (logprob, entropy, m, s), here)
    return logprob, entropy


@triton.jit(do_not_specialize=["rows"])
def combine_kernel(shares, targets, mask, results, ranks, rows, vocab_size, c, BLOCK: tl.constexpr):
    """The ranks' shares of each row, in rank order, to results [4, rows]: log-probability, entropy, m and s."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = row < rows
    m, s, t = no_statistics(BLOCK)
    target_logit = tl.zeros((BLOCK,), tl.float32)
    for rank in range(ranks):
        share = shares + (rank * rows + row) * 4
        total = tl.load(share + 1, here, 1.0)
        m, s, t = merge(m, s, t, tl.load(share, here, 0.0), total, tl.load(share + 2, here, 0.0))
        target_logit += tl.load(share + 3, here, 0.0)  # a sum: a maximum would drop NaN
    target = tl.load(targets + row, here, 0)
    exists = (target >= 0) & (target < vocab_size)
    trained = tl.load(mask + row, here, 0) != 0
    store_row(results + row, rows, m, s, t, target_logit, c, exists, trained, here)


@triton.jit
def row_factors(a, e, entropy, total):
    """Constant and bend of q (-a - e (log q + H)) as 2^x (constant + bend x), with x = z c - m."""
    return -(a + e * (entropy - LN2 * tl.log2(total))) / total, -e * LN2 / total


@triton.jit
def slope_of(x, constant, bend, BENDS: tl.constexpr):
    """2^x (constant + bend x)."""
    factor = constant
    if BENDS:
        factor = tl.fma(tl.maximum(x, LOWEST), bend, constant)
    return tl.exp2(x) * factor


@triton.jit
def _tile_gradient(tiles, column, of_row, CAP: tl.constexpr, BENDS: tl.constexpr):
    """`slope_of` the logits, and a more at the target."""
    target, c, peak, constant, bend, a = of_row
    z = softcapped(tiles[0].to(tl.float32), CAP)
    gradient = slope_of(tl.fma(z, c, -peak), constant, bend, BENDS)
    return through_cap(tl.where(column == target, gradient + a, gradient), z, CAP)


@triton.jit
def row_slopes(row, target, c, totals, vocab_size, by_logprobs, by_entropies, grad_loss):
    """a and e of the gradient of a row, and its total.

    a (delta_j - p_j) - e p_j (log p_j + H),   a, e = by_logprobs, by_entropies times grad_loss c ln2
    """
    total = tl.load(totals + row)
    exists = (target >= 0) & (target < vocab_size) & (total > 0) & (total < float("inf"))
    scale = c * LN2
    if grad_loss is not None:
        scale *= tl.load(grad_loss)
    # an objective that compares and clips has slope 0 where the log-probability is NaN
    a = tl.where(exists, tl.load(by_logprobs + row), float("nan")) * scale
    e = 0.0
    if by_entropies is not None:
        e = tl.load(by_entropies + row) * scale
    return a, e, total


@triton.jit
def write_block(sources, g_row, place, of_row, GRADIENT: tl.constexpr, OPTION: tl.constexpr, WALK: tl.constexpr):
    """Writes GRADIENT(tiles, column, of_row, ...) of a block's tiles, one from each of the `sources`.

    `place`: columns of the first tile, whether the block is inside the row, its valid columns, and all of them.
    """
    UNROLL: tl.constexpr = WALK.unroll
    # more would take the registers, of which scalar loads and two sources need more
    TOGETHER: tl.constexpr = 1 if WALK.shifted or len(sources) > 1 else UNROLL
    TILE: tl.constexpr = WALK.threads * WALK.words
    CAP: tl.constexpr = WALK.kind.cap
    dtype: tl.constexpr = g_row.dtype.element_ty
    column, inside, valid, columns = place
    if inside:
        tiles = ()
        for k in tl.static_range(UNROLL):
            tiles = tiles + (_load_tiles(sources, k * TILE, None),)
        for k in tl.static_range(UNROLL):
            out = GRADIENT(tiles[k], column + k * TILE, of_row, CAP, OPTION)
            tl.store(g_row + k * TILE, out.to(dtype))
    else:
        for first_tile in tl.static_range(0, UNROLL, TOGETHER):
            masked = ()
            for k in tl.static_range(first_tile, first_tile + TOGETHER):
                here = (column + k * TILE >= 0) & (column + k * TILE < valid)
                masked = masked + (_load_tiles(sources, k * TILE, here),)
            for k in tl.static_range(first_tile, first_tile + TOGETHER):
                at = column + k * TILE
                out = GRADIENT(masked[k - first_tile], at, of_row, CAP, OPTION)
                out = tl.where((at >= 0) & (at < valid), out, 0.0)
                tl.store(g_row + k * TILE, out.to(dtype), mask=(at >= 0) & (at < columns))


@triton.jit
def _load_tiles(sources, at, here):
    """A tile of each source; `here` None: all of it is there."""
    tiles = ()
    for i in tl.static_range(len(sources)):
        if here is None:
            tiles = tiles + (tl.load(sources[i] + at),)
        else:
            tiles = tiles + (tl.load(sources[i] + at, mask=here, other=float("-inf")),)
    return tiles


@triton.jit
def _no_gradient(tiles, column, of_row, CAP: tl.constexpr, OPTION: tl.constexpr):
    """Of a row that is not read."""
    return tl.zeros(column.shape, tl.float32)


@triton.jit(do_not_specialize=["rows"])
def gradient_kernel(logits, gradients, targets, mask, of_rows, rows, columns, blocks, strides, c, WALK: tl.constexpr):
    """One block of one row: 2^x (constant + bend x) with x = z c - peak, and a more at the target; z are capped.

    Without factors in `of_rows`, constant, bend and a are those of `row_slopes` and `row_factors`.
    The last row comes first: `statistics_kernel` read it last, so it may still be in the L2 cache.
    """
    BLOCK: tl.constexpr = WALK.threads * WALK.words * WALK.unroll
    peaks, totals, entropies, by_logprobs, by_entropies, grad_loss, factors = of_rows
    BENDS: tl.constexpr = factors is not None or by_entropies is not None
    row = (rows - 1 - tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks) * BLOCK
    offsets = in_tile(WALK)
    target = tl.load(targets + row)
    is_read = tl.load(mask + row) != 0
    if factors is None and totals is None:
        entropies = peaks + ENTROPY * rows
        totals = peaks + TOTAL * rows
        by_logprobs = peaks + SLOPE * rows
        peaks += PEAK * rows
    if factors is None:
        a, e, total = row_slopes(row, target, c, totals, columns.size, by_logprobs, by_entropies, grad_loss)
        is_read = is_read & ((a != 0) | (e != 0))
    target -= columns.first
    z_start, lead = _row_start(row, strides[0], WALK)
    g_start, _ = _row_start(row, strides[1], WALK)
    z_row = logits + z_start + start + offsets
    g_row = gradients + g_start + start + offsets
    column = offsets + (start - lead)  # of the first tile
    inside = (start >= lead) & (start + BLOCK <= lead + columns.valid)  # then no mask, which no vector may share
    place = (column, inside, columns.valid, columns.count)
    if is_read:
        if factors is None:
            constant, bend = row_factors(a, e, tl.load(entropies + row), total)
        else:
            constant, bend = tl.load(factors + row * 3), tl.load(factors + row * 3 + 1)
            a = tl.load(factors + row * 3 + 2)
        of_row = (target, c, tl.load(peaks + row), constant, bend, a)
        write_block((z_row,), g_row, place, of_row, _tile_gradient, BENDS, WALK)
    else:
        write_block((), g_row, place, (), _no_gradient, None, WALK)
