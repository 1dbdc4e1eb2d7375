"""Corrections that choose among all trained tokens of a step, by one number per token: its key.

    cov = (A - mean A)(log π_old - mean log π_old),   d = log π_old - log π_rollout

The tokens stand in an order that no layout changes: by samples, then within the sample. Of equal keys the earlier comes
first. Sums are exact, so every choice has the same tokens however the step is cut. docs/corrections.md has the sources.
"""

import bisect
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import cast

import torch
from torch import Tensor

from megatron_pg.objectives.corrections.correction import Correction, of_trained
from megatron_pg.rollouts.sample import Sample

MOST_PARTS = 40  # of an exact sum: 53 bits each of all that float64 has
_LARGEST = 1e100  # of what keys are made of, so that their sums and products are finite
_GOLDEN, _MIX = -7046029254386353131, (-4658895280553007687, -7723592293110705685)  # of SplitMix64, as signed integers


@dataclass(frozen=True, slots=True, eq=False)
class StepKeys:
    """The trained tokens of a step, sample after sample."""

    keys: Tensor  # [T] float64
    lengths: Sequence[int]  # [S] trained tokens of each sample
    origins: Sequence[int]  # [S] 64 bits, from which the draws of a sample's tokens come

    def draws(self) -> Tensor:
        """[T] float64 in [0, 1): the k-th number of SplitMix64 for the k-th token, from its sample's origin."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        token = torch.arange(len(self.keys)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        x = torch.tensor(self.origins, dtype=torch.int64).repeat_interleave(lengths) + (token + 1) * _GOLDEN
        x = (x ^ _shifted(x, 30)) * _MIX[0]
        x = (x ^ _shifted(x, 27)) * _MIX[1]
        return _shifted(x ^ _shifted(x, 31), 11).double() / 2**53


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Of 64 bits without a sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


@dataclass(frozen=True, slots=True, eq=False)
class TokenSelection:
    """What a correction chooses of a step."""

    tokens: Tensor  # [T] bool
    threshold: float | None  # the key at which the choice ends; None: nothing is chosen, or not by the order of keys
    num_candidates: int | None = None  # that were drawn from; None: nothing is drawn


# --- what a token is chosen by: [n] float64 of a sample's trained tokens ---


def covariance(sample: Sample, advantage: float, logprob: float) -> Tensor:
    """(A - mean A)(log π_old - mean log π_old), from the means over the step (2505.22617)."""
    advantages, logprobs = of_trained(sample, sample.advantages), of_trained(sample, sample.old_logprobs)
    return (advantages.double() - advantage) * (logprobs.double() - logprob)


def squared_gap(sample: Sample) -> Tensor:
    """d² (2510.01161)."""
    gaps = of_trained(sample, sample.old_logprobs) - of_trained(sample, sample.rollout_logprobs)
    return gaps.double().square()


def entropy(sample: Sample) -> Tensor:
    """H of the sampling policy (2506.01939)."""
    return of_trained(sample, sample.old_entropies).double()


def check_size(samples: Sequence[Sample], correction: Correction) -> None:
    """Refuse finite numbers whose sums or products are not: then no key could be compared.

    Raises:
        ValueError: one is beyond 1e100.
    """
    declared = correction.declared.selection
    for sample in samples:
        for name in declared.reads if declared else ():
            values = getattr(sample, name)
            if (bad := sample.loss_mask & (values.abs() > _LARGEST)).any():
                k = int(bad.nonzero()[0])
                raise ValueError(
                    f"{name} of sample {sample.sample_id} is {float(values[k]):g} at response token {k}, and "
                    f"--pg-correction {correction.name} compares all tokens of the step, whose sums would not be "
                    "finite. Repair the value."
                )


# --- which are chosen; the numbers of a correction that its declaration reads are there ---


def largest(step: StepKeys, correction: Correction) -> TokenSelection:
    """The ⌊f·T⌋ largest keys."""
    return _first(step.keys, share(cast(float, correction.fraction), len(step.keys)))


def second_moment(step: StepKeys, correction: Correction) -> TokenSelection:
    """As many of the largest keys as it takes until the mean of the others is at most hi; all, where none is."""
    ordered, size, high = step.keys.sort().values, len(step.keys), cast(float, correction.high)
    means = ordered.cumsum(0) / torch.arange(1, size + 1)
    slack = size * 2.0**-50  # more than the sums are rounded by
    fewest, most = (int((means <= high * factor).sum()) for factor in (1 - slack, 1 + slack))

    def is_beyond(kept: int) -> bool:  # fsum rounds once, so its sign is exact
        return math.fsum([*ordered[:kept].tolist(), *[-high] * kept]) > 0

    kept = fewest + bisect.bisect_left(range(fewest + 1, most + 1), True, key=is_beyond)
    return _first(step.keys, size - kept)


def drawn_between(step: StepKeys, correction: Correction) -> TokenSelection:
    """⌊f·T⌋ tokens, drawn from those with lo < key < hi; all of them where there are fewer."""
    candidates = (step.keys > cast(float, correction.low)) & (step.keys < cast(float, correction.high))
    number = int(candidates.sum())
    count = min(share(cast(float, correction.fraction), len(step.keys)), number)
    drawn = torch.where(candidates, step.draws(), -1.0) if count else step.keys
    return TokenSelection(_first(drawn, count).tokens, None, number)


def below_quantile(step: StepKeys, correction: Correction) -> TokenSelection:
    """The keys below the (1 - f) quantile, linearly interpolated: not the 1 + ⌊f·(T - 1)⌋ largest, nor their equals."""
    size = len(step.keys)
    least = step.keys.kthvalue(size - share(cast(float, correction.fraction), size - 1)).values
    return TokenSelection(step.keys < least, float(least))


def share(fraction: float, count: int) -> int:
    """⌊f·n⌋ of the fraction as it is written: 0.29 of 100 are 29, which float64 has as 28.999…"""
    return math.floor(Fraction(repr(fraction)) * count)


def _first(keys: Tensor, count: int) -> TokenSelection:
    """The `count` largest."""
    if not count:
        return TokenSelection(torch.zeros_like(keys, dtype=torch.bool), None)
    least = keys.kthvalue(len(keys) - count + 1).values
    above, equal = keys > least, keys == least
    return TokenSelection(above | (equal & (equal.cumsum(0) <= count - above.sum())), float(least))


# --- what no layout changes ---


def exact_parts(values: Sequence[float]) -> list[float]:
    """Few numbers whose sum is exactly that of many."""
    parts: list[float] = []
    while rest := math.fsum([*values, *(-part for part in parts)]):
        parts.append(rest)
    return parts


def average(parts: Sequence[float], count: int) -> float:
    """Of `count` numbers from the parts of their sum, rounded once."""
    return float(sum(map(Fraction, parts), Fraction(0)) / max(count, 1))


def identity_of(sample: Sample) -> int:
    """64 bits that name a sample on every rank and in every layout: its step, ids, tokens and loss mask."""
    named = (sample.step, sample.prompt_id, sample.rollout_id, sample.response_length)
    return _digest(repr(named).encode(), sample.tokens.numpy().tobytes(), sample.loss_mask.numpy().tobytes())


def content_of(sample: Sample, keys: Tensor) -> int:
    """64 bits of what may differ between samples of one identity; samples equal in this too have the same loss."""
    values = (of_trained(sample, each).double() for each in (sample.old_logprobs, sample.advantages))
    return _digest(*(each.numpy().tobytes() for each in (keys, *values)))


def origin_of(seed: int, identity: int, occurrence: int) -> int:
    """64 bits that seed the draws of a sample's tokens; `occurrence`: its number among samples of one identity."""
    return _digest(repr((seed, identity, occurrence)).encode())


def _digest(*texts: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(b"".join(texts), digest_size=8).digest(), "big", signed=True)
