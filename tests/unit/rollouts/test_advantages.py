"""Advantages against the papers' formulas, written out with numpy."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_pg import group_advantages
from megatron_pg.rollouts.advantages import RULES

# One group's rewards -> advantages, as the papers print them.
FORMULAS = {
    "group_mean": lambda r: r - r.mean(),
    "group_norm": lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-6),
    "rloo": lambda r: np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))]),
    "max_rl": lambda r: (r - r.mean()) / r.mean() if r.any() else 0 * r,
    "reward": lambda r: r,
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(5))
def test_advantages_are_those_of_the_paper_whatever_the_order_of_the_samples(rule, seed):
    rng = random.Random(seed)
    groups = [
        np.array([float(rng.random() < 0.4) if rule == "max_rl" else rng.gauss(0, 2) for _ in range(rng.randint(2, 9))])
        for _ in range(6)
    ]
    rows = [(p, r, a) for p, group in enumerate(groups) for r, a in zip(group, FORMULAS[rule](group), strict=True)]
    rng.shuffle(rows)
    prompts, rewards, expected = zip(*rows, strict=True)
    found = group_advantages(rewards, prompts, rule=rule)
    assert found.values == pytest.approx(list(expected), rel=1e-12, abs=1e-14)
    assert found.num_groups == 6
    assert found.num_zero_variance == sum(len(set(group)) == 1 for group in groups)


@pytest.mark.parametrize("rule", ["group_mean", "group_norm", "rloo"])
def test_a_group_of_equal_rewards_has_no_advantage_at_all_and_is_said(rule):
    found = group_advantages([0.1, 0.1, 0.1, 0, 1], ["a", "a", "a", "b", "b"], rule=rule)
    assert found.values[:3] == [0.0, 0.0, 0.0]  # exactly: 0.1 + 0.1 + 0.1 is not 3 times 0.1
    assert str(found) == "1 of 2 prompt groups (50%) have equal rewards"
    assert all(found.values[3:])


def test_prompts_that_nobody_and_that_everybody_solves_have_no_advantage_under_max_rl():
    found = group_advantages([0, 0, 1, 1, 1, 0, 0, 0], [1, 1, 2, 2, 3, 3, 3, 3], rule="max_rl")
    assert found.values == [0, 0, 0, 0, 3, -1, -1, -1]
    assert found.num_zero_variance == 2


def test_no_rewards_have_no_advantages():
    assert str(group_advantages([], [], rule="rloo")) == "0 of 0 prompt groups (0%) have equal rewards"


def test_a_reward_beyond_float_precision_is_one_reward():
    found = group_advantages([2**53 + 1, 2**53 + 1, 0], ["q"] * 3, rule="group_mean", rollout_ids=[1, 1, 2])
    assert found.values == [2.0**52, 2.0**52, -(2.0**52)]


def test_the_page_of_the_rollout_file_has_every_rule_and_its_paper():
    page = (Path(__file__).parents[3] / "docs" / "rollout_file.md").read_text(encoding="utf-8")
    rows = {row.split("`")[1]: row for row in page.splitlines() if row.startswith("| `")}
    for name, rule in RULES.items():
        assert rule.source.rpartition(" ")[2] in rows[name], name


def test_a_rollout_of_several_samples_counts_once():
    found = group_advantages([1, 1, 1, 0], ["q"] * 4, rule="group_mean", rollout_ids=[7, 7, 7, 8])
    assert found.values == [0.5, 0.5, 0.5, -0.5]


def test_tensors_and_arrays_are_taken():
    for rewards, prompts in (
        (torch.tensor([1.0, 0.0]), torch.tensor([3, 3])),
        (np.array([1, 0], dtype=np.int32), np.array(["q", "q"])),
    ):
        assert group_advantages(rewards, prompts, rule="rloo").values == [1.0, -1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"rule": "grpo"},
            "rule='grpo' is not one of group_mean, group_norm, rloo, max_rl, reward. Choose one. Did you mean "
            "group_norm?",
        ),
        ({"rule": "std"}, "rule='std' is not one of group_mean, group_norm, rloo, max_rl, reward. Choose one."),
        ({"prompt_ids": [1]}, "prompt_ids has 1 entries for 2 rewards"),
        ({"rollout_ids": [1]}, "rollout_ids has 1 entries for 2 rewards"),
        ({"rollout_ids": [1, 1]}, "rollout 1 of prompt 1 has samples with different rewards"),
        ({"prompt_ids": [1, 2]}, "prompt 1 has one rollout, and group_mean compares several"),
        ({"prompt_ids": [1, None]}, "prompt_ids[1]=None is neither"),
        ({"rewards": [0.0, float("nan")]}, "rewards[1]=nan is not a finite number"),
        ({"rewards": [0.0, "1"]}, "rewards[1]='1' is not a finite number"),
        ({"rewards": [0.0, True]}, "rewards[1]=True is not a finite number"),
        ({"rewards": [1e308, 1e308 * 0.9]}, "prompt 1 has rewards too large for group_mean"),
        ({"rewards": [1.7e308, -1.7e308], "rule": "rloo"}, "prompt 1 has rewards too large for rloo"),
        ({"rewards": [0.5, 1.0], "rule": "max_rl"}, "the reward 0.5, and max_rl is defined for rewards of 0 and 1"),
        ({"rewards": [0.5, 0.5], "rule": "max_rl"}, "prompt 1 has the reward 0.5"),
    ],
)
def test_what_has_no_advantage_is_refused(arguments, message):
    rewards, prompts = arguments.pop("rewards", [0.0, 1.0]), arguments.pop("prompt_ids", [1, 1])
    with pytest.raises(ValueError) as error:
        group_advantages(rewards, prompts, **{"rule": "group_mean"} | arguments)
    assert message in str(error.value)
