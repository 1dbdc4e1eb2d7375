"""Causes that show between documents or along them: their start, the age of their weights, which worker made them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from megatron_pg.mismatch.causes import Answer, cannot_tell, decided
from megatron_pg.mismatch.gap import Booleans, Floats, Gap
from megatron_pg.mismatch.inference import FEWEST, mean_over, p_above, tail
from megatron_pg.mismatch.noise import Noise, bins_of, noise_of

_HARMLESS = 0.1  # of log |d|: engines and ages may differ by a tenth
_MOST = 20.0  # scales that a token counts with at most
_LEAST_SURPRISE = 0.05  # nats
_FEWEST_TOKENS = 4  # of a document that counts
_FEWEST_DOCUMENTS = 4  # of a group
_EARLY = 8  # tokens at the start of a response


def _uncertain(gap: Gap) -> Gap:
    """Drop tokens of which both sides are certain: their d is nearly 0 under every cause."""
    return gap.where(gap.surprise > _LEAST_SURPRISE)


def _after_start(gap: Gap) -> Gap:
    """The tokens after the start of their response, if they are enough."""
    late = gap.position >= 4 * _EARLY
    return gap.where(late) if late.sum() > 0.3 * len(late) else gap


def _sizes(gap: Gap, noise: Noise) -> Floats:
    """[T] |d - center| over its mean among tokens of similar surprise after the start; each at most 20 scales."""
    like = _after_start(gap)
    sizes, of_like = (np.minimum(np.abs(noise.standardized(tokens)), _MOST) for tokens in (gap, like))
    count = np.bincount(bins_of(like), minlength=len(noise.scale))
    mean = np.bincount(bins_of(like), weights=of_like, minlength=len(noise.scale)) / np.maximum(count, 1)
    mean = np.where(count >= 30, mean, of_like.mean() if len(of_like) else 1.0)
    return sizes / np.maximum(mean[bins_of(gap)], 1e-9)


def template(gap: Gap, level: float) -> tuple[Answer, int]:
    """|d| at a response's first 8 tokens compared with its second half; the test, and how many tokens it lasts."""
    gap = _uncertain(gap)
    last = np.zeros(len(gap.step), int)
    np.maximum.at(last, gap.document, gap.position)
    half = last[gap.document] / 2
    early, late = gap.position < _EARLY, (gap.position >= half) & (gap.position >= 2 * _EARLY)
    both = np.isin(gap.document, np.intersect1d(gap.document[early], gap.document[late]))
    early, late = early & both, late & both
    if len(np.unique(gap.document[early])) < FEWEST:
        return cannot_tell(
            "template", f"fewer than {FEWEST} documents have trained tokens at their start and 16 after it"
        ), 0
    noise = noise_of(_after_start(gap))
    sizes = _sizes(gap, replace(noise, center=np.zeros_like(noise.center)))
    usual = float(sizes[late].mean())
    mean = mean_over(sizes[early] - 1.6 * usual, gap.document[early])
    ratio = float(sizes[early].mean()) / max(usual, 1e-9)
    edges = [e for e in (0, 4, 8, 16, 32, 64, 128, 256, 512) if e <= last.max()]
    parts = np.searchsorted(edges, gap.position, side="right") - 1
    profile = np.bincount(parts, weights=sizes) / np.maximum(np.bincount(parts), 1)
    lasts = next((edge for edge, size in zip(edges, profile, strict=False) if size < 1.25 * usual), edges[-1])
    evidence = (
        f"|log π - log q| is {ratio:.1f} times as large in the first {_EARLY} tokens of a response as in its later half"
    )
    return decided("template", p_above(mean), level, ratio >= 1.6, evidence, ratio=ratio, lasts=int(lasts)), int(lasts)


def _of_documents(gap: Gap) -> tuple[Floats, np.ndarray]:
    """Log mean size of d of every document that has tokens, and their numbers."""
    gap = _uncertain(gap)
    size, count = _sizes(gap, noise_of(_after_start(gap))), np.bincount(gap.document, minlength=len(gap.step))
    total = np.bincount(gap.document, weights=size, minlength=len(gap.step))
    there = np.flatnonzero(count >= _FEWEST_TOKENS)
    return np.log(total[there] / count[there] + 0.05), there


class _Group(NamedTuple):
    """The documents of one worker, rank, file …, compared with the others."""

    p: float  # Welch's test
    factor: str  # "worker", …
    label: Any
    distance: float  # of the mean log size of d
    members: Booleans  # [documents with tokens]

    @property
    def ratio(self) -> float:
        return float(np.exp(self.distance))


def groups(gap: Gap, level: float) -> tuple[Answer, Booleans]:
    """Documents of each worker, rank, file … against all others; the test, and the documents [D] outside bad groups."""
    values, there = _of_documents(gap)
    fine, candidates = np.ones(len(gap.step), bool), list[_Group]()
    for factor, labels in gap.groups.items():
        candidates += _against_others(values, factor, [labels[i] for i in there])
    if not candidates:
        why = f"no two workers, data_parallel_ranks or files have {_FEWEST_DOCUMENTS} documents each to compare"
        return cannot_tell("group", why), fine
    candidates.sort(key=lambda group: group.p)
    bad = [group for group in candidates if group.p * len(candidates) <= level and abs(group.distance) >= 0.35]
    if sum(group.members.sum() for group in bad) > 0.7 * len(there):
        bad = bad[:1]  # most would be bad: remove the surest one only, and test the other documents
    for group in bad:
        fine[there[group.members]] = False
    shown = [
        f"{group.factor} {group.label}: |log π - log q| is {group.ratio:.2f} times as large as in the others"
        for group in bad or candidates[:1]
    ]
    estimate = [{"factor": group.factor, "group": group.label, "ratio": group.ratio} for group in bad]
    p = min(1.0, candidates[0].p * len(candidates))
    return decided("group", p, level, bool(bad), "; ".join(shown), groups=estimate), fine


def _against_others(values: Floats, factor: str, labels: Sequence[Any]) -> list[_Group]:
    """Every group of at least 4 documents, against the groups of usual median."""
    numbers = {label: i for i, label in enumerate(dict.fromkeys(label for label in labels if label is not None))}
    codes = np.array([numbers.get(label, len(numbers)) for label in labels], dtype=np.int64)
    order = np.argsort(codes, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(codes, minlength=len(numbers) + 1))[:-1])[: len(numbers)]
    large = [(label, part) for label, part in zip(numbers, parts, strict=True) if len(part) >= _FEWEST_DOCUMENTS]
    if len(large) < 2:
        return []
    medians = np.array([np.median(values[part]) for _, part in large])
    is_odd = np.abs(medians - np.median(medians)) >= 0.3
    pool = np.ones(len(values), bool)
    for (_, part), odd in zip(large, is_odd, strict=True):
        pool[part] = not odd
    if pool.sum() < _FEWEST_DOCUMENTS:  # two groups: each against the other
        pool[:], is_odd[:] = True, False
    candidates = list[_Group]()
    for (label, part), odd in zip(large, is_odd, strict=True):
        members = np.zeros(len(values), bool)
        members[part] = True
        count, mean, variance = _moments(values[pool], values[part] if not odd else values[:0])
        if count < _FEWEST_DOCUMENTS:
            continue
        distance = float(values[part].mean() - mean)
        error = float(np.sqrt(values[part].var(ddof=1) / len(part) + variance / count))
        p = 2 * tail((abs(distance) - _HARMLESS) / max(error, 1e-12), min(len(part), count) - 1)
        candidates.append(_Group(min(p, 1.0), factor, label, distance, members))
    if len(large) == 2:
        return [max(candidates, key=lambda group: group.distance)]
    return candidates


def _moments(values: Floats, without: Floats) -> tuple[int, float, float]:
    """Number, mean and variance of values, some of them excluded."""
    count = len(values) - len(without)
    if count < 2:
        return count, 0.0, 0.0
    shift = float(values.mean())
    total = (values - shift).sum() - (without - shift).sum()
    squares = ((values - shift) ** 2).sum() - ((without - shift) ** 2).sum()
    return count, shift + float(total) / count, max(float(squares - total**2 / count), 0.0) / (count - 1)


def staleness(gap: Gap, level: float) -> tuple[Answer, Floats]:
    """Regress log |d| on the age of the weights; the test, and [D] the factor by which age has multiplied d."""
    values, there = _of_documents(gap)
    known = ~np.isnan(gap.weight_version).any()
    age = (gap.step - gap.weight_version if known else gap.step - gap.step.min()).astype(float)
    x, ones = age[there], np.ones(len(gap.step))
    what = "step - weight_version" if known else "steps since the first rollouts (no weight_version is given)"
    if len(np.unique(x)) < (2 if known else 3) or len(x) < FEWEST:
        return cannot_tell("staleness", f"all documents have the same {what}"), ones
    centered = x - x.mean()
    slope = float(centered @ values / (centered @ centered))
    rest = values - values.mean() - slope * centered
    error = float(np.sqrt((centered**2 * rest**2).sum()) / (centered @ centered)) * np.sqrt(len(x) / (len(x) - 2))
    low, high = np.quantile(x, [0.1, 0.9])
    growth = float(np.exp(slope * (high - low)))
    evidence = f"|log π - log q| grows {growth:.2f} times from {low:.0f} to {high:.0f} {what}"
    p = tail((slope - _HARMLESS / (high - low)) / max(error, 1e-12), len(x) - 2) if high > low else 1.0
    test = decided(
        "staleness", p, level, growth >= (1.3 if known else 1.5), evidence, growth=growth, steps=float(high - low)
    )
    levels = {value: np.exp(np.median(values[x == value])) for value in np.unique(x)}
    least = min(levels.values())
    factors = np.array([levels.get(value, 1.0) / least for value in age])
    return test, factors if test.outcome == "found" else ones
