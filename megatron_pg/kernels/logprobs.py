"""Vocabulary-parallel logits to log-probabilities and entropy, without gathering the vocabulary.

Each tensor-parallel rank reduces its slice of the vocabulary to four numbers per token; one all-gather of [T, 4]
combines them in rank order, so every rank ends with the same bits. The backward needs no collective.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_pg.kernels.vocabulary import Vocabulary

FLOOR = -1000.0  # exp(FLOOR) is 0 in every dtype, and FLOOR * 0 is not NaN as -inf * 0 would be


class RowStatistics(NamedTuple):
    """Statistics of each row's distribution, [T] each."""

    logprobs: Tensor
    entropy: Tensor
    peaks: Tensor  # m = max z/tau
    totals: Tensor  # S = sum e^(z/tau - m)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """What the loss is a function of."""
        return self.logprobs, self.entropy


def statistics(logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
    """[T, 4] of this rank's columns: m, S, U, and z/tau of the target, 0 if another rank owns it.

    U = sum (z/tau - m) e^(z/tau - m)
    """
    z = scaled(logits, vocabulary)
    local, owned = vocabulary.owned(targets)
    # where, not a product: a NaN of another rank's target must not enter here
    target = torch.where(owned, z.gather(1, local[:, None])[:, 0], 0)
    return torch.cat([moments(z), target[:, None]], dim=1)


def moments(scaled: Tensor) -> Tensor:
    """[T, 3] of z/tau [T, V / tp]: m, S and U."""
    finite = torch.finfo(scaled.dtype).min  # a slice of -inf only must not give -inf - -inf
    peaks = scaled.amax(dim=1).clamp(min=finite)
    shifted = scaled - peaks[:, None]
    weights = shifted.exp()
    return torch.stack([peaks, weights.sum(dim=1), (weights * shifted.clamp(min=FLOOR)).sum(dim=1)], dim=1)


def combine(shares: Tensor, targets: Tensor, vocabulary: Vocabulary) -> RowStatistics:
    """The ranks' shares [tp, T, 4], in rank order, to log-probabilities and entropy of the whole vocabulary."""
    peaks, totals, moments, target_logits = shares.unbind(dim=2)  # [tp, T] each
    peak = peaks.amax(dim=0)
    offset = peaks - peak
    scale = offset.exp()
    moments = (moments + totals * offset.clamp(min=FLOOR)) * scale
    total = (totals * scale).sum(dim=0)
    log_total = total.log()
    logprobs = vocabulary.defined(target_logits.sum(dim=0) - peak - log_total, targets)
    return RowStatistics(logprobs, log_total - moments.sum(dim=0) / total, peak, total)


def gradient(
    logits: Tensor, targets: Tensor, rows: RowStatistics, slopes: tuple[Tensor, ...], vocabulary: Vocabulary
) -> Tensor:
    """[T, V / tp] gradient of the logits, in the dtype that is computed in; no collective.

        dz_j = (a (delta_j - p_j) - e p_j (log p_j + H)) / tau

    with a and e the upstream gradients of log-probability and entropy, the slopes; with a softcap times `through_cap`.
    """
    local, owned = vocabulary.owned(targets)
    grad_logprobs, grad_entropy = slopes
    grad_logprobs = vocabulary.defined(grad_logprobs, targets)  # where the log-probability is NaN, so is the gradient
    shifted = scaled(logits, vocabulary) - rows.peaks[:, None]
    grad = shifted.exp().div_(rows.totals[:, None])
    # log p_j + H, kept finite where p_j is 0; in place: tables are large
    bend = shifted.sub_((rows.totals.log() - rows.entropy)[:, None]).clamp_(min=FLOOR)
    grad.mul_(torch.sub(-grad_logprobs[:, None], bend.mul_(grad_entropy[:, None]), out=bend))
    at_target = grad.gather(1, local[:, None]) + torch.where(owned, grad_logprobs, 0)[:, None]
    return vocabulary.through_cap(grad.scatter_(1, local[:, None], at_target).div_(vocabulary.temperature), logits)


def scaled(logits: Tensor, vocabulary: Vocabulary) -> Tensor:
    """[T, V / tp] z / tau in the compute dtype, of capped logits."""
    return vocabulary.capped(compute_dtype(logits)) / vocabulary.temperature


def compute_dtype(logits: Tensor) -> Tensor:
    """The logits in the compute dtype: float32, or float64 for float64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def check_logits(logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> None:
    """Raise ValueError for invalid shapes and dtypes, or another number of columns than the vocabulary's."""
    if logits.dim() != 2 or not logits.dtype.is_floating_point:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)} and dtype {logits.dtype}, not [T, V / tp] floating point. "
            "Flatten them."
        )
    if targets.shape != logits.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets have shape {tuple(targets.shape)} and dtype {targets.dtype}, the logits need "
            f"{tuple(logits.shape[:1])} int64. Give one token id per row."
        )
    vocabulary.check_columns("logits", logits.shape[1])
