"""What the kinds of payload have in common.

A payload is what a sample carries in addition to one number per token. Each kind is parsed from what users and engines
give, checked when the sample is made, written to the rollout file, and, where a loss term reads it, brought to the rows
of the logits on a rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from megatron_pg.rollouts.printable import shorten

Record = TypeVar("Record")


class Layout(NamedTuple):
    """Where the response tokens of a micro-batch are on a rank."""

    lengths: list[int]  # R of each sample
    here: Callable[[Tensor], Tensor]  # values [sum of R, …] to rows [T, …], 0 where a row predicts no response token


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """A payload at T rows of logits, in the order of the logits."""

    per_row: ClassVar[tuple[str, ...]]  # its fields [T, …]; further fields are shared by all rows

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply a function to every field [T, …]."""
        return replace(self, **{name: function(getattr(self, name)) for name in self.per_row})

    def to(self, move: Callable[[Tensor], Tensor]) -> Self:
        """All tensors, moved by `move` to the device that reads them."""
        tensors = {
            field.name: value for field in fields(self) if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **{name: move(value) for name, value in tensors.items()})

    def at(self, rows: Tensor | slice) -> Self:
        """Select rows."""
        return self.map(lambda values: values[rows])


@dataclass(frozen=True, slots=True)
class Payload(ABC, Generic[Record]):
    """One kind of payload, under the name of its field in `Sample`."""

    name: str
    form: ClassVar[str]  # what a value must be, as the message of `of` ends

    def of(self, values: Any, label: str) -> Record:
        """A sample's record from any form that users and engines give it; tensors and arrays are copied."""
        try:
            return self.parse(values)
        except Exception:  # any conversion failure gets the one message below
            text = shown(values)
        raise ValueError(f"{self.name}={text} of sample {label} {self.form}")

    @abstractmethod
    def parse(self, values: Any) -> Record:
        """The record, or any exception."""

    @abstractmethod
    def check(self, record: Any, sample: Any) -> None:
        """Raise ValueError for wrong shapes or dtypes, or wrong values at tokens that the `Sample` trains."""

    def check_read(self, record: Any, mask: Tensor, sample_id: str, flag: str) -> None:  # optional
        """Raise ValueError for a record that lacks what the loss term of a flag needs at its tokens [R]."""

    @abstractmethod
    def to_json(self, record: Record) -> Any:
        """The record as the rollout file contains it."""

    def tensors(self, record: Any) -> list[Tensor]:
        """The bytes of everything in the record, for digests."""
        parts = [record] if isinstance(record, Tensor) else [getattr(record, field.name) for field in fields(record)]
        # Copies, because one element of an expanded tensor counts as contiguous; bytes, because numpy has no bfloat16.
        return [part.clone(memory_format=torch.contiguous_format).view(torch.uint8) for part in parts]

    def rows(self, records: Sequence[Record | None], layout: Layout, is_read: Tensor) -> Rows | None:
        """The payload at the rows of a rank.

        Args:
            records: of each sample of the micro-batch; None where a sample has none.
            layout: of the micro-batch on this rank.
            is_read: [T] bool, rows at which a loss term reads the payload.

        Returns:
            The rows, or None if the payload changes none of them: no loss term reads this kind.
        """
        return None


def shown(values: Any) -> str:
    """A value as messages show it: shape, dtype and device of a tensor."""
    if isinstance(values, Tensor) and not values.is_nested:
        return f"a tensor of shape {tuple(values.shape)}, {values.dtype}, on {values.device}"
    return shorten(values)


def is_plain(values: Any, dim: int, *dtypes: torch.dtype) -> bool:
    """Whether it is a dense tensor on the CPU with `dim` dimensions, of one of the dtypes if any are given."""
    is_dense = isinstance(values, Tensor) and values.layout == torch.strided and not values.is_nested
    return (
        is_dense and values.dim() == dim and values.device.type == "cpu" and values.dtype in (dtypes or {values.dtype})
    )


def integers(values: Any, dtype: Any = np.int32) -> np.ndarray:
    """A copy of an array or tensor of integers; TypeError for other dtypes and for integers that do not fit."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    bounds = np.iinfo(dtype)
    fits = array.size == 0 or (bounds.min <= int(array.min()) and int(array.max()) <= bounds.max)
    if array.dtype.kind not in "iu" or not fits:
        raise TypeError
    return array.astype(dtype)


def first_trained(bad: Tensor, trained: Tensor) -> int | None:
    """The first trained response token [R] that is bad, or None."""
    tokens = (bad & trained).nonzero()
    return int(tokens[0]) if len(tokens) else None
