"""The table of `make prove`: tests marked `proof("row")` report their cases and worst error, and the rows are printed.

A row with no case, or with a failed or skipped test, is a failure of the run: a check that did not happen proves nothing.
"""

import datetime
import importlib.metadata
import math
import os
import platform
from dataclasses import dataclass

PACKAGES = ("megatron-core", "torch", "triton", "numpy")


@dataclass
class Row:
    cases: int = 0
    failures: int = 0
    worst: float | None = None
    seconds: float = 0.0


class Evidence:
    """What the tests of one run have shown, by row."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def add(self, row: str, *, cases: int, worst: float | None = None) -> None:
        """Counts `cases` passed cases; NaN is no error figure and is refused."""
        if cases < 1 or (worst is not None and math.isnan(worst)):
            raise ValueError(f"{row}: {cases} cases with worst error {worst} show nothing")
        entry = self.rows.setdefault(row, Row())
        entry.cases += cases
        if worst is not None:
            entry.worst = max(worst, entry.worst or 0.0)

    def finish(self, row: str, *, passed: bool, seconds: float) -> None:
        """Adds one test's outcome."""
        entry = self.rows.setdefault(row, Row())
        entry.failures += not passed
        entry.seconds += seconds

    def holds(self) -> bool:
        """True if every row has cases and no failure."""
        return bool(self.rows) and all(row.cases > 0 and row.failures == 0 for row in self.rows.values())

    def table(self) -> str:
        """The rows as a Markdown table."""
        lines = ["| Check | Cases | Failures | Worst error | Seconds |", "|---|---:|---:|---:|---:|"]
        for name, row in sorted(self.rows.items()):
            worst = "" if row.worst is None else f"{row.worst:.1e}" if row.worst else "0"
            lines.append(f"| {name} | {row.cases:,} | {row.failures} | {worst} | {row.seconds:.0f} |")
        return "\n".join(lines) + "\n"


def page(evidence: Evidence, command: str, seconds: float) -> str:
    """docs/proof.md."""
    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    return (
        "# Proof\n\n"
        "What the tests have shown, in figures: written by `make prove`, which fails if a row has a failure or no case. "
        "Errors are relative to Σ|w·ℓ| for losses and to the largest gradient entry for gradients; an empty cell means that the "
        "check is exact or has no error figure. [aggregation.md](aggregation.md) says what is being proved.\n\n"
        f"{datetime.date.today()}, {os.cpu_count()} CPU cores, Python {platform.python_version()}, {versions}. "
        f"Command: `{command}`, {seconds / 60:.0f} minutes.\n\n"
        f"{evidence.table()}"
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
