"""Denominators by hand: three samples of two rollouts, one of them masked, in two prompts."""

import pytest
import torch

from megatron_pg.declarations.aggregations import AGGREGATIONS
from megatron_pg.reducers.base import StepCounts

# rollouts: a = {s0, s1} with 3 + 5 trained tokens, b = {s2} with none; prompts: P = {a}, Q = {b}; N_r = 2, P = 2, T = 8
COUNTS = {
    "tokens_per_rollout": torch.tensor([8, 8, 0]),
    "tokens_per_prompt": torch.tensor([8, 8, 0]),
    "num_rollouts": 2,
    "num_prompts": 2,
    "num_tokens": 8,
    "divisor": 16.0,
    "num_turns": 3,
}
BY_HAND = {
    "sample_mean": [16, 16, 2],  # N_r · M_rollout, and M is 1 at least
    "prompt_mean": [16, 16, 2],  # P · M_group
    "turn_mean": [3, 3, 3],  # N_turn; the plan multiplies by M of each turn
    "token_mean": [8, 8, 8],  # T
    "constant": [32, 32, 32],  # N_r · L
}


def denominators(name: str, **changes) -> list[float]:
    found = AGGREGATIONS[name].load()(StepCounts(**COUNTS | changes))
    assert found.dtype == torch.float64
    return found.tolist()


def test_every_reducer_has_values_worked_by_hand():
    assert BY_HAND.keys() == AGGREGATIONS.keys()


@pytest.mark.parametrize("name", BY_HAND)
def test_hand_worked_denominators(name):
    assert denominators(name) == BY_HAND[name]


def test_a_rollout_is_divided_by_its_own_tokens_and_a_prompt_by_those_of_its_group():
    uneven = {"tokens_per_rollout": torch.tensor([3, 5, 7]), "tokens_per_prompt": torch.tensor([8, 8, 7])}
    assert denominators("sample_mean", **uneven, num_rollouts=3) == [9, 15, 21]
    assert denominators("prompt_mean", **uneven, num_rollouts=3) == [16, 16, 14]


def test_only_the_constant_reads_the_divisor_and_only_the_prompt_mean_the_prompts():
    for name in AGGREGATIONS:
        if name != "constant":
            assert denominators(name, divisor=None) == BY_HAND[name]
        if name != "prompt_mean":
            assert denominators(name, tokens_per_prompt=None, num_prompts=None) == BY_HAND[name]


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_counts_beyond_float32_stay_exact(name):
    many = 2**24 + 1
    counts = {field: torch.tensor([many]) for field in ("tokens_per_rollout", "tokens_per_prompt")}
    found = denominators(name, **counts, num_rollouts=3, num_prompts=3, num_tokens=many, divisor=float(many))
    assert found == [many if name == "token_mean" else 3 if name == "turn_mean" else 3 * many]


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_a_rank_without_a_sample_has_no_denominator(name):
    none = torch.zeros(0, dtype=torch.int64)
    assert denominators(name, tokens_per_rollout=none, tokens_per_prompt=none) == []
