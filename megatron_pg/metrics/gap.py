"""Trainer against rollout engine in a step: the statistics of `megatron-pg mismatch` that are sums over tokens.

d = o - b of a trained token, its log-probability by the trainer minus that by the engine. Medians and documents need more than sums;
the file command has them.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

NEAR = 3.0  # nats: beyond it a token is another token, template or model, and no moment has it
OUTLIER = 0.5  # nats: ten times the scale that bfloat16 gives a whole model, nearly
_FOLLOWS = 0.5  # correlation of d with b from which a temperature is estimated
_ROUNDING = 1e-12  # of a mean square, what a variance of equal values may come to

# Sums over tokens that have both: all of them, and those within NEAR. e = e^d - 1 and f = e^-d - 1.
SUMS = (
    *("all", "size", "outliers", "e_all", "f_all"),
    *("near", "d", "dd", "b", "bb", "db", "e", "ed", "eb", "f", "fd", "fb"),
)
Sums = Mapping[str, float]


def sums_of(trainer: Tensor, engine: Tensor) -> Tensor:
    """[len(SUMS), T] float64, what each sum adds up, of log-probabilities [T], anything where they are not known."""
    d = trainer - engine
    near = d.abs() <= NEAR
    one, zero = torch.ones_like(d), torch.zeros_like(d)
    e_all, f_all = (torch.expm1(each.clamp(max=NEAR)) for each in (d, -d))
    size, outliers = d.abs().clamp(max=NEAR), (d.abs() > OUTLIER).double()
    d, b, e, f = (torch.where(near, each, zero) for each in (d, engine, e_all, f_all))
    moments = (near.double(), d, d * d, b, b * b, d * b, e, e * d, e * b, f, f * d, f * b)
    return torch.stack([one, size, outliers, e_all, f_all, *moments])


def difference(s: Sums) -> float:
    """Mean of d."""
    return s["d"] / s["near"]


def spread(s: Sums) -> float:
    """Standard deviation of d."""
    return math.sqrt(_variance(s, "d"))


def correlation(s: Sums) -> float:
    """Of d and b."""
    return _covariance(s, "db", "d", "b") / math.sqrt(_variance(s, "d") * _variance(s, "b"))


def temperature(s: Sums) -> float | None:
    """The trainer's over the engine's, 1/κ of π ∝ q^κ; None where d does not follow b.

    κ·b - o depends on the context alone and E[e] = 0 in every context, so κ = cov(e, o)/cov(e, b); where f is nearer to 0 than e, f in
    the place of e: the trainer's distribution is then the one that drew the tokens.
    """
    if abs(correlation(s)) < _FOLLOWS:
        return None
    e = "e" if abs(s["e"]) <= abs(s["f"]) else "f"
    with_b = _covariance(s, f"{e}b", e, "b")
    kappa = 1 + _covariance(s, f"{e}d", e, "d") / with_b  # o = b + d
    return 1 / kappa if kappa > 0 else None


def missing_mass(s: Sums) -> float:
    """1 - E[e^d] or, where that is larger, 1 - E[e^-d]: probability that one side has in columns that the other one lacks."""
    return (0.0 - min(s["e_all"], s["f_all"])) / s["all"]


def outlier_fraction(s: Sums) -> float:
    """Share of the tokens whose sides are further apart than OUTLIER."""
    return s["outliers"] / s["all"]


def farthest_rank(ranks: Sequence[Sums]) -> tuple[int, float] | None:
    """The data-parallel rank whose mean |d| is the largest beside that of the others, and by what factor; None: there is
    none, or the others agree with the engine to the last bit."""
    factors = [(_beside_others(each, ranks), -number) for number, each in enumerate(ranks) if each["all"]]
    known = [(factor, number) for factor, number in factors if factor is not None]
    if not known:
        return None
    factor, number = max(known)
    return -number, factor


def _beside_others(own: Sums, ranks: Sequence[Sums]) -> float | None:
    tokens, size = (math.fsum(each[name] for each in ranks if each is not own) for name in ("all", "size"))
    return own["size"] / own["all"] * tokens / size if size else None


def _covariance(s: Sums, product: str, one: str, other: str) -> float:
    return s[product] / s["near"] - s[one] / s["near"] * (s[other] / s["near"])


def _variance(s: Sums, name: str) -> float:
    found = _covariance(s, 2 * name, name, name)
    return found if found > _ROUNDING * s[2 * name] / s["near"] else 0.0
