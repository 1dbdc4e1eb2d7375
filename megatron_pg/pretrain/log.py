"""Where the steps of a run go: metrics.jsonl, console, TensorBoard and W&B, together with the numbers of `on_step`."""

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from megatron_pg.args import ArgumentError
from megatron_pg.metrics.file import MetricsFile
from megatron_pg.metrics.reporting import GROUP, CallbackError, added_values
from megatron_pg.plan.collectives import all_gather_rows, text_of_failed
from megatron_pg.plan.errors import message_of
from megatron_pg.plan.settings import LossSettings
from megatron_pg.step.findings import StepReport
from megatron_pg.step.log import Console, StepLog, step_record


class RunLog:
    """The log of one run. Every rank calls `write`; files and console are rank 0's.

    Args:
        on_step: the user's callback, or None.
        say: prints a text; called on rank 0.
        path: of metrics.jsonl, or None.
    """

    def __init__(
        self,
        on_step: Callable[[StepLog], Mapping[str, float] | None] | None,
        say: Callable[[str], None],
        path: str | Path | None,
    ):
        self.objective: dict[str, str] = {}  # the loss in force, as the banner shows it
        self.last_iteration = 0  # the last one that was logged in this run
        self.report: StepReport  # of the last training step
        self._on_step, self._say, self._path = on_step, say, path
        self._is_called_back = False  # a rank has an on_step
        self._console = Console(say, time.monotonic if sys.stdout.isatty() else None)
        self._file: MetricsFile | None = None

    def open(self) -> None:
        """Open metrics.jsonl on rank 0.

        Raises:
            ArgumentError: rule E63, if it cannot be written or another job writes it.
        """
        if self._path is not None and torch.distributed.get_rank() == 0:
            try:
                self._file = MetricsFile(self._path)
            except ValueError as error:
                raise ArgumentError([("E63", str(error))]) from error

    def close(self) -> None:
        """Close metrics.jsonl, and report steps that could not be written."""
        if self._file is None:
            return
        self._file.close()
        if self._file.num_missing:
            self._say(
                f"{self._file.path} lacks the last {self._file.num_missing} steps, because it could not be written. "
                "Free some disk space, or choose another metrics_file."
            )

    def write(self, values: dict[str, Any], settings: LossSettings, args: Namespace) -> None:
        """Log one step; `values` are the arguments of Megatron's training_log by name, `args` Megatron's arguments."""
        # the optimizer of Megatron-FSDP gives 0 for the norm that it does not compute
        is_unknown = vars(args).get("use_megatron_fsdp") and not args.clip_grad
        grad_norm = None if is_unknown else values["grad_norm"]
        log = StepLog(
            iteration=values["iteration"],
            report=self.report,
            learning_rate=values["learning_rate"],
            grad_norm=None if grad_norm is None else float(grad_norm),
            skipped=bool(values["skipped_iter"]),
            objective=self.objective,
        )
        if not self.last_iteration:
            self._begin(log, settings)
        self.last_iteration = log.iteration
        record = step_record(log)
        added = self._additions(log, record)
        if log.iteration % args.tensorboard_log_interval == 0:
            _to_megatrons_writers(log.iteration, log.report.metrics | added)
        if self._file:
            self._file.write(record | added)
        if torch.distributed.get_rank() == 0:
            is_shown = log.iteration % args.log_interval == 0
            extra_names = [*settings.terms.objective.reported, *added]
            self._console.step(record | added, extra_names, is_shown=is_shown, last=vars(args).get("train_iters") or 0)

    def _begin(self, log: StepLog, settings: LossSettings) -> None:
        if torch.distributed.get_rank() == 0:
            self._console.begin(log.report, settings, self._file.before(log.iteration) if self._file else ())
        self._is_called_back = bool(all_gather_rows(torch.tensor([self._on_step is not None])).any())

    def _additions(self, log: StepLog, record: Mapping[str, Any]) -> dict[str, float]:
        """What rank 0's callback returned, or an error of a callback, on every rank: two ranks have the writers.

        Raises:
            CallbackError: rank 0 returned what no log can show, or the callback of another rank raised an error.
        """
        if not self._is_called_back:
            return {}
        error: Exception | None = None
        text = ""
        try:
            returned = self._on_step(log) if self._on_step else None
            if torch.distributed.get_rank() == 0 and (values := added_values(returned, record.keys())):
                text = json.dumps(values)
        except CallbackError as failure:
            error, text = failure, str(failure)
        except Exception as failure:
            rank = torch.distributed.get_rank()
            error, text = failure, f"on_step raised an error on rank {rank}: {message_of(failure)}"
        failed, text = text_of_failed(text, error)
        if failed is not None:
            raise CallbackError(text)
        return json.loads(text or "{}")


def _to_megatrons_writers(iteration: int, metrics: Mapping[str, float]) -> None:
    """Write to Megatron's TensorBoard and W&B writers, as `pg/` followed by the name in metrics.jsonl."""
    if writer := get_tensorboard_writer():
        for name, value in metrics.items():
            writer.add_scalar(GROUP + name, value, iteration)
    if wandb := get_wandb_writer():
        wandb.log({GROUP + name: value for name, value in metrics.items()}, iteration)
