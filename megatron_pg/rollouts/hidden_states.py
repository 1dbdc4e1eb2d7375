"""A teacher's last hidden states, one row of numbers per response token, and how the rollout file holds them."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_pg.rollouts.fields import is_int
from megatron_pg.rollouts.printable import shorten

_NUMBERS = {"bfloat16": torch.bfloat16, "float32": torch.float32}  # by what the file calls them


def hidden_states_of(values: Any, label: str) -> Tensor:
    """[R, H] bfloat16 or float32 from a tensor or array [R, H] of floating-point numbers, or from what `encoded` makes.

    Raises:
        ValueError: they are no such thing.
    """
    try:
        if isinstance(values, Mapping):
            return _decoded(values)
        if isinstance(values, np.ndarray):
            values = torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))
        if values.dim() == 2 and values.dtype.is_floating_point:
            dtype = torch.bfloat16 if values.dtype == torch.bfloat16 else torch.float32
            # copied, because the caller may reuse a buffer
            return values.detach().to("cpu", dtype, copy=True).contiguous()
    except Exception:  # of whatever else was given
        dtype = None
    raise ValueError(
        f"teacher_hidden={shorten(values)} of sample {label} are no hidden states. Give a tensor or array [R, H] of floating-point numbers, "
        'or {"width": H, "bfloat16": …}: rows of little-endian numbers in base64 (or "float32").'
    )


def encoded(states: Tensor) -> dict[str, Any]:
    """As the rollout file has them: bits, so that nothing is rounded."""
    name = next(name for name, dtype in _NUMBERS.items() if dtype == states.dtype)
    bits = states.view(torch.int16 if name == "bfloat16" else torch.int32).numpy()
    content = base64.b64encode(bits.astype(bits.dtype.newbyteorder("<")).tobytes())
    return {"width": states.shape[1], name: content.decode("ascii")}


def _decoded(values: Mapping) -> Tensor:
    (name,) = {*values} - {"width"}
    width, dtype = values["width"], _NUMBERS[name]
    if not is_int(width) or width < 1:
        raise TypeError
    bits = np.frombuffer(base64.b64decode(values[name], validate=True), "<i2" if name == "bfloat16" else "<i4")
    return torch.from_numpy(bits.astype(bits.dtype.newbyteorder("="))).view(dtype).view(-1, width)


def check_hidden_states(states: Any, length: int, trained: Tensor, label: str) -> None:
    """Refuse what is no row of numbers per response token; at tokens that nothing trains they may be anything.

    Args:
        states: the field.
        length: R.
        trained: [R] bool.
        label: what messages call the sample.

    Raises:
        ValueError: shape or dtype cannot be, or a number at a trained token is not finite.
    """
    is_plain = isinstance(states, Tensor) and states.layout == torch.strided and not states.is_nested
    if not is_plain or states.dim() != 2 or states.dtype not in _NUMBERS.values() or states.device.type != "cpu":
        raise ValueError(
            f"teacher_hidden of sample {label} are no [R, H] bfloat16 or float32 on the CPU. Use Sample.build, which takes tensors and arrays."
        )
    if len(states) != length or not states.shape[1]:
        raise ValueError(
            f"teacher_hidden of sample {label} have shape {tuple(states.shape)} for {length} response tokens, so they would not align. Give "
            "the states that predict the response tokens, one row for each."
        )
    if (bad := trained & ~torch.isfinite(states).all(dim=1)).any():
        raise ValueError(
            f"teacher_hidden of sample {label} hold a number that is not finite at response token {int(bad.nonzero()[0])}, which is trained, "
            "so the loss would not be finite. Mask the token or repair the record."
        )
