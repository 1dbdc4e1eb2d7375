"""`megatron-pg report`: one page about one or several runs, for a browser, without network.

It shows the effective objective, the red flags of the table of metrics, and the curves. plotly, an extra, draws them;
its script is in the page.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_pg.cli.runs.curves import Run, add_run_options, metrics_of, read_runs, requested_metrics
from megatron_pg.cli.terminal import InputError, check_output, say, show_json, show_path, table, written_whole
from megatron_pg.metrics.limits import LIMITS
from megatron_pg.metrics.table import METRICS
from megatron_pg.rollouts.printable import printable

SHOWN = (
    *("reward", "reward_std", "zero_variance_fraction", "response_length", "truncated_fraction", "pg_loss", "loss"),
    *("kl_loss", "entropy_loss", "kl_new_old", "kl_new_ref", "mismatch_kl", "clipped_ratio_fraction"),
    *("clipped_high_fraction", "clipped_low_fraction", "ess", "aggregation_ess", "entropy", "grad_norm"),
    "learning_rate",
)
_COUNTS = {"N_r": "num_rollouts", "P": "num_prompts", "T": "num_tokens"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `report`."""
    add_run_options(parser, metrics="the usual ones, your own, and those with a red flag", smooth=0.6)
    parser.add_argument("--output", metavar="FILE", help="the page, .html; needs plotly. Without it, give --json")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")


def run(options: argparse.Namespace) -> int:
    """Write the page, and print its red flags."""
    if options.output is None and not options.json:
        raise InputError("--output is not given. Give a file for the page, or --json for the red flags alone.")
    if options.output is None and options.metrics:
        raise InputError(f"--metrics {printable(options.metrics)} selects curves of the page. Give --output as well.")
    if options.output is not None:
        _check_page(options)
    runs = read_runs(options.runs)
    flags = [flag for label, one_run in runs.items() for flag in red_flags(label, one_run)]
    names = [] if options.output is None else _write(options, runs, flags)
    if options.json:
        show_json(flags)
        return 0
    counts = (("run", runs), ("metric", names), ("red flag", flags))
    texts = (f"{len(items)} {noun}{'s' * (len(items) != 1)}" for noun, items in counts)
    say(f"{show_path(options.output)}: {', '.join(texts)}")
    if flags:
        say(table(("run", "metric", "red flag", "steps", "worst"), [_cells(flag)[:5] for flag in flags]))
    return 0


def _write(options: argparse.Namespace, runs: Mapping[str, Run], flags: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write the page; the metrics that it shows."""
    from megatron_pg.cli.runs.report_page import page  # imports plotly

    if options.metrics:
        names = requested_metrics(options.metrics, runs)
    else:
        names = list(dict.fromkeys([*_default_metrics(runs), *(flag["metric"] for flag in flags)]))
    curves = {name: {label: one_run.curves.get(name, {}) for label, one_run in runs.items()} for name in names}
    text = page(curves, runs, _objectives(runs), [_cells(flag) for flag in flags], smoothing=options.smooth)
    with written_whole(options.output, overwrite=options.overwrite) as scratch:
        scratch.write_text(text, encoding="utf-8", errors="backslashreplace")  # names come from files
    return names


def _check_page(options: argparse.Namespace) -> None:
    """Refuse a page that cannot be made, before any work is done."""
    check_output(options.output, overwrite=options.overwrite, suffixes=(".html",))
    try:
        import megatron_pg.cli.runs.report_page  # noqa: F401
    except Exception as error:  # plotly is missing or broken
        raise InputError(
            f"plotly cannot be imported ({type(error).__name__}: {error}). pip install 'megatron-pg[report]'."
        ) from error


def red_flags(label: str, run: Run) -> list[dict[str, Any]]:
    """The limits that a run exceeded, and its metrics that were not finite."""
    flags: list[tuple] = []
    for name, limit in LIMITS.items():
        curve = run.curves.get(name, {})
        if beyond := {step: value for step, value in curve.items() if limit.is_exceeded(value, step)}:
            worst = max(beyond.values(), key=lambda value: max(value - limit.high, limit.low - value))
            flags.append((name, limit.bounds, list(beyond), len(curve), worst, limit.cause))
    for name, steps in run.nonfinite.items():
        cause = "the metrics file names the ranks that it came from"
        flags.append((name, "not finite", steps, len(run.curves[name]) + len(steps), None, cause))
    names = ("run", "metric", "red_flag", "steps", "of", "worst", "cause")
    return [dict(zip(names, (label, *flag), strict=True)) for flag in flags]


def _cells(flag: Mapping[str, Any]) -> tuple[str, ...]:
    steps = flag["steps"]
    when = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} of {flag['of']}, from {steps[0]} to {steps[-1]}"
    worst = "–" if flag["worst"] is None else f"{flag['worst']:.4g}"
    return flag["run"], flag["metric"], flag["red_flag"], when, worst, flag["cause"]


def _objectives(runs: Mapping[str, Run]) -> dict[str, dict[str, str]]:
    """The rows of the banner and the counts of a step, by run and, if they changed, first step."""
    columns = {}
    for label, run in runs.items():
        counted = {symbol: run.curves[name].values() for symbol, name in _COUNTS.items() if run.curves.get(name)}
        ranges = [f"{symbol} = {min(v):,.0f}" + f"–{max(v):,.0f}" * (max(v) > min(v)) for symbol, v in counted.items()]
        counts = {"a step counts": ", ".join(ranges)} if ranges else {}
        for step, rows in (run.objectives or {1: {"objective": "not in the file: another release wrote it"}}).items():
            columns[label if len(run.objectives) < 2 else f"{label}, from step {step}"] = rows | counts
    return columns


def _default_metrics(runs: Mapping[str, Run]) -> list[str]:
    known = metrics_of(runs)
    others = {*SHOWN, *(metric.name for metric in METRICS)}
    custom = [name for name in known if name not in others and not name.startswith(("num_", "documents_"))]
    return [*[name for name in SHOWN if name in known], *custom]
