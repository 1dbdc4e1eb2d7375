"""Vocabulary-parallel logits to distributions over what could be sampled: softmax(z / tau) over a row's mask S.

    log π_S(y) = z_y/tau - log Σ_{j∈S} e^(z_j/tau)
    dz_j = (a (δ_jy - q_j) - e q_j (log q_j + H)) / tau   in S, 0 outside

A row without a sampling mask has the whole vocabulary, so `logprobs` applies to every row, over its own columns. If the
entropy is over the whole vocabulary, the whole rows are read too, and one exchange carries both.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from megatron_pg.batch.fields import SamplingMask
from megatron_pg.kernels import logprobs
from megatron_pg.kernels.logprobs import RowStatistics
from megatron_pg.kernels.readers import Reader, Slopes, filled


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Restriction:
    """The sampling mask of T rows, and whether the entropy is over all columns."""

    sampling_mask: SamplingMask
    whole_entropy: bool = True

    def at(self, rows: Tensor | slice) -> "Restriction":
        """Select rows."""
        return replace(self, sampling_mask=self.sampling_mask.at(rows))


class SamplingMaskRowStatistics(NamedTuple):
    """`RowStatistics` over the sampling mask and over all columns, [T] each.

    Without `whole_entropy` both are over the sampling mask.
    """

    logprobs: Tensor
    entropy: Tensor  # of the sampling mask, or of all columns
    totals: Tensor
    peaks: Tensor
    sampling_mask_entropy: Tensor
    whole_totals: Tensor
    whole_peaks: Tensor

    @classmethod
    def of(cls, rows: RowStatistics, whole: RowStatistics | None = None) -> "SamplingMaskRowStatistics":
        """From the statistics over the sampling mask, and those over all columns if the entropy is over them."""
        whole = rows if whole is None else whole
        return cls(rows.logprobs, whole.entropy, rows.totals, rows.peaks, rows.entropy, whole.totals, whole.peaks)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """What the loss is a function of."""
        return self.logprobs, self.entropy

    @property
    def of_sampling_mask(self) -> RowStatistics:
        """Over the sampling mask."""
        return RowStatistics(self.logprobs, self.sampling_mask_entropy, self.peaks, self.totals)

    @property
    def of_all(self) -> RowStatistics:
        """Over all columns, where the entropy is; without the log-probability there, which nothing reads."""
        return RowStatistics(self.logprobs, self.entropy, self.whole_peaks, self.whole_totals)


def check_restriction(restriction: Restriction | None, targets: Tensor) -> None:
    """Raise ValueError for a restriction of another number of rows."""
    if restriction is not None and restriction.sampling_mask.counts.shape != targets.shape:
        raise ValueError(
            f"the restriction has {len(restriction.sampling_mask.counts)} rows for {len(targets)} targets. Give one "
            "set of ids per row; an empty set means the whole vocabulary."
        )


class SamplingMaskReader(Reader[SamplingMaskRowStatistics, Restriction]):
    """Distributions over what could be sampled, in torch."""

    record = SamplingMaskRowStatistics

    @override
    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        """[c, 4] over the sampling mask; with `whole_entropy` [2 c, 4], those over all columns after them."""
        z, targets = self._vocabulary.hide_padding(z), self._targets[chunk]
        tables = [self._restricted(z, chunk), *([z] if self._detail.whole_entropy else [])]
        return torch.cat([logprobs.statistics(table, targets, self._vocabulary) for table in tables])

    @override
    def combine(self, shares: Tensor, z: Tensor, chunk: slice) -> SamplingMaskRowStatistics:
        targets = self._targets[chunk]
        parts = shares.split(len(targets), dim=1)
        return SamplingMaskRowStatistics.of(*(logprobs.combine(part, targets, self._vocabulary) for part in parts))

    @override
    def write_gradient(
        self, z: Tensor, out: Tensor, chunk: slice, rows: SamplingMaskRowStatistics, slopes: Slopes
    ) -> None:
        z, targets = self._vocabulary.hide_padding(z), self._targets[chunk]
        by_logprob, by_entropy = filled(slopes, rows)
        table, zeros = self._restricted(z, chunk), torch.zeros_like(by_entropy)
        own = by_logprob, zeros if self._detail.whole_entropy else by_entropy
        grad = logprobs.gradient(table, targets, rows.of_sampling_mask, own, self._vocabulary)
        if self._detail.whole_entropy:
            grad = grad + logprobs.gradient(z, targets, rows.of_all, (zeros, by_entropy), self._vocabulary)
        out.copy_(grad)

    def _restricted(self, z: Tensor, chunk: slice) -> Tensor:
        """A copy of z with -inf in the columns that are not in a row's sampling mask."""
        sampling_mask = self._detail.sampling_mask.at(chunk)
        local, owned = self._vocabulary.owned(sampling_mask.table())
        kept = torch.zeros(len(z), z.shape[1] + 1, dtype=torch.bool, device=z.device)
        kept.scatter_(1, torch.where(owned, local, z.shape[1]).long(), True)
        return z.masked_fill(~(kept[:, :-1] | (sampling_mask.counts == 0)[:, None]), -torch.inf)
