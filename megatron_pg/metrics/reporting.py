"""The metrics of a step as texts for people and files."""

import json
import numbers
from collections.abc import Collection, Mapping
from typing import Any

import torch

from megatron_pg.metrics.table import METRICS, Limit, red_flags

GROUP = "pg/"  # before every name in TensorBoard and W&B
CONSOLE = (
    *("reward", "response_length", "pg_loss", "kl_new_old", "clipped_ratio_fraction", "ess", "entropy"),
    *("max_advantage", "grad_norm"),
)
ADDED_BYTES = 1 << 14  # of what a callback adds to a step, as JSON


class CallbackError(ValueError):
    """What `on_step` returned cannot be logged; raised on every rank."""


def nonfinite_entries(nonfinite: Mapping[str, list[int]]) -> list[dict[str, Any]]:
    """The "nonfinite" list of a record: each metric with the ranks whose contribution is NaN or inf."""
    return [{"metric": name, "ranks": ranks} for name, ranks in nonfinite.items()]


def console_line(iteration: int, values: Mapping[str, Any], own: Collection[str] = ()) -> str:
    """The step in one line, signs always printed: Megatron's own line drops a metric whose value is negative.

    What is beyond a limit of the table is in it, marked with "!"; `own` are further names to show.
    """
    flags = red_flags({**values, "iteration": iteration})
    names = [name for name in dict.fromkeys((*CONSOLE, *flags, *own)) if isinstance(values.get(name), (int, float))]
    shown = [f"{name} {values[name]:+.4g}{'!' if name in flags else ''}" for name in names]
    return " | ".join([f"pg {iteration:>6}", *shown])


def red_flag_line(name: str, value: float, limit: Limit) -> str:
    """What "!" behind a metric means."""
    return f"red flag: {name} {value:.4g} is {limit} (docs/metrics.md)"


def added_values(returned: object, taken: Collection[str]) -> dict[str, float]:
    """What a callback adds to a step, checked; `taken` are the names of the step's record.

    Raises:
        CallbackError: it is no dict of numbers, a name is taken, or there is too much of it.
    """
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise CallbackError(
            f"on_step returned a {type(returned).__name__}, so it is unclear what to log. Return a dict of numbers by name, or nothing."
        )
    values = {}
    for name, value in returned.items():
        if not isinstance(name, str) or not name or not name.isprintable():
            raise CallbackError(
                f"on_step returned a value named {name!r:.80}, which no log can show. Give it a printable name."
            )
        if name in taken or name == "nonfinite" or any(metric.name == name for metric in METRICS):
            raise CallbackError(
                f"on_step returned {name!r:.80}, which is a metric of megatron_pg, so two values would share a name. Choose another."
            )
        values[name] = _real(name, value)
    if (size := len(json.dumps(values))) > ADDED_BYTES:
        raise CallbackError(
            f"on_step returned {len(values)} values in {size} bytes, more than {ADDED_BYTES}, which no step sends. Return fewer."
        )
    return values


def _real(name: str, value: Any) -> float:
    is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1
    try:
        if is_scalar or (isinstance(value, numbers.Real) and not isinstance(value, bool)):
            return float(value)
    except (OverflowError, RuntimeError):  # beyond float, a complex tensor
        pass
    raise CallbackError(
        f"on_step returned {name:.80}={_shown(value)}, which is not a real number in the range of float. Return floats, ints or "
        "tensors with one element."
    )


def _shown(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # more digits than Python writes
        return f"a very long {type(value).__name__}"
