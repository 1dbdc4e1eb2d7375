"""GAE against the plain sums of its definition, by hand, under context parallelism, and what it refuses."""

import math
import random

import pytest
import threads
import torch
import value_oracle

from megatron_pg import gae
from megatron_pg.cp_utils import all_gather_with_cp, response_index

GIVEN = {"gamma": 1.0, "lam": 0.95, "next_value": 0.0}


def drawn(rng: random.Random, turns: int) -> tuple[list, list, list]:
    """Rewards, values and masks by turn; the first token is trained, values at masked tokens are finite."""
    lengths = [rng.randint(1, 9) for _ in range(turns)]
    masks = [[int(rng.random() < 0.7) for _ in range(n)] for n in lengths]
    masks[0][0] = 1
    rewards = [[rng.choice([0.0, 0.0, rng.gauss(0, 1)]) for _ in range(n)] for n in lengths]
    return rewards, [[rng.gauss(0, 1) for _ in range(n)] for n in lengths], masks


@pytest.mark.proof("GAE: advantages and returns equal the plain sums of the definition")
def test_advantages_and_returns_are_the_sums_of_the_definition(full, evidence):
    rng, worst, count = random.Random(0), 0.0, 1000 if full else 200
    for case in range(count):
        rewards, values, masks = drawn(rng, rng.randint(1, 4))
        masked, gamma, critic_lam = (
            ("skip", "pass")[case % 2],
            rng.choice([1.0, 0.97, 0.0]),
            rng.choice([None, 1.0, 0.5]),
        )
        next_value = rng.choice([0.0, rng.gauss(0, 1)])
        chosen = {"lam": rng.choice([1.0, 0.95, 0.0])} if rng.random() < 0.5 else {"alpha": rng.choice([0.05, 2.0])}
        found = gae(
            rewards, values, masks, gamma=gamma, next_value=next_value, critic_lam=critic_lam, masked=masked, **chosen
        )
        flat = [[x for turn in part for x in turn] for part in (rewards, values, masks)]
        flat[2] = [1] * len(flat[2]) if masked == "pass" else flat[2]
        steps, own, baseline = value_oracle.steps_of(*flat)
        lam = chosen["lam"] if "lam" in chosen else max(0.0, 1 - 1 / (chosen["alpha"] * len(steps)))
        expected = value_oracle.gae(own, baseline, gamma, lam, next_value)
        targets = value_oracle.gae(own, baseline, gamma, lam if critic_lam is None else critic_lam, next_value)
        assert found.lam == lam
        assert [len(turn) for turn in found.advantages] == [len(turn) for turn in masks]
        advantages, returns = ([x for turn in part for x in turn] for part in (found.advantages, found.returns))
        for k, x, y in zip(steps, expected, [a + v for a, v in zip(targets, baseline, strict=True)], strict=True):
            worst = max(worst, abs(advantages[k] - x), abs(returns[k] - y))
        rest = {*range(len(flat[2]))} - {*steps}
        assert not any(advantages[k] or returns[k] for k in rest)
    assert worst <= 1e-12
    evidence(cases=count, worst=worst, tolerance=1e-12)


def test_a_trajectory_worked_by_hand():
    """Two turns with a tool's output between them: γ = 1, λ = 1/2, a reward of 1 at the end."""
    rewards, values, masks = [[0.0, 0.0, 0.0], [1.0]], [[0.5, 0.25, 9.0], [0.75]], [[1, 1, 0], [1]]
    found = gae(rewards, values, masks, gamma=1.0, lam=0.5, next_value=0.0)
    assert found.advantages == [[-0.25 + 0.5 * 0.625, 0.5 + 0.5 * 0.25, 0.0], [0.25]]
    assert found.returns == [[0.5 + 0.0625, 0.25 + 0.625, 0.0], [1.0]]
    passed = gae(rewards, values, masks, gamma=1.0, lam=0.5, next_value=0.0, masked="pass")
    assert passed.advantages[0][2] == 0.75 - 9.0 + 0.5 * 0.25
    assert passed.advantages[0][1] == 9.0 - 0.25 + 0.5 * passed.advantages[0][2]


def test_skipped_tokens_need_no_value_and_their_reward_belongs_to_the_step_before():
    found = gae([[0.0, 3.0, 1.0]], [[0.0, math.nan, 0.0]], [[1, 0, 1]], gamma=1.0, lam=0.0, next_value=0.0)
    assert found.advantages == [[3.0, 0.0, 1.0]]


def test_a_trajectory_without_a_trained_token_has_no_advantage():
    found = gae([[1.0]], [[math.nan]], [[0]], gamma=1.0, alpha=0.05, next_value=0.0)
    assert (found.advantages, found.returns) == ([[0.0]], [[0.0]])


@pytest.mark.parametrize("size", [2, 4])
def test_gathered_values_of_context_parallel_ranks_give_the_same_bits(size):
    rng, total, response = random.Random(size), 21, 15
    values = torch.tensor([rng.gauss(0, 1) for _ in range(response)], dtype=torch.float64)
    rewards, masks = [[0.0] * (response - 1) + [1.0]], [[1] * response]

    def work(rank):
        group = threads.subgroup(lambda r: 0, size, rank)
        local = values[response_index(total, response, cp_rank=rank, cp_size=size)]
        whole = all_gather_with_cp(local, total, response, group=group, cp_rank=rank, cp_size=size)
        return gae(rewards, [whole.tolist()], masks, **GIVEN)

    expected = gae(rewards, [values.tolist()], masks, **GIVEN)
    assert threads.run(size, work) == [expected] * size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"masked": "ignore"}, "masked='ignore' is neither skip nor pass"),
        ({"alpha": 0.05}, "lam and alpha both set λ"),
        ({"lam": None}, "exactly one of them is needed"),
        ({"lam": None, "alpha": 0.0}, "alpha=0.0 is not a finite number > 0"),
        ({"gamma": 1.5}, "gamma=1.5 is not a number from 0 to 1"),
        ({"critic_lam": -0.1}, "critic_lam=-0.1 is not a number from 0 to 1"),
        ({"next_value": math.nan}, "next_value=nan is not a finite number"),
        ({"values": [[0.0]]}, r"values have \[1\] entries and loss_masks \[3\]"),
        ({"values": [[0.0, 0.0, math.inf]]}, "values of response token 2 of the trajectory=inf is not a finite number"),
        ({"rewards": [[math.nan, 0.0, 0.0]]}, "rewards of response token 0 of the trajectory=nan"),
        ({"rewards": [0.0, 0.0, 0.0]}, r"rewards=\[0.0, 0.0, 0.0\] is not a list for each turn"),
        ({"loss_masks": [0, 1, 1]}, r"loss_masks=\[0, 1, 1\] is not a list for each turn"),
        ({"loss_masks": [[0, 1, 2]]}, "loss_masks contain 2, which is neither 0 nor 1"),
        ({"loss_masks": [[0, 1, math.nan]]}, "loss_masks contain nan"),
        ({"rewards": [[1.0, 0.0, 0.0]]}, "before the first trained token have no step"),
    ],
)
def test_what_has_no_meaning_is_refused(changes, message):
    given = {"rewards": [[0.0] * 3], "values": [[0.0] * 3], "loss_masks": [[0, 1, 1]], **GIVEN} | changes
    with pytest.raises(ValueError, match=message):
        gae(**given)
