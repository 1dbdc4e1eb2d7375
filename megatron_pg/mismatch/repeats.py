"""Whether d repeats: with other weights a token has the same d again; dropout and rounding of logits act like
chance."""

from dataclasses import dataclass

import numpy as np

from megatron_pg.mismatch.gap import Floats, Gap, Integers
from megatron_pg.mismatch.inference import FEWEST, mean_over, p_above
from megatron_pg.mismatch.noise import bins_of, noise_of

BY_CHANCE = 0.1  # of the variance of d; the rounding of logits repeats less
OF_WEIGHTS = 0.2  # of the variance of d; other weights repeat more, dropout less
_MOST = 4.0  # scales that a token counts with at most
_LEAST_SURPRISE = 0.05  # nats
_FEWEST_TOKENS = 200


@dataclass(frozen=True, slots=True)
class Share:
    """A share of the variance of d, and the p-values of the share being at most, and at least, a bound."""

    value: float
    p_above: float
    p_below: float


def at_pairs(gap: Gap, bound: float = BY_CHANCE) -> Share | None:
    """Share of the variance of d that repeats at the same two tokens in other documents; None if there are too few.

    Sums of d over the other documents are unbiased, so the share is 0 if d is chance.
    """
    if gap.pair is None:
        return None
    noise = noise_of(gap)
    scale = np.maximum(noise.scale[bins_of(gap)], 1e-9)
    uncertain = gap.surprise > _LEAST_SURPRISE
    z = np.clip((gap.difference - noise.center[bins_of(gap)]) / scale, -_MOST, _MOST)[uncertain]
    document = gap.document[uncertain]
    _, pair = np.unique(gap.pair[uncertain], return_inverse=True)
    _, in_document = np.unique(pair * len(gap.step) + document, return_inverse=True)
    total, count = (np.bincount(pair, w)[pair] - np.bincount(in_document, w)[in_document] for w in (z, np.ones(len(z))))
    others = count > 0
    if others.sum() < _FEWEST_TOKENS or len(np.unique(document[others])) < FEWEST:
        return None
    z, mean, weight = z[others], total[others] / count[others], np.minimum(count[others], 10.0)
    return _share(weight * z * mean, weight * z * z, bound, document[others])


def at_places(gap: Gap, side: Floats, bound: float) -> Share | None:
    """Variance of a side between samples of a step with the same tokens so far, over the variance of d; None if too
    few."""
    if gap.place is None:
        return None
    uncertain = gap.surprise > _LEAST_SURPRISE
    _, number = np.unique(gap.place[uncertain], return_inverse=True)
    same = np.bincount(number)[number] > 1
    if same.sum() < _FEWEST_TOKENS / 4:
        return None
    side, d, number = side[uncertain][same], gap.difference[uncertain][same], number[same]
    count = np.bincount(number)[number]
    rest = side - (np.bincount(number, side)[number] / count)
    first = np.full(number.max() + 1, len(gap.step))
    np.minimum.at(first, number, gap.document[uncertain][same])  # samples of one prompt are one observation
    if len(np.unique(first[number])) < FEWEST:
        return None
    return _share(np.minimum(rest**2 * count / (count - 1), 1.0), np.minimum(d**2, 1.0), bound, first[number])


def _share(part: Floats, whole: Floats, bound: float, observation: Integers) -> Share:
    more = mean_over(part - bound * whole, observation)
    less = mean_over(bound * whole - part, observation)
    return Share(float(part.sum() / max(whole.sum(), 1e-12)), p_above(more), p_above(less))


def shown(pairs: Share | None) -> str:
    """The result of `at_pairs`, to append to the evidence."""
    if pairs is None:
        return ""
    return (
        f"; {pairs.value:.0%} of the variance repeats at the same two tokens in other documents (other weights: above "
        f"{OF_WEIGHTS:.0%})"
    )
