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

from megatron_pg.cli.pictures import add_picture_options, check_picture, picture
from megatron_pg.cli.terminal import InputError, opened, progress, say, show_json, show_path, table
from megatron_pg.metrics.reporting import CONSOLE
from megatron_pg.rollouts.fields import is_int, is_number
from megatron_pg.rollouts.printable import printable

SHOWN = (*CONSOLE, "aggregation_ess", "reward", "response_length")
_BARS = "▁▂▃▄▅▆▇█"
_MAX_LINE = 2**20  # bytes; a step's metrics are a few kilobytes

Curve = dict[int, float]  # value by optimizer step, in order


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `plot`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a metrics.jsonl, or the folder that holds it")
    parser.add_argument("--metrics", metavar="NAME,…", help=f"default: those of {', '.join(SHOWN)} that a run has")
    add_picture_options(parser)


def run(options: argparse.Namespace) -> int:
    """Print the curves and draw them."""
    check_picture(options)
    runs = {label: read_metrics(path) for label, path in _labelled(options.runs).items()}
    names = _chosen(options.metrics, runs)
    if options.output:
        _draw(runs, names, options)
    if options.json:
        show_json(
            {label: {name: _listed(curves[name]) for name in names if name in curves} for label, curves in runs.items()}
        )
        return 0
    for name in names:
        say(name)
        say(table(("run", "steps", "first", "last", "min", "max", "curve"), _rows(runs, name)))
    return 0


def read_metrics(path: Path) -> dict[str, Curve]:
    """Every metric of a metrics file, by step; a value that was not finite is left out.

    Raises:
        InputError: the file cannot be read, or a line is no step's record.
    """
    shown = show_path(path)
    curves: dict[str, Curve] = {}
    with opened(path) as file, progress(f"reading {shown}", path.stat().st_size) as update:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE + 1), b""), start=1):
            if len(line) <= _MAX_LINE and not line.endswith(b"\n"):
                break  # its run is writing it
            _add(curves, line, f"{shown}:{number}")
            update(file.tell())
    if not curves:
        raise InputError(f"{shown}: holds no step yet, so there is nothing to draw. Wait for the first one.")
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


def _add(curves: dict[str, Curve], line: bytes, where: str) -> None:
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
    for name, value in record.items():
        if name != "iteration" and is_number(value):
            curves.setdefault(name, {})[step] = float(value)


def _labelled(paths: Sequence[str]) -> dict[str, Path]:
    """The runs by a name that tells them apart."""
    files = [Path(path) / "metrics.jsonl" if Path(path).is_dir() else Path(path) for path in paths]
    if again := [file for i, file in enumerate(files) if os.path.abspath(file) in map(os.path.abspath, files[:i])]:
        raise InputError(
            f"{show_path(again[0])}: is given twice, so its curves would hide each other. Give every run once."
        )
    short = [printable(file.parent.name if file.name == "metrics.jsonl" else file.stem) or "." for file in files]
    labels = short if len(set(short)) == len(short) else [show_path(path) for path in paths]
    return dict(zip(labels, files, strict=True))


def _chosen(asked: str | None, runs: Mapping[str, dict[str, Curve]]) -> list[str]:
    known = list(dict.fromkeys(name for curves in runs.values() for name in curves))
    if asked is None:
        return [name for name in SHOWN if name in known] or known[:8]
    names = asked.split(",")
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else f" There are {', '.join(map(printable, known[:20]))}."
            raise InputError(f"--metrics {printable(name)}: no run has this metric.{hint}")
    return list(dict.fromkeys(names))


def _rows(runs: Mapping[str, dict[str, Curve]], name: str) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for label, curves in runs.items():
        if name not in curves:
            rows.append((label, "0", "–", "–", "–", "–", ""))
            continue
        values = list(curves[name].values())
        numbers = (values[0], values[-1], min(values), max(values))
        rows.append((label, str(len(values)), *(f"{value:.4g}" for value in numbers), small_curve(values)))
    return rows


def small_curve(values: Sequence[float], width: int = 40) -> str:
    """The values as a line of bars, each the mean of its stretch, from the smallest to the largest."""
    edges = [round(i * len(values) / min(width, len(values))) for i in range(min(width, len(values)) + 1)]
    means = [_visible(math.fsum(values[a:b]) / (b - a)) for a, b in itertools.pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1)) if span else 3] for mean in means)


def _visible(value: float) -> float:
    """The value with nine digits: a last bit that comes and goes is no curve."""
    return float(f"{value:.9g}")


def _listed(curve: Curve) -> dict[str, list]:
    return {"iterations": list(curve), "values": list(curve.values())}


def _draw(runs: Mapping[str, dict[str, Curve]], names: Sequence[str], options: argparse.Namespace) -> None:
    columns = min(len(names), 3)
    rows = -(-len(names) // columns)
    with picture(options, rows, columns, (4.2 * columns, 2.9 * rows)) as (figure, axes):
        for name, axis in itertools.zip_longest(names, axes.flat):
            if name is None:
                axis.set_visible(False)
                continue
            for label, curves in runs.items():
                curve = curves.get(name, {})
                axis.plot([*curve], [*map(_visible, curve.values())], label=label, linewidth=1.3)
            axis.set_title(printable(name), fontsize=10)
            axis.grid(alpha=0.3)
        axes[0][0].legend(fontsize=8)
        figure.supxlabel("optimizer step", fontsize=10)
