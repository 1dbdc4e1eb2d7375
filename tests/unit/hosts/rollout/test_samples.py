"""Samples of a rollout of slime or miles, and how their indices tell prompts apart."""

from types import SimpleNamespace

import pytest
import threads
import torch

from megatron_pg.cp_utils import response_index
from megatron_pg.hosts.rollout.samples import Rollout

ALONE = SimpleNamespace(size=lambda: 1)


def rollout_of(**data) -> Rollout:
    return Rollout(data=data, rollouts_per_step="n", old_logprobs="log_probs", samples_per_prompt=2)


def data_of(tokens, lengths, values) -> dict:
    """One rollout a sample; `values` are the advantages and log-probabilities of this rank."""
    return {
        "tokens": tokens,
        "total_lengths": [len(each) for each in tokens],
        "response_lengths": lengths,
        "loss_masks": [torch.ones(n, dtype=torch.int) for n in lengths],
        "log_probs": [-each for each in values],
        "advantages": values,
        "rollout_ids": list(range(len(tokens))),
        "sample_indices": list(range(len(tokens))),
    }


def samples(indices, rollout_ids=(0, 1, 2, 3)):
    data = data_of([torch.tensor([1, 2, 3])] * 4, [2] * 4, [torch.ones(2)] * 4)
    rollout = rollout_of(**data | {"rollout_ids": list(rollout_ids), "sample_indices": list(indices)})
    return rollout.samples(ALONE, needs_prompts=True)


def test_responses_are_put_together_from_the_parts_of_every_context_parallel_rank():
    tokens, length = [torch.arange(8), torch.arange(6)], [5, 4]
    whole = [torch.arange(1.0, n + 1) for n in length]

    def work(rank: int):
        group = torch.distributed.group.WORLD
        index = [response_index(len(t), n, cp_rank=rank, cp_size=2) for t, n in zip(tokens, length, strict=True)]
        parts = [values[i] for values, i in zip(whole, index, strict=True)]
        assert all(len(part) < n for part, n in zip(parts, length, strict=True))
        rollout = rollout_of(**data_of(tokens, length, parts))
        return [(sample.old_logprobs, sample.advantages) for sample in rollout.samples(group, needs_prompts=False)]

    for found in threads.run(2, work):
        for (old, advantages), values in zip(found, whole, strict=True):
            assert torch.equal(old, -values.double())
            assert torch.equal(advantages, values.double())


def test_steps_take_their_own_micro_batches():
    data = data_of([], [], []) | {"n": [4, 2, 1]}
    rollout = rollout_of(**data, micro_batch_indices=[[0, 1], [2], [3, 4], [5]], num_microbatches=[2, 1, 1])
    assert rollout.steps() == [[[0, 1], [2]], [[3, 4]], [[5]]]


def test_prompts_are_samples_in_a_row():
    found = samples([4, 5, 6, 7])
    assert [sample.prompt_id for sample in found] == [2, 2, 3, 3]


def test_samples_without_an_index_have_no_prompt():
    """slime lets a generate function of the user's leave it out."""
    found = samples([None] * 4)
    assert [sample.prompt_id for sample in found] == [None] * 4


def test_samples_of_one_rollout_may_share_an_index():
    assert len(samples([0, 0, 1, 1], rollout_ids=[0, 0, 1, 1])) == 4


def test_an_index_that_rollouts_share_is_no_number_of_a_sample():
    with pytest.raises(ValueError, match="sample index 5 is in rollouts 0 and 1"):
        samples([5, 5, 6, 6])
