"""Diagnostics: each metric is declared once, beside its formula, and reduced exactly.

A metric is a mean over documents, a sum, a maximum or a minimum over the trained tokens of the whole step. Every
rank contributes partial results or the reduction's identity, all of them travel in one all-gather, and a metric to
which nobody contributed is absent. Means weigh every document (sample) the same, whatever `--loss-aggregation` says,
so that runs with different aggregations stay comparable.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pg.objectives.grpo import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenValues:
    """What the formulas read: [T] float64 per token of one micro-batch on one rank, anything where masked."""

    mask: Tensor  # [T] bool
    document_weights: Tensor  # v: sums to 1 over a document's trained tokens
    weights: Tensor  # w of the aggregation
    token_losses: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    log_ratios: Tensor
    advantages: Tensor
    entropy: Tensor | None
    clip_eps_low: float
    clip_eps_high: float

    @property
    def ratios(self) -> Tensor:
        """r = new / old probability, with the log-ratio clamped as in the objective."""
        return self.log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@dataclass(frozen=True, slots=True)
class Metric:
    """One diagnostic: its name, the level that switches it on, its reduction and its per-token formula."""

    name: str
    level: str  # "none" (always there), "basic" or "with_entropy"
    reduce: str  # "mean", "sum", "max" or "min"
    formula: Callable[[TokenValues], Tensor]
    meaning: str


def _clipped(t: TokenValues) -> Tensor:
    return (t.ratios < 1 - t.clip_eps_low) | (t.ratios > 1 + t.clip_eps_high)


METRICS = (
    Metric(
        "pg_loss",
        "none",
        "sum",
        lambda t: t.weights * t.token_losses,
        "the objective: sum of w·ℓ over the step",
    ),
    Metric("num_tokens", "none", "sum", lambda t: torch.ones_like(t.weights), "trained tokens of the step"),
    Metric(
        "new_logprobs",
        "basic",
        "mean",
        lambda t: t.logprobs,
        "log-probability under the model being trained, nats",
    ),
    Metric(
        "old_logprobs",
        "basic",
        "mean",
        lambda t: t.old_logprobs,
        "log-probability under the sampling policy, nats",
    ),
    Metric("ratio_new_old", "basic", "mean", lambda t: t.ratios, "probability ratio r, new over old"),
    Metric(
        "kl_new_old",
        "basic",
        "mean",
        lambda t: t.ratios - 1 - t.log_ratios,
        "k3 = r - 1 - log r over samples of the old policy: estimates KL(old‖new), nats",
    ),
    Metric(
        "clipped_ratio_fraction",
        "basic",
        "mean",
        _clipped,
        "share of tokens with r outside [1 - ε_low, 1 + ε_high]",
    ),
    Metric(
        "clamped_log_ratio_fraction",
        "basic",
        "mean",
        lambda t: t.log_ratios.abs() > MAX_LOG_RATIO,
        f"share of tokens with |log r| > {MAX_LOG_RATIO:g}, whose gradient is 0",
    ),
    Metric("advantage", "basic", "mean", lambda t: t.advantages, "advantage"),
    Metric("max_advantage", "basic", "max", lambda t: t.advantages, "largest advantage of a trained token"),
    Metric("min_advantage", "basic", "min", lambda t: t.advantages, "smallest advantage of a trained token"),
    Metric("entropy", "with_entropy", "mean", lambda t: t.entropy, "exact entropy over the vocabulary, nats"),
)

_LEVELS = ("none", "basic", "with_entropy")
_IDENTITY = {"mean": 0.0, "sum": 0.0, "max": -math.inf, "min": math.inf}


def metrics_of(level: str) -> tuple[Metric, ...]:
    """The metrics that a level of `--pg-metrics` switches on."""
    return tuple(metric for metric in METRICS if _LEVELS.index(metric.level) <= _LEVELS.index(level))


def width_of(metrics: Sequence[Metric]) -> int:
    """Numbers in a partial result: one per metric, and the number of documents that the means divide by."""
    return len(metrics) + 1


def identity(metrics: Sequence[Metric]) -> list[float]:
    """Partial result of a rank or micro-batch without a trained token."""
    return [*(_IDENTITY[metric.reduce] for metric in metrics), 0.0]


def partial_result(metrics: Sequence[Metric], tokens: TokenValues) -> Tensor:
    """[width] float64 on the device: this rank's contribution from one micro-batch. No host sync."""
    values = [_reduce_tokens(metric, tokens) for metric in metrics]
    return torch.stack([*values, torch.where(tokens.mask, tokens.document_weights, 0).sum()])


def combine(metrics: Sequence[Metric], partials: Tensor) -> Tensor:
    """[width] from [n, width] partial results, added up in their order."""
    columns = [_OPERATIONS[metric.reduce](column) for metric, column in zip(metrics, partials.t(), strict=False)]
    return torch.stack([*columns, partials[:, -1].sum()])


def finish(metrics: Sequence[Metric], totals: Sequence[float]) -> dict[str, float]:
    """Values by name; a metric to which no token contributed is absent."""
    documents, values = totals[-1], {}
    if documents == 0:
        return values
    for metric, total in zip(metrics, totals, strict=False):
        values[metric.name] = total / documents if metric.reduce == "mean" else total
    return values


_OPERATIONS = {"mean": torch.sum, "sum": torch.sum, "max": torch.amax, "min": torch.amin}


def _reduce_tokens(metric: Metric, tokens: TokenValues) -> Tensor:
    values = metric.formula(tokens).double()
    if metric.reduce == "mean":
        values = values * tokens.document_weights
    neutral = torch.full((1,), _IDENTITY[metric.reduce], dtype=torch.float64, device=values.device)
    # the neutral entry lets max and min of a micro-batch without any position exist
    return _OPERATIONS[metric.reduce](torch.cat([torch.where(tokens.mask, values, neutral), neutral]))
