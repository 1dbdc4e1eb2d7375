"""Whether both log-probabilities belong to the same tokens; all causes but an offset and a bfloat16 grid assume it."""

from dataclasses import replace

import numpy as np

from megatron_pg.mismatch.causes import Answer, decided
from megatron_pg.mismatch.gap import Booleans, Floats, Gap, Integers
from megatron_pg.mismatch.inference import binomial_tail, mean_over, p_above

UNRELATED = 0.3  # rank correlation below which the sides are unrelated
_CERTAIN = 0.05  # nats of surprise: a token with less is certain
_LARGEST = 3.0  # of d in e^d
_POSITIONS = 128  # of a response, by which documents are compared
_FEWEST = 32  # positions that two documents must share: unrelated ones correlate by 0.8 in fewer than one of 10^8 pairs
_LEAST_VARIANCE = 0.01  # of sqrt(-log p): less is a document of which both sides are certain
_MOST = 2000  # documents whose place is searched
_CHUNK = 256  # of them at once, which bounds the memory
_FITS_OWN = 0.5  # least correlation of a document with its own values, even with much dropout or old weights
_FITS_OTHER = 0.8  # correlation that identifies the document of the values, at any temperature
_SAME, _ALL = "ip,ip->i", "ip,jp->ij"  # pairs of rows: each with its own, or with all
_BY_CHANCE = 1e-4  # share of documents that fit another's values so well and not their own


def agreement(gap: Gap) -> float:
    """Spearman's correlation of the two sides where the engine is uncertain; 1 if a side is constant, as with a greedy
    engine.

    An engine that truncates has log q = 0 at every token that it left alone, which orders nothing.
    """
    uncertain = gap.engine < -_CERTAIN
    sides = gap.trainer[uncertain], gap.engine[uncertain]
    if uncertain.mean() < 0.02 or min(np.ptp(side) for side in sides) < 1e-3:
        return 1.0
    ranks = [np.unique(side, return_inverse=True, return_counts=True)[1:] for side in sides]
    middle = [(np.cumsum(counts) - (counts - 1) / 2)[index] for index, counts in ranks]
    return float(np.corrcoef(middle[0], middle[1])[0, 1])


def excess(gap: Gap) -> tuple[float, float]:
    """The smaller of E[π/q] - 1 and E[q/π] - 1, with d clipped at 3 nats, and the p-value of: it is at most 0.

    If both sides belong to these tokens and one side drew them, one of the two is a probability mass minus 1, so at
    most 0 under every other cause.
    """
    ratios = [np.expm1(np.minimum(d, _LARGEST)) for d in (gap.difference, -gap.difference)]
    means = [mean_over(ratio, gap.observation) for ratio in ratios]
    return min(mean.value for mean in means), max(p_above(mean) for mean in means)


def doubt(gap: Gap, level: float) -> str:
    """Why the sides may belong to different tokens; empty if they agree."""
    related, (more, p) = agreement(gap), excess(gap)
    if related < UNRELATED:
        return f"the sides may belong to different tokens: their rank correlation is {related:.2f}"
    if more > 0.02 and p <= level:
        return (
            f"some values may belong to different tokens: E[π/q] and E[q/π] are {1 + more:.2f} or more, which is "
            "impossible for draws from either side"
        )
    return ""


def other_samples(gap: Gap, level: float) -> tuple[Answer, Gap]:
    """Documents whose trainer's values fit another document's engine values; the test, and the realigned tokens.

    If no other document fits, both ratios above 1 show that the values belong to other tokens. Then the result has the
    tokens of documents that fit their own values if most do, and no tokens otherwise.
    """
    own_fit, best, partner = _fits(gap)
    judged = ~np.isnan(own_fit)
    number = int(judged.sum())
    moved = judged & (own_fit < _FITS_OWN) & (best > _FITS_OTHER)
    share, p = int(moved.sum()) / max(number, 1), binomial_tail(int(moved.sum()), number, _BY_CHANCE)
    related, (more, p_more) = agreement(gap), excess(gap)
    numbers = f"rank correlation {related:.2f}, E[π/q] and E[q/π] at least {1 + more:.2f}"
    is_moved = moved.sum() >= 2 and p <= level
    evidence = (
        f"the trainer's values of {share:.1%} of {number} documents fit the engine's values of another document, not "
        f"their own; {numbers}"
    )
    if not is_moved and more > 0.05 and p_more <= level:
        evidence, p = f"the values belong to other tokens, and to no other document in these files; {numbers}", p_more
    test = decided("other_samples", p, level, is_moved or more > 0.05, evidence, share=share, correlation=related)
    if test.outcome != "found":
        return test, gap
    fine = judged & (own_fit >= _FITS_OWN)
    if not is_moved and fine.sum() < 0.5 * number:
        fine[:] = False
    return test, _returned(gap, fine, np.where(moved & is_moved, partner, -1))


def _fits(gap: Gap) -> tuple[Floats, Floats, Integers]:
    """[D] each: correlation of the trainer's values with the document's own engine values, the best with another's, and
    whose.

    NaN if fewer than 32 tokens are known or one side is nearly constant. Other documents are tried only if the own
    values do not fit.
    """
    size, early = len(gap.step), gap.position < _POSITIONS
    at = gap.document[early], gap.position[early]
    trainer, engine, there = (np.zeros((size, _POSITIONS)) for _ in range(3))
    root = lambda side: np.sqrt(np.maximum(-side[early], 0.0))  # noqa: E731 a few unlikely tokens do not decide alone
    trainer[at], engine[at], there[at] = root(gap.trainer), root(gap.engine), 1.0
    own_fit = _correlations(_SAME, trainer, engine, there, there)
    best, partner = np.full(size, -1.0), np.zeros(size, int)
    doubtful = np.flatnonzero(own_fit < _FITS_OWN)[:_MOST]
    for rows in np.split(doubtful, range(_CHUNK, len(doubtful), _CHUNK)):
        fits = _correlations(_ALL, trainer[rows], engine, there[rows], there)
        fits[np.isnan(fits)] = -1.0  # no partner
        fits[np.arange(len(rows)), rows] = -1.0
        best[rows], partner[rows] = fits.max(axis=1), fits.argmax(axis=1)
    return own_fit, best, partner


def _correlations(pairs: str, x: Floats, y: Floats, has_x: Floats, has_y: Floats) -> Floats:
    """Pearson's correlation of rows of x and y [_, P] over the positions that both have; NaN if it is not defined."""
    n = np.maximum(np.einsum(pairs, has_x, has_y, optimize=True), 1.0)
    mean = lambda a, b: np.einsum(pairs, a, b, optimize=True) / n  # noqa: E731
    mean_x, mean_y = mean(x, has_y), mean(has_x, y)
    var_x, var_y = mean(x**2, has_y) - mean_x**2, mean(has_x, y**2) - mean_y**2
    is_known = (n >= _FEWEST) & (np.minimum(var_x, var_y) > _LEAST_VARIANCE)
    return np.where(is_known, (mean(x, y) - mean_x * mean_y) / np.sqrt(np.where(is_known, var_x * var_y, 1.0)), np.nan)


def _returned(gap: Gap, fine: Booleans, partner: Integers) -> Gap:
    """The tokens of documents that are fine, and of documents with a partner [D] (-1: none), at the partner's
    tokens."""
    stay = np.flatnonzero(fine[gap.document])
    places = gap.document * 2**32 + gap.position
    moved = np.flatnonzero(partner[gap.document] >= 0)
    wanted = partner[gap.document[moved]] * 2**32 + gap.position[moved]
    targets = np.minimum(np.searchsorted(places, wanted), len(places) - 1)
    moved, targets = moved[places[targets] == wanted], targets[places[targets] == wanted]
    trainer, engine = np.concatenate([stay, moved]), np.concatenate([stay, targets])
    engine, first = np.unique(engine, return_index=True)  # in order, each token once
    return replace(gap.where(engine), trainer=gap.trainer[trainer[first]])
