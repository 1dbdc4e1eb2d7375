"""Causes that change the whole distribution: missing probability, a temperature, a heavy tail.

The tokens are drawn from the engine's distribution q, so E_q[π/q] = E[e^d] is the mass that π gives to the tokens that
q can draw. It is 1 unless one side leaves out columns.
"""

import numpy as np

from megatron_pg.mismatch.causes import Answer, cannot_tell, decided
from megatron_pg.mismatch.gap import Booleans, Floats, Gap
from megatron_pg.mismatch.inference import FEWEST, mean_over, p_above
from megatron_pg.mismatch.noise import bins_of, noise_of
from megatron_pg.mismatch.repeats import OF_WEIGHTS, at_pairs, shown

_LARGEST = 3.0  # of d in e^d
_FOLLOWS = 0.4  # correlation of d with log q
_TAIL_BY_CHANCE = 0.0005  # share of outliers; a Student's t with 4 degrees of freedom has 0.06 %
MOST_OUTLIERS = 0.003  # share of outliers that noise has at most; a Student's t with 3 degrees of freedom has 0.15 %
_CROWDED = 1.4  # variance of a document's number of outliers over that of independent ones


def _ratios(d: Floats, most: float = _LARGEST) -> Floats:
    return np.expm1(np.minimum(d, most))


# --- missing mass ---


def missing_mass(gap: Gap, level: float) -> list[Answer]:
    """1 - E[e^d] above 0: the engine draws from fewer columns than the trainer counts; tests of truncation and
    padding."""
    d, seen = gap.difference, gap.observation
    if len(np.unique(seen)) < FEWEST:
        return [cannot_tell(cause, f"fewer than {FEWEST} documents") for cause in ("truncation", "padding")]
    sided = _one_sided(d)
    forward, backward = _missing(gap, d, gap.engine), _missing(gap, -d, gap.trainer)
    forward = forward[0], min(forward[1], _p_certain(gap))
    least = max(0.003, 0.15 * float(np.abs(d).mean()))
    is_forward = forward[0] >= least and forward[1] <= level and sided > 0
    is_backward = backward[0] >= least and backward[1] <= level and sided < -0.5
    missing, p = backward if is_backward else forward
    if is_forward or is_backward:
        found, why = ("padding", "the engine's probabilities are the smaller ones") if is_backward else _which(gap)
        text = f"{missing:.2%} of the probability is missing on one side (E[π/q] = {1 - forward[0]:.4f}); {why}"
    else:
        ratios = f"E[π/q] = {1 - forward[0]:.4f}, E[q/π] = {1 - backward[0]:.4f}"
        found, text = "", f"{ratios}: no probability is missing on one side alone"
    sizes = {found: {"missing": missing, "kept": 1 - missing}}
    return [
        decided(cause, p, level, cause == found, text, **sizes.get(cause, {})) for cause in ("truncation", "padding")
    ]


def _missing(gap: Gap, d: Floats, sampler: Floats) -> tuple[float, float]:
    """1 - mean e^d, and its p-value over all tokens and over those not clipped at 0, with d up to 3 and up to 12."""
    parts = [np.ones(len(d), bool), sampler < -0.2]
    means = [
        mean_over(-_ratios(d[part], most), gap.observation[part]) for part in parts for most in (_LARGEST, 4 * _LARGEST)
    ]
    return means[0].value, max(p_above(mean, 0.001) for mean in means)


def _p_certain(gap: Gap) -> float:
    """p-value of: at most 1 % of the tokens are certain for the engine and less likely than e^-0.1 for the trainer."""
    certain = (gap.engine > -1e-6) & (gap.difference < -0.1)
    return p_above(mean_over(certain.astype(float), gap.observation), 0.01)


def _one_sided(d: Floats) -> float:
    """(Σ d² where d < 0 - Σ d² where d > 0)/Σ d², of d within its 1 and 99 % quantiles."""
    d = d[np.abs(d) <= np.quantile(np.abs(d), 0.995)]
    total = float(d @ d)
    return float((d * np.abs(d)).sum() / -total) if total > 0 else 0.0


def _which(gap: Gap) -> tuple[str, str]:
    """Truncation or padding, and why.

    Truncation leaves out the least likely columns. If one column remains, log q = 0; and each column left out is less
    likely than the token that was drawn, so 1 - e^d <= V·π. Padding columns satisfy neither.
    """
    d, q = gap.difference, gap.engine
    certain = (q > -1e-6) & (d < -0.003)
    nearly = (q <= -1e-6) & (q > -0.02)
    if certain.sum() >= 10 and certain.sum() > 0.5 * nearly.sum():
        return (
            "truncation",
            f"the engine is certain (log q = 0) of {certain.mean():.1%} of the tokens, and the trainer is not",
        )
    columns, noise = len(np.unique(gap.ids)), 5 * noise_of(gap).scale[bins_of(gap)].min()
    heavy = (-np.expm1(d) > np.maximum(2 * columns * np.exp(gap.trainer), noise)) & (d < -0.01)
    if heavy.sum() >= max(3, 2e-4 * len(d)):
        return (
            "padding",
            f"at {int(heavy.sum())} unlikely tokens, more is missing than {columns} less likely columns can hold",
        )
    return "truncation", "at no token is more missing than the less likely columns can hold"


# --- temperature ---


def temperature(gap: Gap, level: float) -> Answer:
    """κ of π ∝ q^κ, from E_q[(e^d - 1)·A] = 0, where A = κ·log q - log π = log Σ q^κ depends on the context alone.

    So κ = cov(e^d - 1, log π)/cov(e^d - 1, log q). Required: d rises with log q and changes its sign.
    """
    d, q, seen = gap.difference, gap.engine, gap.observation
    if len(np.unique(seen)) < FEWEST:
        return cannot_tell("temperature", f"fewer than {FEWEST} documents")
    kept = np.abs(d) <= max(np.quantile(np.abs(d), 0.995), 1e-9)
    d, q, seen = d[kept], q[kept], seen[kept]
    products = (d - d.mean()) * (q - q.mean())
    mean = mean_over(products, seen)
    correlation = float(mean.value / max(d.std() * q.std(), 1e-12))
    slope = mean.value / max(float(q.var()), 1e-12)
    kappa = 1 + float(d.var() / mean.value) if mean.value else 1.0
    if abs(slope) > 0.02:  # exact, not to first order
        kappa = _exponent(gap.trainer[kept], q)
    high, low = _extremes(d, q)
    changes = min(high, -low) > max(0.04 * max(high, -low), 0.003)
    missing = min(abs(float(_ratios(d).mean())), abs(float(_ratios(-d).mean())))
    is_balanced = abs(float(d.mean())) > 0.01 and missing < 0.25 * abs(float(d.mean()))  # both sides sum to 1
    p = p_above(mean_over(products * np.sign(mean.value), seen))
    evidence = (
        f"log π - log q rises by {slope:+.4f} per nat of log q (correlation {correlation:+.2f}), its mean goes from "
        f"{low:+.4f} to {high:+.4f}"
    )
    is_large = abs(slope) >= 0.008 and abs(correlation) >= _FOLLOWS and (changes or is_balanced) and kappa > 0.05
    return decided("temperature", min(2 * p, 1.0), level, is_large, evidence, trainer_over_engine=1 / max(kappa, 1e-3))


def _exponent(trainer: Floats, engine: Floats) -> float:
    """κ of π ∝ q^κ for tokens drawn from q, or from π if E[q/π] is nearer to 1 than E[π/q]."""
    forward, backward = _ratios(trainer - engine), _ratios(engine - trainer)
    e = forward if abs(forward.mean()) <= abs(backward.mean()) else backward
    return float((e - e.mean()) @ trainer / ((e - e.mean()) @ engine))


def _extremes(d: Floats, q: Floats) -> tuple[float, float]:
    """The largest and the smallest mean of d over parts of log q that have enough tokens."""
    parts = np.searchsorted([-8.0, -4.0, -2.0, -1.0, -0.5, -0.1], q)
    means = [d[parts == part].mean() for part in range(6) if (parts == part).sum() >= 50] or [0.0]
    return float(max(means)), float(min(means))


# --- tail ---


def routing(gap: Gap, level: float) -> Answer:
    """Share of tokens beyond ±10 scales and ±0.1 nats that crowd in documents and whose d does not repeat."""
    beyond = is_outlier(gap)
    mean = mean_over(beyond.astype(float), gap.observation)
    up = float((gap.difference[beyond] > 0).mean()) if beyond.any() else 0.0
    spread, pairs = _clustering(gap, beyond), at_pairs(gap)
    evidence = (
        f"{mean.value:.2%} of the tokens are more than 10 scales and 0.1 nats apart ({up:.0%} of them upwards); "
        f"documents differ in their number {spread:.1f} times as much as by chance{shown(pairs)}"
    )
    p, is_large = p_above(mean, _TAIL_BY_CHANCE), mean.value >= 0.001 and 0.1 <= up <= 0.9
    if is_large and p <= level and pairs is not None and pairs.value >= OF_WEIGHTS:
        return cannot_tell("routing", f"{evidence}, as with other token ids or weights")
    if mean.value >= MOST_OUTLIERS and is_large and p <= level and spread < _CROWDED:
        return cannot_tell("routing", f"{evidence}: too evenly for other experts alone; dropout would look the same")
    return decided("routing", p, level, is_large and spread >= _CROWDED, evidence, share=mean.value, clustering=spread)


def is_outlier(gap: Gap) -> Booleans:
    """[T] whether d is beyond 10 scales and 0.1 nats."""
    return (np.abs(noise_of(gap).standardized(gap)) > 10) & (np.abs(gap.difference) > 0.1)


def _clustering(gap: Gap, hits: np.ndarray) -> float:
    """Variance of the number of hits of a document over that of independent hits."""
    sizes = np.bincount(gap.document, minlength=len(gap.step))
    counts = np.bincount(gap.document, weights=hits, minlength=len(gap.step))[sizes > 0]
    expected = sizes[sizes > 0] * hits.mean()
    return float(((counts - expected) ** 2).sum() / expected.sum()) if expected.sum() else 1.0
