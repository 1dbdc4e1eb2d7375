"""Reward, response length, truncation and environment of a step's rollouts.

The plan's table has three integers per sample. The rank that owns a rollout merges the integers of its samples, so a
rollout counts once on any ranks. Only integer sums and maxima are reduced over the ranks, so the results are
bit-identical on every rank and in every layout.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_pg.rollouts.sample import Sample

COLUMNS = 3  # per sample in the table: bits of the reward, length and flags, key of the environment
LARGEST, SMALLEST, LAST, FIRST, LENGTH, TRUNCATION = range(6)  # columns of `unit_facts`
UNIT_COLUMNS = 6
ONE_PER_ROLLOUT = {"reward": LARGEST, "environment": LAST}  # fields of which a rollout has one value, and their column
_HAS_REWARD, _SAYS_TRUNCATED, _IS_TRUNCATED = 1 << 40, 1 << 41, 1 << 42  # above any length
_UNIT = 1074  # the smallest float64 is 2^-1074: rewards and their squares are multiples of it and its square
_LIMB, _SUM, _SQUARES = 32, 68, 135  # bits of an integer that is sent; integers of Σ R and of Σ R², for 2^47 rollouts
_SUMS = 8 + _SUM + _SQUARES  # integers of `fact_sums`
NOTHING = torch.iinfo(torch.int64).min  # in LARGEST and LAST of a unit without a reward, without a label
_STARTS = ((NOTHING, "amax"), (~NOTHING, "amin")) * 2 + ((0, "sum"), (0, "amax"))  # of the columns of `unit_facts`


def encode_facts(samples: Sequence[Sample]) -> Tensor:
    """[S, 3] int64 of this process's samples, for the exchange."""
    rewards = torch.tensor([float(s.reward or 0.0) for s in samples], dtype=torch.float64) + 0.0  # no -0.0
    rewards = torch.where(rewards.isnan(), torch.nan, rewards)  # one NaN, so that equal bits are equal rewards
    bits = ordered_bits(rewards.view(torch.int64))
    facts = [
        s.response_length
        + _HAS_REWARD * (s.reward is not None)
        + _SAYS_TRUNCATED * (s.truncated is not None)
        + _IS_TRUNCATED * bool(s.truncated)
        for s in samples
    ]
    keys = [0 if s.environment is None else environment_key(s.environment) for s in samples]
    return torch.stack([bits, *(torch.tensor(column, dtype=torch.int64) for column in (facts, keys))], dim=1)


def environment_key(name: str) -> int:
    """62 bits, > 0."""
    return 1 + (int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 2)


def unit_facts(encoded: Tensor, rollouts: Tensor | None = None) -> Tensor:
    """[S, 6] int64: bits of the reward twice, a label twice, length, truncation (0 unknown, 1 no, 2 yes).

    The label of a prompt's sample is its rollout's key, if it has a reward; that of a rollout's sample is its
    environment's.
    """
    rewards, facts, environments = encoded.unbind(dim=1)
    has_reward = facts & _HAS_REWARD != 0
    labels, has_label = (environments, environments > 0) if rollouts is None else (rollouts, has_reward)
    columns = [torch.where(has_reward, rewards, bound) for bound in (NOTHING, ~NOTHING)]
    columns += [torch.where(has_label, labels, bound) for bound in (NOTHING, ~NOTHING)]
    truncation = (facts & _SAYS_TRUNCATED != 0).long() + (facts & _IS_TRUNCATED != 0)
    return torch.stack([*columns, facts & (_HAS_REWARD - 1), truncation], dim=1)


def merged_facts(facts: Tensor, units: Tensor, number: int) -> Tensor:
    """[number, 6] int64 from [n, 6] and the unit of each row: lengths are summed, truncation is the largest."""
    merged = [
        torch.full((number,), start, dtype=torch.int64).scatter_reduce(0, units, column, reduce)
        for column, (start, reduce) in zip(facts.unbind(dim=1), _STARTS, strict=True)
    ]
    return torch.stack(merged, dim=1)


def _rewards(rollouts: Tensor) -> Tensor:
    """[n] float64, of the rollouts that have one."""
    bits = rollouts[:, LARGEST]
    return ordered_bits(bits[bits != NOTHING]).view(torch.float64)


def ordered_bits(bits: Tensor) -> Tensor:
    """Bits of float64 ordered as the numbers are, and back: the bits of negative numbers are reversed."""
    return torch.where(bits < 0, bits ^ torch.iinfo(torch.int64).max, bits)


def fact_sums(rollouts: Tensor) -> Tensor:
    """[n] int64 of some rollouts, from `merged_facts`: what adds up over all of them, exactly."""
    rewards, lengths, truncation = _rewards(rollouts), rollouts[:, LENGTH], rollouts[:, TRUNCATION]
    counts = [lengths > 0, lengths, truncation > 0, truncation > 1, torch.ones_like(rewards)]
    special = [rewards.isnan(), rewards == torch.inf, rewards == -torch.inf]
    values, numbers = rewards[rewards.isfinite()].unique(return_counts=True)
    total = squares = 0
    for value, number in zip(values.tolist(), numbers.tolist(), strict=True):
        numerator, denominator = value.as_integer_ratio()
        units = (numerator << _UNIT) // denominator
        total, squares = total + number * units, squares + number * units**2
    limbs = [*limbs_of(total, _SUM), *limbs_of(squares, _SQUARES)]
    return torch.tensor([*(int(count.sum()) for count in (*counts, *special)), *limbs], dtype=torch.int64)


def largest_facts(rollouts: Tensor) -> Tensor:
    """[3] float64 of some rollouts: largest reward, negative smallest reward, largest length; -inf without any."""
    rewards = _rewards(rollouts)
    rewards = rewards[~rewards.isnan()]
    values = [rewards, -rewards, rollouts[:, LENGTH].double()]
    return torch.stack([torch.cat([each, each.new_tensor([-torch.inf])]).amax() for each in values])


def of_environments(rollouts: Tensor, names: Sequence[str]) -> list[Tensor]:
    """The rollouts of each environment."""
    return [rollouts[rollouts[:, LAST] == environment_key(name)] for name in names]


def count_groups(prompts: Tensor) -> Tensor:
    """[2] int64: prompts with at least two rewards, and the number of these whose rewards are all equal."""
    return torch.stack([_are_groups(prompts).sum(), are_flat(prompts).sum()])


def are_flat(prompts: Tensor) -> Tensor:
    """[n] bool from `merged_facts`: prompts with at least two rewards, which are all equal."""
    is_number = ~ordered_bits(prompts[:, LARGEST]).view(torch.float64).isnan()
    return _are_groups(prompts) & (prompts[:, LARGEST] == prompts[:, SMALLEST]) & is_number


def _are_groups(prompts: Tensor) -> Tensor:
    return prompts[:, LAST] > prompts[:, FIRST]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFacts:
    """Statistics over the rollouts of a step that carry a value; None where no rollout does."""

    num_rollouts: int  # of the objective, fully masked ones included
    num_rewards: int | None  # rollouts that carry a reward
    reward: float | None  # mean, rounded once
    reward_std: float | None  # √(Σ (R - mean)² / n)
    max_reward: float | None  # NaN where one is
    min_reward: float | None  # NaN where one is
    zero_variance_fraction: float | None  # of prompts with two rewards or more: those whose rewards are equal
    response_length: float | None  # mean over rollouts, of response tokens of all their samples, trained or not
    max_response_length: float | None
    truncated_fraction: float | None  # of the rollouts with a sample that has the field
    environments: Mapping[str, "SampleFacts"] = field(default_factory=dict)  # the same for the rollouts of each

    @classmethod
    def of(cls, sums: Tensor, largest: Tensor, groups: Tensor, names: Sequence[str] = ()) -> "SampleFacts":
        """From `count_groups` of all prompts, and `fact_sums` and `largest_facts` of all rollouts.

        The sums and the largest values are followed by those of the rollouts of each environment.
        """
        (of_all, *sums_of), (largest_of_all, *largest_of) = sums.split(_SUMS), largest.split(3)
        parts, none = zip(names, sums_of, largest_of, strict=True), torch.zeros_like(groups)
        environments = {name: cls.of(of_one, most, none) for name, of_one, most in parts}
        counts, of_rewards = of_all.tensor_split([8])
        rollouts, length, known, truncated, rewards, *special = counts.tolist()
        total, squares = (whole_of(limbs) for limbs in of_rewards.split([_SUM, _SQUARES]))
        mean, deviation = _moments(total, squares, rewards, special)
        most, negative_least, longest = largest_of_all.tolist()
        extremes = (math.nan, math.nan) if special[0] else (most, -negative_least)
        return cls(
            num_rollouts=rollouts,
            num_rewards=rewards or None,
            reward=mean,
            reward_std=deviation,
            max_reward=extremes[0] if rewards else None,
            min_reward=extremes[1] if rewards else None,
            zero_variance_fraction=_share(int(groups[1]), int(groups[0])),
            response_length=_share(length, rollouts),
            max_response_length=longest if rollouts else None,
            truncated_fraction=_share(truncated, known),
            environments=environments,
        )


def _moments(total: int, squares: int, count: int, special: Sequence[int]) -> tuple[float | None, float | None]:
    """Mean and standard deviation of rewards from their exact sums; `special`: how many are NaN, inf, -inf."""
    nan, positive, negative = special
    if not count:
        return None, None
    if any(special):
        return math.nan if nan or (positive and negative) else math.inf if positive else -math.inf, math.nan
    return total / (count << _UNIT), _root(count * squares - total**2, count**2 << 2 * _UNIT)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def limbs_of(value: int, number: int) -> list[int]:
    """A whole number in parts that can be added up in 64 bits."""
    sign, size = (-1 if value < 0 else 1), abs(value)
    return [sign * (size >> _LIMB * k & (1 << _LIMB) - 1) for k in range(number)]


def whole_of(limbs: Tensor) -> int:
    """The number that these parts add up to, also after they were added to those of others."""
    return sum(limb << _LIMB * k for k, limb in enumerate(limbs.tolist()))


def _root(numerator: int, denominator: int) -> float:
    """√(numerator / denominator), from 64 bits or more."""
    shift = max(0, 128 - numerator.bit_length() + denominator.bit_length())
    shift += shift % 2
    return math.ldexp(math.isqrt((numerator << shift) // denominator), -shift // 2)
