"""Causes that the values themselves show: a grid, an offset, another vocabulary."""

import numpy as np

from megatron_pg.mismatch.causes import Test, cannot_tell, decided
from megatron_pg.mismatch.gap import Booleans, Floats, Gap, Integers
from megatron_pg.mismatch.inference import binomial_tail, mean_over, p_above

_LEAST = 0.25  # nats: a softmax in float32 rounds smaller log-probabilities to few bits by itself
_ON_GRID_BY_CHANCE = 2.0**-8  # at 0.25 nats and logits up to 64; 2^-16 for exact float32 values
_BLOCK = 32  # consecutive tokens that are aligned together
_LAGS = (-2, -1, 1, 2)


# --- bfloat16 ---


def on_grid(values: Floats) -> Booleans:
    """[T] whether bfloat16 holds the value: a float32 whose last 16 bits are 0."""
    single = values.astype(np.float32)
    return (single == values.astype(np.float64).astype(np.float32)) & ((single.view(np.uint32) & 0xFFFF) == 0)


def grid(gap: Gap, level: float) -> Test:
    """Share of values on bfloat16's grid, which hits a float32 by chance once in 2^16 and, after cancellation, once in 2^8."""
    shares, p = {}, 1.0
    for side in ("engine", "trainer"):
        values = getattr(gap, side)
        values = values[np.abs(values) >= _LEAST]
        hits = int(on_grid(values).sum())
        shares[side] = hits / max(len(values), 1)
        p = min(p, 2 * binomial_tail(hits, len(values), _ON_GRID_BY_CHANCE))
    evidence = f"{shares['engine']:.1%} of the engine's and {shares['trainer']:.1%} of the trainer's values are on bfloat16's grid"
    return decided("bfloat16_grid", p, level, max(shares.values()) >= 0.05, evidence, share=shares)


def rounding_scale(gap: Gap) -> Floats:
    """[T] the standard deviation that rounding to bfloat16 has brought into d, 0 where neither value is on the grid."""
    variance = np.zeros(len(gap.engine))
    for values in (gap.engine, gap.trainer):
        _, exponent = np.frexp(values)
        variance += np.where(on_grid(values) & (values != 0), np.ldexp(1.0, exponent - 8) ** 2 / 12, 0.0)
    return np.sqrt(variance)


# --- an offset ---


def _blocks(gap: Gap) -> np.ndarray:
    """[T] the number of the block of consecutive tokens that a token is in."""
    gaps = (np.diff(gap.position, prepend=-2) != 1) | (np.diff(gap.document, prepend=-1) != 0)
    runs = np.cumsum(gaps)
    begin = np.flatnonzero(gaps)[runs - 1]
    return np.cumsum(np.diff(runs * 2**32 + (np.arange(len(runs)) - begin) // _BLOCK, prepend=-1) != 0) - 1


def _distances(gap: Gap, lag: int, blocks: np.ndarray) -> tuple[Floats, np.ndarray]:
    """Mean of min(|log π[t] - log q[t + lag]|, 1) of every block, and the number of pairs that it is over."""
    size = int(blocks[-1]) + 1
    t = np.arange(max(0, -lag), len(blocks) - max(0, lag))
    t = t[blocks[t] == blocks[t + lag]]
    distance = np.minimum(np.abs(gap.trainer[t] - gap.engine[t + lag]), 1.0)
    pairs = np.bincount(blocks[t], minlength=size)
    return np.bincount(blocks[t], weights=distance, minlength=size) / np.maximum(pairs, 1), pairs


def shift(gap: Gap, level: float) -> tuple[Test, dict[int, Booleans]]:
    """Blocks of 32 tokens that agree better at another lag; the test, and for each such lag the documents [D] that have it."""
    blocks = _blocks(gap)
    here, pairs = _distances(gap, 0, blocks)
    usable = (pairs >= 8) & (here > 0.1)
    if not (pairs >= 8).any():
        return cannot_tell("shift", "no document has 8 consecutive trained tokens"), {}
    best, best_lag = here / 2, np.zeros(len(here), int)
    for lag in _LAGS:
        there, _ = _distances(gap, lag, blocks)
        better = usable & (there < best)
        best, best_lag = np.where(better, there, best), np.where(better, lag, best_lag)
    votes = {lag: int((best_lag == lag).sum()) for lag in _LAGS}
    lag = max(votes, key=votes.__getitem__)
    total, others = int((pairs >= 8).sum()), sum(votes.values()) - votes[lag]
    share, p = votes[lag] / total, binomial_tail(votes[lag], total, 0.002)
    is_large = share >= 0.02 and votes[lag] >= max(3, 3 * others)
    evidence = f"{share:.1%} of {total} blocks of {_BLOCK} tokens agree when the trainer's values move by {lag:+d}"
    test = decided("shift", p, level, is_large, evidence, lag=lag, share=share)
    documents = {}
    if test.outcome == "found":
        of_block = gap.document[np.flatnonzero(np.diff(blocks, prepend=-1))]
        size = len(gap.step)
        voted = np.bincount(of_block, weights=best_lag == lag, minlength=size)
        documents = {lag: voted > 0.5 * np.bincount(of_block, weights=usable, minlength=size), 0: voted == 0}
    return test, documents


def realigned(gap: Gap, documents: dict[int, Booleans]) -> Gap:
    """The tokens of documents that are aligned, or that become so as a whole; the others are left out."""
    (lag,) = documents.keys() - {0}
    shifted = documents[lag][gap.document] & ~documents[0][gap.document]
    kept = np.flatnonzero(documents[0][gap.document] | shifted)
    other = np.where(shifted[kept], kept + lag, kept)
    inside = (other >= 0) & (other < len(gap.document))
    kept, other = kept[inside], other[inside]
    same = (gap.document[kept] == gap.document[other]) & (
        gap.position[other] - gap.position[kept] == np.where(shifted[kept], lag, 0)
    )
    found = gap.where(np.isin(np.arange(len(gap.document)), []))  # the tokens are the engine's
    columns = {name: getattr(gap, name)[other[same]] for name in ("engine", "ids", "position", "document")}
    return Gap(
        **columns,
        trainer=gap.trainer[kept[same]],
        step=found.step,
        weight_version=found.weight_version,
        groups=found.groups,
    )


# --- a vocabulary ---


def agreement(gap: Gap) -> float:
    """1 - mean min(|d|, 1) over that of pairs of unrelated tokens: 1 for equal sides, 0 for unrelated ones."""
    order = np.random.default_rng(0).permutation(len(gap.engine))
    apart = np.minimum(np.abs(gap.trainer - gap.engine[order]), 1.0).mean()
    return float(1 - np.minimum(np.abs(gap.difference), 1.0).mean() / apart) if apart > 0 else 1.0


def _elsewhere(gap: Gap, mask: Booleans) -> Integers:
    """[T] how many tokens of the mask have the same id in other documents."""
    _, of_id = np.unique(gap.ids, return_inverse=True)
    _, of_both = np.unique(gap.ids * 2**32 + gap.document, return_inverse=True)
    return (
        np.bincount(of_id[mask], minlength=len(mask))[of_id] - np.bincount(of_both[mask], minlength=len(mask))[of_both]
    )


def vocabulary(gap: Gap, level: float) -> tuple[Test, Booleans]:
    """Whole: the sides are unrelated at every token. In part: tokens that the trainer does not expect have ids of their own.

    Returns the test and [T] the tokens that remain when those ids are left out (none where it is the whole vocabulary).
    """
    related = agreement(gap)
    if related < 0.25:
        mean = mean_over(gap.difference, gap.observation)
        evidence = f"the sides agree as unrelated numbers do (agreement {related:.2f} of 1), log π - log q is {mean.value:.1f} nats on average"
        p = p_above(mean_over(-gap.difference, gap.observation))
        return decided("vocabulary", p, level, True, evidence, share=1.0), np.zeros(len(gap.ids), bool)
    gross = gap.difference < np.minimum(
        gap.engine, -2.0
    )  # less than q squared: no temperature up to twice the other does this
    of_id, gross_of_id = _elsewhere(gap, np.ones(len(gap.ids), bool)), _elsewhere(gap, gross)
    judged = (of_id >= 1) & (gap.position >= _BLOCK // 4)
    consistent = (gross_of_id >= 0.5 * of_id) & judged
    hits, chance = gross & consistent, float(gross[judged].mean()) if judged.any() else 0.0
    among = float(hits.sum() / max((gross & judged).sum(), 1))
    p = (
        p_above(mean_over((hits - chance * consistent)[judged].astype(float), gap.observation[judged]))
        if judged.any()
        else 1.0
    )
    share = float(hits[judged].mean()) if judged.any() else 0.0
    bad = np.unique(gap.ids[hits])
    evidence = (
        f"{among:.0%} of the {int((gross & judged).sum())} tokens of which the trainer gives less than the engine's probability "
        f"squared have {len(bad)} ids of which most tokens are so"
    )
    test = decided(
        "vocabulary", p, level, share >= 0.002 and among >= 0.4, evidence, share=share, ids=bad[:20].tolist()
    )
    return test, ~np.isin(gap.ids, bad)
