"""Where the steps of a host go: lines for people, metrics.jsonl, and the host's own logger."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_pg.metrics.advice import Advice
from megatron_pg.metrics.file import MetricsFile
from megatron_pg.step.findings import StepReport
from megatron_pg.step.log import Console, StepLog, step_record
from megatron_pg.step.settings import LossSettings


def last_iteration(path: str | None) -> int:
    """The last step that a metrics.jsonl has; 0 without one."""
    if path is None or not Path(path).exists():
        return 0
    lines = Path(path).read_bytes().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]  # a crash may have torn the last one
    return int(json.loads(whole[-1])["iteration"]) if whole else 0


class HostLog:
    """What the one rank does that writes the steps.

    Args:
        settings: the loss settings.
        objective: the rows of the startup's banner.
        path: metrics.jsonl of the run; None: no such file.
        to_host: takes a step's metrics by name, and its number, to the host's logger.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(
        self,
        settings: LossSettings,
        objective: dict[str, str],
        path: str | None,
        to_host: Callable[[Mapping[str, float], int], None] = lambda metrics, iteration: None,
    ):
        self._settings, self._objective, self._to_host = settings, objective, to_host
        self._file = None if path is None else MetricsFile(path)
        self._console = Console(lambda text: print(text, flush=True))  # noqa: T201
        self._has_begun = False

    def write(
        self, iteration: int, report: StepReport, *, grad_norm: float | None, learning_rate: float | None, skipped: bool
    ) -> None:
        """A step that the optimizer has seen."""
        if not self._has_begun:
            advice = Advice(self._file.before(iteration) if self._file else ()) if self._settings.advises else None
            self._console.begin(report, self._settings.metrics, advice)
            self._has_begun = True
        log = StepLog(
            iteration=iteration,
            report=report,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            skipped=skipped,
            objective=self._objective,
        )
        record = step_record(log)
        if self._file is not None:
            self._file.write(record)
        self._console.step(record, self._settings.terms.objective.reported)
        self._to_host(report.metrics, iteration)
