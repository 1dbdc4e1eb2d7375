"""The metrics of a step as text for the console, TensorBoard and files."""

import json
import numbers
from collections.abc import Collection, Mapping
from typing import Any

import torch

from megatron_pg.metrics.limits import Limit, red_flags
from megatron_pg.metrics.table import METRICS
from megatron_pg.rollouts.printable import shorten

GROUP = "pg/"  # before every name in TensorBoard and W&B
CONSOLE = (
    *("reward", "response_length", "pg_loss", "kl_new_old", "clipped_ratio_fraction", "ess", "entropy"),
    *("max_advantage", "value_loss", "explained_variance", "grad_norm"),
)
ADDED_BYTES = 1 << 14  # most that a callback may add to a step, as JSON


class CallbackError(ValueError):
    """The value that `on_step` returned cannot be logged, or another rank's `on_step` failed; raised on every rank."""


def console_line(iteration: int, values: Mapping[str, Any], own: Collection[str] = ()) -> str:
    """The step in one line, with all signs: Megatron's own line drops a metric whose value is negative.

    Values beyond a limit are marked with "!" and always shown; `own` are further names to show.
    """
    flags = red_flags({**values, "iteration": iteration})
    names = [name for name in dict.fromkeys((*CONSOLE, *flags, *own)) if isinstance(values.get(name), (int, float))]
    shown = [f"{name} {values[name]:+.4g}{'!' if name in flags else ''}" for name in names]
    return " | ".join([f"pg {iteration:>6}", *shown])


def red_flag_line(name: str, value: float, limit: Limit) -> str:
    """The meaning of "!" after a metric."""
    return f"red flag: {name} {value:.4g} is {limit} (docs/metrics.md)"


def added_values(returned: object, taken: Collection[str]) -> dict[str, float]:
    """The values that a callback adds to a step, checked; `taken` are the names in the step's record.

    Raises:
        CallbackError: they are not a dict of numbers, a name is taken, or they are too large.
    """
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise CallbackError(
            f"on_step returned a {type(returned).__name__}, so it is unclear what to log. Return a dict of numbers by "
            "name, or nothing."
        )
    values = {}
    for name, value in returned.items():
        if not isinstance(name, str) or not name or not name.isprintable():
            raise CallbackError(
                f"on_step returned a value named {name!r:.80}, which no log can show. Give it a printable name."
            )
        if name in taken or name == "nonfinite" or any(metric.name == name for metric in METRICS):
            raise CallbackError(f"on_step returned {name!r:.80}, which is a metric of megatron_pg. Choose another.")
        values[name] = _real(name, value)
    if (size := len(json.dumps(values))) > ADDED_BYTES:
        raise CallbackError(
            f"on_step returned {len(values)} values in {size} bytes, more than {ADDED_BYTES}, which no step sends. "
            "Return fewer."
        )
    return values


def _real(name: str, value: Any) -> float:
    is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1
    try:
        if is_scalar or (isinstance(value, numbers.Real) and not isinstance(value, bool)):
            return float(value)
    except (OverflowError, RuntimeError):  # too large for a float, or a complex tensor
        pass
    raise CallbackError(
        f"on_step returned {name:.80}={shorten(value)}, which is not a real number in the range of float. Return "
        "floats, ints or tensors with one element."
    )
