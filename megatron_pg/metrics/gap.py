"""The trainer compared with the rollout engine: the statistics of `megatron-pg mismatch` that are sums over tokens.

d = o - b of a trained token: its log-probability by the trainer minus its log-probability by the engine. Statistics
that need more than sums, such as medians, are computed by the command only.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

NEAR = 3.0  # nats: a larger |d| means another token, template or model, and is left out of all moments
OUTLIER = 0.5  # nats: about ten times the scale of d in bfloat16
_FOLLOWS = 0.5  # |correlation| of d with b above which a temperature is estimated
_SMALL = 0.02  # nats: of a smaller spread, in a nearly deterministic policy, a few tokens would decide the temperature
_ROUNDING = 1e-12  # of a mean square: a variance below it is rounding error

# Sums over tokens with both log-probabilities: all of them, and those with |d| ≤ NEAR. e = e^d - 1 and f = e^-d - 1.
SUMS = (
    *("all", "size", "outliers", "e_all", "f_all"),
    *("near", "d", "dd", "b", "bb", "db", "e", "ed", "eb", "f", "fd", "fb"),
)
Sums = Mapping[str, float]


def sums_of(trainer: Tensor, engine: Tensor) -> Tensor:
    """[len(SUMS), T] float64, the summands of log-probabilities [T]; arbitrary where a log-probability is unknown."""
    d = trainer - engine
    near = d.abs() <= NEAR
    one, zero = torch.ones_like(d), torch.zeros_like(d)
    e_all, f_all = (torch.expm1(gaps.clamp(max=NEAR)) for gaps in (d, -d))
    size, outliers = d.abs().clamp(max=NEAR), (d.abs() > OUTLIER).double()
    d, b, e, f = (torch.where(near, values, zero) for values in (d, engine, e_all, f_all))
    moments = (near.double(), d, d * d, b, b * b, d * b, e, e * d, e * b, f, f * d, f * b)
    return torch.stack([one, size, outliers, e_all, f_all, *moments])


def difference(s: Sums) -> float:
    """Mean of d."""
    return s["d"] / s["near"]


def spread(s: Sums) -> float:
    """Standard deviation of d."""
    return math.sqrt(variance(s, "d"))


def correlation(s: Sums) -> float:
    """Correlation of d and b."""
    return _covariance(s, "db", "d", "b") / math.sqrt(variance(s, "d") * variance(s, "b"))


def temperature(s: Sums) -> float | None:
    """The trainer's temperature over the engine's, 1/κ of π ∝ q^κ; None if d does not follow b, or is rounding.

    κ·b - o depends on the context alone and E[e] = 0 in every context, so κ = cov(e, o)/cov(e, b). If f is nearer to 0
    than e, f replaces e: the tokens were then drawn from the trainer's distribution.
    """
    if spread(s) < _SMALL or abs(correlation(s)) < _FOLLOWS:
        return None
    e = "e" if abs(s["e"]) <= abs(s["f"]) else "f"
    with_b = _covariance(s, f"{e}b", e, "b")
    kappa = 1 + _covariance(s, f"{e}d", e, "d") / with_b  # o = b + d
    return 1 / kappa if kappa > 0 else None


def missing_mass(s: Sums) -> float:
    """The larger of 1 - E[e^d] and 1 - E[e^-d]: probability of columns that only one of the two sides has."""
    return (0.0 - min(s["e_all"], s["f_all"])) / s["all"]


def outlier_fraction(s: Sums) -> float:
    """Share of the tokens with |d| > OUTLIER."""
    return s["outliers"] / s["all"]


def farthest_rank(ranks: Sequence[Sums]) -> tuple[int, float] | None:
    """The data-parallel rank with the largest mean |d| relative to the other ranks, and the factor.

    None if there is no such rank, or if all others agree with the engine to the last bit.
    """
    factors = [(_relative_gap(sums, ranks), -number) for number, sums in enumerate(ranks) if sums["all"]]
    known = [(factor, number) for factor, number in factors if factor is not None]
    if not known:
        return None
    factor, number = max(known)
    return -number, factor


def _relative_gap(rank: Sums, ranks: Sequence[Sums]) -> float | None:
    """Mean |d| of a rank over the mean |d| of all others."""
    tokens, size = (math.fsum(other[name] for other in ranks if other is not rank) for name in ("all", "size"))
    return rank["size"] / rank["all"] * tokens / size if size else None


def _covariance(s: Sums, product: str, one: str, other: str) -> float:
    return s[product] / s["near"] - s[one] / s["near"] * (s[other] / s["near"])


def variance(s: Sums, name: str) -> float:
    """Of `name`, whose squares are summed as twice the name; 0 where it is rounding error."""
    variance = _covariance(s, 2 * name, name, name)
    return variance if variance > _ROUNDING * s[2 * name] / s["near"] else 0.0
