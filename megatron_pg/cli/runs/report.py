"""`megatron-pg report`: one page about one or several runs, for a browser, without network.

What was in force, which limits of the table of metrics a run touched, and its curves. Drawn by plotly, an extra, whose
script is in the page.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_pg.cli.runs.plot import Curve, chosen, labelled, nonfinite_metrics, read_metrics
from megatron_pg.cli.terminal import InputError, check_output, opened, say, show_json, show_path, table, written_whole
from megatron_pg.metrics.table import LIMITS, METRICS

SHOWN = (
    *("reward", "reward_std", "zero_variance_fraction", "response_length", "truncated_fraction", "pg_loss", "loss"),
    *("kl_loss", "entropy_loss", "kl_new_old", "kl_new_ref", "mismatch_kl", "clipped_ratio_fraction"),
    *("clipped_high_fraction", "clipped_low_fraction", "ess", "aggregation_ess", "entropy", "grad_norm"),
    "learning_rate",
)
_COUNTS = {"N_r": "num_rollouts", "P": "num_prompts", "T": "num_tokens"}


@dataclass(frozen=True, slots=True)
class Run:
    """What the page shows of one metrics file."""

    curves: dict[str, Curve]
    objectives: dict[int, dict[str, str]]  # rows of the banner, by the step from which they were in force
    nonfinite: dict[str, list[int]]  # steps in which a metric was NaN or inf


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `report`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a metrics.jsonl, or the folder that holds it")
    parser.add_argument("--output", metavar="FILE", required=True, help="the page, .html; needs plotly")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE where it exists")
    parser.add_argument("--metrics", metavar="NAME,…", help="curves to draw; default: what one looks at, and your own")
    parser.add_argument(
        "--smooth",
        metavar="W",
        type=float,
        default=0.6,
        help="weight of the past in the bold curves, 0 to below 1; default 0.6",
    )


def run(options: argparse.Namespace) -> int:
    """Write the page, and say which red flags are in it."""
    if not 0 <= options.smooth < 1:
        raise InputError(f"--smooth {options.smooth:g} is no weight of the past. Give 0 or more, below 1.")
    check_output(options.output, overwrite=options.overwrite)
    page = _page()
    runs = {label: read_run(path) for label, path in labelled(options.runs).items()}
    flags = [flag for label, each in runs.items() for flag in red_flags(label, each)]
    if options.metrics:
        names = chosen(options.metrics, {label: each.curves for label, each in runs.items()})
    else:
        names = list(dict.fromkeys([*shown(runs), *(flag["metric"] for flag in flags)]))
    curves = {name: {label: each.curves.get(name, {}) for label, each in runs.items()} for name in names}
    with written_whole(options.output, overwrite=options.overwrite) as scratch:
        text = page(curves, in_force(runs), [flag_cells(flag) for flag in flags], smoothing=options.smooth)
        scratch.write_text(text, encoding="utf-8", errors="backslashreplace")  # names come from files
    if options.json:
        show_json(flags)
        return 0
    counts = (("run", runs), ("metric", names), ("red flag", flags))
    shown_counts = ", ".join(f"{len(each)} {noun}{'s' * (len(each) != 1)}" for noun, each in counts)
    say(f"{show_path(options.output)}: {shown_counts}")
    if flags:
        say(table(("run", "metric", "red flag", "steps", "worst"), [flag_cells(flag)[:5] for flag in flags]))
    return 0


def _page() -> Callable[..., str]:
    try:
        from megatron_pg.cli.runs.report_page import page
    except Exception as error:  # plotly is missing, or broken in any way
        raise InputError(
            f"plotly cannot be imported ({type(error).__name__}: {error}), so no page can be drawn. pip install 'megatron-pg[report]'."
        ) from error
    return page


def read_run(path: Path) -> Run:
    """A metrics file.

    Raises:
        InputError: as `read_metrics`, or it is no file, which could not be read twice.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"{show_path(path)}: is no file, and a report reads it twice. Write it to one first.")
    found = Run(read_metrics(path), {}, {})
    with opened(path) as file:
        for line in file:
            if line.endswith(b"\n") and (b'"objective"' in line or b'"nonfinite"' in line):
                record = json.loads(line)
                if isinstance(rows := record.get("objective"), dict):
                    found.objectives[record["iteration"]] = {str(name): str(text) for name, text in rows.items()}
                for name in nonfinite_metrics(record):
                    found.nonfinite.setdefault(name, []).append(record["iteration"])
    return found


def red_flags(label: str, run: Run) -> list[dict[str, Any]]:
    """The limits that a run touched, and its metrics that were not finite."""
    found = []
    for name, limit in LIMITS.items():
        curve = run.curves.get(name, {})
        if beyond := {step: value for step, value in curve.items() if limit.is_touched(value, step)}:
            worst = max(beyond.values(), key=lambda value: max(value - limit.high, limit.low - value))
            flag = {"run": label, "metric": name, "red_flag": limit.bounds, "steps": list(beyond), "of": len(curve)}
            found.append(flag | {"worst": worst, "cause": limit.cause})
    for name, steps in run.nonfinite.items():
        flag = {
            "run": label,
            "metric": name,
            "red_flag": "not finite",
            "steps": steps,
            "of": len(run.curves[name]) + len(steps),
        }
        found.append(flag | {"worst": None, "cause": "the ranks that it came from are in the metrics file"})
    return found


def flag_cells(flag: Mapping[str, Any]) -> tuple[str, ...]:
    """A red flag as the cells of a row."""
    steps = flag["steps"]
    when = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} of {flag['of']}, from {steps[0]} to {steps[-1]}"
    worst = "–" if flag["worst"] is None else f"{flag['worst']:.4g}"
    return flag["run"], flag["metric"], flag["red_flag"], when, worst, flag["cause"]


def in_force(runs: Mapping[str, Run]) -> dict[str, dict[str, str]]:
    """The rows of the banner and what a step counted, by run and, where they changed, first step."""
    columns = {}
    for label, each in runs.items():
        counted = {symbol: each.curves[name].values() for symbol, name in _COUNTS.items() if each.curves.get(name)}
        ranges = [f"{symbol} = {min(v):,.0f}" + f"–{max(v):,.0f}" * (max(v) > min(v)) for symbol, v in counted.items()]
        counts = {"a step counts": ", ".join(ranges)} if ranges else {}
        for step, rows in (each.objectives or {1: {"objective": "not in the file: another release wrote it"}}).items():
            columns[label if len(each.objectives) < 2 else f"{label}, from step {step}"] = rows | counts
    return columns


def shown(runs: Mapping[str, Run]) -> list[str]:
    """The curves to draw: what one looks at, and the user's own."""
    known = dict.fromkeys(name for each in runs.values() for name in each.curves)
    others = {*SHOWN, *(metric.name for metric in METRICS)}
    own = [name for name in known if name not in others and not name.startswith(("num_", "documents_"))]
    return [*[name for name in SHOWN if name in known], *own]
