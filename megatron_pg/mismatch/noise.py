"""The noise model: d is symmetric about 0 with a scale that depends on how unlikely the token is, of any shape."""

from dataclasses import dataclass

import numpy as np

from megatron_pg.mismatch.gap import Floats, Gap

EDGES = np.array(
    [0, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.2, 0.4, 0.7, 1, 1.5, 2, 3, 4, 5, 6.5, 8, 10, 13, np.inf]
)  # nats of surprise
_FEWEST = 60  # tokens of a bin
_LEAST_SHARE = 0.3  # of the scale at 0.4 to 4 nats: the least scale of certain tokens


@dataclass(frozen=True, slots=True)
class Noise:
    """Center and robust scale of d in bins of surprise; bins with few tokens use their neighbors'."""

    center: Floats  # [bins] median of d
    scale: Floats  # [bins] 1.4826 · median |d - center|
    level: float  # scale of the tokens between 0.4 and 4 nats, or of all

    def standardized(self, gap: Gap) -> Floats:
        """[T] (d - center)/scale, the scale at least 0.3 of the level."""
        bins = bins_of(gap)
        return (gap.difference - self.center[bins]) / np.maximum(self.scale[bins], max(_LEAST_SHARE * self.level, 1e-6))


def bins_of(gap: Gap) -> np.ndarray:
    """[T] the bin of EDGES that contains a token's surprise."""
    return np.clip(np.searchsorted(EDGES, gap.surprise, side="right") - 1, 0, len(EDGES) - 2)


def noise_of(gap: Gap) -> Noise:
    """The noise model of these tokens; medians ignore what a minority of tokens has."""
    bins, d = bins_of(gap), gap.difference
    count = np.bincount(bins, minlength=len(EDGES) - 1).astype(float)
    center, scale = np.full(len(count), np.nan), np.full(len(count), np.nan)
    for number in np.flatnonzero(count >= _FEWEST):
        center[number], scale[number] = robust(d[bins == number])
    usual = (gap.surprise > 0.4) & (gap.surprise < 4)
    level = robust(d[usual] if usual.sum() >= _FEWEST else d)[1]
    return Noise(_filled(center, 0.0), _filled(scale, level), level)


def robust(values: Floats) -> tuple[float, float]:
    """Median and 1.4826 times the median distance from it, which is a normal distribution's standard deviation."""
    if not len(values):
        return 0.0, 0.0
    center = float(np.median(values))
    return center, 1.4826 * float(np.median(np.abs(values - center)))


def _filled(values: Floats, otherwise: float) -> Floats:
    known = np.flatnonzero(~np.isnan(values))
    if not len(known):
        return np.full(len(values), otherwise)
    return np.interp(np.arange(len(values)), known, values[known])
