"""Token kernels: Triton functions of one token by which kernels compute an objective, and their evaluation in torch.

loss, slope = token_kernel(logprob, old_logprob, advantage, numbers),   slope = d loss / d logprob
"""

import builtins
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MOST_NUMBERS = 4


@dataclass(frozen=True, slots=True)
class TokenKernel:
    """An objective as kernels compute it. The same on every rank."""

    load: Callable[[], Any]
    """Gives the Triton function. Called where a kernel is launched, because torch alone must not need Triton."""
    numbers: tuple[float, ...] = ()  # its numbers, at most `MOST_NUMBERS`
    load_averaged: Callable[[], Any] | None = None
    """Gives the function (log-ratio, advantage, numbers) whose value is averaged over sequences; None: none is."""


class _Language:
    """What token kernels use of `triton.language`, in torch; a number has the dtype of the values."""

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype

    exp, exp2, log, log2 = (staticmethod(each) for each in (torch.exp, torch.exp2, torch.log, torch.log2))
    abs, sqrt, sigmoid = (staticmethod(each) for each in (torch.abs, torch.sqrt, torch.sigmoid))
    maximum, minimum = staticmethod(torch.maximum), staticmethod(torch.minimum)

    def fma(self, x: Tensor, y: Any, z: Any) -> Tensor:
        """x y + z, rounded once."""
        return (x.double() * y + z).to(self._dtype)

    def where(self, condition: Tensor, x: Any, y: Any) -> Tensor:
        """As torch's, which would make two numbers float32."""
        x, y = (v if isinstance(v, Tensor) else torch.tensor(v, dtype=self._dtype) for v in (x, y))
        return torch.where(condition, x, y)


def in_torch(function: Any, dtype: torch.dtype = torch.float64) -> Callable:
    """The same source as a function of tensors of that dtype.

    Args:
        function: of `triton.jit`; it may call others that its module has by name, and use of `triton.language` what
            token kernels need.
        dtype: of the values.
    """
    return _translated(function.fn, _Language(dtype), {})


def _translated(
    function: types.FunctionType, language: _Language, found: dict[types.FunctionType, Callable]
) -> Callable:
    if function in found:
        return found[function]
    names: dict[str, Any] = {"__builtins__": builtins}
    translated = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    found[function] = translated
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(inner := getattr(value, "fn", None), types.FunctionType):
            names[name] = _translated(inner, language, found)
        elif getattr(value, "__name__", None) == "triton.language":
            names[name] = language
        elif value is not None:
            names[name] = getattr(value, "value", value)  # of a constexpr
    return translated
