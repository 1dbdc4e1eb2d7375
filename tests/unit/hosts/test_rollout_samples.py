"""Samples of a rollout of slime or miles, and how their indices tell prompts apart."""

from types import SimpleNamespace

import pytest
import torch

from megatron_pg.hosts.rollout import Rollout
from megatron_pg.hosts.rollout_trainer import _check_numbers

ALONE = SimpleNamespace(size=lambda: 1)


def samples(indices, rollout_ids=(0, 1, 2, 3)):
    data = {
        "tokens": [torch.tensor([1, 2, 3])] * 4,
        "total_lengths": [3] * 4,
        "response_lengths": [2] * 4,
        "loss_masks": [torch.ones(2, dtype=torch.int)] * 4,
        "log_probs": [torch.zeros(2)] * 4,
        "advantages": [torch.ones(2)] * 4,
        "rollout_ids": list(rollout_ids),
        "sample_indices": list(indices),
    }
    rollout = Rollout(data=data, rollouts_per_step=[4], old_logprobs="log_probs", rewards=None, samples_per_prompt=2)
    return rollout.samples(ALONE)


def test_prompts_are_samples_in_a_row():
    found = samples([4, 5, 6, 7])
    assert [sample.prompt_id for sample in found] == [2, 2, 3, 3]
    _check_numbers(found)


def test_samples_without_an_index_have_no_prompt():
    """slime lets a generate function of the user's leave it out."""
    found = samples([None] * 4)
    assert [sample.prompt_id for sample in found] == [None] * 4
    _check_numbers(found)  # the plan says that prompt_mean needs them


def test_samples_of_one_rollout_may_share_an_index():
    _check_numbers(samples([0, 0, 1, 1], rollout_ids=[0, 0, 1, 1]))


def test_an_index_that_rollouts_share_is_no_number_of_a_sample():
    with pytest.raises(ValueError, match="sample index 5 is of rollouts 0 and 1"):
        _check_numbers(samples([5, 5, 6, 6]))
