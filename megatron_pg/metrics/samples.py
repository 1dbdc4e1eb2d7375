"""What is known of a step's samples as wholes: reward, response length, truncation.

Two integers of each sample travel with the plan's table, so every sample of the step counts once, a prompt group whose
rollouts lie on several ranks is whole, and the values are the same on every rank, in every layout, to the last bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pg.rollouts.sample import Sample

COLUMNS = 2  # of a sample in the table: the bits of its reward; its length, and what it carries
_HAS_REWARD, _SAYS_TRUNCATED, _IS_TRUNCATED = 1 << 40, 1 << 41, 1 << 42  # above any length


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


@dataclass(frozen=True, slots=True, eq=False)
class SampleFacts:
    """Statistics over the samples of a step that carry a value; None where no sample does.

    Args:
        rewards: [n] float64, of the samples that carry one, sorted: sums do not depend on where samples lie.
        lengths: [S] float64, response tokens, trained or not.
        truncated: [m] float64, 1 or 0, of the samples that say whether they are.
        groups: [P] bool, whether all rewards are equal, of the prompts of which two rollouts carry one.
    """

    rewards: Tensor
    lengths: Tensor
    truncated: Tensor
    groups: Tensor

    @classmethod
    def of(cls, encoded: Tensor, rollouts: Tensor, prompts: Tensor | None) -> "SampleFacts":
        """From `encode_facts` of all ranks' samples and the keys of their units, [S] int64; None: there are no prompts."""
        rewards, facts = encoded[:, 0].contiguous().view(torch.float64), encoded[:, 1]
        has_reward, lengths = facts & _HAS_REWARD != 0, facts & (_HAS_REWARD - 1)
        groups = torch.zeros(0, dtype=torch.bool)
        if prompts is not None and has_reward.any():
            groups = _equal_rewards(rewards[has_reward], rollouts[has_reward], prompts[has_reward])
        return cls(
            rewards[has_reward].sort().values,
            lengths[lengths > 0].double(),
            (facts & _IS_TRUNCATED != 0)[facts & _SAYS_TRUNCATED != 0].double(),
            groups,
        )

    @property
    def num_rewards(self) -> int | None:
        """Samples that carry a reward."""
        return len(self.rewards) or None

    @property
    def reward(self) -> float | None:
        """Mean."""
        return _mean(self.rewards)

    @property
    def reward_std(self) -> float | None:
        """√(Σ (R - mean)² / n)."""
        return None if self.reward is None else float((self.rewards - self.reward).square().mean().sqrt())

    @property
    def max_reward(self) -> float | None:
        """Largest; NaN where one is."""
        return float(self.rewards.amax()) if len(self.rewards) else None

    @property
    def min_reward(self) -> float | None:
        """Smallest; NaN where one is."""
        return float(self.rewards.amin()) if len(self.rewards) else None

    @property
    def zero_variance_fraction(self) -> float | None:
        """Share of the prompts with rewards of two rollouts or more whose rewards are all equal."""
        return _mean(self.groups.double())

    @property
    def response_length(self) -> float | None:
        """Mean."""
        return _mean(self.lengths)

    @property
    def max_response_length(self) -> float | None:
        """Largest."""
        return float(self.lengths.amax()) if len(self.lengths) else None

    @property
    def truncated_fraction(self) -> float | None:
        """Share of the samples that say whether they are."""
        return _mean(self.truncated)


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if len(values) else None


def _equal_rewards(rewards: Tensor, rollouts: Tensor, prompts: Tensor) -> Tensor:
    """[P] bool: all rewards of a prompt are equal, for the prompts with two rollouts or more."""
    units, inverse = torch.unique(prompts, return_inverse=True)
    largest = torch.full((len(units),), -torch.inf, dtype=torch.float64).scatter_reduce(0, inverse, rewards, "amax")
    smallest = torch.full((len(units),), torch.inf, dtype=torch.float64).scatter_reduce(0, inverse, rewards, "amin")
    pairs = torch.unique(torch.stack([inverse, rollouts]), dim=1)
    return (largest == smallest)[torch.bincount(pairs[0], minlength=len(units)) > 1]
