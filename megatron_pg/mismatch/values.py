"""Causes that the values themselves show: a grid, an offset, another vocabulary."""

from dataclasses import replace

import numpy as np

from megatron_pg.mismatch.alignment import UNRELATED, agreement
from megatron_pg.mismatch.causes import Answer, cannot_tell, decided
from megatron_pg.mismatch.gap import Booleans, Floats, Gap, Integers
from megatron_pg.mismatch.inference import binomial_tail, mean_over, p_above

_LEAST = 0.25  # nats: a float32 softmax itself rounds smaller log-probabilities to few bits
_ON_GRID_BY_CHANCE = 2.0**-8  # at 0.25 nats and logits up to 64; 2^-16 for exact float32 values
_BLOCK = 32  # consecutive tokens that are aligned together
_LAGS = (-2, -1, 1, 2)


# --- bfloat16 ---


def on_grid(values: Floats) -> Booleans:
    """[T] whether bfloat16 holds the value: a float32 whose last 16 bits are 0."""
    single = values.astype(np.float32)
    return (single == values.astype(np.float64).astype(np.float32)) & ((single.view(np.uint32) & 0xFFFF) == 0)


def grid(gap: Gap, level: float) -> Answer:
    """Share of values on bfloat16's grid; a float32 is there by chance once in 2^16, after cancellation once in 2^8."""
    shares, p = {}, 1.0
    for side in ("engine", "trainer"):
        values = getattr(gap, side)
        values = values[np.abs(values) >= _LEAST]
        hits = int(on_grid(values).sum())
        shares[side] = hits / max(len(values), 1)
        p = min(p, 2 * binomial_tail(hits, len(values), _ON_GRID_BY_CHANCE))
    evidence = (
        f"{shares['engine']:.1%} of the engine's and {shares['trainer']:.1%} of the trainer's values are on bfloat16's "
        "grid"
    )
    return decided("bfloat16_grid", p, level, max(shares.values()) >= 0.05, evidence, share=shares)


def rounding_scale(gap: Gap) -> Floats:
    """[T] standard deviation that rounding to bfloat16 adds to d, 0 if neither value is on the grid."""
    variance = np.zeros(len(gap.engine))
    for values in (gap.engine, gap.trainer):
        _, exponent = np.frexp(values)
        variance += np.where(on_grid(values) & (values != 0), np.ldexp(1.0, exponent - 8) ** 2 / 12, 0.0)
    return np.sqrt(variance)


# --- an offset ---


def _blocks(gap: Gap) -> np.ndarray:
    """[T] number of the block of consecutive tokens that contains the token."""
    gaps = (np.diff(gap.position, prepend=-2) != 1) | (np.diff(gap.document, prepend=-1) != 0)
    runs = np.cumsum(gaps)
    begin = np.flatnonzero(gaps)[runs - 1]
    return np.cumsum(np.diff(runs * 2**32 + (np.arange(len(runs)) - begin) // _BLOCK, prepend=-1) != 0) - 1


def _distance(gap: Gap, trainer: Integers, engine: Integers) -> Floats:
    """min(|log π - log q|, 1) of these tokens of both sides."""
    return np.minimum(np.abs(gap.trainer[trainer] - gap.engine[engine]), 1.0)


def _distances(gap: Gap, lag: int, blocks: np.ndarray) -> tuple[Floats, Floats]:
    """Mean distance of log π[t] and log q[t + lag] in every block, and the smaller one at lag 0: of t, or of t + lag.

    A lag leaves out tokens at the ends of a block. If only those disagree, the block agrees at no other lag.
    """
    t = np.arange(max(0, -lag), len(blocks) - max(0, lag))
    t = t[blocks[t] == blocks[t + lag]]
    pairs = np.maximum(np.bincount(blocks[t], minlength=int(blocks[-1]) + 1), 1)

    def mean(trainer: Integers, engine: Integers) -> Floats:
        return np.bincount(blocks[t], weights=_distance(gap, trainer, engine), minlength=len(pairs)) / pairs

    return mean(t, t + lag), np.minimum(mean(t, t), mean(t + lag, t + lag))


def shift(gap: Gap, level: float) -> tuple[Answer, Gap]:
    """Blocks of 32 consecutive tokens that agree at another lag but not at 0; the test, and the realigned tokens."""
    blocks = _blocks(gap)
    has_pairs = np.bincount(blocks) >= 8
    if not has_pairs.any():
        return cannot_tell("shift", "no document has 8 consecutive trained tokens"), gap
    best, best_lag = np.full(len(has_pairs), np.inf), np.zeros(len(has_pairs), int)
    for lag in _LAGS:
        there, here = _distances(gap, lag, blocks)
        better = has_pairs & (here > 0.1) & (there < np.minimum(best, 0.7 * here))
        best, best_lag = np.where(better, there, best), np.where(better, lag, best_lag)
    votes = {lag: int((best_lag == lag).sum()) for lag in _LAGS}
    lag = max(votes, key=votes.__getitem__)
    total, others = int(has_pairs.sum()), sum(votes.values()) - votes[lag]
    # Unrelated sides agree by chance in one block of a hundred, and then at any lag.
    share, p = votes[lag] / total, binomial_tail(votes[lag], total, 0.01)
    is_large = share >= 0.02 and votes[lag] >= max(3, 3 * others)
    evidence = f"{share:.1%} of {total} blocks of {_BLOCK} tokens agree when the trainer's values move by {lag:+d}"
    test = decided("shift", p, level, is_large, evidence, lag=lag, share=share)
    return test, realigned(gap, lag) if test.outcome == "found" else gap


def realigned(gap: Gap, lag: int) -> Gap:
    """The tokens of all documents at lag 0, or at `lag` for documents that agree better there; unpaired tokens are
    dropped."""
    pairs = [_pairs(gap, shift_by) for shift_by in (0, lag)]
    size = len(gap.step)
    sums = [np.bincount(gap.document[t], _distance(gap, t, other), size) for t, other in pairs]
    moves = sums[1] < sums[0]
    (stay, _), (t, other) = pairs
    stay, moved = stay[~moves[gap.document[stay]]], moves[gap.document[t]]
    order = np.argsort(np.concatenate([stay, t[moved]]), kind="stable")
    trainer, engine = (np.concatenate([stay, indices[moved]])[order] for indices in (t, other))
    return replace(gap.where(engine), trainer=gap.trainer[trainer])  # the tokens are those of the engine


def _pairs(gap: Gap, lag: int) -> tuple[Integers, Integers]:
    """Tokens t, and the tokens of the same document `lag` positions later."""
    t = np.arange(max(0, -lag), len(gap.position) - max(0, lag))
    fits = (gap.document[t] == gap.document[t + lag]) & (gap.position[t + lag] - gap.position[t] == lag)
    return t[fits], t[fits] + lag


# --- a vocabulary ---


def _elsewhere(gap: Gap, mask: Booleans) -> Integers:
    """[T] how many tokens of the mask have the same id in other documents."""
    _, of_id = np.unique(gap.ids, return_inverse=True)
    _, of_both = np.unique(gap.ids * 2**32 + gap.document, return_inverse=True)
    return (
        np.bincount(of_id[mask], minlength=len(mask))[of_id] - np.bincount(of_both[mask], minlength=len(mask))[of_both]
    )


def vocabulary(gap: Gap, level: float) -> tuple[Answer, Booleans]:
    """Whole vocabulary: the sides are unrelated at every token. Part of it: unexpected tokens share a few ids.

    Returns the test, and [T] the tokens without those ids (no token if it is the whole vocabulary).
    """
    related = agreement(gap)
    # Less than q squared: no temperature up to twice the other one does this.
    gross = gap.difference < np.minimum(gap.engine, -2.0)
    if gap.difference.mean() < -0.5 and (related < UNRELATED or gross.mean() > 0.5):
        mean = mean_over(gap.difference, gap.observation)
        evidence = (
            f"the sides are nearly unrelated (rank correlation {related:.2f}), log π - log q is {mean.value:.1f} nats "
            "on average"
        )
        p = p_above(mean_over(-gap.difference, gap.observation))
        return decided("vocabulary", p, level, True, evidence, share=1.0), np.zeros(len(gap.ids), bool)
    of_id, gross_of_id = _elsewhere(gap, np.ones(len(gap.ids), bool)), _elsewhere(gap, gross)
    judged = (of_id >= 1) & (gap.position >= _BLOCK // 4)
    consistent = (gross_of_id >= 0.5 * of_id) & judged
    hits, p = gross & consistent, _p_hits(gap, gross, consistent)
    number = int((gross & judged).sum())
    among = float(hits.sum() / max(number, 1))
    share = float(hits[judged].mean()) if judged.any() else 0.0
    bad = np.unique(gap.ids[hits])
    evidence = "the trainer's probability is at least the square of the engine's at every token"
    if number:
        evidence = (
            f"the trainer gives {number} tokens less than the square of the engine's probability, and {among:.0%} of "
            f"them have one of {len(bad)} ids for which most tokens are so"
        )
    test = decided(
        "vocabulary", p, level, share >= 0.0005 and among >= 0.3, evidence, share=share, ids=bad[:20].tolist()
    )
    return test, ~np.isin(gap.ids, bad)


def _p_hits(gap: Gap, gross: Booleans, consistent: Booleans) -> float:
    """p-value of: tokens whose id is gross in other documents are gross as often as all tokens of their document.

    An id counts once in a document.
    """
    size = np.bincount(gap.document, minlength=len(gap.step))
    rate = np.bincount(gap.document, weights=gross, minlength=len(gap.step)) / np.maximum(size, 1)
    _, cell = np.unique(gap.ids[consistent] * 2**32 + gap.document[consistent], return_inverse=True)
    tokens = np.bincount(cell)
    hits = int((np.bincount(cell, gross[consistent]) >= 0.5 * tokens).sum())
    chance = float(rate[gap.document[consistent]].mean()) if len(cell) else 0.0
    return binomial_tail(hits, len(tokens), max(chance, 1e-6)) if len(tokens) else 1.0
