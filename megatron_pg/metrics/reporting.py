"""Where the metrics of a step go: a JSON line, a console line, a TensorBoard or W&B writer. One name everywhere."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_pg.rollouts.printable import printable

CONSOLE = ("pg_loss", "kl_new_old", "clipped_ratio_fraction", "ess", "entropy", "max_advantage", "grad_norm")


class MetricsFile:
    """metrics.jsonl: one object per optimizer step, flushed, so that a run that dies leaves what it knew.

    Args:
        path: the file; its folder is made.
        after: the iteration that the run continues from. A torn last line and the lines of later iterations, which
            will be trained again, are dropped; 0 starts anew.

    Raises:
        ValueError: as `check_metrics_file`.
    """

    def __init__(self, path: str | Path, *, after: int = 0):
        self.path = Path(path)
        kept = check_metrics_file(self.path, after=after)
        scratch = self.path.with_suffix(".part")
        scratch.write_text("".join(kept), encoding="utf-8")
        os.replace(scratch, self.path)  # never half a file
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one step; a value that is not finite becomes null and is named under "nonfinite"."""
        bad = [name for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)]
        known = list(record.get("nonfinite", []))
        listed = known + [{"metric": name} for name in bad if name not in {entry["metric"] for entry in known}]
        clean = {name: None if name in bad else value for name, value in record.items() if name != "nonfinite"}
        self._file.write(json.dumps(clean | ({"nonfinite": listed} if listed else {}), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def check_metrics_file(path: str | Path, *, after: int = 0) -> list[str]:
    """The lines of iterations up to `after`; makes the folder, and refuses a file of something else.

    Raises:
        ValueError: there is a file at `path` and it is no metrics file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()  # torn by a crash
    kept: dict[int, str] = {}
    for number, raw in enumerate(lines, start=1):
        try:
            line = raw.decode("utf-8")
            step = int(json.loads(line)["iteration"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{printable(str(path), limit=None)}:{number} is no line of a metrics file, so writing there would destroy or mix something else. Choose another path."
            ) from error
        if step <= after:
            kept[step] = line
    return [kept[step] for step in sorted(kept)]


def nonfinite_entries(nonfinite: Mapping[str, list[int]]) -> list[dict[str, Any]]:
    """The "nonfinite" list of a record: each metric with the ranks whose contribution is NaN or inf."""
    return [{"metric": name, "ranks": ranks} for name, ranks in nonfinite.items()]


def console_line(iteration: int, values: Mapping[str, Any]) -> str:
    """The step in one line, signs always printed: Megatron's own line drops a metric whose value is negative."""
    shown = [f"{name} {values[name]:+.4g}" for name in CONSOLE if isinstance(values.get(name), (int, float))]
    return " | ".join([f"pg {iteration:>6}", *shown])
