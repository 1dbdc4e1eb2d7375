"""`megatron-pg plot`: curves of the metrics.jsonl of one or several runs, as a table or as a picture."""

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence

from megatron_pg.cli.runs import curves
from megatron_pg.cli.runs.curves import Curve, Run
from megatron_pg.cli.runs.pictures import add_picture_options, check_picture, picture
from megatron_pg.cli.terminal import InputError, say, show_json, table
from megatron_pg.metrics.reporting import CONSOLE
from megatron_pg.rollouts.printable import printable

SHOWN = tuple(dict.fromkeys(("reward", *CONSOLE, "aggregation_ess", "response_length")))
_BARS = "▁▂▃▄▅▆▇█"

Line = dict[str, list]  # a run's metric as it is shown: "iterations", "values", if requested "tokens" and "smoothed"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `plot`."""
    curves.add_run_options(parser, metrics=f"{', '.join(SHOWN)}, if a run has them", smooth=0.0)
    axis = "x axis: optimizer steps (default), or tokens trained since the first line of the file"
    parser.add_argument("--x", choices=("step", "tokens"), default="step", help=axis)
    add_picture_options(parser)


def run(options: argparse.Namespace) -> int:
    """Print the curves and draw them."""
    check_picture(options)
    runs = curves.read_runs(options.runs)
    known = curves.metrics_of(runs)
    if options.metrics is None:
        names = [name for name in SHOWN if name in known] or known[:8]
    else:
        names = curves.requested_metrics(options.metrics, runs)
    lines: dict[str, dict[str, Line]] = {name: {} for name in names}
    for label, one_run in runs.items():
        tokens = _tokens(label, one_run) if options.x == "tokens" else None
        for name in names:
            lines[name][label] = _line(one_run.curves.get(name, {}), tokens, options.smooth)
    if options.output:
        _draw(lines, sorted({step for one_run in runs.values() for step in one_run.changes}), options)
    if options.json:
        show_json({label: {name: lines[name][label] for name in names if name in runs[label].curves} for label in runs})
    else:
        _show(lines)
    return 0


def _tokens(label: str, run: Run) -> dict[int, int]:
    """The tokens that a run has trained after each step."""
    tokens = run.curves.get("num_tokens", {})
    if missing := [step for step in run.steps if step not in tokens]:
        has_terms = any(name.endswith("/num_tokens") for name in run.curves)
        why = "the run does not train the policy loss" if has_terms else "--pg-metrics none leaves it out"
        raise InputError(f"--x tokens: {label} has no num_tokens at step {missing[0]} ({why}). Use --x step.")
    return dict(zip(run.steps, itertools.accumulate(round(tokens[step]) for step in run.steps), strict=True))


def _line(curve: Curve, tokens: Mapping[int, int] | None, weight: float) -> Line:
    line: Line = {"iterations": list(curve), "values": list(curve.values())}
    if tokens is not None:
        line["tokens"] = [tokens[step] for step in curve]
    if weight:
        line["smoothed"] = curves.smoothed(line["values"], weight)
    return line


def _points(line: Line) -> tuple[list[int], list[float]]:
    """The x and y values that are drawn."""
    return line.get("tokens", line["iterations"]), line.get("smoothed", line["values"])


# --- table ---


def _show(lines: Mapping[str, Mapping[str, Line]]) -> None:
    for name, line_of_run in lines.items():
        say(printable(name))
        rows = [(label, *_cells(line, name)) for label, line in line_of_run.items()]
        longest = max(len(row[-1]) for row in rows)
        rows = [(*row[:-1], row[-1].ljust(longest)) for row in rows]  # aligns the curves on the left
        say(table(("run", "steps", "first", "last", "min", "max", "curve"), rows))


def _cells(line: Line, name: str) -> tuple[str, ...]:
    if not (values := line["values"]):
        return ("0", "–", "–", "–", "–", "")
    numbers = (values[0], values[-1], min(values), max(values))
    return (str(len(values)), *(f"{value:.4g}" for value in numbers), small_curve(*_points(line), name))


def small_curve(at: Sequence[int], values: Sequence[float], name: str = "", width: int = 40) -> str:
    """The values as a line of bars, each the mean over an equal part of the x axis."""
    count, length = min(width, len(values)), (at[-1] - at[0]) or 1
    parts: dict[int, list[float]] = {}
    for x, value in zip(at, values, strict=True):
        parts.setdefault(min((x - at[0]) * count // length, count - 1), []).append(value)
    means = [math.fsum(part) / len(part) for part in parts.values()]
    low, span = min(means), max(means) - min(means)
    if span <= curves.rounding_noise(name, means):
        return _BARS[3] * len(means)
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1))] for mean in means)


# --- picture ---


def _draw(lines: Mapping[str, Mapping[str, Line]], changes: Sequence[int], options: argparse.Namespace) -> None:
    """A panel for each metric; a dashed line is a step from which another objective was in force."""
    columns = min(len(lines), 3)
    rows = -(-len(lines) // columns)
    with picture(options, rows, columns, (4.2 * columns, 2.9 * rows)) as (figure, axes):
        for name, axis in itertools.zip_longest(lines, axes.flat):
            if name is None:
                axis.set_visible(False)
                continue
            for label, line in lines[name].items():
                at, values = _points(line)
                (drawn,) = axis.plot(at, values, ".-", label=label, linewidth=1.3, markersize=9 if len(at) == 1 else 0)
                if options.smooth:
                    axis.plot(at, line["values"], color=drawn.get_color(), alpha=0.25, linewidth=0.8)
            values = [value for line in lines[name].values() for value in line["values"]] or [0.0]  # none was finite
            for step in changes if options.x == "step" else ():
                axis.axvline(step, color="grey", linestyle="--", linewidth=0.8)
            if limits := curves.constant_range(name, values, margin=0.05) or curves.typical_range(values):
                axis.set_ylim(*limits)
            axis.set_title(printable(name), fontsize=10)
            axis.ticklabel_format(axis="y", useOffset=False)
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.grid(alpha=0.3)
        axes[0][0].legend(fontsize=8)
        figure.supxlabel("optimizer step" if options.x == "step" else "trained tokens", fontsize=10)
