"""Whether the tokens were drawn from the distribution that the engine reports, if it reports top-k log-probabilities.

The K reported tokens, and all others together, are categories with known probabilities; a temperature or a truncation
changes these. If nothing is wrong, the likelihood ratio of any alternative to the report exceeds e^x with probability
at most e^-x (Markov), no matter how the tokens depend on each other.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_pg.mismatch.causes import Answer, cannot_tell, decided
from megatron_pg.mismatch.gap import Floats, Gap, Integers

_FEWEST, _MOST = 200, 50_000  # tokens
_TEMPERATURES = np.geomspace(0.5, 2.0, 31)
_SHARES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995)
_COUNTS = (1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100, 128, 200, 256)
_STRAY = 1e-3  # share of tokens that an alternative draws from the whole vocabulary: rounding at the bound
_LEAST = 1e-6  # probability of all tokens that are not reported
_CLEARLY = 10.0  # nats that a further number must bring


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to sample: at `temperature` times the reported one, with top-p `share` or top-k `count`."""

    temperature: float = 1.0
    share: float | None = None
    count: int | None = None

    @property
    def is_truncated(self) -> bool:
        return self.share is not None or self.count is not None

    def __str__(self) -> str:
        parts = [f"at {self.temperature:.3f} times the reported temperature"] if self.temperature != 1.0 else []
        parts += [f"with top-p {self.share:g}"] if self.share is not None else []
        parts += [f"with top-k {self.count}"] if self.count is not None else []
        return ", ".join(parts)


def sampling(gap: Gap, level: float) -> Answer:
    """The most likely way to sample, compared with the reported one."""
    if gap.topk is None or gap.rank is None:
        return cannot_tell("sampling", "the rollouts have no rollout_topk, the engine's top-k log-probabilities")
    known = (gap.rank >= 0).nonzero()[0]
    if len(known) < _FEWEST:
        return cannot_tell("sampling", f"fewer than {_FEWEST} tokens have the engine's top-k log-probabilities")
    known = known[:: -(-len(known) // _MOST)]
    log_q, rank = gap.topk[known].astype(float), gap.rank[known]
    gains = dict(_gains(log_q, rank))
    way, gain = _plainest(gains)
    p = min(1.0, len(gains) * math.exp(-min(max(gain, 0.0), 700.0)))
    if way.temperature != 1.0:
        way = _Way(_temperature(log_q, rank, way), way.share, way.count)
    probabilities = _probabilities(log_q, way.temperature)
    kept = float((probabilities * _kept(probabilities, way)).sum(axis=1).mean())
    drawn = str(way) or "as reported"
    evidence = f"{len(known)} tokens are drawn {drawn}: {gain:.1f} nats more likely than as reported"
    is_large = abs(math.log(way.temperature)) >= 0.02 or kept <= 0.995
    estimate = {"temperature": way.temperature, "top_p": way.share, "top_k": way.count, "kept": kept}
    return decided("sampling", p, level, is_large, evidence, **estimate)


def _gains(log_q: Floats, rank: Integers) -> Iterator[tuple[_Way, float]]:
    """Every way to sample, and its log-likelihood minus the reported one's."""
    reported = np.log(_of_drawn(_probabilities(log_q, 1.0), rank))
    truncations = [_Way(), *(_Way(share=c) for c in _SHARES), *(_Way(count=k) for k in _COUNTS if k <= log_q.shape[1])]
    for temperature in _TEMPERATURES:
        probabilities = _probabilities(log_q, temperature)
        drawn = _of_drawn(probabilities, rank)
        for truncation in truncations:
            rounded = 1.0 if math.isclose(temperature, 1.0) else float(temperature)
            way = _Way(rounded, truncation.share, truncation.count)
            likelihood = drawn
            if way.is_truncated:
                kept = _kept(probabilities, way)
                mass = (probabilities * kept).sum(axis=1)
                likelihood = drawn * ((1 - _STRAY) * kept[np.arange(len(rank)), rank] / mass + _STRAY)
            yield way, float((np.log(likelihood) - reported).sum())


def _plainest(gains: dict[_Way, float]) -> tuple[_Way, float]:
    """The best way with both numbers, or with one or none if a further number adds little."""
    whole, as_reported = ([w for w in gains if not w.is_truncated], [w for w in gains if w.temperature == 1.0])
    groups = [_Way()], whole, as_reported, [*gains]
    nothing, hotter, truncated, both = (max(group, key=gains.__getitem__) for group in groups)
    one = max(hotter, truncated, key=gains.__getitem__)
    chosen = both if gains[both] > gains[one] + _CLEARLY else one
    chosen = chosen if gains[chosen] > gains[nothing] else nothing
    return chosen, gains[chosen]


def _probabilities(log_q: Floats, temperature: float) -> Floats:
    """[n, K + 1] of the reported tokens and of all others together, each assumed as likely as the last reported one."""
    inverse, q = 1.0 / temperature, np.exp(log_q)
    others = np.maximum(1.0 - q.sum(axis=1, keepdims=True), _LEAST)
    last = np.where(q > 0, q, 1.0).min(axis=1, keepdims=True)
    weights = np.concatenate([q**inverse, others * last ** (inverse - 1.0)], axis=1)
    return weights / weights.sum(axis=1, keepdims=True)


def _of_drawn(probabilities: Floats, rank: Integers) -> Floats:
    return np.maximum(probabilities[np.arange(len(rank)), rank], 1e-300)


def _kept(probabilities: Floats, way: _Way) -> NDArray[np.bool_]:
    """[n, K] which of the tokens can be drawn."""
    kept = probabilities > 0
    if way.share is not None:
        kept &= probabilities.cumsum(axis=1) - probabilities < way.share
    if way.count is not None:
        kept &= np.arange(probabilities.shape[1]) < way.count
    return kept


def _temperature(log_q: Floats, rank: Integers, way: _Way) -> float:
    """The most likely temperature over the reported tokens that the way keeps, by Newton's method on its inverse."""
    inverse = 1.0 / way.temperature
    kept = _kept(_probabilities(log_q, way.temperature), way)
    inside = kept[np.arange(len(rank)), rank] & (rank < log_q.shape[1])
    log_q, kept, rank = log_q[inside], kept[inside, :-1], rank[inside]
    drawn = log_q[np.arange(len(rank)), rank]
    for _ in range(20):
        weights = np.where(kept, np.exp(inverse * (log_q - log_q[:, :1])), 0.0)
        weights /= weights.sum(axis=1, keepdims=True)
        values = np.where(kept, log_q, 0.0)
        mean = (weights * values).sum(axis=1)
        variance = (weights * values**2).sum(axis=1) - mean**2
        inverse = float(np.clip(inverse + (drawn - mean).sum() / max(float(variance.sum()), 1e-12), 0.2, 5.0))
    return 1.0 / inverse
