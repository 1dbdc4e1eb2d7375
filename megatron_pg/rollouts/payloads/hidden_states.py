"""A teacher's last hidden states: one row of numbers per response token."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_pg.rollouts.fields import is_int
from megatron_pg.rollouts.payloads.base import Layout, Payload, Rows, first_trained, is_plain

_NUMBERS = {"bfloat16": torch.bfloat16, "float32": torch.float32}  # by their names in the file


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeacherStates(Rows):
    """The teacher's last hidden states: row t's are states[slots[t]], and arbitrary ones where no term reads them."""

    per_row = ("slots",)
    slots: Tensor  # [T] int64
    states: Tensor  # [m, H_T] of the rows at which a term reads them, on any device; m = 0 without such rows

    def to(self, move: Callable[[Tensor], Tensor]) -> "TeacherStates":
        """The slots alone move: states stay on the host, where each chunk of the head takes its own."""
        moved = self.map(move)
        is_host = moved.slots.device.type == "cpu"
        return moved if is_host else replace(moved, states=self.states.pin_memory())


class HiddenStates(Payload[Tensor]):
    """[R, H_T] bfloat16 or float32; at tokens that nothing trains the numbers may be arbitrary."""

    form = (
        "are not hidden states. Give a tensor or array [R, H] of floating-point numbers, "
        'or {"width": H, "bfloat16": …}: rows of little-endian numbers in base64 (or "float32").'
    )

    def parse(self, values: Any) -> Tensor:
        """From a tensor or array [R, H] of floating-point numbers, or from the output of `to_json`."""
        if isinstance(values, Mapping):
            return _decoded(values)
        if isinstance(values, np.ndarray):
            values = torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))
        if values.dim() != 2 or not values.dtype.is_floating_point:
            raise TypeError
        dtype = torch.bfloat16 if values.dtype == torch.bfloat16 else torch.float32
        return values.detach().to("cpu", dtype, copy=True).contiguous()

    def check(self, record: Any, sample: Any) -> None:
        """Raise ValueError for other shapes or dtypes, and for a trained token with a number that is not finite."""
        label = f"{self.name} of sample {sample.sample_id}"
        if not is_plain(record, 2, *_NUMBERS.values()):
            raise ValueError(
                f"{label} are not [R, H] bfloat16 or float32 on the CPU. Use Sample.build, which takes tensors and "
                "arrays."
            )
        if len(record) != sample.response_length or not record.shape[1]:
            raise ValueError(
                f"{label} have shape {tuple(record.shape)} for {sample.response_length} response tokens, so they do "
                "not align. Give the states that predict the response tokens, one row for each."
            )
        if (k := first_trained(~torch.isfinite(record).all(dim=1), sample.trained)) is not None:
            raise ValueError(
                f"{label} contain a number that is not finite at response token {k}, which is trained. Mask the token "
                "or repair the record."
            )

    def to_json(self, record: Tensor) -> dict[str, Any]:
        """Bits, which are not rounded."""
        name = next(name for name, dtype in _NUMBERS.items() if dtype == record.dtype)
        bits = record.contiguous().view(torch.int16 if name == "bfloat16" else torch.int32).numpy()
        content = base64.b64encode(bits.astype(bits.dtype.newbyteorder("<")).tobytes())
        return {"width": record.shape[1], name: content.decode("ascii")}

    def rows(self, records: Sequence[Tensor | None], layout: Layout, is_read: Tensor) -> TeacherStates:
        """The states of the rows at which a term reads them; all states are as large as the activations."""
        numbers, start = layout.here(torch.arange(sum(layout.lengths)))[is_read], 0
        states = torch.zeros(0, 1)
        for record, length in zip(records, layout.lengths, strict=True):
            number = numbers - start
            is_here = (number >= 0) & (number < length)
            start += length
            if record is None or not is_here.any():
                continue
            if not len(states):
                states = torch.zeros(len(numbers), record.shape[1], dtype=record.dtype)
            states = states.to(torch.promote_types(states.dtype, record.dtype))
            states[is_here] = record[number[is_here]].to(states.dtype)
        return TeacherStates(slots=(is_read.cumsum(0) - 1).clamp(min=0), states=states)


def _decoded(values: Mapping) -> Tensor:
    (name,) = {*values} - {"width"}
    width, dtype = values["width"], _NUMBERS[name]
    if not is_int(width) or width < 1:
        raise TypeError
    bits = np.frombuffer(base64.b64decode(values[name], validate=True), "<i2" if name == "bfloat16" else "<i4")
    return torch.from_numpy(bits.astype(bits.dtype.newbyteorder("="))).view(dtype).view(-1, width)
