"""Exact reduction: per micro-batch, over micro-batches, over ranks.

A partial result is one float64 vector. Without a token, sums and means contribute 0, maxima and minima their identity.
Pipeline stages without the loss, empty micro-batches and empty ranks therefore change nothing. Means are divided once,
at the end, by the number of documents that contributed. A metric without contributions is absent.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_pg.declarations.choices import METRIC_LEVELS
from megatron_pg.declarations.loss_terms import SHORTHANDS, LossTerm
from megatron_pg.metrics.table import METRICS, Metric, own_metric, term_metrics
from megatron_pg.metrics.values import TokenValues

_NEEDED = tuple(dict.fromkeys(metric.needs for metric in METRICS if metric.needs and metric.kind != "rollout"))
_FIELDS = (None, *_NEEDED)  # fields that metrics need; None: no field
_OF_THE_STEP = ("all", "total", "step", "rollout")  # kinds that need no trained token of the objective
_NAMES = frozenset(metric.name for metric in METRICS)


class Reduction:
    """The metrics of one level of `--pg-metrics` for a loss with certain features (`settings.features_of`), in order.

    `own` are the names of the values that a custom objective reports. A partial result contains the added metrics, the
    extrema (minima negated, so that all are maxima), and for every optional field the number of documents that have it.

    Raises:
        ValueError: a name of `own` is a metric of ours.
    """

    def __init__(
        self,
        level: str,
        features: Collection[str] = ("clip",),
        own: Sequence[str] = (),
        terms: Sequence[LossTerm] = (),
        role: str = "policy",
    ):
        if taken := sorted(_NAMES.intersection(own)):
            raise ValueError(
                f"the custom objective reports {taken[0]!r}, which is a metric of megatron_pg. Choose another."
            )
        of_terms = [m for term in terms if term.name not in SHORTHANDS for m in term_metrics(term)]
        declared = [m for m in (*METRICS, *of_terms, *map(own_metric, own)) if m.role in (None, role)]
        levels = METRIC_LEVELS[: METRIC_LEVELS.index(level) + 1]
        active = [m for m in declared if m.level in levels and (m.only_with is None or m.only_with in features)]
        self.level = level
        self.metrics: tuple[Metric, ...] = tuple(active)
        self._means = [metric for metric in active if metric.kind == "mean"]
        self._sums = [metric for metric in active if metric.kind in ("sum", "all")]
        self._totals = [metric for metric in active if metric.kind == "total"]
        self._ages = [metric for metric in active if metric.kind == "age"]
        self._added = [*self._means, *self._sums, *self._totals, *self._ages]
        self._extrema = [metric for metric in active if metric.kind in ("max", "min")]
        self._derived = [metric for metric in active if metric.kind in ("step", "rollout", "ratio", "rank")]

    @property
    def needs_entropy(self) -> bool:
        """Whether a metric reads the entropy."""
        return any(metric.name == "entropy" for metric in self.metrics)

    @property
    def width(self) -> int:
        """Length of a partial result."""
        return len(self._added) + len(self._extrema) + len(_FIELDS)

    def identity(self) -> list[float]:
        """Partial result of a rank or micro-batch without a trained token."""
        return [*[0.0] * len(self._added), *[-math.inf] * len(self._extrema), *[0.0] * len(_FIELDS)]

    def partial(self, tokens: TokenValues) -> Tensor:
        """[width] float64 on the device: this rank's contribution from one micro-batch. No host sync."""
        mask, weights = tokens.fields.objective_mask, tokens.sample_weights
        masks: dict[str | None, Tensor] = {None: mask}
        for field in _NEEDED:
            known = getattr(tokens.fields, field)
            masks[field] = torch.zeros_like(mask) if known is None else mask & ~torch.isnan(known)

        def table(metrics: Sequence[Metric], neutral: float) -> Tensor:  # [n, T]
            rows = [_select(metric, tokens, masks, neutral) for metric in metrics]
            return torch.stack(rows) if rows else weights.new_zeros(0, 1)

        means = table(self._means, 0.0) * torch.where(mask, weights, 0)
        sums = table(self._sums, 0.0)
        totals = [metric.formula(tokens).double().view(1) for metric in self._totals]
        by_age = [metric.formula(tokens) for metric in self._ages[:1]]  # all of them
        extrema = pad(table(self._extrema, -math.inf), (0, 1), value=-math.inf)  # amax needs a column
        documents = torch.stack([torch.where(masks[field], weights, 0).sum() for field in _FIELDS])
        return torch.cat([means.sum(dim=1), sums.sum(dim=1), *totals, *by_age, extrema.amax(dim=1), documents])

    def combine(self, partials: Tensor) -> Tensor:
        """[width] from [n, width] partial results, added in this order."""
        added, extrema, documents = partials.split([len(self._added), len(self._extrema), len(_FIELDS)], dim=1)
        return torch.cat([added.sum(dim=0), extrema.amax(dim=0), documents.sum(dim=0)])

    def rescaled(self, partial: Tensor, factor: float) -> Tensor:
        """[width] the partial result if every weight had been `factor` times as large."""
        powers = [metric.power for metric in self._added] + [0] * (len(partial) - len(self._added))
        return partial * torch.tensor([factor**power for power in powers], dtype=partial.dtype, device=partial.device)

    def by_rank(self, rows: Tensor, data_ranks: Tensor) -> list[list[float]]:
        """The added metrics of each data-parallel rank, from partial results [n, width] and their ranks [n] int64."""
        totals = rows.new_zeros(int(data_ranks.amax()) + 1, len(self._added))
        return totals.index_add_(0, data_ranks, rows[:, : len(self._added)]).tolist()

    def finish(self, totals: Sequence[float], plan: Any, by_rank: Sequence[Sequence[float]] = ()) -> dict[str, float]:
        """Values by name, in the order of the table, from the combined totals, the step plan and `by_rank`."""
        documents = dict(zip(_FIELDS, totals[-len(_FIELDS) :], strict=True))
        ranks = [dict(zip([metric.name for metric in self._added], row, strict=True)) for row in by_rank]
        values = {}
        for metric, total in zip([*self._added, *self._extrema], totals, strict=False):
            if _is_present(metric, documents, plan):
                sign = -1 if metric.kind == "min" else 1
                values[metric.name] = total / documents[metric.needs] if metric.kind == "mean" else sign * total
                values[metric.name] /= 1 if metric.per is None else metric.per(plan)
        for metric in self._derived:
            if _is_present(metric, documents, plan):
                source = {"ratio": values, "rank": ranks, "rollout": plan.facts}.get(metric.kind, plan)
                with suppress(ZeroDivisionError):  # weights that are all 0
                    values[metric.name] = metric.formula(source)
        order = [metric.name for metric in self.metrics if metric.is_reported]
        known = {name: values[name] for name in order if values.get(name) is not None}
        return known | self._of_environments(plan.facts.environments)

    def _of_environments(self, facts: Mapping[str, object]) -> dict[str, float]:
        """The metrics over rollouts, for each environment separately."""
        declared = [metric for metric in self.metrics if metric.kind == "rollout"]
        formulas = {metric.name: metric.formula for metric in declared}
        if declared:
            formulas["num_rollouts"] = attrgetter("num_rollouts")
        return {
            f"environment/{environment}/{name}": value
            for environment, rollouts in facts.items()
            for name, formula in formulas.items()
            if (value := formula(rollouts)) is not None
        }

    def lacking(self, values: dict[str, float]) -> dict[str, list[str]]:
        """Metrics that are absent from `values` because no sample has the field: names by field."""
        names: dict[str, list[str]] = {}
        for metric in self.metrics:
            if metric.needs and metric.is_reported:
                names.setdefault(metric.needs, []).append(metric.name)
        return {field: absent for field, absent in names.items() if not values.keys() & set(absent)}

    def nonfinite(self, rows: Sequence[Sequence[float]]) -> dict[str, list[int]]:
        """For every metric the ranks whose contribution is not finite, from the ranks' partial results `rows`."""
        ranks_of: dict[str, list[int]] = {}
        for column, metric in enumerate([*self._added, *self._extrema]):
            neutral = -math.inf if metric in self._extrema else 0.0
            if ranks := [r for r, row in enumerate(rows) if row[column] != neutral and not math.isfinite(row[column])]:
                ranks_of[metric.name] = ranks
        return ranks_of


def _is_present(metric: Metric, documents: dict[str | None, float], plan: Any) -> bool:
    """Whether a token contributed; a metric over other tokens than the objective's is None where it is unknown."""
    if metric.term is not None:
        return plan.terms[metric.term].num_tokens > 0
    return metric.kind in _OF_THE_STEP or documents.get(metric.needs, documents[None]) != 0


def _select(metric: Metric, tokens: TokenValues, masks: dict[str | None, Tensor], neutral: float) -> Tensor:
    """[T] the values of a metric, minima negated; neutral where the token is masked or lacks the field."""
    if metric.needs is not None and getattr(tokens.fields, metric.needs) is None:
        return torch.full_like(tokens.sample_weights, neutral)
    values = metric.formula(tokens).double()
    is_of_terms = metric.kind == "all" or metric.term is not None
    mask = tokens.fields.mask if is_of_terms else masks[metric.needs]
    return torch.where(mask, -values if metric.kind == "min" else values, neutral)
