"""What could be sampled, at the door: what is taken, what is written, and what is refused, by name."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from sample_fields import FIELDS

from megatron_pg import RolloutFileError, RolloutWriter, Sample, read_rollouts
from megatron_pg.rollouts.file import version_of
from megatron_pg.rollouts.support import Support, support_of

FLAT = {"ids": [7, 3, 8, 4], "offsets": [0, 2, 4, 4]}


@pytest.mark.parametrize(
    "given",
    [
        [[7, 3], [8, 4], []],
        ([7, 3], np.array([8, 4]), torch.tensor([], dtype=torch.int64)),
        FLAT,
        {"token_ids": FLAT["ids"], "offsets": FLAT["offsets"]},
        {name: np.array(values, dtype=np.int32) for name, values in FLAT.items()},
        {name: torch.tensor(values) for name, values in FLAT.items()},
    ],
    ids=range(6),
)
def test_every_engines_form_is_taken(given):
    support = Sample.build(**FIELDS, support=given).support
    assert support.lists() == FLAT
    assert (support.ids.dtype, support.offsets.dtype) == (torch.int32, torch.int64)
    assert support.counts.tolist() == [2, 2, 0]


def test_a_file_gives_back_what_was_written(tmp_path):
    sample = Sample.build(**FIELDS, support=FLAT)
    assert version_of([sample]) == 2
    with RolloutWriter(tmp_path / "r.jsonl", version=2) as writer:
        writer.write([sample])
    (again,) = read_rollouts(tmp_path / "r.jsonl")
    assert again.support.lists() == FLAT
    with (
        RolloutWriter(tmp_path / "old.jsonl") as writer,
        pytest.raises(ValueError, match="has support, which version 1"),
    ):
        writer.write([sample])


def test_a_line_has_one_form(tmp_path):
    path = tmp_path / "r.jsonl"
    with RolloutWriter(path, version=2) as writer:
        writer.write([Sample.build(**FIELDS, support=FLAT)])
    path.write_text(path.read_text().replace('"ids"', '"token_ids"'))
    with pytest.raises(RolloutFileError, match=r"support=.* has the wrong type or range"):
        read_rollouts(path)


def test_which_tokens_are_held():
    rng = random.Random(0)
    for _ in range(50):
        sets = [rng.sample(range(9), rng.randint(0, 4)) for _ in range(rng.randint(1, 6))]
        tokens = [rng.randrange(9) for _ in sets]
        found = support_of(sets, "s").holds(torch.tensor(tokens))
        assert found.tolist() == [not s or token in s for s, token in zip(sets, tokens, strict=True)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, "is not the ids that could be sampled"),
        ("abc", "is not the ids that could be sampled"),
        ([[7.5], [8], [9]], "is not the ids that could be sampled"),
        ([[True], [8], [9]], "is not the ids that could be sampled"),
        ([[2**31], [8], [9]], "is not the ids that could be sampled"),
        ({"ids": [7]}, "is not the ids that could be sampled"),
        ({"names": [7], "offsets": [0, 1, 1, 1]}, "is not the ids that could be sampled"),
        ({"ids": [[7]], "offsets": [0, 1, 1, 1]}, "is not the ids that could be sampled"),
        ({"ids": np.array([7.0]), "offsets": [0, 1, 1, 1]}, "is not the ids that could be sampled"),
        ([[7], [8]], "has 3 offsets for 3 response tokens and 2 ids"),
        ({"ids": [7, 8], "offsets": [0, 1, 1, 1]}, "do not rise from 0 to 2"),
        ({"ids": [7, 8], "offsets": [1, 1, 1, 2]}, "do not rise from 0 to 2"),
        ({"ids": [7, 8], "offsets": [0, 2, 1, 2]}, "do not rise from 0 to 2"),
        ({"ids": [], "offsets": []}, "has 0 offsets for 3 response tokens"),
        ([[7], [8, -1], [9]], "holds a negative number.*response token 1"),
        ([[7], [8, 4, 8], [9]], "names a token twice.*response token 1"),
    ],
    ids=range(16),
)
def test_what_is_no_support_is_refused(given, message):
    with pytest.raises(ValueError, match=f"support.* of sample 2 .*{message}"):
        Sample.build(**FIELDS, support=given)


def test_at_tokens_that_the_objective_does_not_train_it_may_hold_any_integers():
    odd = [[7, 8], [8, 7], [4, 4, -7]]
    Sample.build(**FIELDS, support=odd)
    with pytest.raises(ValueError, match=r"names a token twice|holds a negative"):
        Sample.build(**FIELDS | {"loss_mask": [1, 1, 1]}, support=odd)
    supervised = {name: v for name, v in FIELDS.items() if name not in ("old_logprobs", "advantage", "reward")}
    Sample.build(**supervised | {"loss_mask": [1, 1, 1]}, term="sft", support=odd)


@pytest.mark.parametrize(
    "change",
    [
        {"ids": torch.zeros(2)},
        {"ids": torch.zeros(2, 2, dtype=torch.int32)},
        {"offsets": torch.zeros(4)},
        {"ids": None},
    ],
    ids=range(4),
)
def test_tensors_of_another_kind_are_refused(change):
    support = support_of([[7], [8], []], "s")
    with pytest.raises(ValueError, match=r"support of sample 2 is no Support of \[n\] int32"):
        Sample.build(**FIELDS, support=dataclasses.replace(support, **change))
    assert isinstance(support, Support)
