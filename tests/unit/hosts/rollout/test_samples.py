"""Samples of a rollout of slime or miles, and how their indices tell prompts apart."""

from types import SimpleNamespace

import pytest
import threads
import torch

from megatron_pg.cp_utils import response_index
from megatron_pg.hosts.rollout.samples import Rollout
from megatron_pg.hosts.step import HostLossError

ALONE = SimpleNamespace(size=lambda: 1)


def rollout_of(tokens, values, **more) -> Rollout:
    """One rollout a sample; `values` are the advantages and log-probabilities of this rank."""
    numbers = list(range(len(tokens)))
    data = {
        "tokens": tokens,
        "total_lengths": [len(each) for each in tokens],
        "log_probs": [-each for each in values],
        "advantages": values,
        "rollout_ids": numbers,
        "sample_indices": numbers,
        **more,
    }
    lengths = data.setdefault("response_lengths", [len(each) for each in values])
    data["loss_masks"] = [torch.ones(n, dtype=torch.int) for n in lengths]
    return Rollout(data=data, rollouts_per_step="n", samples_per_prompt=2)


def prompts(indices, rollout_ids=(0, 1, 2, 3)) -> list:
    numbers = {"rollout_ids": list(rollout_ids), "sample_indices": list(indices)}
    rollout = rollout_of([torch.tensor([1, 2, 3])] * 4, [torch.ones(2)] * 4, **numbers)
    return [sample.prompt_id for sample in rollout.samples(range(4), ALONE, needs_prompts=True)]


def test_responses_are_put_together_from_the_parts_of_every_context_parallel_rank():
    tokens, length = [torch.arange(8), torch.arange(6)], [5, 4]
    whole = [torch.arange(1.0, n + 1) for n in length]

    def work(rank: int):
        index = [response_index(len(t), n, cp_rank=rank, cp_size=2) for t, n in zip(tokens, length, strict=True)]
        parts = [values[i] for values, i in zip(whole, index, strict=True)]
        assert all(len(part) < n for part, n in zip(parts, length, strict=True))
        rollout = rollout_of(tokens, parts, response_lengths=length)
        samples = rollout.samples([1, 0], torch.distributed.group.WORLD, needs_prompts=False)
        return [(sample.old_logprobs, sample.advantages) for sample in samples]

    for found in threads.run(2, work):
        for (old, advantages), values in zip(found, whole[::-1], strict=True):
            assert torch.equal(old, -values.double())
            assert torch.equal(advantages, values.double())


SCHEDULE = {"micro_batch_indices": [[0, 1], [2], [3, 4], [5]], "num_microbatches": [2, 1, 1], "n": [4, 2, 1]}


def test_steps_take_their_own_micro_batches():
    assert rollout_of([], [], **SCHEDULE).steps() == [[[0, 1], [2]], [[3, 4]], [[5]]]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_microbatches", None, "the rollout data have no num_microbatches"),
        ("micro_batch_indices", None, "have no micro_batch_indices, .* In miles, use neither multimodal data, fewer"),
        ("sample_indices", None, "the rollout data have no sample_indices"),
        ("n", [6], "are inconsistent"),
        ("num_microbatches", [1, 2, 2], "are inconsistent"),
    ],
)
def test_data_of_another_form_are_refused_by_key(name, value, message):
    rollout = rollout_of([], [], **SCHEDULE | {name: value})
    if value is None:
        del rollout.data[name]
    with pytest.raises(HostLossError, match=message):
        rollout.steps()


def test_prompts_are_samples_in_a_row():
    assert prompts([4, 5, 6, 7]) == [2, 2, 3, 3]
    assert prompts([0, 0, 1, 1], rollout_ids=[0, 0, 1, 1]) == [0, 0, 0, 0]  # one rollout's samples may share an index
    assert prompts([None] * 4) == [None] * 4  # as after a generate function of the user's; the plan refuses prompt_mean


def test_an_index_that_rollouts_share_is_no_number_of_a_sample():
    with pytest.raises(ValueError, match="sample index 5 is in rollouts 0 and 1"):
        prompts([5, 5, 6, 6])
