"""Means over documents and their p-values: documents are independent, the tokens within one are not."""

import math
from dataclasses import dataclass

import numpy as np

from megatron_pg.mismatch.gap import Floats, Integers

FEWEST = 12  # observations that a test needs


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over tokens, and its standard error over observations."""

    value: float
    error: float
    observations: int


def mean_over(values: Floats, observation: Integers) -> Mean:
    """The mean of [T] token values, its error from the sums of the observations that hold them (cluster-robust)."""
    _, index = np.unique(observation, return_inverse=True)
    count = int(index.max()) + 1 if len(index) else 0
    if count < 2:
        return Mean(float(values.mean()) if len(values) else 0.0, math.inf, count)
    mean = float(values.mean())
    sums = np.bincount(index, weights=values - mean, minlength=count)
    error = math.sqrt(float(sums @ sums) * count / (count - 1)) / len(values)
    return Mean(mean, error, count)


def tail(t: float, freedom: int) -> float:
    """P(T > t) of Student's t, by Wallace's normal approximation (relative error below 2 % for ten degrees of
    freedom)."""
    if freedom < 1 or math.isnan(t):
        return 1.0
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    scaled = math.sqrt(freedom * math.log1p(t * t / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
    return 0.5 * math.erfc(math.copysign(scaled, t) / math.sqrt(2))


def p_above(mean: Mean, bound: float = 0.0) -> float:
    """The p-value of: the true mean is at most `bound`."""
    distance = mean.value - bound
    t = distance / mean.error if mean.error > 0 else math.copysign(math.inf, distance) if distance else 0.0
    return tail(t, mean.observations - 1)


def binomial_tail(successes: int, trials: int, chance: float) -> float:
    """An upper bound (Chernoff) of P(at least so many successes)."""
    share = successes / trials if trials else 0.0
    if share <= chance:
        return 1.0
    if share >= 1.0:
        return math.exp(max(trials * math.log(chance), -700.0))
    relative = share * math.log(share / chance) + (1 - share) * math.log((1 - share) / (1 - chance))
    return math.exp(max(-trials * relative, -700.0))
