import errno
import json
import math
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from rollout_files import HEADER, RECORD, write_lines
from samples import random_step

from megatron_pg import RolloutFileError, RolloutWriter, Sample, read_rollouts
from megatron_pg.rollouts.fields import FIELDS


@pytest.fixture
def file(tmp_path):
    """The path of a file of these lines."""
    return lambda *lines: write_lines(tmp_path / "rollouts.jsonl", lines)


GOOD = {"tokens": [5, 6, 7], "response_length": 2, "loss_mask": [1, 0], "old_logprobs": [-1.0, -2.0], "advantage": 1.0}
WHOLE = GOOD | {"prompt_id": 0, "rollout_id": 0, "step": 0, "reward": 1.0}


def rewritten(folder, *samples, version: int = 1) -> list[Sample]:
    """The samples after a file was written and read."""
    with RolloutWriter(folder / "again.jsonl", version=version) as writer:
        writer.write(samples)
    return read_rollouts(folder / "again.jsonl")


def test_a_sample_comes_back_from_a_file(file):
    sample = read_rollouts(file(HEADER, RECORD | {"x_source": "mine", "rollout_logprobs": [-1.4, -2.1]}))[0]
    assert sample.tokens.tolist() == [5, 6, 7, 8]
    assert sample.loss_mask.tolist() == [True, False]
    assert sample.old_logprobs.tolist() == [-1.5, -2.0]
    assert sample.advantages.tolist() == [0.5, 0.5]
    assert sample.rollout_logprobs.tolist() == [-1.4, -2.1]
    assert (sample.prompt_id, sample.rollout_id, sample.step, sample.reward) == ("p0", 0, 0, 1.0)
    assert sample.extra == {"x_source": "mine"}
    assert sample.sample_id == "rollouts.jsonl:2"


def test_what_is_written_is_read_back_exactly(tmp_path):
    samples = random_step(random.Random(0), poison=False)
    for found, expected in zip(rewritten(tmp_path, *samples), samples, strict=True):
        for name in ("tokens", "loss_mask", "old_logprobs", "advantages"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        for name in ("prompt_id", "rollout_id", "reward"):
            assert getattr(found, name) == getattr(expected, name), name


def test_values_of_masked_tokens_need_not_be_finite(tmp_path):
    values = {"loss_mask": [0, 1], "old_logprobs": [float("nan"), -1.0], "advantage": [float("inf"), 1.0]}
    (found,) = rewritten(tmp_path, Sample.build(**WHOLE | values))
    assert found.old_logprobs.tolist() == [0.0, -1.0]


MISSING = {k: v for k, v in RECORD.items() if k != "prompt_id"}
BAD_FILES = [
    ([HEADER], " contains no sample"),
    ([HEADER, MISSING], "2: field 'prompt_id' is missing"),
    ([HEADER, json.dumps(RECORD).encode().replace(b"-1.5", b"-1e999")], "2: old_logprobs=[-inf, -2.0]"),
    *(
        ([HEADER, RECORD, RECORD | change], f"3: {message}")
        for change, message in [
            ({"advantages": 1.0}, "unknown field 'advantages'"),
            ({"prompt_id": None}, "prompt_id=None has the wrong type"),
            ({"tokens": [5, -6, 7, 8]}, "tokens=[5, -6, 7, 8] has the wrong type or range"),
            ({"tokens": "5678"}, "tokens='5678'"),
            ({"tokens": [5, 6]}, "total_length=2 with response_length=2 leaves no prompt token"),
            ({"response_length": 3}, "loss_mask of sample rollouts.jsonl:3 has 2 entries for 3"),
            ({"response_length": 0, "loss_mask": [], "old_logprobs": []}, "response_length=0 of a sample of 4 tokens"),
            ({"old_logprobs": [0.7, -1.0]}, "old_logprobs of sample rollouts.jsonl:3 reach 0.7. Log-probabilities are"),
            (
                {"loss_mask": [1, 0.5]},
                "loss_mask of sample rollouts.jsonl:3 contains 0.5, and it must be 0 or 1. Put weights into",
            ),
            ({"routed_experts": [[1], [2], [3]]}, "routed_experts=[[1], [2], [3]] has the wrong type"),
            ({"routed_experts": [[[1.0]], [[2]], [[3]]]}, "routed_experts=[[[1.0]], [[2]], [[3]]] has the wrong type"),
            ({"reward": 10**400}, "reward="),
        ]
    ),
]


@pytest.mark.parametrize(("lines", "message"), BAD_FILES)
def test_a_bad_file_is_refused_with_its_name_and_line(file, lines, message):
    path = file(*lines)
    with pytest.raises(RolloutFileError) as error:
        read_rollouts(path)
    assert str(error.value).startswith(f"{path}:{message}")


UNUSUAL = [  # good lines
    *({"loss_mask": [1.0, 0.0]}, {"old_logprobs": [5e-4, -1]}, {"old_logprobs": [-1e-300, -1e5]}),
    *({"x_nested": {"old_logprobs": [1, 2], "tokens": "x"}, "x_none": None}, {"advantage": [1, -2.5]}),
    *({"loss_mask": [0, 1], "old_logprobs": [3.0, -1.0]}, {"prompt_id": "é", "rollout_id": -(2**61)}),
]


@pytest.mark.parametrize("fields", UNUSUAL, ids=str)
def test_an_unusual_line_is_read(file, fields):
    (sample,) = read_rollouts(file(HEADER, RECORD | fields))
    assert sample.num_trained == 1
    assert sample.extra == {name: value for name, value in fields.items() if name.startswith("x_")}


def test_token_ids_are_not_rounded_and_numbers_of_numpy_are_numbers():
    fields = {"response_length": 1, "loss_mask": [1], "old_logprobs": [-1.0]}
    with pytest.raises(ValueError, match=r"tokens of sample without id are fractions, and none may be rounded"):
        Sample.build(tokens=[1.9, 2.0], advantage=1.0, **fields)
    assert Sample.build(tokens=[1, 2], advantage=np.float32(0.5), **fields).advantages.tolist() == [0.5]


MEANT = {  # other values of GOOD's meaning
    "tokens": [
        *(torch.tensor([5, 6, 7], dtype=torch.int32), np.array([5, 6, 7], dtype=np.uint16), range(5, 8)),
        (np.int64(5), torch.tensor(6), 7),
    ],
    "response_length": [np.int32(2), torch.tensor(2)],
    "loss_mask": [[True, False], [np.True_, 0], np.array([True, False]), torch.tensor([1.0, 0.0])],
    "old_logprobs": [
        np.array([-2, -1], dtype=">f2")[::-1],
        torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True),
        [np.float32(-1), torch.tensor(-2.0)],
    ],
    "advantage": [torch.tensor(1.0), torch.tensor(1), np.float16(1), np.array(1), [1, np.int64(1)]],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in MEANT for value in MEANT[name]], ids=repr)
def test_a_value_with_one_meaning_is_taken(name, value):
    sample = Sample.build(**GOOD | {name: value})
    assert sample.tokens.tolist() == [5, 6, 7]
    assert sample.loss_mask.tolist() == [True, False]
    assert sample.old_logprobs.tolist() == [-1.0, -2.0]
    assert sample.advantages.tolist() == [1.0, 1.0]
    assert {t.dtype for t in (sample.old_logprobs, sample.advantages)} == {torch.float64}
    assert not sample.old_logprobs.requires_grad


def test_ids_and_numbers_of_numpy_and_torch_become_pythons_and_0_is_an_id(tmp_path):
    ids = {"prompt_id": np.int64(3), "rollout_id": torch.tensor(0), "step": np.int32(1)}
    sample = Sample.build(**GOOD, **ids, reward=torch.tensor(0.5))
    assert sample.sample_id == "0"
    for found in (sample, *rewritten(tmp_path, sample)):
        values = [found.prompt_id, found.rollout_id, found.step, found.reward]
        assert values == [3, 0, 1, 0.5]
        assert list(map(type, values)) == [int, int, int, float]


class Broken:
    """An object that raises on every access."""

    ndim = 0

    def item(self):
        raise KeyError

    __len__ = __iter__ = __str__ = __repr__ = item


HOSTILE = [
    *(None, "text", b"12", True, 1.5, float("nan"), -1, 2**63, 10**400, 10**5000, object(), Broken(), type, slice(1)),
    *({}, {1: 2}, {1, 2}, iter([1, 2]), [], (), [None], ["1"], [[1, 2]], [[1], [1, 2]], [True, False], [10**30, 1]),
    *([10**400, 1], [object(), 1], [torch.zeros(2)] * 2, torch.zeros(2, 2), torch.zeros(0), torch.zeros(2).to_sparse()),
    *(torch.zeros(2, dtype=torch.complex64), torch.zeros(2, device="meta"), torch.zeros((), device="meta")),
    *(torch.tensor([1, 2**62]), torch.tensor([2**63 + 1, 2], dtype=torch.uint64), np.zeros((2, 2)), np.array("x")),
    *(np.array(["a", "b"]), np.array([object(), 1]), np.complex64(1), np.datetime64("2020"), np.longdouble(1.5)),
]


@pytest.mark.parametrize("build", [True, False], ids=["Sample.build", "Sample"])
def test_a_value_without_a_meaning_is_refused_in_one_line(build):
    good = Sample.build(**GOOD)
    whole = {name: getattr(good, name) for name in ("tokens", "loss_mask", "old_logprobs", "advantages")}
    make, fields = (Sample.build, GOOD) if build else (Sample, whole)
    others = ("prompt_id", "rollout_id", "sample_id", "step", "reward", "extra", "rollout_logprobs", "ref_logprobs")
    others += ("routed_experts", "weight_version")
    messages = []
    for name in (*fields, *others):
        for value in HOSTILE:
            try:
                make(**fields | {name: value})
            except ValueError as error:
                messages.append(str(error))
    assert all(message.isprintable() and len(message) < 400 for message in messages)
    assert len(messages) > 0.7 * len(HOSTILE) * (len(fields) + len(others) - 1)  # anything may be a label


NOT_FINITE = "at response token 1, which is trained"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": []}, "total_length=0 with response_length=2 leaves no prompt token"),
        ({"tokens": None}, "tokens=None of sample s is not one flat list of token ids. Give one."),
        ({"tokens": "567"}, "tokens='567' of sample s is not one flat list of token ids"),
        ({"tokens": [[5, 6, 7]]}, "tokens=[[5, 6, 7]] of sample s is not one flat list"),
        ({"tokens": torch.zeros(1, 3, dtype=torch.int64)}, "a tensor of shape (1, 3), torch.int64, on cpu of sample s"),
        ({"tokens": [5, 2**31, 7]}, "tokens of sample s contain 2147483648, which is not a token id"),
        ({"response_length": "2"}, "response_length='2' of sample s is not a length"),
        ({"response_length": True}, "response_length=True of sample s is not a length"),
        ({"loss_mask": "10"}, "loss_mask='10' of sample s is not one flat list of 0 and 1"),
        ({"loss_mask": None}, "loss_mask=None of sample s is not one flat list of 0 and 1"),
        ({"old_logprobs": -1.0}, "old_logprobs=-1.0 of sample s is not one flat list of numbers"),
        ({"advantage": True}, "advantage=True of sample s is not one flat list of numbers"),
        ({"advantage": "1"}, "advantage='1' of sample s is not one flat list of numbers"),
        ({"advantage": torch.tensor([1.0])}, "advantages of sample s has 1 entries for 2 response tokens"),
        ({"step": 1.0}, "step=1.0 of sample s is not an integer of at least 0"),
        ({"reward": "1"}, "reward='1' of sample s is not a number"),
        ({"truncated": "no"}, "truncated='no' of sample s is neither True nor False"),
        ({"truncated": 1}, "truncated=1 of sample s is neither True nor False"),
        ({"extra": [1]}, "extra=[1] of sample s is not a dict of x_ fields"),
        *(({"prompt_id": value}, f"prompt_id={value} of sample s is neither") for value in (3.5, True, 2**63)),
        *(({"loss_mask": [1, 1], "old_logprobs": [-1.0, value]}, NOT_FINITE) for value in (math.nan, math.inf)),
        *(({"loss_mask": [1, 1], "advantage": [1.0, value]}, NOT_FINITE) for value in (math.nan, math.inf)),
        ({"weight_version": -1}, "weight_version=-1 of sample s does not say where it comes from"),
        ({"weight_version": 1.5}, "weight_version=1.5 of sample s does not say"),
        ({"weight_version": [1.5, 2]}, "weight_version of sample s are fractions, and none may be rounded"),
        (
            {"weight_version": [3]},
            "weight_version=[3] of sample s is not a number of optimizer steps for each of its 2",
        ),
        *(({"weight_version": [1, v]}, f"[1, {v}] of sample s is not a number of optimizer") for v in (-1, 2**62)),
        ({"weight_version": 10**400}, "of sample s does not say where it comes from"),
        ({"worker": [1]}, "worker=[1] of sample s does not say"),
        ({"data_parallel_rank": True}, "data_parallel_rank=True of sample s does not say"),
        ({"worker": "a\nb"}, "does not say where it comes from"),
        ({"term": "Sft"}, "term='Sft' of sample s"),
        ({"term": 3}, "term=3 of sample s"),
        ({"masks": [1]}, "masks=[1] of sample s"),
        ({"masks": {"rl": [1, 0]}}, "masks of sample s contain 'rl', which is not a further loss term"),
        ({"masks": {"a b": [1, 0]}}, "contain 'a b', which is not a further loss term"),
        ({"masks": {"echo": [1, 0, 1]}}, "masks['echo'] of sample s has 3 entries for 2 response tokens"),
        ({"masks": {"echo": [0.5, 0]}}, "masks['echo'] of sample s contains 0.5, and it must be 0 or 1"),
        ({"old_logprobs": None}, "has no old_logprobs, which the objective needs"),
        ({"advantage": None}, "has no advantage, which the objective needs. Give it, or set term to the NAME"),
        ({"teacher_logprobs": [-1.0, 2.0], "loss_mask": [1, 1]}, "teacher_logprobs of sample s reach 2"),
        ({"old_entropies": [0.5, -0.7], "loss_mask": [1, 1]}, "old_entropies of sample s go down to -0.7. Entropies"),
        ({"old_entropies": [0.5], "loss_mask": [1, 1]}, "old_entropies of sample s has 1 entries for 2 response"),
        ({"advantages": [1.0]}, "'advantages' is not an argument of Sample.build. Did you mean advantage?"),
        ({"rewrad": 1.0}, "'rewrad' is not an argument of Sample.build. Did you mean reward?"),
        ({"x_mine": 1.0}, "'x_mine' is not an argument of Sample.build. Put your own fields into extra."),
    ],
)
def test_a_refusal_names_the_value(change, message):
    with pytest.raises(ValueError) as error:
        Sample.build(**GOOD | {"sample_id": "s"} | change)
    assert message in str(error.value)


def test_a_file_of_samples_is_kept_unless_it_is_to_be_appended_to_or_replaced(tmp_path):
    path, samples = tmp_path / "r.jsonl", random_step(random.Random(5), poison=False)[:2]
    path.touch()  # an empty file holds nothing
    with RolloutWriter(path) as writer:
        writer.write(samples)
    with pytest.raises(RolloutFileError, match="exists already and is kept"):
        RolloutWriter(path)
    for _ in range(2):
        with RolloutWriter(path, if_exists="append") as writer:
            writer.write(samples)
    assert len(read_rollouts(path)) == 6
    with RolloutWriter(path, if_exists="replace") as writer:
        writer.write(samples)
    assert len(read_rollouts(path)) == 2
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RolloutFileError, match="its last line has no end"):
        RolloutWriter(path, if_exists="append")
    path.write_bytes(b'{"mine": 1}\n')
    with pytest.raises(RolloutFileError, match="header has format None"):
        RolloutWriter(path, if_exists="append")
    assert path.read_bytes() == b'{"mine": 1}\n'
    with pytest.raises(ValueError, match="if_exists='keep' is none of refuse, append and replace"):
        RolloutWriter(path, if_exists="keep")


@pytest.mark.parametrize(
    "origin",
    [
        *({}, {"weight_version": 0}, {"worker": "engine-3"}, {"truncated": True}, {"truncated": False}),
        {"worker": 7, "data_parallel_rank": 0, "weight_version": 2**61},
        {"weight_version": [2**61, 0]},
    ],
    ids=str,
)
def test_where_a_sample_comes_from_is_written_and_read(origin, tmp_path):
    (found,) = rewritten(tmp_path, Sample.build(**WHOLE, **origin))
    names = ("weight_version", "worker", "data_parallel_rank", "truncated")
    values = {name: getattr(found, name) for name in names}
    values = {name: v.tolist() if isinstance(v, torch.Tensor) else v for name, v in values.items()}
    assert values == dict.fromkeys(names) | origin


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": {"mine": 1}}, "extra field 'mine'"),
        ({"extra": {"x_a": {1}}}, "has a value that JSON cannot contain"),
        ({"extra": {"x_a": float("nan")}}, "has a value that JSON"),
        ({"reward": float("nan")}, "reward of sample"),
    ],
)
def test_a_field_that_could_not_be_read_back_is_not_written(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        rewritten(tmp_path, Sample.build(**WHOLE | change))


def test_a_batch_is_written_whole_at_once_or_not_at_all(tmp_path):
    path, samples = tmp_path / "r.jsonl", random_step(random.Random(3), poison=False, most_tokens=200)
    writer = RolloutWriter(path)
    writer.write(samples)
    before = path.read_bytes()  # nothing waits in a buffer that a killed process would lose or tear
    assert before.endswith(b"\n")
    assert len(before.splitlines()) == 1 + len(samples)
    object.__setattr__(samples[-1], "reward", None)
    with pytest.raises(ValueError, match="has no reward"):
        writer.write(samples)
    writer.close()
    assert path.read_bytes() == before


class FullDisk:
    """A file on a disk that has room for so many bytes more."""

    def __init__(self, file, room: int) -> None:
        self.file, self.room, self.name = file, room, file.name

    def __getattr__(self, name: str):
        return getattr(self.file, name)

    def write(self, data: bytes) -> int:
        written = self.file.write(data[: min(self.room, 100)])
        self.room -= written
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written


def test_a_full_disk_leaves_whole_batches_and_the_next_one_goes_behind_them(tmp_path):
    path, samples = tmp_path / "r.jsonl", [sample for sample in random_step(random.Random(3)) if sample.num_trained]
    with RolloutWriter(path) as writer:
        writer.write(samples)
        before, whole = path.read_bytes(), writer._file
        for room in (0, 1, len(before) // 2, len(before) - 200):
            writer._file = FullDisk(whole, room)
            with pytest.raises(
                RolloutFileError, match=rf"r.jsonl: cannot be written \(No space.*none of these {len(samples)} lines"
            ):
                writer.write(samples)
            assert path.read_bytes() == before
        writer._file = whole
        writer.write(samples)
    assert len(read_rollouts(path)) == 2 * len(samples)


OF_OBJECTIVE = ("old_logprobs", "advantage", "reward")
SUPERVISED = {name: value for name, value in RECORD.items() if name not in OF_OBJECTIVE} | {"term": "sft"}


def test_a_sample_of_another_term_needs_only_what_that_reads(file, tmp_path):
    masks, teacher = {"echo": [0, 1], "tool": [1.0, 0.0]}, {"teacher_logprobs": [-0.5, -0.25]}
    mixed = [SUPERVISED, RECORD | {"rollout_id": 1, "masks": masks} | teacher]
    found = read_rollouts(file(HEADER | {"version": 3}, *mixed))
    assert [sample.term for sample in found] == ["sft", "rl"]
    assert (found[0].old_logprobs, found[0].advantages, found[0].reward) == (None, None, None)
    assert {name: mask.int().tolist() for name, mask in found[1].masks.items()} == masks
    assert found[1].mask_of("echo").tolist() == [False, True]
    assert found[1].mask_of("sft") is None
    again = rewritten(tmp_path, *found, version=3)
    assert [sample.term for sample in again] == ["sft", "rl"]
    assert again[1].teacher_logprobs.tolist() == [-0.5, -0.25]
    assert torch.equal(again[1].masks["tool"], found[1].masks["tool"])


@pytest.mark.parametrize(
    ("fields", "version"),
    [({"term": "sft"}, 3), ({"masks": {}}, 2), ({"teacher_logprobs": [-1, -2]}, 2), ({"old_entropies": [1, 2]}, 2)],
    ids=str,
)
def test_an_older_version_lacks_a_field(file, tmp_path, fields, version):
    message = rf":2: field '\w+' needs version {version}, and the header has version 1\."
    with pytest.raises(RolloutFileError, match=message):
        read_rollouts(file(HEADER, RECORD | fields))
    (sample,) = read_rollouts(file(HEADER | {"version": version}, RECORD | fields))
    if fields != {"masks": {}}:
        with (
            RolloutWriter(tmp_path / "r.jsonl") as writer,
            pytest.raises(ValueError, match=rf"RolloutWriter\(…, version={version}\)"),
        ):
            writer.write([sample])
    with pytest.raises(ValueError, match="version=4 is none of 1, 2, 3"):
        RolloutWriter(tmp_path / "other.jsonl", version=4)


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [("stream", "term", "sft"), ("support", "sampling_mask", {"ids": [7, 3, 8], "offsets": [0, 2, 3]})],
)
def test_version_2_has_the_names_of_its_time(file, old, new, value):
    def read(version: int, name: str) -> object:
        (sample,) = read_rollouts(file(HEADER | {"version": version}, RECORD | {name: value}))
        return sample.sampling_mask.lists() if new == "sampling_mask" else sample.term

    assert read(2, old) == read(3, new) == value
    with pytest.raises(RolloutFileError, match=rf"unknown field '{old}'\. Did you mean {new}\?"):
        read(3, old)
    with pytest.raises(RolloutFileError, match=f"field '{new}' needs version 3, and the header has version 2\\."):
        read(2, new)


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_a_reused_buffer_does_not_change_a_sample(kind):
    """Tensors that need no conversion are copied too."""
    float64 = {"old_logprobs": [-1.0, -2.0], "advantage": [0.5, 0.25], "ref_logprobs": [-3.0, -4.0]}
    buffers = {name: torch.tensor(values, dtype=torch.float64) for name, values in float64.items()}
    buffers |= {"tokens": torch.tensor([5, 6, 7]), "loss_mask": torch.tensor([True, False])}
    buffers["teacher_hidden"] = torch.ones(2, 3)
    given = buffers if kind == "tensor" else {name: values.numpy() for name, values in buffers.items()}
    names = {"advantages" if name == "advantage" else name for name in buffers}
    sample = Sample.build(response_length=2, **given)
    before = {name: getattr(sample, name).clone() for name in names}
    for values in buffers.values():
        values.zero_()
    assert all(torch.equal(getattr(sample, name), before[name]) for name in names)
    half = torch.ones(2, 3, dtype=torch.bfloat16)
    sample = Sample.build(response_length=2, **buffers | {"tokens": [1, 2, 3], "teacher_hidden": half})
    half.zero_()
    assert sample.teacher_hidden.eq(1).all()


def test_the_file_format_page_names_every_field():
    page = (Path(__file__).parents[3] / "docs" / "rollout_file.md").read_text(encoding="utf-8")
    for name in FIELDS:
        assert f"`{name}`" in page, name


@pytest.mark.parametrize("name", ["absent/r.jsonl", "a\0b", "x" * 300, "\ud800", "", "\x1b[31m/r"])
@pytest.mark.parametrize("if_exists", ["refuse", "append", "replace"])
def test_a_path_that_cannot_be_written_is_a_named_error(name, if_exists, tmp_path):
    with pytest.raises(RolloutFileError) as error:
        RolloutWriter(tmp_path / name, if_exists=if_exists)
    assert str(error.value).isprintable()
    assert str(tmp_path) in str(error.value)
