"""Vocabulary-parallel logits to the log-probabilities of a few tokens per row and of all others together, the tail.

    Q_tail = Σ_{j∉S} q_j,   summed directly: 1 - Σ_S q would lose all digits of a small tail

The ids of a row are hidden while its slice of the vocabulary is reduced to four numbers. The K hidden logits are
exchanged in the same all-gather. The rest is computed on [T, K] in float64. With a_k, b, a, e the upstream gradients of
the log-probabilities of the ids, of the tail and of the target, and of the entropy, and C = -(Σ a_k + b + a):

    dz_j = q_j (C - e (log q_j + H)) + (b / Q_tail) q_j   outside S
    dz_k = q_k (C - e (log q_k + H)) + a_k                 in S,       and a more at the target; all over τ
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from megatron_pg.kernels.logprobs import FLOOR, moments, scaled
from megatron_pg.kernels.readers import Reader, Slopes, filled
from megatron_pg.kernels.vocabulary import Vocabulary


class TopKLogprobs(NamedTuple):
    """The further inputs of a loss over a top-k teacher, float64."""

    head: Tensor  # [T, K] log q of the ids, nats, -inf where there is none
    tail: Tensor  # [T] log Q_tail, nats
    has_tail: Tensor  # [T] bool, whether the vocabulary has a token that is not named


class TopKRowStatistics(NamedTuple):
    """`RowStatistics` with the log-probabilities of the ids and of the tail."""

    logprobs: Tensor  # [T]
    entropy: Tensor  # [T]
    totals: Tensor  # [T], of `RowStatistics`
    head: Tensor  # [T, K] float64
    tail: Tensor  # [T] float64
    tail_peaks: Tensor  # [T] m = max z/tau over the tail
    tail_totals: Tensor  # [T] float64, S = Σ e^(z/tau - m) over it

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """What the loss is a function of."""
        return self.logprobs, self.entropy, self.head, self.tail


class Coefficients(NamedTuple):
    """The gradient of the logits: e^x (outside + by_x · x), x = z/tau - m, outside S, and `named` in S; float64."""

    outside: Tensor  # [T]
    by_x: Tensor  # [T]
    named: Tensor  # [T, K]
    at_target: Tensor  # [T], where the target is not in S


def topk_logprobs(head: Tensor, tail: Tensor, ids: Tensor, vocabulary: Vocabulary) -> TopKLogprobs:
    """What the loss reads of rows with these ids [T, K]."""
    return TopKLogprobs(head, tail, (ids >= 0).sum(dim=1) < vocabulary.size)


class TopKReader(Reader[TopKRowStatistics, Tensor]):
    """Distributions with the log-probabilities of some ids [n, K] of each row, -1 where there is none, in torch."""

    record = TopKRowStatistics

    @override
    def empty(self, like: Tensor, dtype: torch.dtype) -> TopKRowStatistics:
        """The log-probabilities of the ids and of the tail are float64."""
        shapes = dict.fromkeys(TopKRowStatistics._fields, (len(self._targets),)) | {"head": tuple(self._detail.shape)}
        double = {"head", "tail", "tail_totals"}
        tensors = (like.new_empty(s, dtype=torch.float64 if n in double else dtype) for n, s in shapes.items())
        return TopKRowStatistics(*tensors)

    @override
    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        """[c, 4 + K]: m, S, U of `logprobs` without the ids, then z/tau of target and ids, 0 if not owned."""
        z, targets, ids = self._vocabulary.hide_padding(z), self._targets[chunk], self._detail[chunk]
        x = scaled(z, self._vocabulary)
        local, owned = self._vocabulary.owned(torch.cat([targets[:, None], ids], dim=1))
        named = torch.where(owned, x.gather(1, local), 0)
        return torch.cat([moments(_with(x, ids, -torch.inf, self._vocabulary)), named], dim=1)

    @override
    def combine(self, shares: Tensor, z: Tensor, chunk: slice) -> TopKRowStatistics:
        return combine(shares, self._targets[chunk], self._detail[chunk], self._vocabulary)

    @override
    def write_gradient(self, z: Tensor, out: Tensor, chunk: slice, rows: TopKRowStatistics, slopes: Slopes) -> None:
        z, targets, ids = self._vocabulary.hide_padding(z), self._targets[chunk], self._detail[chunk]
        shifted = scaled(z, self._vocabulary) - rows.tail_peaks[:, None]
        shifted = _with(shifted, ids, -torch.inf, self._vocabulary)
        factors = coefficients(targets, ids, rows, filled(slopes, rows), self._vocabulary)
        outside, by_x, named, at_target = (values.to(shifted.dtype) for values in factors)
        grad = shifted.exp() * (outside[:, None] + by_x[:, None] * shifted.clamp(min=FLOOR))
        local, owned = self._vocabulary.owned(targets)
        grad.scatter_add_(1, local[:, None], torch.where(owned, at_target, 0)[:, None])
        out.copy_(self._vocabulary.through_cap(_with(grad, ids, named, self._vocabulary), z))


def combine(shares: Tensor, targets: Tensor, ids: Tensor, vocabulary: Vocabulary) -> TopKRowStatistics:
    """The ranks' shares [tp, T, 4 + K], in rank order, to the distributions of the whole vocabulary."""
    dtype = shares.dtype
    peaks, totals, moments_, _ = shares[..., :4].double().unbind(dim=2)
    logits = shares[..., 3:].double().sum(dim=0)  # a sum: a maximum would drop NaN
    target, head = logits[:, 0], torch.where(ids >= 0, logits[:, 1:], -torch.inf)
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
    return TopKRowStatistics(
        logprobs=vocabulary.defined(target - peak - log_total, targets).to(dtype),
        entropy=(log_total - moment / total).to(dtype),
        totals=total.to(dtype),
        head=head,
        tail=offset + tail_total.log() - log_total,
        tail_peaks=tail_peak.to(dtype),
        tail_totals=tail_total,
    )


def coefficients(
    targets: Tensor, ids: Tensor, rows: TopKRowStatistics, slopes: Sequence[Tensor], vocabulary: Vocabulary
) -> Coefficients:
    """From the derivatives by `outputs`, on [T, K]."""
    by_logprob, by_entropy, by_head, by_tail = slopes
    of_target, of_entropy = by_logprob.double(), by_entropy.double()
    of_target = vocabulary.defined(of_target, targets)  # where the log-probability is NaN, so is the gradient
    common = -(by_head.sum(dim=1) + by_tail + of_target)
    entropy = rows.entropy.double()
    # e^x of the tail is q over this; where there is no tail nothing is multiplied by it
    log_factor = rows.tail - rows.tail_totals.log()
    is_there = rows.tail_totals != 0
    factor, log_factor = torch.where(is_there, log_factor.exp(), 0), torch.where(is_there, log_factor, 0)
    of_tail = torch.where(is_there, by_tail / rows.tail_totals, 0)
    head = rows.head.clamp(min=FLOOR)
    named = head.exp() * (common[:, None] - of_entropy[:, None] * (head + entropy[:, None])) + by_head
    named = named + torch.where(ids == targets[:, None], of_target[:, None], 0)
    unscaled = Coefficients(
        outside=factor * (common - of_entropy * (log_factor + entropy)) + of_tail,
        by_x=-factor * of_entropy,
        named=named,
        at_target=of_target,
    )
    return Coefficients(*(values / vocabulary.temperature for values in unscaled))


def _with(table: Tensor, ids: Tensor, values: Tensor | float, vocabulary: Vocabulary) -> Tensor:
    """A copy of [T, V / tp] with [T, K] values in the columns of the ids; ids of other ranks go to a dropped column."""
    local, owned = vocabulary.owned(ids)
    wide = torch.nn.functional.pad(table, (0, 1))
    places = torch.where(owned, local, table.shape[1]).long()
    wide.scatter_(1, places, values) if isinstance(values, Tensor) else wide.scatter_(1, places, value=values)
    return wide[:, :-1]
