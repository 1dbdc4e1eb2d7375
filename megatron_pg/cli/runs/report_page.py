"""The page of `megatron-pg report`: tables in HTML, curves by plotly, in the frame of report.html."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import plotly.graph_objects as go
from plotly.colors import qualitative
from plotly.offline import get_plotlyjs

from megatron_pg import __version__
from megatron_pg.cli.runs.curves import Curve, Run, constant_range, smoothed, typical_range
from megatron_pg.metrics.limits import LIMITS, Limit
from megatron_pg.metrics.table import METRICS

MOST_POINTS = 4000  # drawn of one curve
MOST_CHARACTERS = 3000  # of a prompt and its answers
_FRAME = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
_DOCUMENTED = {metric.name: metric for metric in METRICS}
_RED, _GREY = "#b3261e", "#8a93a2"
_FLAG_HEAD = ("run", "metric", "red flag", "steps", "worst", "where to look")

Styles = Mapping[str, tuple[str, str]]  # dash and color of a run


def page(
    curves: Mapping[str, Mapping[str, Curve]],
    runs: Mapping[str, Run],
    objective: Mapping[str, Mapping[str, str]],
    flags: Sequence[Sequence[str]],
    *,
    smoothing: float,
) -> str:
    """The whole page, with plotly's script in it.

    Args:
        curves: by metric and run; every metric has all runs.
        runs: what the metrics files hold.
        objective: rows of the banner, by run and, if they changed, first step.
        flags: cells of each red flag.
        smoothing: weight of the past in the bold curves.
    """
    styles = dict(zip(runs, itertools.cycle(itertools.product(("solid", "dash", "dot"), qualitative.D3)), strict=False))
    changes = sorted({step for run in runs.values() for step in run.changes})
    figures = [figure_of(name, curve_of, styles, smoothing, changes).to_json() for name, curve_of in curves.items()]
    return _FRAME.substitute(
        title=escape(", ".join(runs)),
        plotly=get_plotlyjs(),
        runs="".join(map(_about, runs, runs.values(), (styles[label][1] for label in runs))),
        objective=_objective(objective),
        flags=_table(_FLAG_HEAD, map(_cells, flags))
        if flags
        else "<p>No value is beyond a limit of docs/metrics.md.</p>",
        smoothing=f"{smoothing:g}",
        conversations="".join(map(_conversations, runs, runs.values())),
        panels="".join(_panel(number, name) for number, name in enumerate(curves)),
        figures="{" + ",".join(f'"f{i}":{text}' for i, text in enumerate(figures)).replace("<", "\\u003c") + "}",
        version=__version__,
    )


def _about(label: str, run: Run, color: str) -> str:
    """A line about a run: name, file, steps, when the file was written, and the phases."""
    steps = f"steps {run.steps[0]:,} to {run.steps[-1]:,}" if len(run.steps) > 1 else f"step {run.steps[0]:,}"
    facts = [str(run.path), steps]
    if run.path.is_file():  # not standard input
        facts.append(f"written {datetime.fromtimestamp(run.path.stat().st_mtime):%Y-%m-%d %H:%M}")
    facts += [f"{phase} from step {step:,}" for step, phase in run.phases.items()]
    return f'<p><b style="color:{color}">●</b> <b>{escape(label)}</b> {escape(", ".join(facts))}</p>'


def _conversations(label: str, run: Run) -> str:
    """The first and the last section of conversations.txt, which is next to the metrics: a prompt and its answers."""
    path = run.path.with_name("conversations.txt")
    if not path.is_file():
        return ""
    sections = path.read_text(encoding="utf-8", errors="replace").split("\n=== ")[1:]
    shown = [sections[0], sections[-1]] if len(sections) > 1 else sections
    texts = (f"<pre>{escape(text[:MOST_CHARACTERS])}</pre>" for text in shown)
    return f"<p><b>{escape(label)}</b>, the first and the last prompt of {escape(path.name)}</p>{''.join(texts)}"


def _cells(texts: Sequence[str]) -> str:
    return "".join(f"<td>{escape(text)}</td>" for text in texts)


def _table(head: Sequence[str], rows: Iterable[str], kind: str = "flags") -> str:
    top = "".join(f"<th>{escape(text)}</th>" for text in head)
    return f'<div class="wide"><table class="{kind}"><tr>{top}</tr><tr>{"</tr><tr>".join(rows)}</tr></table></div>'


def _objective(columns: Mapping[str, Mapping[str, str]]) -> str:
    """A row for each line of the banner, with one cell if all runs agree."""
    rows = []
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        texts = [column.get(name, "–") for column in columns.values()]
        same = f'<td colspan="{len(texts)}">{escape(texts[0])}</td>'
        rows.append(_cells([name]) + (same if len(set(texts)) == 1 else _cells(texts)))
    return _table(("", *columns), rows, "objective")


def _panel(number: int, name: str) -> str:
    metric = _DOCUMENTED.get(name)
    about = escape(f"{metric.equation} [{metric.unit}]: {metric.meaning}".replace("`", "")) if metric else ""
    note = f'<p class="note">{about}</p>'
    return f'<div class="panel"><h3>{escape(name)}</h3>{note}<div id="f{number}"></div></div>'


def figure_of(
    name: str, curves: Mapping[str, Curve], styles: Styles, smoothing: float, changes: Sequence[int] = ()
) -> go.Figure:
    """A metric's curves, its limits, and the steps from which another objective was in force.

    A limit that is far from the values is a note instead of a line, so that it does not flatten the curves.
    """
    figure = go.Figure()
    for label, curve in curves.items():
        _draw(figure, escape(label), curve, styles[label], smoothing)
    values = [value for curve in curves.values() for value in curve.values()] or [0.0]  # none was finite
    _mark(figure, LIMITS.get(name), min(values), max(values))
    for step in changes:
        figure.add_vline(step, line={"color": _GREY, "dash": "dash", "width": 1.5})
    if limits := constant_range(name, values, margin=0.5) or typical_range(values):
        figure.update_yaxes(range=limits)
    axis: dict[str, Any] = {"showgrid": True, "exponentformat": "power"}
    figure.update_layout(
        template="simple_white",
        margin={"l": 55, "r": 10, "t": 8, "b": 32},
        height=250,
        showlegend=False,
        hovermode="x unified",
        xaxis=axis | {"tickformat": ",d"},
        yaxis=axis,
    )
    return figure


def _mark(figure: go.Figure, limit: Limit | None, lowest: float, highest: float) -> None:
    if limit is None:
        return
    near = highest - lowest
    bounds = [bound for bound in (limit.low, limit.high) if math.isfinite(bound)]
    if limit.in_step_1 or not all(lowest - near <= bound <= highest + near for bound in bounds):
        note: dict[str, Any] = {"xref": "paper", "yref": "paper", "x": 1, "y": 1, "xanchor": "right", "yanchor": "top"}
        figure.add_annotation(text=f"red flag: {limit.bounds}", font={"color": _RED}, showarrow=False, **note)
        return
    for bound in bounds:
        figure.add_hline(bound, line={"color": _RED, "dash": "dot", "width": 1.2}, opacity=1)


def _draw(figure: go.Figure, label: str, curve: Curve, style: tuple[str, str], smoothing: float) -> None:
    """A run's values as a thin line, and smoothed as a bold one."""
    smooth, steps = dict(zip(curve, smoothed([*curve.values()], smoothing), strict=True)), thinned(curve)
    line = dict(zip(("dash", "color"), style, strict=True))
    raw, bold = [curve[step] for step in steps], [smooth[step] for step in steps]
    mode = "lines+markers" if len(steps) < 30 else "lines"  # a run of one step is visible
    hover = "%{y:.5g} (smoothed %{customdata:.5g})"
    thin: dict[str, Any] = {"line": line | {"width": 1}, "opacity": 0.45, "mode": mode, "marker": {"size": 4}}
    figure.add_scatter(x=steps, y=raw, customdata=bold, name=label, hovertemplate=hover, **thin)
    figure.add_scatter(x=steps, y=bold, line=line | {"width": 2.2}, mode="lines", hoverinfo="skip")


def thinned(curve: Curve) -> list[int]:
    """The steps that are drawn: all, or the smallest and the largest value of each of `MOST_POINTS` / 2 parts."""
    steps = list(curve)
    size = -(-2 * len(steps) // MOST_POINTS)
    if size <= 2:
        return steps
    parts = [steps[i : i + size] for i in range(0, len(steps), size)]
    return sorted({pick(part, key=curve.__getitem__) for part in parts for pick in (min, max)})
