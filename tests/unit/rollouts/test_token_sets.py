"""The teacher's likeliest tokens at the door: what is taken, what is written, and what is refused, by name."""

import dataclasses

import numpy as np
import pytest
import torch
from sample_fields import FIELDS

from megatron_pg import RolloutWriter, Sample, read_rollouts
from megatron_pg.rollouts.file import version_of
from megatron_pg.rollouts.token_sets import MOST_IDS, TokenSets, token_sets_of

LISTS = {"ids": [[3, 9], [4], []], "logprobs": [[-0.5, -1.5], [-0.25], []]}


def test_lists_of_any_lengths_become_a_table():
    sets = Sample.build(**FIELDS, teacher_topk=LISTS).teacher_topk
    assert sets.ids.tolist() == [[3, 9], [4, -1], [-1, -1]]
    assert (sets.ids.dtype, sets.logprobs.dtype) == (torch.int32, torch.float32)
    assert sets.logprobs[0].tolist() == [-0.5, -1.5]
    assert sets.lists() == LISTS


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_arrays_are_taken_as_they_are(kind):
    given = {"ids": kind([[3, 9], [4, -1], [-1, -1]]), "logprobs": kind([[-0.5, -1.5], [-0.25, 9.0], [0.0, 0.0]])}
    assert Sample.build(**FIELDS, teacher_topk=given).teacher_topk.lists() == LISTS
    half = given | {"logprobs": torch.as_tensor(given["logprobs"]).bfloat16()}
    assert Sample.build(**FIELDS, teacher_topk=half).teacher_topk.lists() == LISTS


def test_a_file_gives_back_what_was_written(tmp_path):
    sample = Sample.build(**FIELDS, teacher_topk=LISTS)
    noise = dataclasses.replace(sample.teacher_topk, logprobs=sample.teacher_topk.logprobs + torch.rand(3, 2))
    noise.logprobs[2] = torch.nan  # of no id
    sample = dataclasses.replace(sample, teacher_topk=dataclasses.replace(noise, logprobs=noise.logprobs - 2))
    assert version_of([sample]) == 2
    with RolloutWriter(tmp_path / "r.jsonl", version=2) as writer:
        writer.write([sample])
    (again,) = read_rollouts(tmp_path / "r.jsonl")
    assert again.teacher_topk.lists() == sample.teacher_topk.lists()
    with (
        RolloutWriter(tmp_path / "old.jsonl") as writer,
        pytest.raises(ValueError, match="has teacher_topk, which version 1"),
    ):
        writer.write([sample])


def test_the_tail_is_what_is_not_named():
    logprobs = torch.tensor([[0.5, 0.25], [0.125, 0.5], [0.5, 0.5]]).log()
    sets = TokenSets(ids=torch.tensor([[1, 2], [3, -1], [-1, -1]], dtype=torch.int32), logprobs=logprobs)
    assert sets.tails.dtype == torch.float64
    assert torch.allclose(sets.tails, torch.tensor([0.25, 0.875, 1.0], dtype=torch.float64), atol=1e-7)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1], "are not ids and their log-probabilities"),
        ({"ids": [[1]]}, "are not ids and their log-probabilities"),
        ({"ids": [[1.5], [2], [3]], "logprobs": [[-1]] * 3}, "are not ids and their log-probabilities"),
        ({"ids": [[True], [2], [3]], "logprobs": [[-1]] * 3}, "are not ids and their log-probabilities"),
        ({"ids": [["a"], [2], [3]], "logprobs": [[-1]] * 3}, "are not ids and their log-probabilities"),
        ({"ids": [[1], [2], [3]], "logprobs": [[-1], [-1], []]}, "are not ids and their log-probabilities"),
        ({"ids": [1, 2, 3], "logprobs": [-1, -1, -1]}, "are not ids and their log-probabilities"),
        ({"ids": [[2**31], [2], [3]], "logprobs": [[-1]] * 3}, "are not ids and their log-probabilities"),
        ({"ids": [[1], [2]], "logprobs": [[-1]] * 2}, r"have ids \(2, 1\) and logprobs \(2, 1\) for 3 response tokens"),
        ({"ids": [[1], [-2], [3]], "logprobs": [[-1]] * 3}, "hold a negative number other than -1.*response token 1"),
        ({"ids": [[1], [4, 4], [3]], "logprobs": [[-1], [-1, -2], [-1]]}, "name a token twice.*response token 1"),
        (
            {"ids": [[1], [4, 5], [3]], "logprobs": [[-1], [-0.1, -0.1], [-1]]},
            "sum to more than 1.01.*response token 1",
        ),
        ({"ids": [[1]] * 3, "logprobs": [[float("nan")]] * 3}, "log-probability that is not finite.*response token 0"),
        ({"ids": [[1]] * 3, "logprobs": [[float("-inf")]] * 3}, "log-probability that is not finite.*response token 0"),
        (
            {"ids": np.zeros((3, MOST_IDS + 1)).astype(int), "logprobs": np.zeros((3, MOST_IDS + 1))},
            "more than the 512",
        ),
        ({"ids": np.zeros((3, 1)), "logprobs": np.zeros((3, 1))}, "are not ids and their log-probabilities"),
    ],
    ids=range(16),
)
def test_what_is_no_teacher_is_refused(given, message):
    with pytest.raises(ValueError, match=f"teacher_topk.* of sample 2 .*{message}"):
        Sample.build(**FIELDS, teacher_topk=given)


def test_at_tokens_that_nothing_trains_it_may_hold_anything():
    given = {"ids": [[1, 2], [3, 4], [7, 7]], "logprobs": [[-1.0, -1.0], [-1.0, -1.0], [5.0, float("nan")]]}
    sample = Sample.build(**FIELDS, teacher_topk=given)
    with pytest.raises(ValueError, match="name a token twice"):
        dataclasses.replace(sample, masks={"echo": torch.tensor([False, False, True])})


@pytest.mark.parametrize(
    "change",
    [
        {"ids": torch.zeros(3, 2)},
        {"ids": torch.zeros(3, dtype=torch.int32)},
        {"logprobs": torch.zeros(3, 2, dtype=torch.float64)},
        {"logprobs": None},
    ],
    ids=range(4),
)
def test_tables_of_another_kind_are_refused(change):
    sets = token_sets_of("teacher_topk", {"ids": [[1, 2]] * 3, "logprobs": [[-1.0, -1.0]] * 3}, "s")
    with pytest.raises(ValueError, match=r"teacher_topk of sample 2 are not TokenSets of \[R, K\] int32"):
        Sample.build(**FIELDS, teacher_topk=dataclasses.replace(sets, **change))
