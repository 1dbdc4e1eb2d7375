"""Logits of student and teacher to the divergence of their distributions over the whole vocabulary.

    q = softmax(z / τ), p = softmax(y / τ):   forward_kl Σ p log(p/q),   reverse_kl Σ q log(q/p),
    jsd β Σ p log(p/m) + (1 - β) Σ q log(q/m),   m = βp + (1 - β)q

Each tensor-parallel rank reduces its columns to the four numbers of `logprobs` and three further ones. With
x = z/τ - m_S and u = y/τ - m_T they are the teacher's m_T and s_T, and the cross moment Σ e^u (u - x), or under the
reverse Σ e^x (x - u). jsd needs both sums first, so it takes a second exchange. With g the upstream gradient of the
divergence

    dz_j = g q_j (f_j - Σ q f) / τ,     f_j: -p_j/q_j,   log(q_j/p_j),   (1 - β) log(q_j/m_j)
"""

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from megatron_pg.kernels import logprobs
from megatron_pg.kernels.logprobs import RowStatistics, compute_dtype, moments, scaled
from megatron_pg.kernels.readers import Reader, Slopes, filled


class Form(NamedTuple):
    """Which divergence."""

    name: str  # forward_kl, reverse_kl or jsd
    share: float | None = None  # β

    @property
    def shares(self) -> tuple[float, float]:
        """Of teacher and student in the mixture; that of the reverse is the teacher's."""
        return (0.0, 1.0) if self.share is None else (self.share, 1.0 - self.share)


class TeacherRowStatistics(NamedTuple):
    """Statistics of a student's and a teacher's distribution, [T] each."""

    logprobs: Tensor
    entropy: Tensor
    peaks: Tensor
    totals: Tensor
    divergence: Tensor  # nats
    centers: Tensor  # Σ q f
    teacher_peaks: Tensor
    teacher_totals: Tensor

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """What the loss is a function of."""
        return self.logprobs, self.entropy, self.divergence


class TeacherLogits(Protocol):
    """The logits of a teacher."""

    form: Form

    def of(self, chunk: slice, student: Tensor) -> Tensor:
        """[c, V / tp] of a chunk of rows, in the dtype of the student's logits, capped and with padding hidden."""


class TeacherReader(Reader[TeacherRowStatistics, TeacherLogits]):
    """Distributions of a student and the divergence from its teacher's, in torch."""

    record = TeacherRowStatistics

    @property
    def _form(self) -> Form:
        return self._detail.form

    @override
    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        """[c, 7]."""
        student, teacher = self._scaled(*self._pair(z, chunk))
        own = logprobs.statistics(z, self._targets[chunk], self._vocabulary)
        others = moments(teacher)[:, :2]
        x, u = student - own[:, :1], teacher - others[:, :1]
        if self._form.name == "forward_kl":
            cross = _times(u.exp(), u - x).sum(dim=1)
        elif self._form.name == "reverse_kl":
            cross = _times(x.exp(), x - u).sum(dim=1)
        else:
            cross = torch.zeros_like(own[:, 0])
        return torch.cat([own, others, cross[:, None]], dim=1)

    @override
    def combine(self, shares: Tensor, z: Tensor, chunk: slice) -> TeacherRowStatistics:
        """A jsd takes another exchange."""
        rows = self._combine(shares, self._targets[chunk])
        if self._form.share is None:
            return rows
        sums = self._vocabulary.gather(self._mixture_sums(z, self._detail.of(chunk, z), rows)).sum(dim=0)
        divergence, centers = sums.t().contiguous()  # kernels have no strides
        return rows._replace(divergence=divergence, centers=centers)

    @override
    def write_gradient(self, z: Tensor, out: Tensor, chunk: slice, rows: TeacherRowStatistics, slopes: Slopes) -> None:
        student, teacher = self._pair(z, chunk)
        *by_plain, by_divergence = filled(slopes, rows)
        log_q, log_p, log_m = _logs(*self._scaled(student, teacher), rows, self._form)
        q = log_q.exp()
        is_forward, (_, share) = self._form.name == "forward_kl", self._form.shares
        pulled = -log_p.exp() if is_forward else share * _times(q, log_q - log_m)
        of_divergence = by_divergence[:, None] * (pulled - q * rows.centers[:, None]) / self._vocabulary.temperature
        plain = RowStatistics(*rows[:4])
        own = logprobs.gradient(student, self._targets[chunk], plain, tuple(by_plain), self._vocabulary)
        out.copy_(own + self._vocabulary.through_cap(of_divergence, student))

    def _combine(self, shares: Tensor, targets: Tensor) -> TeacherRowStatistics:
        """Both distributions, in rank order; of a jsd the divergence is not known yet."""
        rows = logprobs.combine(shares[..., :4], targets, self._vocabulary)
        peaks, totals, tops, weights, crosses = shares[..., [0, 1, 4, 5, 6]].unbind(dim=2)
        top = tops.amax(dim=0)
        drop, fall = peaks - rows.peaks, tops - top
        teacher_total = (weights * fall.exp()).sum(dim=0)
        gap = rows.totals.log() - teacher_total.log()
        if self._form.name == "forward_kl":
            cross = ((crosses + weights * (fall - drop)) * fall.exp()).sum(dim=0)
            divergence = cross / teacher_total + gap
            centers = torch.full_like(gap, -1.0)
        else:
            cross = ((crosses + totals * (drop - fall)) * drop.exp()).sum(dim=0)
            divergence = centers = cross / rows.totals - gap
        return TeacherRowStatistics(*rows, divergence, centers, top, teacher_total)

    def _mixture_sums(self, student: Tensor, teacher: Tensor, rows: TeacherRowStatistics) -> Tensor:
        """[c, 2] of this rank's columns: the jsd and Σ q f."""
        log_q, log_p, log_m = _logs(*self._scaled(student, teacher), rows, self._form)
        of_teacher, of_student = self._form.shares
        of_q = of_student * _times(log_q.exp(), log_q - log_m).sum(dim=1)
        return torch.stack([of_teacher * _times(log_p.exp(), log_p - log_m).sum(dim=1) + of_q, of_q], dim=1)

    def _pair(self, z: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        z = self._vocabulary.hide_padding(z)
        return z, self._detail.of(chunk, z)

    def _scaled(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Both over τ; the teacher's logits come capped."""
        return scaled(student, self._vocabulary), compute_dtype(teacher) / self._vocabulary.temperature


def _logs(student: Tensor, teacher: Tensor, rows: TeacherRowStatistics, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """log q, log p, and log m of the mixture, or log p without one, from logits over τ."""
    log_q = student - rows.peaks[:, None] - rows.totals.log()[:, None]
    log_p = teacher - rows.teacher_peaks[:, None] - rows.teacher_totals.log()[:, None]
    if form.share is None:
        return log_q, log_p, log_p
    return log_q, log_p, torch.logaddexp(log_p + math.log(form.share), log_q + math.log1p(-form.share))


def _times(probabilities: Tensor, values: Tensor) -> Tensor:
    """Their product; 0 where the probability is 0."""
    return torch.where(probabilities == 0, 0, probabilities * values)
