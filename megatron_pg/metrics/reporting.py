"""The metrics of a step as texts for people and files."""

from collections.abc import Mapping
from typing import Any

CONSOLE = ("pg_loss", "kl_new_old", "clipped_ratio_fraction", "ess", "entropy", "max_advantage", "grad_norm")


def nonfinite_entries(nonfinite: Mapping[str, list[int]]) -> list[dict[str, Any]]:
    """The "nonfinite" list of a record: each metric with the ranks whose contribution is NaN or inf."""
    return [{"metric": name, "ranks": ranks} for name, ranks in nonfinite.items()]


def console_line(iteration: int, values: Mapping[str, Any]) -> str:
    """The step in one line, signs always printed: Megatron's own line drops a metric whose value is negative."""
    shown = [f"{name} {values[name]:+.4g}" for name in CONSOLE if isinstance(values.get(name), (int, float))]
    return " | ".join([f"pg {iteration:>6}", *shown])
