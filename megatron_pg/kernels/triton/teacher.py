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
from megatron_pg.kernels.teacher import TeacherLogits, TeacherReader, TeacherRowStatistics
from megatron_pg.kernels.triton.tiles import (
    FLOOR,
    FUSED,
    LN2,
    LOWEST,
    logprob_and_entropy,
    softcapped,
    through_cap,
    times,
)
from megatron_pg.kernels.triton.vocab_parallel import COMBINE_ROWS, READ, Walk, log2_scale
from megatron_pg.kernels.vocabulary import Vocabulary

MIX, WRITE = Walk(warps=8, unroll=4), Walk(warps=1, unroll=8)


class TritonTeacherReader(TeacherReader):
    """`TeacherReader` by kernels."""

    def __init__(self, vocabulary: Vocabulary, targets: Tensor, teacher: TeacherLogits):
        super().__init__(vocabulary, targets.contiguous(), teacher)  # kernels have no strides

    @override
    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        """[c, 7] float32: m, s, t, the target's logit, 0 if it is not here, n, w and x."""
        (student, teacher), vocabulary = self._pair(z, chunk), self._vocabulary
        shares = torch.empty(len(z), 7, dtype=torch.float32, device=z.device)
        tensors = student, teacher, self._targets[chunk], shares
        sizes = vocabulary.valid, vocabulary.first, student.stride(0), teacher.stride(0), log2_scale(vocabulary)
        options = READ.options(student, vocabulary.softcap)
        statistics_kernel[(len(z),)](*tensors, *sizes, **options, FORM=self._form.name)
        return shares

    @override
    def _combine(self, shares: Tensor, targets: Tensor) -> TeacherRowStatistics:
        ranks, rows, _ = shares.shape
        out = torch.empty(len(TeacherRowStatistics._fields), rows, dtype=torch.float32, device=shares.device)
        sizes = ranks, rows, self._vocabulary.size, log2_scale(self._vocabulary)
        combine_kernel[(triton.cdiv(rows, COMBINE_ROWS),)](
            shares, targets, out, *sizes, FORM=self._form.name, BLOCK=COMBINE_ROWS, **FUSED
        )
        return TeacherRowStatistics(*out)

    @override
    def _mixture_sums(self, student: Tensor, teacher: Tensor, rows: TeacherRowStatistics) -> Tensor:
        sums = torch.empty(len(student), 2, dtype=torch.float32, device=student.device)
        sizes = self._vocabulary.valid, student.stride(0), teacher.stride(0), log2_scale(self._vocabulary)
        options = MIX.options(student, self._vocabulary.softcap) | {"NUMBERS": self._form.shares}
        mixture_kernel[(len(student),)](student, teacher, *_sums_of(rows), sums, *sizes, **options)
        return sums

    @override
    def write_gradient(self, z: Tensor, out: Tensor, chunk: slice, rows: TeacherRowStatistics, slopes: Slopes) -> None:
        (student, teacher), vocabulary = self._pair(z, chunk), self._vocabulary
        blocks = WRITE.blocks(student, student.shape[1])
        tensors = student, teacher, out, self._targets[chunk], *_sums_of(rows), rows.entropy, rows.centers
        by_outputs = [slope.contiguous() for slope in filled(slopes, rows)]
        sizes = student.shape[1], vocabulary.valid, vocabulary.first, vocabulary.size, blocks
        strides = student.stride(0), teacher.stride(0), out.stride(0)
        options = WRITE.options(student, vocabulary.softcap) | {"FORM": self._form.name, "NUMBERS": self._form.shares}
        launch = gradient_kernel[(len(student) * blocks,)]
        launch(*tensors, *by_outputs, *sizes, *strides, log2_scale(vocabulary), **options)


def _sums_of(rows: TeacherRowStatistics) -> tuple[Tensor, ...]:
    return rows.peaks, rows.totals, rows.teacher_peaks, rows.teacher_totals


@triton.jit
def rescale(m, s, t, n, w, x, peak, top, FORM: tl.constexpr):
    """s, t, w and x, rebased from the maxima (m, n) to (peak, top)."""
    drop = m - peak
    fall = n - top
    scale = tl.exp2(drop)
    fade = tl.exp2(fall)
    if FORM == "forward_kl":
        x = (x + w * (fall - drop)) * fade
    elif FORM == "reverse_kl":
        x = (x + s * (drop - fall)) * scale
    return s * scale, (t + s * drop) * scale, w * fade, x


@triton.jit
def add_pairs(m, s, t, n, w, x, students, teachers, c, FORM: tl.constexpr):
    """Adds tuples of tiles to each thread's statistics, as `tiles.accumulate` does."""
    peak = m
    top = n
    for k in tl.static_range(len(students)):
        peak = tl.maximum(peak, tl.max(students[k], axis=1) * c)
        top = tl.maximum(top, tl.max(teachers[k], axis=1) * c)
    s, t, w, x = rescale(m, s, t, n, w, x, peak, top, FORM)
    for k in tl.static_range(len(students)):
        d = tl.fma(students[k], c, -peak[:, None])
        u = tl.fma(teachers[k], c, -top[:, None])
        of_student = tl.exp2(d)
        of_teacher = tl.exp2(u)
        if FORM == "forward_kl":
            x += tl.sum(times(of_teacher, u - d), axis=1)
        elif FORM == "reverse_kl":
            x += tl.sum(times(of_student, d - u), axis=1)
        s += tl.sum(of_student, axis=1)
        t += tl.sum(of_student * tl.maximum(d, LOWEST), axis=1)
        w += tl.sum(of_teacher, axis=1)
    return peak, s, t, top, w, x


@triton.jit
def _pair_of_tiles(z_row, y_row, group, WALK: tl.constexpr):
    """The group's tiles of both rows, float32; the teacher's come capped."""
    TILE: tl.constexpr = WALK.threads * WALK.words
    UNROLL: tl.constexpr = WALK.unroll
    of_student = ()
    of_teacher = ()
    for k in tl.static_range(UNROLL):
        at = (group * UNROLL + k) * TILE
        of_student = of_student + (softcapped(tl.load(z_row + at).to(tl.float32), WALK.kind.cap),)
        of_teacher = of_teacher + (tl.load(y_row + at).to(tl.float32),)
    return of_student, of_teacher


@triton.jit
def statistics_kernel(
    students,
    teachers,
    targets,
    shares,
    valid,
    first,
    student_stride,
    teacher_stride,
    c,
    WALK: tl.constexpr,
    FORM: tl.constexpr,
):
    """One row per program: shares[row] = m, s, t, the target's logit, 0 where another rank owns it, n, w, x."""
    THREADS: tl.constexpr = WALK.threads
    row = tl.program_id(0).to(tl.int64)
    TILE: tl.constexpr = THREADS * WALK.words
    offsets = tl.arange(0, THREADS)[:, None] * WALK.words + tl.arange(0, WALK.words)[None, :]
    m = tl.full((THREADS,), FLOOR, tl.float32)
    s = tl.zeros((THREADS,), tl.float32)
    t = tl.zeros((THREADS,), tl.float32)
    n = m
    w = s
    x = s
    target = tl.load(targets + row) - first
    owned = (target >= 0) & (target < valid)
    target_logit = tl.load(students + row * student_stride + target, mask=owned, other=0.0).to(tl.float32)
    target_logit = softcapped(target_logit, WALK.kind.cap)
    z_row = students + row * student_stride + offsets
    y_row = teachers + row * teacher_stride + offsets
    full = valid // (TILE * WALK.unroll)
    for group in range(full):
        of_student, of_teacher = _pair_of_tiles(z_row, y_row, group, WALK)
        m, s, t, n, w, x = add_pairs(m, s, t, n, w, x, of_student, of_teacher, c, FORM)
    for start in range(full * (TILE * WALK.unroll), valid, TILE):
        here = offsets < valid - start
        z = softcapped(tl.load(z_row + start, mask=here, other=float("-inf")).to(tl.float32), WALK.kind.cap)
        y = tl.load(y_row + start, mask=here, other=float("-inf")).to(tl.float32)
        m, s, t, n, w, x = add_pairs(m, s, t, n, w, x, (z,), (y,), c, FORM)
    peak = tl.max(m, 0)
    top = tl.max(n, 0)
    s, t, w, x = rescale(m, s, t, n, w, x, peak, top, FORM)
    statistics = (peak, tl.sum(s, 0), tl.sum(t, 0), target_logit, top, tl.sum(w, 0), tl.sum(x, 0))
    for k in tl.static_range(len(statistics)):
        tl.store(shares + row * len(statistics) + k, statistics[k])


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
        s2, t2, w2, x2 = rescale(
            tl.load(share, here, 0.0),
            tl.load(share + 1, here, 1.0),
            tl.load(share + 2, here, 0.0),
            tl.load(share + 4, here, 0.0),
            tl.load(share + 5, here, 1.0),
            tl.load(share + 6, here, 0.0),
            m,
            n,
            FORM,
        )
        s += s2
        t += t2
        w += w2
        x += x2
        target_logit += tl.load(share + 3, here, 0.0)  # a sum: a maximum would drop NaN
    target = tl.load(targets + row, here, 0)
    logprob, entropy = logprob_and_entropy(m, s, t, target_logit, c)
    logprob = tl.where((target >= 0) & (target < vocab_size), logprob, float("nan"))
    gap = tl.log2(s) - tl.log2(w)
    if FORM == "reverse_kl":
        divergence = LN2 * (x / s - gap)
        centre = divergence
    else:  # of a jsd neither is read
        divergence = LN2 * (x / w + gap)
        centre = tl.full((BLOCK,), -1.0, tl.float32)
    fields = (logprob, entropy, m, s, divergence, centre, n, w)
    for k in tl.static_range(len(fields)):
        tl.store(results + k * rows + row, fields[k], here)


@triton.jit
def _over_mixture(log_q, log_p, NUMBERS: tl.constexpr):
    """log2 of q and of p over the mixture β p + (1 - β) q, and q and p over the larger of both."""
    gap = tl.where(log_p == log_q, 0.0, log_p - log_q)  # -inf - -inf would be NaN
    smaller = tl.exp2(-tl.abs(gap))
    of_p = tl.where(gap > 0, 1.0, smaller)
    of_q = tl.where(gap > 0, smaller, 1.0)
    log_m = tl.log2(NUMBERS[0] * of_p + NUMBERS[1] * of_q)  # over the larger's
    return tl.minimum(-gap, 0.0) - log_m, tl.minimum(gap, 0.0) - log_m, of_q, of_p


@triton.jit
def add_mixtures(of_p, of_q, students, teachers, c, ends, NUMBERS: tl.constexpr):
    """Adds tuples of tiles to each thread's Σ p log2(p / mixture) and Σ q log2(q / mixture)."""
    m, n, log_s, log_w = ends
    for k in tl.static_range(len(students)):
        log_q = tl.fma(students[k], c, -m) - log_s
        log_p = tl.fma(teachers[k], c, -n) - log_w
        over_q, over_p, share_q, share_p = _over_mixture(log_q, log_p, NUMBERS)
        larger = tl.exp2(tl.maximum(log_q, log_p))
        of_p += tl.sum(times(larger * share_p, over_p), axis=1)
        of_q += tl.sum(times(larger * share_q, over_q), axis=1)
    return of_p, of_q


@triton.jit
def mixture_kernel(
    students,
    teachers,
    peaks,
    totals,
    teacher_peaks,
    teacher_totals,
    sums,
    valid,
    student_stride,
    teacher_stride,
    c,
    WALK: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """One row per program: sums[row] = the jsd of this rank's columns, and Σ q f."""
    THREADS: tl.constexpr = WALK.threads
    row = tl.program_id(0).to(tl.int64)
    TILE: tl.constexpr = THREADS * WALK.words
    offsets = tl.arange(0, THREADS)[:, None] * WALK.words + tl.arange(0, WALK.words)[None, :]
    z_row = students + row * student_stride + offsets
    y_row = teachers + row * teacher_stride + offsets
    of_p = tl.zeros((THREADS,), tl.float32)
    of_q = of_p
    ends = (
        tl.load(peaks + row),
        tl.load(teacher_peaks + row),
        tl.log2(tl.load(totals + row)),
        tl.log2(tl.load(teacher_totals + row)),
    )
    full = valid // (TILE * WALK.unroll)
    for group in range(full):
        of_student, of_teacher = _pair_of_tiles(z_row, y_row, group, WALK)
        of_p, of_q = add_mixtures(of_p, of_q, of_student, of_teacher, c, ends, NUMBERS)
    for start in range(full * (TILE * WALK.unroll), valid, TILE):
        here = offsets < valid - start
        z = softcapped(tl.load(z_row + start, mask=here, other=float("-inf")).to(tl.float32), WALK.kind.cap)
        y = tl.load(y_row + start, mask=here, other=float("-inf")).to(tl.float32)
        of_p, of_q = add_mixtures(of_p, of_q, (z,), (y,), c, ends, NUMBERS)
    # tensors first: the interpreter of Triton 3.7 cannot multiply a product of constants with one
    centre = tl.sum(of_q, 0) * (NUMBERS[1] * LN2)
    tl.store(sums + row * 2, tl.sum(of_p, 0) * (NUMBERS[0] * LN2) + centre)
    tl.store(sums + row * 2 + 1, centre)


@triton.jit
def _pair_gradient(
    z, y, column, target, c, ends, factors, FORM: tl.constexpr, NUMBERS: tl.constexpr, CAP: tl.constexpr
):
    """2^d (constant + bend d) and what the divergence adds, and a more at the target."""
    m, n, log_s, log_w = ends
    constant, bend, a, pull = factors
    z = softcapped(z.to(tl.float32), CAP)
    d = tl.fma(z, c, -m)
    u = tl.fma(y.to(tl.float32), c, -n)
    power = tl.exp2(d)
    gradient = power * tl.fma(tl.maximum(d, LOWEST), bend, constant)
    if FORM == "forward_kl":
        gradient -= tl.exp2(u) * pull
    elif FORM == "reverse_kl":
        gradient += times(power, (d - u) * pull)
    else:
        over_q, _, _, _ = _over_mixture(d - log_s, u - log_w, NUMBERS)
        gradient += times(power, over_q * pull)
    return through_cap(tl.where(column == target, gradient + a, gradient), z, CAP)


@triton.jit
def _factors(
    row, a, e, g, entropies, centers, total, log_s, teacher_total, log_w, FORM: tl.constexpr, NUMBERS: tl.constexpr
):
    """Constant, bend, a and pull of `_pair_gradient`, from a row's upstream gradients times c ln2."""
    constant = -(a + e * (tl.load(entropies + row) - LN2 * log_s) + g * tl.load(centers + row)) / total
    if FORM == "forward_kl":
        pull = g / teacher_total
    elif FORM == "reverse_kl":
        pull = g * LN2 / total
        constant -= pull * (log_s - log_w)
    else:
        pull = g * LN2 * NUMBERS[1] / total
    return constant, -e * LN2 / total, a, pull


@triton.jit
def _write_block(
    z_row,
    y_row,
    g_row,
    column,
    inside,
    valid,
    columns,
    of_row,
    WALK: tl.constexpr,
    FORM: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """Writes the gradient of a block's tiles, the first of which has the columns `column`."""
    TILE: tl.constexpr = WALK.threads * WALK.words
    UNROLL: tl.constexpr = WALK.unroll
    CAP: tl.constexpr = WALK.kind.cap
    dtype: tl.constexpr = g_row.dtype.element_ty
    if inside:
        of_student = ()
        of_teacher = ()
        for k in tl.static_range(UNROLL):
            of_student = of_student + (tl.load(z_row + k * TILE),)
            of_teacher = of_teacher + (tl.load(y_row + k * TILE),)
        for k in tl.static_range(UNROLL):
            at = column + k * TILE
            out = _pair_gradient(of_student[k], of_teacher[k], at, *of_row, FORM, NUMBERS, CAP)
            tl.store(g_row + k * TILE, out.to(dtype))
    else:
        for k in tl.static_range(UNROLL):
            at = column + k * TILE
            here = at < valid
            z = tl.load(z_row + k * TILE, mask=here, other=float("-inf"))
            y = tl.load(y_row + k * TILE, mask=here, other=float("-inf"))
            out = _pair_gradient(z, y, at, *of_row, FORM, NUMBERS, CAP)
            tl.store(g_row + k * TILE, tl.where(here, out, 0.0).to(dtype), mask=at < columns)


@triton.jit
def gradient_kernel(
    students,
    teachers,
    gradients,
    targets,
    peaks,
    totals,
    teacher_peaks,
    teacher_totals,
    entropies,
    centers,
    by_logprobs,
    by_entropies,
    by_divergences,
    columns,
    valid,
    first,
    vocab_size,
    blocks,
    student_stride,
    teacher_stride,
    gradient_stride,
    c,
    WALK: tl.constexpr,
    FORM: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """One block of one row: c ln2 (a (δ_j - q_j) - e q_j (log q_j + H) + g q_j (f_j - Σ q f)).

    a, e and g are the upstream gradients.
    """
    TILE: tl.constexpr = WALK.threads * WALK.words
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks) * (TILE * WALK.unroll)
    offsets = tl.arange(0, WALK.threads)[:, None] * WALK.words + tl.arange(0, WALK.words)[None, :]
    target = tl.load(targets + row)
    total = tl.load(totals + row)
    teacher_total = tl.load(teacher_totals + row)
    exists = (target >= 0) & (target < vocab_size) & (total > 0) & (total < float("inf"))
    target -= first
    # an objective that compares and clips has slope 0 where the log-probability is NaN
    a = tl.where(exists, tl.load(by_logprobs + row), float("nan")) * (c * LN2)
    e = tl.load(by_entropies + row) * (c * LN2)
    g = tl.load(by_divergences + row) * (c * LN2)
    log_s = tl.log2(total)
    log_w = tl.log2(teacher_total)
    of_row = (row, a, e, g, entropies, centers, total, log_s, teacher_total, log_w)
    factors = _factors(*of_row, FORM, NUMBERS)
    ends = (tl.load(peaks + row), tl.load(teacher_peaks + row), log_s, log_w)
    z_row = students + row * student_stride + start + offsets
    y_row = teachers + row * teacher_stride + start + offsets
    g_row = gradients + row * gradient_stride + start + offsets
    column = offsets + start
    inside = start + TILE * WALK.unroll <= valid  # then no mask, which no vector may share
    block = (column, inside, valid, columns, (target, c, ends, factors))
    _write_block(z_row, y_row, g_row, *block, WALK, FORM, NUMBERS)
