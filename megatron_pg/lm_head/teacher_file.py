"""A teacher's head on disk: one tensor of a safetensors file, of which a rank reads its rows. Nothing in it is code.

The file starts with 8 bytes, the length of a JSON object in little-endian order, which has dtype, shape and place of
each tensor.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_MOST_HEADER_BYTES = 100 * 10**6  # as the format has it


@dataclass(frozen=True, slots=True)
class TeacherHead:
    """[V, H_T] in a file, of which no number was read yet."""

    path: str
    rows: int  # V
    width: int  # H_T
    dtype: torch.dtype
    start: int  # of its numbers in the file, bytes

    @classmethod
    def of(cls, given: str) -> "TeacherHead":
        """From `PATH`, a file whose tensor is called `weight`, or `PATH:NAME`.

        Raises:
            ValueError: there is no such file or tensor, or it is not a matrix of numbers.
        """
        path, colon, name = given.rpartition(":")
        path, name = (path, name) if colon else (given, "weight")
        try:
            return _find(path, name)
        except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:  # all get the one message below
            reason = getattr(error, "strerror", None) or error
            raise ValueError(
                f"head={given} of --pg-term is not a safetensors file with a matrix {name} [V, H] in BF16, F16 or F32 "
                f"({reason}). Give PATH:NAME of the teacher's output layer. If the model is in several files, give the "
                "one that contains this layer."
            ) from error

    def check_vocabulary(self, columns: int) -> None:
        """Refuse a head of another vocabulary than the student's.

        Raises:
            ValueError: it has not as many rows as the student has columns that are no padding.
        """
        if self.rows != columns:
            raise ValueError(
                f"head={self.path} of --pg-term has {self.rows} rows and the student {columns} columns. Give a teacher "
                f"of the same tokenizer. If the student's further columns are padding, add --pg-vocab-size {self.rows}."
            )

    def read(self, first: int, count: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[count, H_T] rows from `first` on; 0 after the last, where the student's columns are padding.

        Raises:
            ValueError: the file has been changed, or holds a number that is not finite.
        """
        held = range(self.rows)[first : first + count]
        weight = torch.zeros(count, self.width, dtype=dtype, device=device)
        if not held:
            return weight
        row = self.width * self.dtype.itemsize
        with open(self.path, "rb") as file:
            file.seek(self.start + held.start * row)
            content = bytearray(file.read(len(held) * row))
        if len(content) != len(held) * row:
            raise ValueError(
                f"head={self.path} of --pg-term ends before row {held[-1]}. Was it changed since the start?"
            )
        weight[: len(held)] = torch.frombuffer(content, dtype=self.dtype).view(len(held), self.width).to(device)
        if not torch.isfinite(weight).all():
            raise ValueError(
                f"head={self.path} of --pg-term holds a number among rows {held[0]} to {held[-1]} that is not finite "
                f"in {dtype}. Repair the file, or train in bfloat16."
            )
        return weight


def _find(path: str, name: str) -> TeacherHead:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = file.seek(0, 2)
        if length > min(_MOST_HEADER_BYTES, size - 8):
            raise ValueError("it does not begin with a header")
        file.seek(8)
        header: Any = json.loads(file.read(length).decode("utf-8"))
    if name not in header:
        raise ValueError(f"it holds {', '.join(sorted(set(header) - {'__metadata__'})[:5])}")
    entry = header[name]
    (rows, width), (begin, end) = entry["shape"], entry["data_offsets"]
    if any(type(number) is not int for number in (rows, width, begin, end)) or min(rows, width) < 1:
        raise ValueError(f"it has the shape {entry['shape']} at {entry['data_offsets']}")
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"it is in {entry['dtype']}")
    dtype = _DTYPES[entry["dtype"]]
    if not 0 <= begin <= end <= size - 8 - length or end - begin != math.prod((rows, width, dtype.itemsize)):
        raise ValueError("it was cut short")
    return TeacherHead(path, rows, width, dtype, 8 + length + begin)
