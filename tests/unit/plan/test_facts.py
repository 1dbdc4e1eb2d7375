"""Statistics over whole rollouts: by hand, over ranks, and to the last bit."""

import math
import random
from collections import defaultdict
from types import SimpleNamespace

import pytest
import threads
import torch.distributed as dist
from plans import planned
from samples import make_sample, plain_sample

from megatron_pg import StepPlanError, pack
from megatron_pg.metrics import Reduction
from megatron_pg.plan.facts import SampleFacts
from megatron_pg.plan.table import PlanRule
from megatron_pg.rollouts.sample import Sample

NAMES = (
    *("reward", "reward_std", "max_reward", "min_reward", "num_rewards", "zero_variance_fraction"),
    *("response_length", "max_response_length", "truncated_fraction"),
)


def sample(reward=None, prompt=None, rollout=None, length=1, truncated=None, **rest) -> Sample:
    ids = {"prompt_id": prompt, "rollout_id": rollout}
    return plain_sample(length, reward=reward, truncated=truncated, **ids, **rest)


def facts_on_ranks(*cells: list[Sample], num_microbatches: int = 1) -> list[SampleFacts]:
    """What every data-parallel rank knows of the step."""

    def work(rank: int):
        group = dist.group.WORLD if len(cells) > 1 else None
        rule = PlanRule(aggregation="token_mean")
        parts = [cells[rank][k::num_microbatches] for k in range(num_microbatches)]
        return planned([pack(part, qkv_format="thd") for part in parts], rule, group).facts

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


TURNS = [
    sample(None, "p", "p/0", length=3, truncated=False),
    sample(1.0, "p", "p/0", truncated=True),  # the reward is given once, with the last turn
    sample(1.0, "p", "p/1", length=2, truncated=False),
    sample(0.0, "q", "q/0", length=4),
    sample(0.0, "q", "q/0", length=5),
]


@pytest.mark.parametrize("cells", [[[0, 1, 2, 3, 4]], [[0, 3], [1, 4, 2]], [[3], [], [0], [4, 2, 1]]])
def test_rewards_lengths_and_truncation_count_rollouts(cells):
    for found in facts_on_ranks(*([TURNS[i] for i in cell] for cell in cells)):
        assert values(found) == {
            "reward": 2 / 3,
            "reward_std": math.sqrt(2 / 9),
            "max_reward": 1.0,
            "min_reward": 0.0,
            "num_rewards": 3,
            "zero_variance_fraction": 1.0,
            "response_length": 5.0,
            "max_response_length": 9.0,
            "truncated_fraction": 0.5,
        }


@pytest.mark.parametrize("cells", [[[0, 1]], [[0], [1]], [[1], [2], [0]], [[0, 1], [2]]])
@pytest.mark.parametrize(
    ("name", "two"), [("reward", (1.0, 0.5)), ("reward", (math.nan, 1.0)), ("environment", ("a", "b"))]
)
def test_two_values_in_one_rollout_are_an_error_on_every_rank(cells, name, two):
    samples = [sample(rollout="r", sample_id=f"s{i}", **{name: two[i]}) for i in range(2)]
    samples.append(sample(rollout="r", sample_id="neither"))
    with pytest.raises(StepPlanError) as caught:
        facts_on_ranks(*([samples[i] for i in cell] for cell in cells))
    values = [f"{two[i]!r} in sample s{i}" for i in range(2)]
    shown = {f"{name} of rollout 'r' is {a} and {b}, but a rollout has one {name}." for a, b in (values, values[::-1])}
    assert any(str(caught.value).startswith(text) for text in shown)


def test_zeros_of_either_sign_are_one_reward():
    (found,) = facts_on_ranks([sample(0.0, "p", "r"), sample(-0.0, "p", "r")])
    assert (found.reward, found.num_rewards) == (0.0, 1)


def by_loops(samples: list[Sample]) -> dict[str, float]:
    """The same from plain loops."""
    rollouts = defaultdict(list)
    for one in samples:
        rollouts[one.rollout_id].append(one)
    lengths = [sum(len(one.loss_mask) for one in own) for own in rollouts.values()]
    found = {
        "num_rollouts": len(rollouts),
        "response_length": sum(lengths) / len(lengths),
        "max_response_length": max(lengths),
    }
    rewards = [next((one.reward for one in own if one.reward is not None), None) for own in rollouts.values()]
    if rewards := [reward for reward in rewards if reward is not None]:
        mean = sum(rewards) / len(rewards)
        found |= {"reward": mean, "max_reward": max(rewards), "min_reward": min(rewards), "num_rewards": len(rewards)}
        found["reward_std"] = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    said = [{one.truncated for one in own} for own in rollouts.values()]
    if any(each != {None} for each in said):
        found["truncated_fraction"] = sum(True in each for each in said) / sum(each != {None} for each in said)
    return found


def rollouts_of_environments(rng: random.Random) -> list[Sample]:
    """Rollouts of one to four samples, of two environments or of none, with dyadic rewards."""
    samples = []
    for rollout in range(rng.randint(1, 9)):
        environment, reward = rng.choice([None, "math/gsm8k", "ünit"]), rng.choice([None, 0.0, 0.25, 1.0])
        for _ in range(rng.randint(1, 4)):
            rest = {"environment": environment if rng.random() < 0.9 else None, "length": rng.randint(1, 9)}
            rest["sample_id"] = str(len(samples))  # two equal samples on two ranks would be taken for a copy
            own = reward if rng.random() < 0.8 else None
            samples.append(sample(own, "p", rollout, truncated=rng.choice([None, False, True]), **rest))
    return samples


@pytest.mark.proof(
    "Metrics over rollouts and per environment equal plain loops, regardless of the partition over ranks and "
    "micro-batches"
)
def test_every_environment_has_its_own_metrics_in_any_partition(full, evidence):
    rng, cases = random.Random(4), 400 if full else 6
    for _ in range(cases):
        samples = rollouts_of_environments(rng)
        environments, expected = {one.environment for one in samples} - {None}, {}
        of = {one.rollout_id: one.environment for one in samples if one.environment is not None}
        for name in environments:
            own = by_loops([one for one in samples if of.get(one.rollout_id) == name])
            expected |= {f"environment/{name}/{metric}": value for metric, value in own.items()}
        expected |= by_loops(samples)
        cells = [[] for _ in range(rng.randint(1, 4))]
        for one in rng.sample(samples, len(samples)):
            rng.choice(cells).append(one)
        for facts in facts_on_ranks(*cells, num_microbatches=rng.randint(1, 3)):
            counts = dict.fromkeys(("tokens", "trained", "response_tokens", "samples", "prompts"), 1)
            plan = SimpleNamespace(facts=facts, selection=None, num_turns=None, num_rollouts=facts.num_rollouts)
            vars(plan).update({f"num_{name}": count for name, count in counts.items()})
            reduction = Reduction("basic")
            found = reduction.finish(reduction.identity(), plan)
            assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-15)
            assert {name for name in found if name.startswith("environment/")} <= expected.keys()
    evidence(cases=cases)


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 101, 7, True])
def test_an_environment_has_a_short_printable_name(name):
    message = r"^environment=.* of sample without id is not a string of 1 to 100 printable characters"
    with pytest.raises(ValueError, match=message):
        sample(environment=name)


def test_two_samples_of_one_rollout_are_no_group():
    (found,) = facts_on_ranks([sample(1.0, "p", "p/0"), sample(1.0, "p", "p/0")])
    assert found.zero_variance_fraction is None


def test_what_no_sample_carries_is_absent():
    (found,) = facts_on_ranks([sample(prompt=1, rollout=1), sample(prompt=1, rollout=2)])
    known = {name for name, value in values(found).items() if value is not None}
    assert known == {"response_length", "max_response_length"}


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_stays_so(reward):
    (found,) = facts_on_ranks([sample(reward, "p", 0), sample(1.0, "p", 1)])
    assert not math.isfinite(found.reward)
    assert not math.isfinite(found.reward_std)
    assert found.zero_variance_fraction == 0.0


def test_fully_masked_samples_count():
    masked = make_sample(prompt_length=1, mask=[0, 0, 0], rng=random.Random(0))  # its own rollout
    (found,) = facts_on_ranks([masked, sample(length=1)])
    assert found.response_length == 2.0
