"""What is known of a step's samples as wholes: reward, response length, truncation.

Two integers of each sample stand in the plan's table. Over the ranks go integers that add up and largest values, so every
sample of the step counts once, a prompt group whose rollouts lie on several ranks is whole, and the values are the same on
every rank, in every layout, to the last bit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pg.rollouts.sample import Sample

COLUMNS = 2  # of a sample in the table: the bits of its reward; its length, and what it carries
RANGES = 4  # columns of `reward_ranges`
_HAS_REWARD, _SAYS_TRUNCATED, _IS_TRUNCATED = 1 << 40, 1 << 41, 1 << 42  # above any length
_UNIT = 1074  # the smallest float64 is 2^-1074, so a reward is a whole number of them, and its square one of theirs
_LIMB, _SUM, _SQUARES = 32, 68, 135  # bits of an integer that travels; integers of Σ R and of Σ R², for 2^47 samples
_INT64 = torch.iinfo(torch.int64)


def encode_facts(samples: Sequence[Sample]) -> Tensor:
    """[S, 2] int64 of this process's samples, for the exchange."""
    rewards = torch.tensor([float(s.reward or 0.0) for s in samples], dtype=torch.float64)
    facts = [
        s.response_length
        + _HAS_REWARD * (s.reward is not None)
        + _SAYS_TRUNCATED * (s.truncated is not None)
        + _IS_TRUNCATED * bool(s.truncated)
        for s in samples
    ]
    return torch.stack([rewards.view(torch.int64), torch.tensor(facts, dtype=torch.int64)], dim=1)


def _rewards(encoded: Tensor) -> tuple[Tensor, Tensor]:
    """[S] float64, and [S] bool: whether there is one."""
    return encoded[:, 0].contiguous().view(torch.float64), encoded[:, 1] & _HAS_REWARD != 0


def fact_sums(encoded: Tensor) -> Tensor:
    """[n] int64 of some samples, from `encode_facts`: what adds up over all of them, exactly."""
    rewards, has_reward = _rewards(encoded)
    rewards, facts = rewards[has_reward], encoded[:, 1]
    lengths, says = facts & (_HAS_REWARD - 1), facts & _SAYS_TRUNCATED != 0
    counts = [lengths > 0, lengths, says, says & (facts & _IS_TRUNCATED != 0), has_reward]
    special = [rewards.isnan(), rewards == torch.inf, rewards == -torch.inf]
    values, numbers = rewards[rewards.isfinite()].unique(return_counts=True)
    total = squares = 0
    for value, number in zip(values.tolist(), numbers.tolist(), strict=True):
        numerator, denominator = value.as_integer_ratio()
        units = (numerator << _UNIT) // denominator
        total, squares = total + number * units, squares + number * units**2
    limbs = [*_limbs(total, _SUM), *_limbs(squares, _SQUARES)]
    return torch.tensor([*(int(count.sum()) for count in (*counts, *special)), *limbs], dtype=torch.int64)


def largest_facts(encoded: Tensor) -> Tensor:
    """[3] float64 of some samples: largest finite reward, the smallest with its sign changed, largest length; -inf without any."""
    rewards, has_reward = _rewards(encoded)
    rewards = rewards[has_reward & ~rewards.isnan()]
    values = [rewards, -rewards, (encoded[:, 1] & (_HAS_REWARD - 1)).double()]
    return torch.stack([torch.cat([each, each.new_tensor([-torch.inf])]).amax() for each in values])


def reward_ranges(encoded: Tensor, rollouts: Tensor) -> Tensor:
    """[S, 4] int64: bits of the reward twice, key of its rollout twice; what changes no range without a reward."""
    rewards, has_reward = _rewards(encoded)
    largest, smallest = (torch.where(has_reward, rewards, bound).view(torch.int64) for bound in (-torch.inf, torch.inf))
    keys = [torch.where(has_reward, rollouts, bound) for bound in (_INT64.min, _INT64.max)]
    return torch.stack([largest, smallest, *keys], dim=1)


def merged_ranges(ranges: Tensor, groups: Tensor, number: int) -> Tensor:
    """[number, 4] int64 from [n, 4]: largest and smallest reward, largest and smallest key of a rollout, of each group."""
    largest, smallest, last, first = (column.contiguous() for column in ranges.unbind(dim=1))

    def merged(values: Tensor, start: float, reduce: str) -> Tensor:
        return torch.full((number,), start, dtype=values.dtype).scatter_reduce(0, groups, values, reduce)

    return torch.stack(
        [
            merged(largest.view(torch.float64), -torch.inf, "amax").view(torch.int64),
            merged(smallest.view(torch.float64), torch.inf, "amin").view(torch.int64),
            merged(last, _INT64.min, "amax"),
            merged(first, _INT64.max, "amin"),
        ],
        dim=1,
    )


def count_ranges(ranges: Tensor) -> Tensor:
    """[2] int64: groups of which two rollouts carry a reward, and those of them whose rewards are all equal."""
    largest, smallest = (column.contiguous().view(torch.float64) for column in (ranges[:, 0], ranges[:, 1]))
    are_groups = ranges[:, 2] > ranges[:, 3]
    return torch.stack([are_groups.sum(), (are_groups & (largest == smallest)).sum()])


@dataclass(frozen=True, slots=True, eq=False)
class SampleFacts:
    """Statistics over the samples of a step that carry a value; None where no sample does.

    Args:
        sums: `fact_sums` of all samples.
        largest: `largest_facts` of all samples.
        groups: `count_ranges` of all prompts.
    """

    sums: Tensor
    largest: Tensor
    groups: Tensor

    @property
    def num_rewards(self) -> int | None:
        """Samples that carry a reward."""
        return int(self.sums[4]) or None

    @property
    def _special(self) -> float | None:
        """What rewards that are not finite add up to."""
        nan, positive, negative = (bool(n) for n in self.sums[5:8])
        if nan or (positive and negative):
            return math.nan
        return math.inf if positive else -math.inf if negative else None

    @property
    def reward(self) -> float | None:
        """Mean, rounded once."""
        if self.num_rewards is None or self._special is not None:
            return self._special
        return _whole(self.sums[8 : 8 + _SUM]) / (self.num_rewards << _UNIT)

    @property
    def reward_std(self) -> float | None:
        """√(Σ (R - mean)² / n)."""
        if self.num_rewards is None:
            return None
        if self._special is not None:
            return math.nan
        total, squares = _whole(self.sums[8 : 8 + _SUM]), _whole(self.sums[8 + _SUM :])
        return _root(self.num_rewards * squares - total**2, self.num_rewards**2 << 2 * _UNIT)

    @property
    def max_reward(self) -> float | None:
        """Largest; NaN where one is."""
        return self._extreme(float(self.largest[0]))

    @property
    def min_reward(self) -> float | None:
        """Smallest; NaN where one is."""
        return self._extreme(-float(self.largest[1]))

    def _extreme(self, value: float) -> float | None:
        return None if self.num_rewards is None else math.nan if self.sums[5] else value

    @property
    def zero_variance_fraction(self) -> float | None:
        """Share of the prompts with rewards of two rollouts or more whose rewards are all equal."""
        return _share(self.groups[1], self.groups[0])

    @property
    def response_length(self) -> float | None:
        """Mean, of response tokens, trained or not."""
        return _share(self.sums[1], self.sums[0])

    @property
    def max_response_length(self) -> float | None:
        """Largest."""
        return float(self.largest[2]) if self.sums[0] else None

    @property
    def truncated_fraction(self) -> float | None:
        """Share of the samples that say whether they are."""
        return _share(self.sums[3], self.sums[2])


def _share(part: Tensor, whole: Tensor) -> float | None:
    return int(part) / int(whole) if whole else None


def _limbs(value: int, number: int) -> list[int]:
    """A whole number in parts that can be added up in 64 bits."""
    sign, size = (-1 if value < 0 else 1), abs(value)
    return [sign * (size >> _LIMB * k & (1 << _LIMB) - 1) for k in range(number)]


def _whole(limbs: Tensor) -> int:
    return sum(limb << _LIMB * k for k, limb in enumerate(limbs.tolist()))


def _root(numerator: int, denominator: int) -> float:
    """√(numerator / denominator), from 64 bits or more."""
    shift = max(0, 128 - numerator.bit_length() + denominator.bit_length())
    shift += shift % 2
    return math.ldexp(math.isqrt((numerator << shift) // denominator), -shift // 2)
