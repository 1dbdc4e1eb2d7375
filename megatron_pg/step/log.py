"""A finished step as a record for files and as lines for people."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_pg.declarations.loss_terms import SHORTHANDS
from megatron_pg.metrics.advice import Advice
from megatron_pg.metrics.limits import red_flags
from megatron_pg.metrics.reporting import console_line, red_flag_line
from megatron_pg.plan.plan import StepPlan
from megatron_pg.plan.settings import LossSettings
from megatron_pg.step.findings import StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """One finished optimizer step, equal on every rank."""

    iteration: int
    report: StepReport
    learning_rate: float | None
    grad_norm: float | None
    skipped: bool  # the optimizer skipped it (fp16 loss scale)
    objective: dict[str, str]  # the rows of the startup's banner


def step_record(log: StepLog) -> dict[str, Any]:
    """The step as one flat record, under the names of docs/metrics.md, without times: equal runs give equal records."""
    record = {
        "iteration": log.iteration,
        **log.report.metrics,
        "grad_norm": log.grad_norm,
        "learning_rate": log.learning_rate,
        "skipped": log.skipped,
        "objective": log.objective,
    }
    entries = [{"metric": name, "ranks": ranks} for name, ranks in log.report.nonfinite.items()]
    return record | ({"nonfinite": entries} if entries else {})


class Console:
    """The console lines of the rank that logs; `say` prints one."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] | None = None):
        self._say = say
        self._clock = clock  # in seconds, for the time left; None: lines have none
        self._first: tuple[int, float] | None = None  # iteration and time of the first line
        self._flagged: set[str] = set()  # metrics whose red flag was reported
        self._advice: Advice | None = None

    def begin(self, report: StepReport, settings: LossSettings, history: Iterable[Mapping[str, Any]] = ()) -> None:
        """Print the counts of the first step, which show wrong ids, and the absent metrics.

        `history` are the records of the run before this process, which advice follows, too.
        """
        self._advice = Advice(history) if settings.warns_of_mismatch else None
        self._say(f"first step: {units_of(report.plan)}")
        lacking = (
            settings.metrics.lacking(report.metrics) if report.plan.num_tokens else {}
        )  # of the objective's samples
        for field, names in lacking.items():
            self._say(f"not logged, because the samples have no {field}: {', '.join(names)}")

    def step(
        self, record: Mapping[str, Any], extra_names: Collection[str] = (), *, is_shown: bool = True, last: int = 0
    ) -> None:
        """The console line, each red flag's meaning once, and advice; the line shows `extra_names` too.

        `last` is the last iteration of the run, if it is known.
        """
        left = self._time_left(record["iteration"], last)
        if is_shown:
            means = [name for name in record if name.endswith("/mean")]  # of loss terms
            self._say(console_line(record["iteration"], record, [*means, *extra_names]) + left)
        for name, limit in red_flags(record).items():
            if name not in self._flagged and limit.steps == 1:
                self._say(red_flag_line(name, record[name], limit))
            self._flagged.add(name)
        if self._advice is not None and (line := self._advice.of(record)) is not None:
            self._say(line)

    def _time_left(self, iteration: int, last: int) -> str:
        """The time left at the mean speed since the first step, as the end of a line; empty if it is not known."""
        if self._clock is None:
            return ""
        now = self._clock()
        first, started = self._first = self._first or (iteration, now)
        if iteration == first or last <= iteration:
            return ""
        seconds = int((now - started) / (iteration - first) * (last - iteration))
        return f" | {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left"


def units_of(plan: StepPlan) -> str:
    """The counts of a step, as text."""
    prompts = "no prompt ids" if plan.num_prompts is None else f"{plan.num_prompts} prompts"
    counted = [f"{plan.num_samples} samples, {plan.num_rollouts} rollouts, {prompts}, {plan.num_tokens} trained tokens"]
    counted += [
        f"{name}: {term.num_rollouts} rollouts, {term.num_tokens} tokens"
        for name, term in plan.terms.items()
        if name not in SHORTHANDS
    ]
    return "; ".join(counted)
