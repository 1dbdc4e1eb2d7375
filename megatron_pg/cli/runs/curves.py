"""The metrics files of runs: reading them, choosing metrics, and what a picture and a page do alike with a curve.

A file may be read while its run writes it: a last line without its end is left out.
"""

import argparse
import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_pg.cli.terminal import InputError, opened, progress, show_path
from megatron_pg.rollouts.fields import is_int, is_number
from megatron_pg.rollouts.printable import listed, printable, shorten

_MAX_LINE = 2**20  # bytes; a step's metrics are a few kilobytes
_LARGEST = 1e300  # of a value, so that sums are finite
# Differences between float32 numbers near 1 that are rounding. k3 is of second order.
_ROUNDING = 1e-7
_ROUNDING_OF = dict.fromkeys(("kl_new_old", "kl_new_ref", "mismatch_kl"), 1e-12) | {"learning_rate": 0.0}

Curve = dict[int, float]  # value by optimizer step, in order
Curves = dict[str, Curve]  # of a run, by metric


@dataclass(slots=True)
class Run:
    """What a metrics file holds."""

    curves: Curves = field(default_factory=dict)
    objectives: dict[int, dict[str, str]] = field(default_factory=dict)  # rows of the banner, by their first step
    phases: dict[int, str] = field(default_factory=dict)  # texts that the user's script gives, by their first step
    nonfinite: dict[str, list[int]] = field(default_factory=dict)  # steps in which a metric was NaN or inf
    path: Path = Path()  # of the metrics file

    @property
    def steps(self) -> list[int]:
        """Every step of the file, in order."""
        return sorted({step for curve in self.curves.values() for step in curve})

    @property
    def changes(self) -> list[int]:
        """The steps from which another objective, aggregation, release or phase was in force."""
        return sorted({*sorted(self.objectives)[1:], *sorted(self.phases)[1:]})


def add_run_options(parser: argparse.ArgumentParser, *, metrics: str, smooth: float) -> None:
    """The options of a subcommand that shows runs; `metrics` describes the default ones."""
    runs = "a metrics.jsonl, the folder that contains it, or - for standard input"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=runs)
    parser.add_argument("--metrics", metavar="NAME,…", help=f"metrics to show (default: {metrics})")
    weight = f"weight of the past in an exponential moving average, from 0 to below 1 (default {smooth:g})"
    parser.add_argument("--smooth", type=_weight, default=smooth, metavar="W", help=weight)


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 1.0
    if not 0 <= weight < 1:
        raise argparse.ArgumentTypeError(f"{shorten(text)} is not a weight of the past. Give 0 or more, below 1.")
    return weight


def read_runs(paths: Sequence[str]) -> dict[str, Run]:
    """The runs, by a name that is unique."""
    given = [Path("/dev/stdin" if path == "-" else path) for path in paths]
    files = [path / "metrics.jsonl" if path.is_dir() else path for path in given]
    if again := [file for i, file in enumerate(files) if os.path.abspath(file) in map(os.path.abspath, files[:i])]:
        raise InputError(f"{show_path(again[0])}: is given twice. Give every run once.")
    short = [printable(file.parent.name if file.name == "metrics.jsonl" else file.stem) or "." for file in files]
    labels = short if len(set(short)) == len(short) else [show_path(path) for path in paths]
    return {label: read_run(file) for label, file in zip(labels, files, strict=True)}


def read_run(path: Path) -> Run:
    """Every metric of a metrics file, by step; a value that was not finite is left out."""
    shown, run, size = show_path(path), Run(path=path), 0
    with opened(path) as file, progress(f"reading {shown}", path.stat().st_size) as update:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE + 1), b""), start=1):
            if len(line) <= _MAX_LINE and not line.endswith(b"\n"):
                break  # its run is writing it
            _add_step(run, line, f"{shown}:{number}")
            update(size := size + len(line))  # a pipe has no position
    if not run.curves:
        what = "metric with a finite number" if size else "step"
        raise InputError(f"{shown}: has no {what} yet. Wait for the first one.")
    run.curves = {name: dict(sorted(curve.items())) for name, curve in run.curves.items()}
    return run


def _add_step(run: Run, line: bytes, where: str) -> None:
    try:
        record: Any = json.loads(line) if len(line) <= _MAX_LINE else None
        step = record["iteration"]
        if not (is_int(step) and 0 <= step < 2**62):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{where}: is not a line of a metrics file (one JSON object with an iteration, below {_MAX_LINE} bytes). "
            "Give the metrics.jsonl of a run."
        ) from error
    if isinstance(rows := record.get("objective"), dict):
        run.objectives[step] = {str(name): str(text) for name, text in rows.items()}
    phase = record.get("phase")
    if isinstance(phase, str) and phase != next(reversed(run.phases.values()), None):
        run.phases[step] = phase
    for name in _nonfinite_metrics(record):
        run.curves.setdefault(name, {})  # the run has the metric, but no value of it to draw
        run.nonfinite.setdefault(name, []).append(step)
    for name, value in record.items():
        if name != "iteration" and is_number(value) and abs(value) <= _LARGEST:
            run.curves.setdefault(name, {})[step] = float(value)


def _nonfinite_metrics(record: Mapping[str, Any]) -> list[str]:
    """The metrics that were NaN or inf in a step's record; other nulls stand for no value."""
    entries = record.get("nonfinite")
    named = [entry.get("metric") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return list(dict.fromkeys(name for name in named if isinstance(name, str)))


def metrics_of(runs: Mapping[str, Run]) -> list[str]:
    """Every metric that a run has, in the order of the files."""
    return list(dict.fromkeys(name for run in runs.values() for name in run.curves))


def requested_metrics(text: str, runs: Mapping[str, Run]) -> list[str]:
    """The metrics that --metrics names."""
    known = metrics_of(runs)
    names = [name for part in text.split(",") if (name := part.strip())] or [text]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            close = close or [metric for metric in known if name and name in metric][:3]
            close = close or difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {' or '.join(map(printable, close))}?" if close else f"Available: {listed(known)}."
            raise InputError(f"--metrics {printable(name)}: no run has this metric. {hint}")
    return list(dict.fromkeys(names))


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """The exponential moving average Σ weight^(n-i)·v_i / Σ weight^(n-i), i up to n, as in TensorBoard."""
    average, total, result = 0.0, 0.0, []
    for value in values:
        average, total = weight * average + value, weight * total + 1
        result.append(average / total)
    return result


def rounding_noise(name: str, values: Sequence[float]) -> float:
    """The largest difference between values of a metric that rounding may cause."""
    return max(_ROUNDING_OF.get(name, _ROUNDING), 10 * _ROUNDING * max(map(abs, values)))


def typical_range(values: Sequence[float]) -> tuple[float, float] | None:
    """Limits of an axis without rare values far away, such as those of warm-up steps; None: all values are shown.

    The frame is three times the range of the middle three fifths, if that is less than a quarter of the whole range.
    """
    ordered = sorted(values)
    cut = len(ordered) // 5
    low, high = ordered[cut], ordered[-1 - cut]
    frame = low - (high - low), high + (high - low)
    return frame if 0 < 4 * (frame[1] - frame[0]) < ordered[-1] - ordered[0] else None


def constant_range(name: str, values: Sequence[float], margin: float) -> tuple[float, float] | None:
    """Limits of an axis for values that are constant up to rounding, with a relative `margin`; else None."""
    low, high, noise = min(values), max(values), rounding_noise(name, values)
    if high - low > noise:
        return None
    space = max(margin * max(map(abs, values)), 1e4 * noise) or margin
    return low - space, high + space
