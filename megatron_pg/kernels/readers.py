"""Readers turn rows of logits into statistics, and the derivatives of a loss into the gradient of the logits.

There is one reader for each kind of distribution and implementation. All of them read stored logits (`read`) and the
chunks of logits that a fused head makes.
"""

from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor
from typing_extensions import override

from megatron_pg.kernels import logprobs
from megatron_pg.kernels.logprobs import RowStatistics
from megatron_pg.kernels.vocabulary import Vocabulary

ALL = slice(None)
Slopes = Sequence[Tensor | None]  # derivatives of the loss by `outputs`; None: the loss does not read that output


class Statistics(Protocol):
    """A named tuple of tensors with one entry per row: with the logits, all that their gradient needs."""

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """What the loss is a function of; the first two are log-probabilities and entropies [T]."""

    @property
    def totals(self) -> Tensor:
        """[T] S = sum e^(z/tau - max z/tau)."""

    def __iter__(self) -> Iterator[Tensor]: ...


R = TypeVar("R", bound=Statistics)
D = TypeVar("D")


class Reader(Generic[R, D]):
    """Reads logits of n rows, all at once or a chunk of rows at a time.

    A chunk is a slice of the n rows, and `z` [c, V / tp] holds this tensor-parallel rank's logits of its rows.

    Args:
        vocabulary: the columns of the logits.
        targets: [n] int64 global token ids.
        detail: what the reader needs in addition, of the n rows; None: nothing.
    """

    record: type[R]

    def __init__(self, vocabulary: Vocabulary, targets: Tensor, detail: D | None = None):
        self._vocabulary, self._targets = vocabulary, targets.contiguous()  # kernels have no strides
        self._detail = cast(D, detail)

    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        """[c, k] of this rank's columns, which the ranks exchange."""
        raise NotImplementedError

    def combine(self, shares: Tensor, z: Tensor, chunk: slice) -> R:
        """The statistics of the whole vocabulary, from the shares [tp, c, k] of every rank."""
        raise NotImplementedError

    def write_gradient(self, z: Tensor, out: Tensor, chunk: slice, rows: R, slopes: Slopes) -> None:
        """Fills `out` [c, V / tp], which may be `z`, with the gradient of the logits."""
        raise NotImplementedError

    def read(self, logits: Tensor, *, may_hide: bool = False) -> R:
        """The statistics of all rows. With `may_hide` the logits may stay changed until the gradient is written."""
        return self.combine(self._vocabulary.gather(self.statistics(logits, ALL)), logits, ALL)

    def empty(self, like: Tensor, dtype: torch.dtype) -> R:
        """Statistics of n rows to be filled, on the device of `like`."""
        return self.record(*like.new_empty(len(self.record.__annotations__), len(self._targets), dtype=dtype))


class PlainReader(Reader[RowStatistics, None]):
    """Distributions over the whole vocabulary, in torch."""

    record = RowStatistics

    @override
    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        """[c, 4]."""
        return logprobs.statistics(self._vocabulary.hide_padding(z), self._targets[chunk], self._vocabulary)

    @override
    def combine(self, shares: Tensor, z: Tensor, chunk: slice) -> RowStatistics:
        return logprobs.combine(shares, self._targets[chunk], self._vocabulary)

    @override
    def write_gradient(self, z: Tensor, out: Tensor, chunk: slice, rows: RowStatistics, slopes: Slopes) -> None:
        z = self._vocabulary.hide_padding(z)
        out.copy_(logprobs.gradient(z, self._targets[chunk], rows, filled(slopes, rows), self._vocabulary))


def filled(slopes: Slopes, rows: Statistics) -> tuple[Tensor, ...]:
    """The slopes, zeros for those that are None; contiguous, because kernels have no strides."""
    pairs = zip(slopes, rows.outputs, strict=True)
    return tuple(torch.zeros_like(v) if s is None else s.contiguous() for s, v in pairs)


def read(logits: Tensor, reader: Reader, *, inplace: bool = False) -> tuple[Tensor, ...]:
    """`outputs` of the reader's statistics, differentiable, then `totals`.

    With `inplace` the backward overwrites the logits.
    """
    may_hide = inplace and torch.is_grad_enabled() and logits.requires_grad
    return _Read.apply(logits, reader, inplace, may_hide)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, reader, inplace, may_hide):
        rows = reader.read(logits.detach(), may_hide=may_hide)
        ctx.save_for_backward(logits, *rows)
        ctx.reader, ctx.inplace = reader, inplace
        ctx.set_materialize_grads(False)  # zeros for an unused gradient would take a launch each
        ctx.mark_non_differentiable(rows.totals)
        return *rows.outputs, rows.totals

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *slopes):
        slopes = slopes[:-1]
        if all(slope is None for slope in slopes):
            return None, None, None, None
        logits, *saved = ctx.saved_tensors
        gradient = logits.detach() if ctx.inplace else torch.empty_like(logits)
        ctx.reader.write_gradient(logits, gradient, ALL, ctx.reader.record(*saved), slopes)
        if ctx.inplace:
            torch.autograd.graph.increment_version(logits)
        return gradient, None, None, None
