"""What the benchmarks on several GPUs share: the machine, the time that is left, and why a row has no figure."""

import re
import time
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch

ERROR = re.compile(r"^.*?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: .*)?)$", re.MULTILINE)
Row = dict[str, Any]  # its figures, or one entry: FAILED or NOT_RUN with the reason
FAILED, NOT_RUN = "failed", "not run"
OUT_OF_TIME = "out of time: call the script again"


class Machine(NamedTuple):
    """What figures depend on."""

    card: str
    gpus: int
    torch: str

    @classmethod
    def here(cls, gpus: int | None = None) -> "Machine":
        """This machine, of which `gpus` are used."""
        return cls(torch.cuda.get_device_name(), gpus or torch.cuda.device_count(), torch.__version__)

    @property
    def heading(self) -> str:
        """The line above a table."""
        return f"{self.gpus} × {self.card}, torch {self.torch}, {date.today().isoformat()}"


class Deadline:
    """When the last run has to be over; without minutes never."""

    def __init__(self, minutes: float | None):
        self._end = time.monotonic() + 60 * minutes if minutes is not None else float("inf")

    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()


def last_error(text: str) -> str:
    """The last line of an output that names an error, else the last line, in at most 200 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [match[1] for match in ERROR.finditer(text) if "ChildFailedError" not in match[1]]  # of the launcher
    return ([*lines, *named] or ["no output"])[-1][:200].replace("|", "\\|")


def error_in(path: Path) -> str:
    """The last error of an output file."""
    return last_error(path.read_text(errors="replace")) if path.exists() else "no output"


def is_measured(row: Row | None) -> bool:
    """Whether a row has figures, so that it is not measured again."""
    return row is not None and FAILED not in row and NOT_RUN not in row


def table(rows: dict[str, Row]) -> str:
    """Markdown: the figures, each failed row with its error; then the rows that did not run, with the reason."""
    done = {name: row for name, row in rows.items() if NOT_RUN not in row}
    columns = list(dict.fromkeys(key for row in done.values() if is_measured(row) for key in row)) or ["figures"]
    lines = [f"| row | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for name, row in done.items():
        cells = [shown(row.get(column, "")) for column in columns]
        if FAILED in row:
            cells = [f"failed: {row[FAILED]}", *[""] * (len(columns) - 1)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, *not_run({name: row[NOT_RUN] for name, row in rows.items() if NOT_RUN in row})])


def shown(value: object) -> str:
    """A cell: three digits of a number."""
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def not_run(reasons: dict[str, str]) -> list[str]:
    """Markdown lines of what did not run; none if everything did."""
    if not reasons:
        return []
    return ["", "| not run | why |", "|---|---|", *(f"| {name} | {why} |" for name, why in reasons.items())]
