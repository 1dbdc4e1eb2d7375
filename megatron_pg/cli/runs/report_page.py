"""The page of `megatron-pg report`: tables in HTML, curves by plotly, in the frame of report.html."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import plotly.graph_objects as go
from plotly.colors import qualitative
from plotly.offline import get_plotlyjs

from megatron_pg import __version__
from megatron_pg.cli.runs.plot import Curve, rounding_noise, smoothed
from megatron_pg.metrics.table import LIMITS, METRICS

MOST_POINTS = 4000  # that are drawn of one curve
_FRAME = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
_OURS = {metric.name: metric for metric in METRICS}
_RED = "#b3261e"
_FLAG_HEAD = ("run", "metric", "red flag", "steps", "worst", "where to look")

Styles = Mapping[str, tuple[str, str]]  # dash and colour of a run


def page(
    curves: Mapping[str, Mapping[str, Curve]],
    objective: Mapping[str, Mapping[str, str]],
    flags: Sequence[Sequence[str]],
    *,
    smoothing: float,
) -> str:
    """The whole page, with plotly's script in it.

    Args:
        curves: by metric and run; every metric has all runs.
        objective: rows of the banner, by run.
        flags: cells of each red flag.
        smoothing: weight of the past in the bold curves.
    """
    runs = list(dict.fromkeys(label for each in curves.values() for label in each))
    styles = dict(zip(runs, itertools.cycle(itertools.product(("solid", "dash", "dot"), qualitative.D3)), strict=False))
    figures = [figure_of(name, each, styles, smoothing).to_json() for name, each in curves.items()]
    return _FRAME.substitute(
        title=escape(", ".join(runs)),
        plotly=get_plotlyjs(),
        runs="".join(f'<span><b style="color:{styles[label][1]}">●</b> {escape(label)}</span>' for label in runs),
        objective=_objective(objective),
        flags=_table(_FLAG_HEAD, map(_cells, flags)) if flags else "<p>No limit was touched.</p>",
        smoothing=f"{smoothing:g}",
        panels="".join(_panel(number, name) for number, name in enumerate(curves)),
        figures="{" + ",".join(f'"f{i}":{text}' for i, text in enumerate(figures)).replace("<", "\\u003c") + "}",
        version=__version__,
    )


def _cells(texts: Sequence[str]) -> str:
    return "".join(f"<td>{escape(text)}</td>" for text in texts)


def _table(head: Sequence[str], rows: Iterable[str], kind: str = "flags") -> str:
    top = "".join(f"<th>{escape(text)}</th>" for text in head)
    return f'<div class="wide"><table class="{kind}"><tr>{top}</tr><tr>{"</tr><tr>".join(rows)}</tr></table></div>'


def _objective(columns: Mapping[str, Mapping[str, str]]) -> str:
    """A row for each line of the banner; one cell where all runs agree."""
    rows = []
    for name in dict.fromkeys(name for each in columns.values() for name in each):
        texts = [each.get(name, "–") for each in columns.values()]
        same = f'<td colspan="{len(texts)}">{escape(texts[0])}</td>'
        rows.append(_cells([name]) + (same if len(set(texts)) == 1 else _cells(texts)))
    return _table(("", *columns), rows, "objective")


def _panel(number: int, name: str) -> str:
    ours = _OURS.get(name)
    about = escape(f"{ours.equation} [{ours.unit}]: {ours.meaning}".replace("`", "")) if ours else ""
    return f'<div class="panel"><h3>{escape(name)}</h3><p class="note" title="{about}">{about}</p><div id="f{number}"></div></div>'


def figure_of(name: str, curves: Mapping[str, Curve], styles: Styles, smoothing: float) -> go.Figure:
    """A metric's curves, and its limit where they come near."""
    figure = go.Figure()
    for label, curve in curves.items():
        _draw(figure, escape(label), curve, styles[label], smoothing)
    values = [value for curve in curves.values() for value in curve.values()] or [0.0]  # none was finite
    low, high, size = min(values), max(values), max(map(abs, values))
    limit = LIMITS.get(name)
    if limit and not limit.in_step_1:
        for bound in (limit.low, limit.high):
            if low <= bound <= high:
                figure.add_hline(bound, line={"color": _RED, "dash": "dot", "width": 1.2}, opacity=1)
    if high - low <= (noise := rounding_noise(name, values)):
        margin = max(size / 2, 1e4 * noise) or 1.0
        figure.update_yaxes(range=[low - margin, high + margin])
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


def _draw(figure: go.Figure, label: str, curve: Curve, style: tuple[str, str], smoothing: float) -> None:
    """A run's values, thin, and smoothed, bold."""
    smooth, steps = dict(zip(curve, smoothed([*curve.values()], smoothing), strict=True)), thinned(curve)
    line = dict(zip(("dash", "color"), style, strict=True))
    raw, bold = [curve[step] for step in steps], [smooth[step] for step in steps]
    mode = "lines+markers" if len(steps) < 30 else "lines"  # a run of one step is visible
    hover = "%{y:.5g} (smoothed %{customdata:.5g})"
    thin: dict[str, Any] = {"line": line | {"width": 1}, "opacity": 0.45, "mode": mode, "marker": {"size": 4}}
    figure.add_scatter(x=steps, y=raw, customdata=bold, name=label, hovertemplate=hover, **thin)
    figure.add_scatter(x=steps, y=bold, line=line | {"width": 2.2}, mode="lines", hoverinfo="skip")


def thinned(curve: Curve) -> list[int]:
    """The steps that are drawn: all, or of every stretch the smallest and the largest value."""
    steps = list(curve)
    size = -(-2 * len(steps) // MOST_POINTS)
    if size <= 2:
        return steps
    stretches = [steps[i : i + size] for i in range(0, len(steps), size)]
    return sorted({pick(part, key=curve.__getitem__) for part in stretches for pick in (min, max)})
