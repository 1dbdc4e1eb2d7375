"""Logits of student and teacher to the divergence of their distributions over the whole vocabulary.

    q = softmax(z / τ), p = softmax(y / τ):   forward_kl Σ p log(p/q),   reverse_kl Σ q log(q/p),
    jsd β Σ p log(p/m) + (1 - β) Σ q log(q/m),   m = βp + (1 - β)q

Each tensor-parallel rank reduces its columns to the four numbers of `logprobs` and three further ones: with x = z/τ - m_S and
u = y/τ - m_T the teacher's m_T and s_T, and the cross moment Σ e^u (u - x), or Σ e^x (x - u) under the reverse. jsd, which needs both
sums first, takes a second exchange. With g the upstream gradient of the divergence

    dz_j = g q_j (f_j - Σ q f) / τ,     f_j: -p_j/q_j,   log(q_j/p_j),   (1 - β) log(q_j/m_j)
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_pg.kernels import logprobs
from megatron_pg.kernels.logprobs import Rows, compute_dtype, moments
from megatron_pg.kernels.vocabulary import Vocabulary


class Form(NamedTuple):
    """Which divergence."""

    name: str  # forward_kl, reverse_kl or jsd
    share: float | None = None  # β


class TeacherRows(NamedTuple):
    """`Rows` beside a teacher: what is known of each row's two distributions, and all that the gradient needs beside their logits."""

    logprobs: Tensor
    entropy: Tensor
    peaks: Tensor
    totals: Tensor
    divergence: Tensor  # nats
    centres: Tensor  # Σ q f
    teacher_peaks: Tensor
    teacher_totals: Tensor

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """What the loss is a function of."""
        return self.logprobs, self.entropy, self.divergence


Slopes = tuple[Tensor, Tensor, Tensor]  # derivatives of the loss by `TeacherRows.outputs`


def statistics(student: Tensor, teacher: Tensor, targets: Tensor, form: Form, vocabulary: Vocabulary) -> Tensor:
    """[T, 7] of this rank's columns of both logits [T, V / tp], of which padding must be hidden."""
    own = logprobs.statistics(student, targets, vocabulary)
    theirs = moments(compute_dtype(teacher) / vocabulary.temperature)[:, :2]
    x, u = _shifted(student, own[:, 0], vocabulary), _shifted(teacher, theirs[:, 0], vocabulary)
    if form.name == "forward_kl":
        cross = _times(u.exp(), u - x).sum(dim=1)
    elif form.name == "reverse_kl":
        cross = _times(x.exp(), x - u).sum(dim=1)
    else:
        cross = torch.zeros_like(own[:, 0])
    return torch.cat([own, theirs, cross[:, None]], dim=1)


def combine(shares: Tensor, targets: Tensor, form: Form, vocabulary: Vocabulary) -> TeacherRows:
    """The ranks' shares [tp, T, 7], in rank order, to both distributions; the divergence of a jsd is that of `with_mixture`."""
    rows = logprobs.combine(shares[..., :4])
    peaks, totals, tops, weights, crosses = shares[..., [0, 1, 4, 5, 6]].unbind(dim=2)
    top = tops.amax(dim=0)
    drop, fall = peaks - rows.peaks, tops - top
    teacher_total = (weights * fall.exp()).sum(dim=0)
    gap = rows.totals.log() - teacher_total.log()
    if form.name == "forward_kl":
        cross = ((crosses + weights * (fall - drop)) * fall.exp()).sum(dim=0)
        divergence = cross / teacher_total + gap
        centres = torch.full_like(gap, -1.0)
    else:
        cross = ((crosses + totals * (drop - fall)) * drop.exp()).sum(dim=0)
        divergence = centres = cross / rows.totals - gap
    known = rows._replace(logprobs=vocabulary.defined(rows.logprobs, targets))
    return TeacherRows(*known, divergence, centres, top, teacher_total)


def mixture_sums(student: Tensor, teacher: Tensor, rows: TeacherRows, form: Form, vocabulary: Vocabulary) -> Tensor:
    """[T, 2] of this rank's columns: the jsd and Σ q f."""
    log_q, log_p, log_m = _logs(student, teacher, rows, form, vocabulary)
    of_q = (1 - form.share) * _times(log_q.exp(), log_q - log_m).sum(dim=1)
    return torch.stack([form.share * _times(log_p.exp(), log_p - log_m).sum(dim=1) + of_q, of_q], dim=1)


def with_mixture(rows: TeacherRows, shares: Tensor) -> TeacherRows:
    """The rows of a jsd, from every rank's `mixture_sums` [tp, T, 2]."""
    divergence, centres = shares.sum(dim=0).t().contiguous()  # kernels have no strides
    return rows._replace(divergence=divergence, centres=centres)


def write_gradient(
    student: Tensor,
    teacher: Tensor,
    out: Tensor,
    targets: Tensor,
    rows: TeacherRows,
    slopes: Slopes,
    form: Form,
    vocabulary: Vocabulary,
) -> None:
    """Fills `out` [T, V / tp], which may be the student's logits, with their gradient."""
    by_logprob, by_entropy, by_divergence = slopes
    log_q, log_p, log_m = _logs(student, teacher, rows, form, vocabulary)
    q = log_q.exp()
    if form.name == "forward_kl":
        pulled = -log_p.exp()
    elif form.name == "reverse_kl":
        pulled = _times(q, log_q - log_p)
    else:
        pulled = (1 - form.share) * _times(q, log_q - log_m)
    of_divergence = by_divergence[:, None] * (pulled - q * rows.centres[:, None]) / vocabulary.temperature
    own = logprobs.gradient(student, targets, Rows(*rows[:4]), by_logprob, by_entropy, vocabulary)
    out.copy_(own + of_divergence)


def _shifted(logits: Tensor, peaks: Tensor, vocabulary: Vocabulary) -> Tensor:
    return compute_dtype(logits) / vocabulary.temperature - peaks[:, None]


def _logs(
    student: Tensor, teacher: Tensor, rows: TeacherRows, form: Form, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor, Tensor]:
    """log q, log p, and log m of a jsd (else log q)."""
    log_q = _shifted(student, rows.peaks, vocabulary) - rows.totals.log()[:, None]
    log_p = _shifted(teacher, rows.teacher_peaks, vocabulary) - rows.teacher_totals.log()[:, None]
    if form.share is None:
        return log_q, log_p, log_q
    return log_q, log_p, torch.logaddexp(log_p + math.log(form.share), log_q + math.log1p(-form.share))


def _times(probabilities: Tensor, values: Tensor) -> Tensor:
    """Their product, 0 where the probability is, however far the value."""
    return torch.where(probabilities == 0, 0, probabilities * values)
