"""The tables of docs/metrics.md, written from the declarations."""

from megatron_pg.metrics.table import METRICS, Metric

BEGIN, END = "<!-- metrics: begin -->\n", "<!-- metrics: end -->\n"
_FRAMEWORKS = ("slime, miles", "verl", "TRL", "NeMo-RL", "PipelineRL")
_ONLY = {
    "auxiliary": "with a KL or entropy term only",
    "kl": "with a KL term only",
    "entropy": "with an entropy term only",
    "sequence": "with an objective of whole sequences only (gspo, gspo_token, your own)",
    "correction": "with a correction only",
    "clip": "not with objectives that have no bounds",
}
_NORMALISER = {
    "mean": "documents",
    "sum": "none",
    "max": "none (maximum)",
    "min": "none (minimum)",
    "step": "none (integer of the plan)",
    "ratio": "formed from reduced sums",
}


def replace_tables(page: str) -> str:
    """The page with today's tables between its markers."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + tables() + END + rest.split(END)[1]


def tables() -> str:
    """Markdown: what every metric is, and what it is called elsewhere."""
    reported = [metric for metric in METRICS if metric.kind != "part"]
    return "\n".join(
        [*_table(_HEAD, [_row(m) for m in reported]), "", *_table(_NAMES, [_names(m) for m in reported]), ""]
    )


_HEAD = ("metric", "from level", "formula per token", "divided by", "unit", "meaning", "healthy", "red flag")
_NAMES = ("metric", *_FRAMEWORKS[:-1], "Fast-LLM, PipelineRL")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = [head, tuple("---" for _ in head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def _row(m: Metric) -> tuple[str, ...]:
    needs = f"; needs `{m.needs}`" if m.needs else f"; {_ONLY[m.only_with]}" if m.only_with else ""
    return (
        f"`{m.name}`",
        f"`{m.level}`",
        m.equation,
        _NORMALISER[m.kind],
        m.unit,
        m.meaning + needs,
        m.healthy,
        m.red_flag,
    )


def _names(m: Metric) -> tuple[str, ...]:
    return (f"`{m.name}`", *(m.elsewhere.get(framework, "–") for framework in _FRAMEWORKS))
