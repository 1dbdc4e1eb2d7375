"""`teacher` by kernels: student and teacher are read side by side, once for the statistics and once for the gradient.

Statistics are those of `tiles`, in the log2 domain: m, s, t and the target's logit of the student, n and w (as m and s)
of the teacher, and

    x = Σ 2^u (u - d) under the forward,  Σ 2^d (d - u) under the reverse,     d = z c - m,  u = y c - n

A summand is 0 where its power of two is 0. If both policies are equal, every summand is 0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from megatron_pg.kernels.readers import Slopes, filled
from megatron_pg.kernels.teacher import TeacherReader, TeacherRowStatistics
from megatron_pg.kernels.triton.tiles import (
    FLOOR,
    FUSED,
    LN2,
    LOWEST,
    logprob_and_entropy,
    no_statistics,
    softcapped,
    store_each,
    through_cap,
    times,
)
from megatron_pg.kernels.triton.vocab_parallel import (
    COMBINE_ROWS,
    READ,
    Columns,
    Walk,
    in_tile,
    log2_scale,
    row_slopes,
    slope_of,
    write_block,
)

MIX, WRITE = Walk(warps=8, unroll=4), Walk(warps=1, unroll=8)


class TritonTeacherReader(TeacherReader):
    """`TeacherReader` by kernels."""

    @override
    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        """[c, 7] float32: m, s, t, the target's logit, 0 if it is not here, n, w and x."""
        (student, teacher), vocabulary = self._pair(z, chunk), self._vocabulary
        shares = torch.empty(len(z), 7, dtype=torch.float32, device=z.device)
        tensors = (student, teacher), self._targets[chunk], shares
        strides = student.stride(0), teacher.stride(0)
        sizes = vocabulary.valid, vocabulary.first, strides, log2_scale(vocabulary)
        options = READ.options(student, vocabulary.softcap)
        statistics_kernel[(len(z),)](*tensors, *sizes, **options, FORM=self._form)
        return shares

    @override
    def _combine(self, shares: Tensor, targets: Tensor) -> TeacherRowStatistics:
        ranks, rows, _ = shares.shape
        out = torch.empty(len(TeacherRowStatistics._fields), rows, dtype=torch.float32, device=shares.device)
        sizes = ranks, rows, self._vocabulary.size, log2_scale(self._vocabulary)
        combine_kernel[(triton.cdiv(rows, COMBINE_ROWS),)](
            shares, targets, out, *sizes, FORM=self._form, BLOCK=COMBINE_ROWS, **FUSED
        )
        return TeacherRowStatistics(*out)

    @override
    def _mixture_sums(self, student: Tensor, teacher: Tensor, rows: TeacherRowStatistics) -> Tensor:
        sums = torch.empty(len(student), 2, dtype=torch.float32, device=student.device)
        strides = student.stride(0), teacher.stride(0)
        sizes = self._vocabulary.valid, strides, log2_scale(self._vocabulary)
        options = MIX.options(student, self._vocabulary.softcap) | {"FORM": self._form}
        mixture_kernel[(len(student),)]((student, teacher), rows, sums, *sizes, **options)
        return sums

    @override
    def write_gradient(self, z: Tensor, out: Tensor, chunk: slice, rows: TeacherRowStatistics, slopes: Slopes) -> None:
        (student, teacher), vocabulary = self._pair(z, chunk), self._vocabulary
        blocks = WRITE.blocks(student, student.shape[1])
        tensors = (student, teacher, out), self._targets[chunk], rows
        strides = student.stride(0), teacher.stride(0), out.stride(0)
        scalars = Columns.of(vocabulary, student), blocks, strides, log2_scale(vocabulary)
        options = WRITE.options(student, vocabulary.softcap) | {"FORM": self._form}
        gradient_kernel[(len(student) * blocks,)](*tensors, filled(slopes, rows), *scalars, **options)


@triton.jit
def rescale(statistics, peak, top, FORM: tl.constexpr):
    """s, t, w and x, rebased from the maxima m and n to `peak` and `top`."""
    m, s, t, n, w, x = statistics
    drop = m - peak
    fall = n - top
    scale = tl.exp2(drop)
    fade = tl.exp2(fall)
    if FORM.name == "forward_kl":
        x = (x + w * (fall - drop)) * fade
    elif FORM.name == "reverse_kl":
        x = (x + s * (drop - fall)) * scale
    return s * scale, (t + s * drop) * scale, w * fade, x


@triton.jit
def add_pairs(statistics, students, teachers, c, ends, FORM: tl.constexpr):
    """Adds tuples of tiles to each thread's statistics, as `tiles.accumulate` does; `ends` is not read."""
    peak = statistics[0]
    top = statistics[3]
    for k in tl.static_range(len(students)):
        peak = tl.maximum(peak, tl.max(students[k], axis=1) * c)
        top = tl.maximum(top, tl.max(teachers[k], axis=1) * c)
    s, t, w, x = rescale(statistics, peak, top, FORM)
    for k in tl.static_range(len(students)):
        d = tl.fma(students[k], c, -peak[:, None])
        u = tl.fma(teachers[k], c, -top[:, None])
        of_student = tl.exp2(d)
        of_teacher = tl.exp2(u)
        if FORM.name == "forward_kl":
            x += tl.sum(times(of_teacher, u - d), axis=1)
        elif FORM.name == "reverse_kl":
            x += tl.sum(times(of_student, d - u), axis=1)
        s += tl.sum(of_student, axis=1)
        t += tl.sum(of_student * tl.maximum(d, LOWEST), axis=1)
        w += tl.sum(of_teacher, axis=1)
    return peak, s, t, top, w, x


@triton.jit
def _read_rows(sums, z_row, y_row, valid, c, ends, ADD: tl.constexpr, FORM: tl.constexpr, WALK: tl.constexpr):
    """ADD(sums, students, teachers, c, ends, FORM) of all tiles of both rows, float32; the teacher's come capped."""
    TILE: tl.constexpr = WALK.threads * WALK.words
    UNROLL: tl.constexpr = WALK.unroll
    CAP: tl.constexpr = WALK.kind.cap
    offsets = in_tile(WALK)
    z_row += offsets
    y_row += offsets
    full = valid // (TILE * UNROLL)
    for group in range(full):
        of_student = ()
        of_teacher = ()
        for k in tl.static_range(UNROLL):
            at = (group * UNROLL + k) * TILE
            of_student = of_student + (softcapped(tl.load(z_row + at).to(tl.float32), CAP),)
            of_teacher = of_teacher + (tl.load(y_row + at).to(tl.float32),)
        sums = ADD(sums, of_student, of_teacher, c, ends, FORM)
    for start in range(full * (TILE * UNROLL), valid, TILE):
        here = offsets < valid - start
        z = softcapped(tl.load(z_row + start, mask=here, other=float("-inf")).to(tl.float32), CAP)
        y = tl.load(y_row + start, mask=here, other=float("-inf")).to(tl.float32)
        sums = ADD(sums, (z,), (y,), c, ends, FORM)
    return sums


@triton.jit
def statistics_kernel(matrices, targets, shares, valid, first, strides, c, WALK: tl.constexpr, FORM: tl.constexpr):
    """One row per program: shares[row] = m, s, t, the target's logit, 0 where another rank owns it, n, w, x."""
    students, teachers = matrices
    row = tl.program_id(0).to(tl.int64)
    m, s, t = no_statistics(WALK.threads)
    target = tl.load(targets + row) - first
    owned = (target >= 0) & (target < valid)
    z_row = students + row * strides[0]
    target_logit = softcapped(tl.load(z_row + target, mask=owned, other=0.0).to(tl.float32), WALK.kind.cap)
    sums = (m, s, t, m, s, s)
    sums = _read_rows(sums, z_row, teachers + row * strides[1], valid, c, None, add_pairs, FORM, WALK)
    peak = tl.max(sums[0], 0)
    top = tl.max(sums[3], 0)
    s, t, w, x = rescale(sums, peak, top, FORM)
    share = (peak, tl.sum(s, 0), tl.sum(t, 0), target_logit, top, tl.sum(w, 0), tl.sum(x, 0))
    store_each(shares + row * len(share), 1, share, True)


@triton.jit(do_not_specialize=["rows"])
def combine_kernel(shares, targets, results, ranks, rows, vocab_size, c, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """The ranks' shares of each row, in rank order, to results [8, rows] in the order of `TeacherRowStatistics`."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = row < rows
    m = tl.full((BLOCK,), FLOOR, tl.float32)
    n = m
    for rank in range(ranks):
        share = shares + (rank * rows + row) * 7
        m = tl.maximum(m, tl.load(share, here, 0.0))
        n = tl.maximum(n, tl.load(share + 4, here, 0.0))
    s = tl.zeros((BLOCK,), tl.float32)
    t = s
    w = s
    x = s
    target_logit = s
    for rank in range(ranks):
        share = shares + (rank * rows + row) * 7
        own = (tl.load(share, here, 0.0), tl.load(share + 1, here, 1.0), tl.load(share + 2, here, 0.0))
        others = (tl.load(share + 4, here, 0.0), tl.load(share + 5, here, 1.0), tl.load(share + 6, here, 0.0))
        s2, t2, w2, x2 = rescale(own + others, m, n, FORM)
        s += s2
        t += t2
        w += w2
        x += x2
        target_logit += tl.load(share + 3, here, 0.0)  # a sum: a maximum would drop NaN
    target = tl.load(targets + row, here, 0)
    logprob, entropy = logprob_and_entropy(m, s, t, target_logit, c)
    logprob = tl.where((target >= 0) & (target < vocab_size), logprob, float("nan"))
    gap = tl.log2(s) - tl.log2(w)
    if FORM.name == "reverse_kl":
        divergence = LN2 * (x / s - gap)
        centre = divergence
    else:  # of a jsd neither is read
        divergence = LN2 * (x / w + gap)
        centre = tl.full((BLOCK,), -1.0, tl.float32)
    store_each(results + row, rows, (logprob, entropy, m, s, divergence, centre, n, w), here)


@triton.jit
def _over_mixture(log_q, log_p, FORM: tl.constexpr):
    """log2 of q and of p over the mixture β p + (1 - β) q, and q and p over the larger of both."""
    gap = tl.where(log_p == log_q, 0.0, log_p - log_q)  # -inf - -inf would be NaN
    smaller = tl.exp2(-tl.abs(gap))
    of_p = tl.where(gap > 0, 1.0, smaller)
    of_q = tl.where(gap > 0, smaller, 1.0)
    log_m = tl.log2(FORM.share * of_p + (1.0 - FORM.share) * of_q)  # over the larger's
    return tl.minimum(-gap, 0.0) - log_m, tl.minimum(gap, 0.0) - log_m, of_q, of_p


@triton.jit
def add_mixtures(sums, students, teachers, c, ends, FORM: tl.constexpr):
    """Adds tuples of tiles to each thread's Σ p log2(p / mixture) and Σ q log2(q / mixture)."""
    of_p, of_q = sums
    m, n, log_s, log_w = ends
    for k in tl.static_range(len(students)):
        log_q = tl.fma(students[k], c, -m) - log_s
        log_p = tl.fma(teachers[k], c, -n) - log_w
        over_q, over_p, share_q, share_p = _over_mixture(log_q, log_p, FORM)
        larger = tl.exp2(tl.maximum(log_q, log_p))
        of_p += tl.sum(times(larger * share_p, over_p), axis=1)
        of_q += tl.sum(times(larger * share_q, over_q), axis=1)
    return of_p, of_q


@triton.jit
def _ends(of_rows, row):
    """m, n, log2 s and log2 w of a row."""
    log_s = tl.log2(tl.load(of_rows.totals + row))
    log_w = tl.log2(tl.load(of_rows.teacher_totals + row))
    return tl.load(of_rows.peaks + row), tl.load(of_rows.teacher_peaks + row), log_s, log_w


@triton.jit
def mixture_kernel(matrices, of_rows, results, valid, strides, c, WALK: tl.constexpr, FORM: tl.constexpr):
    """One row per program: results[row] = the jsd of this rank's columns, and Σ q f."""
    students, teachers = matrices
    row = tl.program_id(0).to(tl.int64)
    z_row = students + row * strides[0]
    y_row = teachers + row * strides[1]
    _, zeros, _ = no_statistics(WALK.threads)
    sums = _read_rows((zeros, zeros), z_row, y_row, valid, c, _ends(of_rows, row), add_mixtures, FORM, WALK)
    # tensors first: the interpreter of Triton 3.7 cannot multiply a product of constants with one
    centre = tl.sum(sums[1], 0) * ((1.0 - FORM.share) * LN2)
    store_each(results + row * 2, 1, (tl.sum(sums[0], 0) * (FORM.share * LN2) + centre, centre), True)


@triton.jit
def _pair_gradient(tiles, column, of_row, CAP: tl.constexpr, FORM: tl.constexpr):
    """2^d (constant + bend d) and what the divergence adds, and a more at the target."""
    target, c, ends, factors = of_row
    m, n, log_s, log_w = ends
    constant, bend, a, pull = factors
    z = softcapped(tiles[0].to(tl.float32), CAP)
    d = tl.fma(z, c, -m)
    u = tl.fma(tiles[1].to(tl.float32), c, -n)
    gradient = slope_of(d, constant, bend, True)
    if FORM.name == "forward_kl":
        gradient -= tl.exp2(u) * pull
    elif FORM.name == "reverse_kl":
        gradient += times(tl.exp2(d), (d - u) * pull)
    else:
        over_q, _, _, _ = _over_mixture(d - log_s, u - log_w, FORM)
        gradient += times(tl.exp2(d), over_q * pull)
    return through_cap(tl.where(column == target, gradient + a, gradient), z, CAP)


@triton.jit
def gradient_kernel(
    matrices, targets, of_rows, slopes, columns, blocks, strides, c, WALK: tl.constexpr, FORM: tl.constexpr
):
    """One block of one row: c ln2 (a (δ_j - q_j) - e q_j (log q_j + H) + g q_j (f_j - Σ q f)).

    a, e and g are the upstream gradients.
    """
    BLOCK: tl.constexpr = WALK.threads * WALK.words * WALK.unroll
    students, teachers, gradients = matrices
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks) * BLOCK
    column = in_tile(WALK) + start
    target = tl.load(targets + row)
    a, e, total = row_slopes(row, target, c, of_rows.totals, columns.size, slopes[0], slopes[1], None)
    g = tl.load(slopes[2] + row) * (c * LN2)
    ends = _ends(of_rows, row)
    _, _, log_s, log_w = ends
    constant = -(a + e * (tl.load(of_rows.entropy + row) - LN2 * log_s) + g * tl.load(of_rows.centers + row)) / total
    if FORM.name == "forward_kl":
        pull = g / tl.load(of_rows.teacher_totals + row)
    elif FORM.name == "reverse_kl":
        pull = g * LN2 / total
        constant -= pull * (log_s - log_w)
    else:
        pull = g * LN2 * (1.0 - FORM.share) / total
    of_row = (target - columns.first, c, ends, (constant, -e * LN2 / total, a, pull))
    z_row = students + row * strides[0] + column
    y_row = teachers + row * strides[1] + column
    inside = start + BLOCK <= columns.valid  # then no mask, which no vector may share
    place = (column, inside, columns.valid, columns.count)
    write_block((z_row, y_row), gradients + row * strides[2] + column, place, of_row, _pair_gradient, FORM, WALK)
