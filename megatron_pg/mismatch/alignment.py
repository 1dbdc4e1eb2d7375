"""Whether both log-probabilities are of the same tokens, which every other cause but an offset and a bfloat16 grid assumes."""

from dataclasses import replace

import numpy as np

from megatron_pg.mismatch.causes import Answer, decided
from megatron_pg.mismatch.gap import Booleans, Floats, Gap, Integers
from megatron_pg.mismatch.inference import binomial_tail, mean_over, p_above

UNRELATED = 0.3  # rank correlation below which the sides have nothing in common
_LARGEST = 3.0  # of d in e^d
_POSITIONS = 128  # of a response, by which documents are compared
_FEWEST = 16  # positions that two documents must share
_MOST = 2000  # documents whose place is searched
_APART = 0.1  # nats: mean distance below which a document fits its own values
_BETTER = 0.5  # of the distance to its own and to the usual document's values, where a document fits another's
_BY_CHANCE = 1e-3  # share of documents that fit another's values so well


def agreement(gap: Gap) -> float:
    """Spearman's correlation of the two sides; 1 where a side is constant, as a greedy engine's is."""
    if min(np.ptp(gap.trainer), np.ptp(gap.engine)) < 1e-3 or (gap.engine < -0.05).mean() < 0.02:
        return 1.0
    ranks = [np.unique(side, return_inverse=True, return_counts=True)[1:] for side in (gap.trainer, gap.engine)]
    middle = [(np.cumsum(counts) - (counts - 1) / 2)[index] for index, counts in ranks]
    return float(np.corrcoef(middle[0], middle[1])[0, 1])


def excess(gap: Gap) -> tuple[float, float]:
    """The smaller one of E[π/q] - 1 and E[q/π] - 1, with d cut at 3 nats, and the p-value of: it is at most 0.

    One of them is the mass that a distribution has in what the tokens were drawn from, if both sides are of these tokens and one side
    drew them: at most 0 then, whatever else differs.
    """
    ratios = [np.expm1(np.minimum(d, _LARGEST)) for d in (gap.difference, -gap.difference)]
    means = [mean_over(each, gap.observation) for each in ratios]
    return min(each.value for each in means), max(p_above(each) for each in means)


def doubt(gap: Gap, level: float) -> str:
    """Why the sides may be of different tokens; empty where they agree."""
    related, (more, p) = agreement(gap), excess(gap)
    if related < UNRELATED:
        return f"the sides may be of different tokens: their rank correlation is {related:.2f}"
    if more > 0.02 and p <= level:
        return f"some values may be of different tokens: E[π/q] and E[q/π] are {1 + more:.2f} or more, which draws from either side exclude"
    return ""


def other_samples(gap: Gap, level: float) -> tuple[Answer, Gap]:
    """Documents whose trainer's values fit another document's engine values; the test, and the tokens at the place where they fit.

    Where no other document fits, both ratios above 1 show that the values are of other tokens.
    """
    own, usual, best, partner = _distances(gap)
    judged = ~np.isnan(own)
    number = int(judged.sum())
    moved = judged & (best < _BETTER * own) & (best < _BETTER * usual)
    share, p = int(moved.sum()) / max(number, 1), binomial_tail(int(moved.sum()), number, _BY_CHANCE)
    related, (more, p_more) = agreement(gap), excess(gap)
    numbers = f"rank correlation {related:.2f}, E[π/q] and E[q/π] at least {1 + more:.2f}"
    is_moved = moved.sum() >= 3 and p <= level
    evidence = f"the trainer's values of {share:.1%} of {number} documents fit the engine's values of another document, not their own; {numbers}"
    if not is_moved and more > 0.05 and p_more <= level:
        evidence, p = f"the values are of other tokens, and of no other document in these files; {numbers}", p_more
    test = decided("other_samples", p, level, is_moved or more > 0.05, evidence, share=share, correlation=related)
    if test.outcome != "found":
        return test, gap
    fine = judged & ((own < _APART) | (own < _BETTER * usual)) & ~moved
    return test, _returned(gap, fine, np.where(moved, partner, -1))


def _distances(gap: Gap) -> tuple[Floats, Floats, Floats, Integers]:
    """[D] each: mean of min(|log π - log q|, 1) to the document's own values, to the usual document's, to the nearest other one's, which it is.

    NaN where fewer than 16 tokens are known. Only documents that do not fit their own values are compared with others.
    """
    size, early = len(gap.step), gap.position < _POSITIONS
    at = gap.document[early], gap.position[early]
    trainer, engine, there = (np.zeros((size, _POSITIONS), np.float32) for _ in range(3))
    trainer[at], engine[at], there[at] = gap.trainer[early], gap.engine[early], 1.0
    count = there.sum(axis=1)
    own = (np.minimum(np.abs(trainer - engine), 1.0).sum(axis=1) / np.maximum(count, 1)).astype(float)
    own[count < _FEWEST] = np.nan
    usual, best, partner = np.full(size, np.inf), np.full(size, np.inf), np.zeros(size, int)
    for i in np.flatnonzero(own > _APART)[:_MOST]:
        both = there * there[i]
        common = both.sum(axis=1)
        distance = (np.minimum(np.abs(trainer[i] - engine), 1.0) * both).sum(axis=1) / np.maximum(common, 1)
        distance[(common < _FEWEST) | (np.arange(size) == i)] = np.inf
        known = distance[np.isfinite(distance)]
        if len(known):
            usual[i], best[i], partner[i] = np.median(known), known.min(), distance.argmin()
    return own, usual, best, partner


def _returned(gap: Gap, fine: Booleans, partner: Integers) -> Gap:
    """The tokens of documents that are fine, and those of documents that have a partner [D] (-1: none) at the partner's tokens."""
    stay = np.flatnonzero(fine[gap.document])
    places = gap.document * 2**32 + gap.position
    moved = np.flatnonzero(partner[gap.document] >= 0)
    wanted = partner[gap.document[moved]] * 2**32 + gap.position[moved]
    found = np.minimum(np.searchsorted(places, wanted), len(places) - 1)
    moved, found = moved[places[found] == wanted], found[places[found] == wanted]
    trainer, engine = np.concatenate([stay, moved]), np.concatenate([stay, found])
    engine, first = np.unique(engine, return_index=True)  # in order, each token once
    return replace(gap.where(engine), trainer=gap.trainer[trainer[first]])
