"""The tables of docs/ that are written from the declarations: `python docs/tables.py`, which `make docs` runs."""

from collections.abc import Callable
from pathlib import Path

from megatron_pg.declarations.aggregations import AGGREGATIONS
from megatron_pg.declarations.choices import DENOMINATORS
from megatron_pg.declarations.corrections import CORRECTIONS
from megatron_pg.declarations.declaration import Reads
from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.metrics.table import METRICS, Metric

DOCS = Path(__file__).parent
FRAMEWORKS = ("slime, miles", "verl", "TRL", "NeMo-RL", "PipelineRL")
ONLY_WITH = {
    "auxiliary": "with a KL or entropy term only",
    "kl": "with a KL term only",
    "entropy": "with an entropy term only",
    "sequence": "with an objective of whole sequences only (gspo, gspo_token, your own)",
    "correction": "with a correction only",
    "clip": "not with objectives that have no bounds",
}
DIVIDED_BY = {
    "mean": "documents",
    "sum": "none",
    "max": "none (maximum)",
    "min": "none (minimum)",
    "step": "none (integer of the plan)",
    "ratio": "formed from reduced sums",
}
Rows = list[tuple[str, ...]]


def table(head: tuple[str, ...], rows: Rows) -> str:
    """Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join("| " + " | ".join(line) + " |\n" for line in cells)


def metrics() -> str:
    """What every metric is."""
    head = ("metric", "from level", "formula per token", "divided by", "unit", "meaning", "healthy", "red flag")
    return table(head, [_metric_row(m) for m in METRICS if m.kind != "part"])


def _metric_row(m: Metric) -> tuple[str, ...]:
    needs = f"; needs `{m.needs}`" if m.needs else f"; {ONLY_WITH[m.only_with]}" if m.only_with else ""
    what = (m.equation, DIVIDED_BY[m.kind], m.unit, m.meaning + needs)
    return (f"`{m.name}`", f"`{m.level}`", *what, m.healthy, m.red_flag)


def metric_names() -> str:
    """What it is called elsewhere."""
    rows = []
    for m in METRICS:
        names = dict(part.split(": ", 1) for part in m.elsewhere.split("; ") if part)
        if m.kind != "part":
            rows.append((f"`{m.name}`", *(names.pop(framework, "–") for framework in FRAMEWORKS)))
        if names:
            raise ValueError(f"{m.name}: {', '.join(names)} is no column of this table")
    return table(("metric", *FRAMEWORKS[:-1], "Fast-LLM, PipelineRL"), rows)


def aggregations() -> str:
    """Formula and denominator of every aggregation."""
    rows = []
    counted, tokens, _ = DENOMINATORS["scheduled"]
    for name, each in AGGREGATIONS.items():
        symbol, _, words = each.denominator.replace("{divisor:.12g}", "L").partition(":")
        words = words.strip().format(counted=counted, tokens=tokens)
        rows.append((f"`{name}`", each.formula, symbol, words, each.elsewhere))
    return table(("`--loss-aggregation`", "policy term", "δ of a sample", "in words", "elsewhere"), rows)


def _numbers(reads: Reads) -> str:
    default = lambda value: "required" if value is None else f"{value:g}"  # noqa: E731
    return ", ".join(f"`{number.flag}` ({default(value)})" for number, value in reads.items()) or "none"


def objectives() -> str:
    """Formula and numbers of every objective."""
    rows = [(f"`{name}`", each.formula, _numbers(each.numbers)) for name, each in OBJECTIVES.items()]
    return table(("objective", "loss of a token", "flags (default)"), rows)


def corrections() -> str:
    """Factor and bounds of every correction."""
    rows = [
        (
            f"`{name}`",
            each.formula,
            _numbers(each.numbers),
            {None: "no", "data": "yes"}.get(each.rejects, "by the model"),
        )
        for name, each in CORRECTIONS.items()
        if name != "none"
    ]
    return table(("correction", "the policy term's factor", "flags (default)", "rejects tokens"), rows)


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "metrics.md": {"metrics": metrics, "metric names": metric_names},
    "aggregation.md": {"aggregations": aggregations},
    "objectives.md": {"objectives": objectives, "corrections": corrections},
}


def written(page: str, makers: dict[str, Callable[[], str]]) -> str:
    """The page with today's tables between their markers."""
    for name, make in makers.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        before, rest = page.split(begin)
        page = before + begin + make() + end + rest.split(end)[1]
    return page


if __name__ == "__main__":
    for file, makers in PAGES.items():
        path = DOCS / file
        path.write_text(written(path.read_text(encoding="utf-8"), makers), encoding="utf-8")
