"""`megatron-pg plot`: curves of the metrics.jsonl of one or several runs, as a table with small curves, or as a picture.

A file may be read while its run writes it: a last line without its end is left out.
"""

import argparse
import difflib
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_pg.cli.runs.pictures import add_picture_options, check_picture, picture
from megatron_pg.cli.terminal import InputError, opened, progress, say, show_json, show_path, table
from megatron_pg.metrics.reporting import CONSOLE
from megatron_pg.rollouts.fields import is_int, is_number
from megatron_pg.rollouts.printable import printable

SHOWN = tuple(dict.fromkeys(("reward", *CONSOLE, "aggregation_ess", "response_length")))
_BARS = "▁▂▃▄▅▆▇█"
_MAX_LINE = 2**20  # bytes; a step's metrics are a few kilobytes
_LARGEST = 1e300  # of a value, so that sums are finite
# What rounding to float32 leaves of numbers near 1: a smaller difference is no signal. k3 is of second order.
_ROUNDING = 1e-7
_ROUNDING_OF = dict.fromkeys(("kl_new_old", "kl_new_ref", "mismatch_kl"), 1e-12) | {"learning_rate": 0.0}

Curve = dict[int, float]  # value by optimizer step, in order
Curves = dict[str, Curve]  # of a run, by metric
Line = dict[str, list]  # a metric of a run as it is shown: "iterations", "values", where asked "tokens" and "smoothed"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `plot`."""
    runs = "a metrics.jsonl, the folder that holds it, or - for the standard input"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=runs)
    parser.add_argument("--metrics", metavar="NAME,…", help=f"default: those of {', '.join(SHOWN)} that a run has")
    axis = "what the curves run over: optimizer steps (default), or tokens trained since the first line of the file"
    parser.add_argument("--x", choices=("step", "tokens"), default="step", help=axis)
    weight = "weight of the past in an exponential moving average, 0 (default, none) to below 1, as in TensorBoard"
    parser.add_argument("--smooth", type=float, default=0.0, metavar="W", help=weight)
    add_picture_options(parser)


def run(options: argparse.Namespace) -> int:
    """Print the curves and draw them."""
    if not 0 <= options.smooth < 1:
        raise InputError(f"--smooth {options.smooth:g} is no weight of the past. Give 0 or more, below 1.")
    check_picture(options)
    runs = {label: read_metrics(path) for label, path in labelled(options.runs).items()}
    names = chosen(options.metrics, runs)
    lines: dict[str, dict[str, Line]] = {name: {} for name in names}
    for label, curves in runs.items():
        tokens = _tokens(label, curves) if options.x == "tokens" else None
        for name in names:
            lines[name][label] = _line(curves.get(name, {}), tokens, options.smooth)
    if options.output:
        _draw(lines, options)
    if options.json:
        show_json({label: {name: lines[name][label] for name in names if name in runs[label]} for label in runs})
        return 0
    for name, of_runs in lines.items():
        say(printable(name))
        rows = [(label, *_cells(line, name)) for label, line in of_runs.items()]
        longest = max(len(row[-1]) for row in rows)
        rows = [(*row[:-1], row[-1].ljust(longest)) for row in rows]  # curves begin below each other
        say(table(("run", "steps", "first", "last", "min", "max", "curve"), rows))
    return 0


def read_metrics(path: Path) -> Curves:
    """Every metric of a metrics file, by step; a value that was not finite is left out.

    Raises:
        InputError: the file cannot be read, or a line is no step's record.
    """
    shown = show_path(path)
    curves: Curves = {}
    size = 0
    with opened(path) as file, progress(f"reading {shown}", path.stat().st_size) as update:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE + 1), b""), start=1):
            if len(line) <= _MAX_LINE and not line.endswith(b"\n"):
                break  # its run is writing it
            _add(curves, line, f"{shown}:{number}")
            update(size := size + len(line))  # a pipe has no position
    if not curves:
        raise InputError(f"{shown}: holds no step yet, so there is nothing to draw. Wait for the first one.")
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


def _add(curves: Curves, line: bytes, where: str) -> None:
    try:
        record = json.loads(line) if len(line) <= _MAX_LINE else None
        step = record["iteration"]
        if not (is_int(step) and 0 <= step < 2**62):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{where}: is no line of a metrics file (one JSON object with an iteration, below {_MAX_LINE} bytes). Give the "
            "metrics.jsonl of a run."
        ) from error
    for name in nonfinite_metrics(record):
        curves.setdefault(name, {})  # it has no value to draw, but the run has it
    for name, value in record.items():
        if name != "iteration" and is_number(value) and abs(value) <= _LARGEST:
            curves.setdefault(name, {})[step] = float(value)


def nonfinite_metrics(record: Mapping[str, Any]) -> list[str]:
    """The metrics that were NaN or inf in a step's record; other nulls stand for no value."""
    entries = record.get("nonfinite")
    named = [entry.get("metric") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return list(dict.fromkeys(name for name in named if isinstance(name, str)))


def labelled(paths: Sequence[str]) -> dict[str, Path]:
    """The runs by a name that tells them apart."""
    found = [Path("/dev/stdin" if path == "-" else path) for path in paths]
    files = [path / "metrics.jsonl" if path.is_dir() else path for path in found]
    if again := [file for i, file in enumerate(files) if os.path.abspath(file) in map(os.path.abspath, files[:i])]:
        raise InputError(
            f"{show_path(again[0])}: is given twice, so its curves would hide each other. Give every run once."
        )
    short = [printable(file.parent.name if file.name == "metrics.jsonl" else file.stem) or "." for file in files]
    labels = short if len(set(short)) == len(short) else [show_path(path) for path in paths]
    return dict(zip(labels, files, strict=True))


def chosen(asked: str | None, runs: Mapping[str, Curves]) -> list[str]:
    """The metrics to show: those asked for, or those of `SHOWN` that a run has."""
    known = list(dict.fromkeys(name for curves in runs.values() for name in curves))
    if asked is None:
        return [name for name in SHOWN if name in known] or known[:8]
    names = [name for part in asked.split(",") if (name := part.strip())] or [asked]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            close = close or [each for each in known if name and name in each][:3]
            close = close or difflib.get_close_matches(name, known, n=1)
            there = ", ".join(map(printable, known[:20]))
            hint = f"Did you mean {' or '.join(map(printable, close))}?" if close else f"There are {there}."
            raise InputError(f"--metrics {printable(name)}: no run has this metric. {hint}")
    return list(dict.fromkeys(names))


def _tokens(label: str, curves: Curves) -> dict[int, int]:
    """The tokens that a run has trained after each step."""
    steps, tokens = sorted({step for curve in curves.values() for step in curve}), curves.get("num_tokens", {})
    if missing := [step for step in steps if step not in tokens]:
        streams = any(name.endswith("/num_tokens") for name in curves)
        why = (
            "the run does not train the objective, whose tokens it counts"
            if streams
            else "--pg-metrics none leaves it out"
        )
        raise InputError(f"--x tokens: {label} has no num_tokens at step {missing[0]} ({why}). Use --x step.")
    return dict(zip(steps, itertools.accumulate(round(tokens[step]) for step in steps), strict=True))


def _line(curve: Curve, tokens: Mapping[int, int] | None, weight: float) -> Line:
    found: Line = {"iterations": list(curve), "values": list(curve.values())}
    if tokens is not None:
        found["tokens"] = [tokens[step] for step in curve]
    return found | ({"smoothed": smoothed(found["values"], weight)} if weight else {})


def _points(line: Line) -> tuple[list[int], list[float]]:
    """Where the values stand on the axis, and the values as they are drawn."""
    return line.get("tokens", line["iterations"]), line.get("smoothed", line["values"])


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """The exponential moving average Σ weight^(n-i)·v_i / Σ weight^(n-i), i up to n."""
    average, total, result = 0.0, 0.0, []
    for value in values:
        average, total = weight * average + value, weight * total + 1
        result.append(average / total)
    return result


def _cells(line: Line, name: str) -> tuple[str, ...]:
    """Its row of the table of metric `name`."""
    if not (values := line["values"]):
        return ("0", "–", "–", "–", "–", "")
    numbers = (values[0], values[-1], min(values), max(values))
    return (str(len(values)), *(f"{value:.4g}" for value in numbers), small_curve(*_points(line), name))


def small_curve(at: Sequence[int], values: Sequence[float], name: str = "", width: int = 40) -> str:
    """The values as a line of bars, each the mean of its stretch of the axis, from the smallest to the largest."""
    count, length = min(width, len(values)), (at[-1] - at[0]) or 1
    stretches: dict[int, list[float]] = {}
    for x, value in zip(at, values, strict=True):
        stretches.setdefault(min((x - at[0]) * count // length, count - 1), []).append(value)
    means = [math.fsum(part) / len(part) for part in stretches.values()]
    low, span = min(means), max(means) - min(means)
    if span <= rounding_noise(name, means):
        return _BARS[3] * len(means)
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1))] for mean in means)


def rounding_noise(name: str, values: Sequence[float]) -> float:
    """The largest difference between values of a metric that rounding may make."""
    return max(_ROUNDING_OF.get(name, _ROUNDING), 10 * _ROUNDING * max(map(abs, values)))


def _draw(lines: Mapping[str, Mapping[str, Line]], options: argparse.Namespace) -> None:
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
            noise, largest = rounding_noise(name, values), max(map(abs, values))
            if max(values) - min(values) <= noise:  # as matplotlib draws a constant
                margin = max(0.05 * largest, 1e4 * noise) or 0.05
                axis.set_ylim(min(values) - margin, max(values) + margin)
            axis.set_title(printable(name), fontsize=10)
            axis.ticklabel_format(axis="y", useOffset=False)
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.grid(alpha=0.3)
        axes[0][0].legend(fontsize=8)
        figure.supxlabel("optimizer step" if options.x == "step" else "trained tokens", fontsize=10)
