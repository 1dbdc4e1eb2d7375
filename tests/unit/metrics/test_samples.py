"""Statistics over whole samples: by hand, over ranks, and to the last bit."""

import math
import random

import pytest
import threads
from samples import make_sample

from megatron_pg import pack
from megatron_pg.metrics.samples import SampleFacts
from megatron_pg.rollouts.sample import Sample
from megatron_pg.step.plan import plan_from_table
from megatron_pg.step.table import PlanRule, local_table_of

NAMES = (
    *("reward", "reward_std", "max_reward", "min_reward", "num_rewards", "zero_variance_fraction"),
    *("response_length", "max_response_length", "truncated_fraction"),
)


def sample(reward=None, prompt=None, rollout=None, length=1, truncated=None) -> Sample:
    return Sample.build(
        tokens=[0] * (length + 1),
        response_length=length,
        loss_mask=[1] * length,
        old_logprobs=[-1.0] * length,
        advantage=1.0,
        prompt_id=prompt,
        rollout_id=rollout,
        reward=reward,
        truncated=truncated,
    )


def facts_on_ranks(*cells: list[Sample]) -> list[SampleFacts]:
    """What every data-parallel rank knows of the step, each with one micro-batch."""

    def work(rank: int):
        group = threads.subgroup(lambda r: 0, len(cells), rank) if len(cells) > 1 else None
        rule = PlanRule(aggregation="token_mean")
        table = local_table_of([pack(cells[rank], qkv_format="thd")], rule, group)
        return plan_from_table(table, rule, error=None, group=group).facts

    return threads.run(len(cells), work)


def values(facts: SampleFacts) -> dict[str, float | None]:
    return {name: getattr(facts, name) for name in NAMES}


STEP = [
    sample(1.0, "p", "p/0", length=2, truncated=True),
    sample(1.0, "p", "p/1", length=4, truncated=False),
    sample(0.0, "q", "q/0", length=6),
    sample(1.0, "q", "q/1", length=8, truncated=False),
    sample(2.0, "alone", "alone/0", length=5),  # no group: its reward has nothing to vary from
]
EXPECTED = {
    "reward": 1.0,
    "reward_std": math.sqrt(2 / 5),
    "max_reward": 2.0,
    "min_reward": 0.0,
    "num_rewards": 5,
    "zero_variance_fraction": 1 / 2,
    "response_length": 5.0,
    "max_response_length": 8.0,
    "truncated_fraction": 1 / 3,
}


@pytest.mark.parametrize("cells", [[[0, 1, 2, 3, 4]], [[0, 2], [4, 3, 1]], [[], [1, 3], [0, 2, 4]]])
def test_a_group_whose_rollouts_lie_on_several_ranks_is_one_group(cells):
    found = facts_on_ranks(*([STEP[i] for i in cell] for cell in cells))
    assert [values(facts) for facts in found] == [EXPECTED] * len(cells)


def test_the_last_bit_does_not_depend_on_where_samples_lie():
    rng = random.Random(3)
    samples = [sample(rng.gauss(0, 1) * 10 ** rng.randint(-9, 9), i // 4, i) for i in range(60)]
    (whole,) = facts_on_ranks(samples)
    rng.shuffle(samples)
    for facts in facts_on_ranks(samples[:7], samples[7:40], samples[40:]):
        assert values(facts) == values(whole)


def test_samples_without_a_value_do_not_count_for_it():
    turns = [sample(None, "p", "p/0", length=3), sample(1.0, "p", "p/0"), sample(1.0, "p", "p/1", truncated=True)]
    (found,) = facts_on_ranks(turns)  # the reward is that of the rollout's last turn
    assert (found.reward, found.num_rewards, found.zero_variance_fraction) == (1.0, 2, 1.0)
    assert (found.response_length, found.truncated_fraction) == (5 / 3, 1.0)


def test_two_samples_of_one_rollout_are_no_group():
    (found,) = facts_on_ranks([sample(1.0, "p", "p/0"), sample(1.0, "p", "p/0")])
    assert found.zero_variance_fraction is None


def test_what_no_sample_carries_is_absent():
    (found,) = facts_on_ranks([sample(prompt=1, rollout=1), sample(prompt=1, rollout=2)])
    assert {name for name, value in values(found).items() if value is not None} == {
        "response_length",
        "max_response_length",
    }


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_stays_so(reward):
    (found,) = facts_on_ranks([sample(reward, "p", 0), sample(1.0, "p", 1)])
    assert not math.isfinite(found.reward)
    assert not math.isfinite(found.reward_std)
    assert found.zero_variance_fraction == 0.0


def test_fully_masked_samples_count():
    masked = make_sample(prompt_length=1, mask=[0, 0, 0], rng=random.Random(0))
    (found,) = facts_on_ranks([masked, sample(length=1)])
    assert found.response_length == 2.0
