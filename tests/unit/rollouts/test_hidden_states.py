"""A teacher's hidden states at the door: what is taken, what is written, and what is refused, by name."""

import dataclasses

import numpy as np
import pytest
import torch
from sample_fields import FIELDS

from megatron_pg import RolloutWriter, Sample, pack, read_rollouts
from megatron_pg.rollouts import lines
from megatron_pg.rollouts.file import version_of
from megatron_pg.rollouts.hidden_states import encoded, hidden_states_of
from megatron_pg.rollouts.lines import RolloutFileError

STATES = torch.tensor([[0.5, -1.0], [3.0, 1e-3], [2.0, 0.0]])


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (STATES, torch.float32),
        (STATES.bfloat16(), torch.bfloat16),
        (STATES.double(), torch.float32),
        (STATES.half(), torch.float32),
        (STATES.numpy(), torch.float32),
        (STATES.double().numpy().astype(">f8"), torch.float32),
        (STATES.t().contiguous().t(), torch.float32),
        (STATES.clone().requires_grad_(), torch.float32),
    ],
    ids=str,
)
def test_tensors_and_arrays_are_taken(given, dtype):
    states = Sample.build(**FIELDS, teacher_hidden=given).teacher_hidden
    assert (states.dtype, states.is_contiguous(), states.requires_grad) == (dtype, True, False)
    assert torch.allclose(states.float(), STATES, rtol=2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_gives_back_every_bit(dtype, tmp_path):
    states = torch.randn(3, 5).to(dtype)
    states[2, 0], states[2, 1] = torch.nan, -torch.inf  # at a token that nothing trains
    sample = Sample.build(**FIELDS, teacher_hidden=states)
    assert version_of([sample]) == 2
    with RolloutWriter(tmp_path / "r.jsonl", version=2) as writer:
        writer.write([sample])
    (again,) = read_rollouts(tmp_path / "r.jsonl")
    assert again.teacher_hidden.dtype == dtype
    assert torch.equal(again.teacher_hidden.view(torch.uint8), states.view(torch.uint8))
    with (
        RolloutWriter(tmp_path / "old.jsonl") as writer,
        pytest.raises(ValueError, match="has teacher_hidden, which version 1"),
    ):
        writer.write([sample])


def test_the_numbers_of_a_file_are_little_endian():
    assert encoded(torch.tensor([[1.0, -2.0]]).bfloat16()) == {"width": 2, "bfloat16": "gD8AwA=="}  # 3f80, c000
    assert encoded(torch.tensor([[1.0]])) == {"width": 1, "float32": "AACAPw=="}
    assert hidden_states_of({"width": 1, "bfloat16": "gD8AwA=="}, "s").tolist() == [[1.0], [-2.0]]


@pytest.mark.parametrize(
    "given",
    [
        [[0.5, 1.0]] * 3,
        STATES.int(),
        STATES[0],
        np.array([["a"]]),
        torch.zeros(3, 2, dtype=torch.complex64),
        {"width": 2, "float16": "AAAA"},
        {"width": 2, "bfloat16": "AAAA"},  # three bytes
        {"width": 2, "bfloat16": "AAAAA"},
        {"width": 2, "bfloat16": "AA AAAA="},
        {"width": 4, "bfloat16": "gD8AwA=="},
        {"width": 0, "bfloat16": ""},
        {"width": True, "bfloat16": ""},
        {"bfloat16": ""},
        "gD8AwA==",
    ],
    ids=str,
)
def test_what_is_no_matrix_is_refused(given):
    with pytest.raises(ValueError, match=r"are no hidden states. Give a tensor or array"):
        Sample.build(**FIELDS, teacher_hidden=given)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (STATES[:2], r"have shape \(2, 2\) for 3 response tokens"),
        (STATES[:, :0], r"have shape \(3, 0\) for 3 response tokens"),
        (STATES + torch.tensor([[0.0], [torch.nan], [0.0]]), "not finite at response token 1, which is trained"),
        (STATES.bfloat16() + torch.tensor([[torch.inf], [0.0], [0.0]]).bfloat16(), "not finite at response token 0"),
    ],
)
def test_rows_that_do_not_align_or_are_not_finite_are_refused(states, message):
    with pytest.raises(ValueError, match=f"teacher_hidden of sample 2 .*{message}"):
        Sample.build(**FIELDS, teacher_hidden=states)


def test_a_sample_takes_nothing_that_build_would_not_make():
    sample = Sample.build(**FIELDS)
    for states in (STATES.double(), STATES[None], STATES.to("meta"), STATES.tolist(), STATES.to_sparse()):
        with pytest.raises(ValueError, match=r"are no \[R, H\] bfloat16 or float32 on the CPU. Use Sample.build"):
            dataclasses.replace(sample, teacher_hidden=states)


def test_a_line_of_a_file_that_says_something_else_is_refused(tmp_path):
    path = tmp_path / "r.jsonl"
    with RolloutWriter(path, version=2) as writer:
        writer.write([Sample.build(**FIELDS, teacher_hidden=STATES)])
    text = path.read_text()
    for old, new in (('"width": 2', '"width": "2"'), ('"float32": "', '"float32": 1, "x": "')):
        path.write_text(text.replace(old, new))
        with pytest.raises(RolloutFileError, match=r"teacher_hidden=.* has the wrong type or range"):
            read_rollouts(path)


def test_a_line_that_no_reader_takes_is_not_written(tmp_path, monkeypatch):
    path, sample = tmp_path / "r.jsonl", Sample.build(**FIELDS, teacher_hidden=STATES)
    with RolloutWriter(path, version=2) as writer:
        writer.write([sample])
        length = len(path.read_bytes().splitlines(keepends=True)[1])
        monkeypatch.setattr(lines, "MAX_LINE_BYTES", length)
        writer.write([sample])
        monkeypatch.setattr(lines, "MAX_LINE_BYTES", length - 1)
        with pytest.raises(ValueError, match=f"would be a line of {length} bytes, and no reader takes more than"):
            writer.write([sample])
    monkeypatch.undo()
    assert len(read_rollouts(path)) == 2


def test_a_micro_batch_does_not_depend_on_how_the_states_lie():
    samples = [Sample.build(**FIELDS, teacher_hidden=STATES)]
    turned = [dataclasses.replace(samples[0], teacher_hidden=STATES.t().contiguous().t())]
    assert pack(turned, qkv_format="thd").digest == pack(samples, qkv_format="thd").digest


def test_a_micro_batch_has_those_of_the_tokens_that_are_asked_for():
    """Samples without any between them, and one in another dtype, of which nothing is rounded."""
    samples = [
        Sample.build(**FIELDS, teacher_hidden=STATES.bfloat16()),
        Sample.build(**FIELDS),
        Sample.build(**FIELDS, teacher_hidden=STATES + 10),
    ]
    batch = pack(samples, qkv_format="thd")
    found = batch.teacher_hidden(torch.tensor([7, 0, 2]))
    assert torch.equal(found, torch.stack([STATES[1] + 10, STATES[0], STATES[2]]))
    assert batch.teacher_hidden(torch.zeros(0, dtype=torch.int64)).shape == (0, 1)
    assert batch.digest != pack([samples[0], samples[1], samples[1]], qkv_format="thd").digest
