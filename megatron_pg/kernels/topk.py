"""Vocabulary-parallel logits to the log-probabilities of a few tokens per row and of all others together, the tail.

    Q_tail = Σ_{j∉S} q_j,   summed directly: 1 - Σ_S q would lose all digits of a small tail

The ids of a row are hidden while its slice of the vocabulary is reduced to four numbers; beside them travel the K logits that were
hidden, in the same one all-gather. What is left is done on [T, K] in float64. With a_k, b, a, e the upstream gradients of the
log-probabilities of the ids, of the tail and of the target, and of the entropy, and C = -(Σ a_k + b + a):

    dz_j = q_j (C - e (log q_j + H)) + (b / Q_tail) q_j   outside S
    dz_k = q_k (C - e (log q_k + H)) + a_k                 in S,       and a more at the target; all over τ
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_pg.kernels.logprobs import FLOOR, compute_dtype, moments
from megatron_pg.kernels.vocabulary import Vocabulary


class TopKLogprobs(NamedTuple):
    """What the loss reads of a row's distribution beside its log-probability and entropy, float64."""

    head: Tensor  # [T, K] log q of the ids, nats, -inf where there is none
    tail: Tensor  # [T] log Q_tail, nats
    has_tail: Tensor  # [T] bool, whether the vocabulary has a token that is not named


class TopKRows(NamedTuple):
    """`Rows` with ids: what is known of each row's distribution, and all that its gradient needs beside the logits."""

    logprobs: Tensor  # [T]
    entropy: Tensor  # [T]
    totals: Tensor  # [T], of `Rows`
    head: Tensor  # [T, K] float64
    tail: Tensor  # [T] float64
    tail_peaks: Tensor  # [T] m = max z/tau over what is not named
    tail_totals: Tensor  # [T] float64, S = Σ e^(z/tau - m) over it

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """What the loss is a function of."""
        return self.logprobs, self.entropy, self.head, self.tail


class Slopes(NamedTuple):
    """Derivatives of the loss by `TopKRows.outputs`."""

    by_logprob: Tensor
    by_entropy: Tensor
    by_head: Tensor
    by_tail: Tensor


class Coefficients(NamedTuple):
    """The gradient of the logits: e^x (outside + by_x · x) with x = z/tau - m outside S, `named` in S; float64, over tau."""

    outside: Tensor  # [T]
    by_x: Tensor  # [T]
    named: Tensor  # [T, K]
    at_target: Tensor  # [T], where the target is not in S


def topk_logprobs(head: Tensor, tail: Tensor, ids: Tensor, vocabulary: Vocabulary) -> TopKLogprobs:
    """What the loss reads of rows with these ids [T, K]."""
    return TopKLogprobs(head, tail, (ids >= 0).sum(dim=1) < vocabulary.size)


def topk_rows_of(logits: Tensor, targets: Tensor, ids: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, ...]:
    """`TopKRows.outputs`, differentiable; padding must be hidden, the logits are left as they are."""
    return _TopKRows.apply(logits, targets, ids, vocabulary)


class _TopKRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, ids, vocabulary):
        rows = combine(vocabulary.gather(statistics(logits, targets, ids, vocabulary)), targets, ids, vocabulary)
        ctx.save_for_backward(logits, targets, ids, *rows)
        ctx.vocabulary = vocabulary
        return rows.outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *slopes):
        logits, targets, ids, *rows = ctx.saved_tensors
        grad = gradient(logits, targets, ids, TopKRows(*rows), Slopes(*slopes), ctx.vocabulary)
        return grad.to(logits.dtype), None, None, None


def statistics(logits: Tensor, targets: Tensor, ids: Tensor, vocabulary: Vocabulary) -> Tensor:
    """[T, 4 + K] of this rank's columns: m, S, U of `Rows` without the ids, then z/tau of target and ids, 0 if not owned."""
    scaled = compute_dtype(logits) / vocabulary.temperature
    wanted = torch.cat([targets[:, None], ids], dim=1)
    local, owned = vocabulary.owned(wanted)
    found = torch.where(owned, scaled.gather(1, local), 0)
    return torch.cat([moments(_with(scaled, ids, -torch.inf, vocabulary)), found], dim=1)


def combine(shares: Tensor, targets: Tensor, ids: Tensor, vocabulary: Vocabulary) -> TopKRows:
    """The ranks' shares [tp, T, 4 + K], in rank order, to the distributions of the whole vocabulary."""
    dtype = shares.dtype
    peaks, totals, moments_, _ = shares[..., :4].double().unbind(dim=2)
    found = shares[..., 3:].double().sum(dim=0)  # a sum: a maximum would drop NaN
    target, head = found[:, 0], torch.where(ids >= 0, found[:, 1:], -torch.inf)
    tail_peak = peaks.amax(dim=0)
    offset = peaks - tail_peak
    scale = offset.exp()
    tail_total = (totals * scale).sum(dim=0)
    tail_moment = ((moments_ + totals * offset.clamp(min=FLOOR)) * scale).sum(dim=0)
    peak = torch.maximum(tail_peak, head.amax(dim=1))
    head, offset = head - peak[:, None], tail_peak - peak
    weights, scale = head.exp(), offset.exp()
    total = tail_total * scale + weights.sum(dim=1)
    moment = (tail_moment + tail_total * offset.clamp(min=FLOOR)) * scale
    moment = moment + (weights * head.clamp(min=FLOOR)).sum(dim=1)
    log_total = total.log()
    head = torch.where(ids < vocabulary.size, head - log_total[:, None], torch.nan)
    return TopKRows(
        logprobs=vocabulary.defined(target - peak - log_total, targets).to(dtype),
        entropy=(log_total - moment / total).to(dtype),
        totals=total.to(dtype),
        head=head,
        tail=offset + tail_total.log() - log_total,
        tail_peaks=tail_peak.to(dtype),
        tail_totals=tail_total,
    )


def coefficients(targets: Tensor, ids: Tensor, rows: TopKRows, slopes: Slopes, vocabulary: Vocabulary) -> Coefficients:
    """From the upstream gradients, on [T, K]."""
    of_target, of_entropy = (slope.double() for slope in slopes[:2])
    of_target = vocabulary.defined(of_target, targets)  # where the log-probability is NaN, so is the gradient
    common = -(slopes.by_head.sum(dim=1) + slopes.by_tail + of_target)
    entropy = rows.entropy.double()
    # e^x of the tail is q over this; where there is no tail nothing is multiplied by it
    log_factor = rows.tail - rows.tail_totals.log()
    is_there = rows.tail_totals != 0
    factor, log_factor = torch.where(is_there, log_factor.exp(), 0), torch.where(is_there, log_factor, 0)
    of_tail = torch.where(is_there, slopes.by_tail / rows.tail_totals, 0)
    head = rows.head.clamp(min=FLOOR)
    named = head.exp() * (common[:, None] - of_entropy[:, None] * (head + entropy[:, None])) + slopes.by_head
    named = named + torch.where(ids == targets[:, None], of_target[:, None], 0)
    found = Coefficients(
        outside=factor * (common - of_entropy * (log_factor + entropy)) + of_tail,
        by_x=-factor * of_entropy,
        named=named,
        at_target=of_target,
    )
    return Coefficients(*(values / vocabulary.temperature for values in found))


def gradient(
    logits: Tensor, targets: Tensor, ids: Tensor, rows: TopKRows, slopes: Slopes, vocabulary: Vocabulary
) -> Tensor:
    """[T, V / tp] gradient of the logits, in the dtype that is computed in; no collective."""
    shifted = compute_dtype(logits) / vocabulary.temperature - rows.tail_peaks[:, None]
    shifted = _with(shifted, ids, -torch.inf, vocabulary)
    outside, by_x, named, at_target = (
        values.to(shifted.dtype) for values in coefficients(targets, ids, rows, slopes, vocabulary)
    )
    grad = shifted.exp() * (outside[:, None] + by_x[:, None] * shifted.clamp(min=FLOOR))
    local, owned = vocabulary.owned(targets)
    grad.scatter_add_(1, local[:, None], torch.where(owned, at_target, 0)[:, None])
    return _with(grad, ids, named, vocabulary)


def _with(table: Tensor, ids: Tensor, values: Tensor | float, vocabulary: Vocabulary) -> Tensor:
    """A copy of [T, V / tp] with [T, K] values in the columns of the ids that are here; the others go to a column beside it."""
    local, owned = vocabulary.owned(ids)
    wide = torch.nn.functional.pad(table, (0, 1))
    places = torch.where(owned, local, table.shape[1]).long()
    wide.scatter_(1, places, values) if isinstance(values, Tensor) else wide.scatter_(1, places, value=values)
    return wide[:, :-1]
