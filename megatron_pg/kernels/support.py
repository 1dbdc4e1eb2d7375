"""Vocabulary-parallel logits to distributions over what could have been sampled: softmax(z / tau) over a row's support S.

    log π_S(y) = z_y/tau - log Σ_{j∈S} e^(z_j/tau),     dz_j = (a (δ_jy - q_j) - e q_j (log q_j + H)) / tau in S, 0 outside

A row without a support has the whole vocabulary, so all of `logprobs` holds for every row, over its own columns. Where the
entropy shall be the whole vocabulary's, the whole rows are read too, and both travel in one exchange.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_pg.batch.fields import TokenSupport
from megatron_pg.kernels import logprobs
from megatron_pg.kernels.logprobs import Rows
from megatron_pg.kernels.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Restriction:
    """What distributions are over: `support` has T rows, and `whole_entropy` says whether the entropy is over all columns."""

    support: TokenSupport
    whole_entropy: bool = True

    def at(self, rows: Tensor | slice) -> "Restriction":
        """That of some of the rows."""
        return replace(self, support=self.support.at(rows))


class SupportRows(NamedTuple):
    """`Rows` over the support, and what the gradient needs of those over all columns, [T] each; one of both without `whole_entropy`."""

    logprobs: Tensor
    entropy: Tensor  # of the support, or of all columns
    totals: Tensor
    peaks: Tensor
    support_entropy: Tensor
    whole_totals: Tensor
    whole_peaks: Tensor

    @classmethod
    def of(cls, rows: Rows, whole: Rows) -> "SupportRows":
        """From those of the support and those that have the entropy."""
        return cls(rows.logprobs, whole.entropy, rows.totals, rows.peaks, rows.entropy, whole.totals, whole.peaks)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """What the loss is a function of."""
        return self.logprobs, self.entropy

    @property
    def of_support(self) -> Rows:
        """Over the support."""
        return Rows(self.logprobs, self.support_entropy, self.peaks, self.totals)

    @property
    def of_all(self) -> Rows:
        """Over all columns, where the entropy is; without the log-probability there, which nothing reads."""
        return Rows(self.logprobs, self.entropy, self.whole_peaks, self.whole_totals)


def check_restriction(restriction: Restriction | None, targets: Tensor) -> None:
    """Refuse one of another number of rows."""
    if restriction is not None and restriction.support.counts.shape != targets.shape:
        raise ValueError(
            f"the restriction has {len(restriction.support.counts)} rows for {len(targets)} targets, so rows would have others' ids. Give one "
            "set of ids per row; an empty one stands for the whole vocabulary."
        )


def support_rows_of(
    logits: Tensor, targets: Tensor, restriction: Restriction, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """`SupportRows.outputs`, differentiable; padding must be hidden, the logits are left as they are."""
    return _SupportRows.apply(logits, targets, restriction, vocabulary)


class _SupportRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, restriction, vocabulary):
        shares = statistics(logits, targets, restriction, vocabulary)
        rows = combine(vocabulary.gather(shares), targets, restriction, vocabulary)
        ctx.save_for_backward(logits, targets, *rows)
        ctx.restriction, ctx.vocabulary = restriction, vocabulary
        return tuple(values.clone() for values in rows.outputs)  # what is saved must not be an output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *slopes):
        logits, targets, *rows = ctx.saved_tensors
        grad = gradient(logits, targets, ctx.restriction, SupportRows(*rows), slopes, ctx.vocabulary)
        return grad.to(logits.dtype), None, None, None


def statistics(logits: Tensor, targets: Tensor, restriction: Restriction, vocabulary: Vocabulary) -> Tensor:
    """[T, 4] as `logprobs.statistics`, over the support; with `whole_entropy` [2 T, 4], those over all columns behind them."""
    tables = [_restricted(logits, restriction.support, vocabulary), *([logits] if restriction.whole_entropy else [])]
    return torch.cat([logprobs.statistics(table, targets, vocabulary) for table in tables])


def combine(shares: Tensor, targets: Tensor, restriction: Restriction, vocabulary: Vocabulary) -> SupportRows:
    """The ranks' shares [tp, T or 2 T, 4], in rank order, to the distributions."""
    found = [logprobs.combine(part) for part in shares.split(len(targets), dim=1)]
    rows = found[0]._replace(logprobs=vocabulary.defined(found[0].logprobs, targets))
    return SupportRows.of(rows, found[-1] if restriction.whole_entropy else rows)


def gradient(
    logits: Tensor,
    targets: Tensor,
    restriction: Restriction,
    rows: SupportRows,
    slopes: tuple[Tensor, ...],
    vocabulary: Vocabulary,
) -> Tensor:
    """[T, V / tp] gradient of the logits from the derivatives by `outputs`, in the dtype that is computed in; no collective."""
    of_logprob, of_entropy = slopes
    table, nothing = _restricted(logits, restriction.support, vocabulary), torch.zeros_like(of_entropy)
    if not restriction.whole_entropy:
        return logprobs.gradient(table, targets, rows.of_support, of_logprob, of_entropy, vocabulary)
    grad = logprobs.gradient(table, targets, rows.of_support, of_logprob, nothing, vocabulary)
    return grad + logprobs.gradient(logits, targets, rows.of_all, nothing, of_entropy, vocabulary)


def _restricted(logits: Tensor, support: TokenSupport, vocabulary: Vocabulary) -> Tensor:
    """A copy of [T, V / tp] with -inf in the columns that are not of a row's support."""
    local, owned = vocabulary.owned(support.table())
    kept = torch.zeros(len(logits), logits.shape[1] + 1, dtype=torch.bool, device=logits.device)
    kept.scatter_(1, torch.where(owned, local, logits.shape[1]).long(), True)
    return logits.masked_fill(~(kept[:, :-1] | (support.counts == 0)[:, None]), -torch.inf)
