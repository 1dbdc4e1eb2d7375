"""The log of a host's steps: console lines, metrics.jsonl, and the host's own logger."""

import sys
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

from megatron_pg.metrics.file import MetricsFile
from megatron_pg.plan.settings import LossSettings
from megatron_pg.step.findings import StepReport
from megatron_pg.step.log import Console, StepLog, step_record

ROUND = "host_round"  # field of a line: the host's rollout or batch that the optimizer step trained


class HostLog:
    """The log on the one rank that writes it; a ValueError means that the file cannot be written."""

    def __init__(
        self,
        settings: LossSettings,
        objective: dict[str, str],  # the rows of the startup's banner
        path: str | None,  # metrics.jsonl of the run; None: no file
        to_host: Callable[[Mapping[str, float], int | None], None] = lambda metrics, number: None,  # its logger
    ):
        self._settings, self._objective, self._to_host = settings, objective, to_host
        self._file = None if path is None else MetricsFile(path)
        self._console = Console(lambda text: print(text, flush=True))  # noqa: T201
        self._iteration: int | None = None  # of the latest step

    def write(
        self,
        host_round: int,  # the host's number of the rollout or batch that the step trains; it grows
        number: int | None,  # the host's own number of the step, from 0; None: the host has none
        report: StepReport,
        *,
        grad_norm: Any,  # before the gradients are clipped, a number or a tensor; None: unknown
        learning_rate: float | None,  # of the first parameter group
        skipped: bool,  # by the optimizer
    ) -> None:
        """Write a step after the optimizer has moved. Steps are numbered from 1, one by one."""
        if self._iteration is None:
            self._iteration = self._before(host_round, number)
            history = self._file.before(self._iteration + 1) if self._file else ()
            self._console.begin(report, self._settings, history)
        self._iteration += 1
        log = StepLog(
            iteration=self._iteration,
            report=report,
            learning_rate=learning_rate,
            grad_norm=None if grad_norm is None else float(grad_norm),
            skipped=skipped,
            objective=self._objective,
        )
        record = {**step_record(log), ROUND: host_round}
        if self._file is not None:
            self._file.write(record)
        self._console.step(record, self._settings.terms.objective.reported)
        self._to_host(report.metrics, number)

    def _before(self, host_round: int, number: int | None) -> int:
        """The number of the step before the first one of this process.

        The host may have resumed from a checkpoint that is older than the last lines of the file, so steps of this
        round and of later rounds are trained again. Lines of earlier rounds give the number of steps if they include
        the previous round. The number of steps per round may vary, so the host's own number is used only if the file
        has no such line.
        """
        lines = self._file.before(sys.maxsize) if self._file else ()
        earlier = [line for line in lines if line.get(ROUND, -1) < host_round]
        last = max(earlier, key=itemgetter("iteration"), default={})
        known = int(last.get("iteration", 0))
        if number is None or last.get(ROUND) == host_round - 1:
            return known
        return max(number, known)
