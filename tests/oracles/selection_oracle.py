"""Independent oracle of the corrections that choose tokens of the whole step: loops over Python numbers, means as
fractions.

    cov_i = (A_i - mean A)(o_i - mean o),  m_i = (o_i - b_i)²,  H_i          of the T trained tokens of the step

    kl_cov       penalises the floor(f T) tokens of the largest cov
    clip_cov     drops floor(f T) tokens, the ones with the largest draws among lo < cov < hi
    m2po         drops the largest m until the mean of the rest is at most hi
    top_entropy  drops the tokens with H below numpy's linear (1 - f) quantile

Of equal numbers that of the earlier token comes first: by the digest of its sample, then by its place in it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

U64 = 2**64


@dataclass
class Row:
    """One sample of the objective."""

    name: tuple  # step, prompt, rollout, response length
    tokens: np.ndarray  # [n] int64
    mask: np.ndarray  # [R] bool
    advantages: np.ndarray
    old: np.ndarray
    rollout: np.ndarray | None = None
    entropies: np.ndarray | None = None


@dataclass
class Rule:
    name: str
    low: float | None = None
    high: float | None = None
    fraction: str | None = None  # as it is written
    seed: int = 0


@dataclass
class Token:
    row: int
    place: int  # in the response
    number: int  # among the trained tokens of its sample
    key: float
    draw: float = 0.0


def digest(*parts: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=8).digest(), "big", signed=True)


def splitmix64(seed: int, number: int) -> int:
    """The number-th output, from 0 on."""
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) % U64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % U64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % U64
    return z ^ z >> 31


def mean(values: Sequence[float]) -> float:
    return float(sum(map(Fraction, values)) / len(values))


def keys_of(rows: Sequence[Row], rule: Rule) -> list[list[float]]:
    """Of the trained tokens of each sample."""
    trained = [np.flatnonzero(row.mask) for row in rows]
    if rule.name == "top_entropy":
        return [[float(row.entropies[k]) for k in at] for row, at in zip(rows, trained, strict=True)]
    if rule.name == "m2po":
        gaps = [[float(row.old[k]) - float(row.rollout[k]) for k in at] for row, at in zip(rows, trained, strict=True)]
        return [[gap * gap for gap in of_row] for of_row in gaps]
    pairs = [[(float(row.advantages[k]), float(row.old[k])) for k in at] for row, at in zip(rows, trained, strict=True)]
    whole = [pair for of_row in pairs for pair in of_row]
    if not whole:
        return pairs
    centre = [mean(values) for values in zip(*whole, strict=True)]
    return [[(a - centre[0]) * (o - centre[1]) for a, o in of_row] for of_row in pairs]


def ordered_tokens(rows: Sequence[Row], rule: Rule) -> list[Token]:
    """All trained tokens of the step in the order of its samples."""
    keys = keys_of(rows, rule)
    names = [digest(repr(row.name).encode(), row.tokens.tobytes(), row.mask.tobytes()) for row in rows]
    fields = [
        [np.array(own, dtype=np.float64), r.old[r.mask], r.advantages[r.mask]]
        for r, own in zip(rows, keys, strict=True)
    ]
    contents = [digest(*(each.tobytes() for each in of_row)) for of_row in fields]
    tokens, seen = [], {}
    for i in sorted(range(len(rows)), key=lambda i: (names[i], contents[i])):
        twin = seen[names[i]] = seen.get(names[i], -1) + 1
        origin = digest(repr((rule.seed, names[i], twin)).encode())
        for number, place in enumerate(np.flatnonzero(rows[i].mask)):
            draw = (splitmix64(origin % U64, number) >> 11) / 2**53
            tokens.append(Token(i, int(place), number, keys[i][number], draw))
    return tokens


def selected_tokens(tokens: list[Token], rule: Rule) -> list[Token]:
    if not tokens:
        return []
    count = 0 if rule.fraction is None else int(Fraction(rule.fraction) * len(tokens))  # towards 0
    by_key = sorted(tokens, key=lambda token: -token.key)  # stable: the earlier of equal ones first
    if rule.name == "kl_cov":
        return by_key[:count]
    if rule.name == "clip_cov":
        among = [token for token in tokens if rule.low < token.key < rule.high]
        return sorted(among, key=lambda token: -token.draw)[:count]
    if rule.name == "m2po":
        rest = sum((Fraction(token.key) for token in tokens), Fraction(0))
        for dropped, token in enumerate(by_key):
            if rest <= Fraction(rule.high) * (len(tokens) - dropped):
                return by_key[:dropped]
            rest -= Fraction(token.key)
        return by_key
    ascending = [Fraction(token.key) for token in reversed(by_key)]
    position = (1 - Fraction(rule.fraction)) * (len(tokens) - 1)
    below = int(position)
    above = min(below + 1, len(tokens) - 1)
    quantile = ascending[below] + (position - below) * (ascending[above] - ascending[below])
    return [token for token in tokens if Fraction(token.key) < quantile]


def select(rows: Sequence[Row], rule: Rule) -> list[np.ndarray]:
    """[R] bool of each sample: what the rule acts on."""
    found = [np.zeros(len(row.mask), dtype=bool) for row in rows]
    for token in selected_tokens(ordered_tokens(rows, rule), rule):
        found[token.row][token.place] = True
    return found


def facts(rows: Sequence[Row], rule: Rule) -> dict[str, float]:
    """What is logged of the choice: where it ends, and how many tokens clip_cov draws from."""
    tokens = ordered_tokens(rows, rule)
    chosen = selected_tokens(tokens, rule)
    if rule.name == "clip_cov":
        return {"selection_candidates": sum(rule.low < token.key < rule.high for token in tokens)}
    ends = chosen if rule.name != "top_entropy" else [token for token in tokens if token not in chosen]
    return {"selection_threshold": min(token.key for token in ends)} if ends else {}
