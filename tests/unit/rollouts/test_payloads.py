"""Payloads of a sample: accepted forms, what is written, what is refused, and the rows of a micro-batch."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from sample_fields import FIELDS

from megatron_pg import RolloutFileError, RolloutWriter, Sample, pack, read_rollouts
from megatron_pg.batch import slice_batch
from megatron_pg.rollouts import lines
from megatron_pg.rollouts.payloads import PAYLOADS
from megatron_pg.rollouts.payloads.sampling_masks import RecordedMask
from megatron_pg.rollouts.payloads.topk import MOST_IDS, TokenSets

MASK = {"ids": [7, 3, 8, 4], "offsets": [0, 2, 4, 4]}
TOPK = {"ids": [[3, 9], [4], []], "logprobs": [[-0.5, -1.5], [-0.25], []]}
STATES = torch.tensor([[0.5, -1.0], [3.0, 1e-3], [2.0, 0.0]])
EXPERTS = [[[0, 0], [3, 1]]] * 4  # the first layer has no experts: engines leave zeros
VALUES = {"sampling_mask": MASK, "teacher_topk": TOPK, "rollout_topk": TOPK}
VALUES |= {"teacher_hidden": STATES, "routed_experts": EXPERTS}


def built(name: str, values: object, **rest: object) -> object:
    return getattr(Sample.build(**FIELDS | rest, **{name: values}), name)


def json_of(name: str, values: object) -> object:
    return PAYLOADS[name].to_json(built(name, values))


def test_every_kind_is_tested():
    assert VALUES.keys() == PAYLOADS.keys()


# ---- Forms ----


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("sampling_mask", [[7, 3], [8, 4], []], MASK),
        ("sampling_mask", ([7, 3], np.array([8, 4]), torch.tensor([], dtype=torch.int64)), MASK),
        ("sampling_mask", MASK, MASK),
        ("sampling_mask", {"token_ids": MASK["ids"], "offsets": MASK["offsets"]}, MASK),
        ("sampling_mask", {name: np.array(values, dtype=np.int32) for name, values in MASK.items()}, MASK),
        ("sampling_mask", {name: torch.tensor(values) for name, values in MASK.items()}, MASK),
        ("teacher_topk", TOPK, TOPK),
        *(
            ("teacher_topk", {"ids": kind([[3, 9], [4, -1], [-1, -1]]), "logprobs": logprobs}, TOPK)
            for kind in (np.array, torch.tensor)
            for numbers in [[[-0.5, -1.5], [-0.25, 9.0], [0.0, 0.0]]]
            for logprobs in (kind(numbers), torch.tensor(numbers).bfloat16())
        ),
        *(
            ("routed_experts", kind(EXPERTS), EXPERTS)
            for kind in (list, np.array, torch.tensor, lambda lists: np.array(lists, dtype=np.uint8))
        ),
        ("teacher_hidden", {"width": 1, "bfloat16": "gD8AwAAA"}, {"width": 1, "bfloat16": "gD8AwAAA"}),
        # 3f80, c000, 0000: little-endian
        ("teacher_hidden", torch.tensor([[1.0], [-2.0], [0]]).bfloat16(), {"width": 1, "bfloat16": "gD8AwAAA"}),
        ("teacher_hidden", torch.tensor([[1.0]] * 3), {"width": 1, "float32": "AACAPwAAgD8AAIA/"}),
    ],
)
def test_every_form_has_the_same_json(name, values, expected):
    assert json_of(name, values) == expected


def test_the_tensors_have_one_dtype():
    sampling_mask, topk = built("sampling_mask", MASK), built("teacher_topk", TOPK)
    assert (sampling_mask.ids.dtype, sampling_mask.offsets.dtype) == (torch.int32, torch.int64)
    assert sampling_mask.counts.tolist() == [2, 2, 0]
    assert (topk.ids.dtype, topk.logprobs.dtype) == (torch.int32, torch.float32)
    assert topk.ids.tolist() == [[3, 9], [4, -1], [-1, -1]]
    assert built("routed_experts", EXPERTS).dtype == torch.int32


@pytest.mark.parametrize(
    "states",
    [
        *(STATES, STATES.bfloat16(), STATES.double(), STATES.half(), STATES.numpy()),
        *(STATES.double().numpy().astype(">f8"), STATES.t().contiguous().t(), STATES.clone().requires_grad_()),
    ],
    ids=range(8),
)
def test_hidden_states_keep_bfloat16_and_become_float32_otherwise(states):
    record, dtype = built("teacher_hidden", states), torch.float32
    if states.dtype == torch.bfloat16:
        dtype = torch.bfloat16
    assert (record.dtype, record.is_contiguous(), record.requires_grad) == (dtype, True, False)
    assert torch.allclose(record.float(), STATES, rtol=2**-8)


# ---- The file ----


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_file_returns_every_bit_that_was_written(name, tmp_path):
    sample = Sample.build(**FIELDS, **{name: VALUES[name]})
    if name == "teacher_hidden":
        sample.teacher_hidden[2, 0], sample.teacher_hidden[2, 1] = torch.nan, -torch.inf  # at an untrained token
    elif name.endswith("topk"):
        getattr(sample, name).logprobs.sub_(torch.rand(3, 2))[2] = torch.nan  # without an id
    version = {"routed_experts": 1, "sampling_mask": 3}.get(name, 2)
    with RolloutWriter(tmp_path / "r.jsonl", version=version) as writer:
        writer.write([sample])
    assert writer.needed_version == version
    (again,) = read_rollouts(tmp_path / "r.jsonl")
    (expected, record), payload = (getattr(each, name) for each in (sample, again)), PAYLOADS[name]
    assert payload.to_json(record) == payload.to_json(expected)
    if name == "teacher_hidden":
        assert torch.equal(record.view(torch.uint8), expected.view(torch.uint8))
    if version > 1:
        refused = pytest.raises(ValueError, match=f"has {name}, which version 1")
        with RolloutWriter(tmp_path / "old.jsonl") as writer, refused:
            writer.write([sample])


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("sampling_mask", '"ids"', '"token_ids"'),
        ("teacher_hidden", '"width": 2', '"width": "2"'),
        ("teacher_hidden", '"float32": "', '"float32": 1, "x": "'),
    ],
)
def test_a_line_has_one_form(name, old, new, tmp_path):
    path = tmp_path / "r.jsonl"
    with RolloutWriter(path, version=3) as writer:
        writer.write([Sample.build(**FIELDS, **{name: VALUES[name]})])
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(RolloutFileError, match=rf"{name}=.* has the wrong type or range"):
        read_rollouts(path)


def test_a_line_that_no_reader_accepts_is_not_written(tmp_path, monkeypatch):
    path, sample = tmp_path / "r.jsonl", Sample.build(**FIELDS, teacher_hidden=STATES)
    with RolloutWriter(path, version=2) as writer:
        writer.write([sample])
        length = len(path.read_bytes().splitlines(keepends=True)[1])
        monkeypatch.setattr(lines, "MAX_LINE_BYTES", length)
        writer.write([sample])
        monkeypatch.setattr(lines, "MAX_LINE_BYTES", length - 1)
        with pytest.raises(ValueError, match=f"would be a line of {length} bytes"):
            writer.write([sample])
    monkeypatch.undo()
    assert len(read_rollouts(path)) == 2


# ---- Refusals ----

LOGPROBS = [[-1]] * 3
WRONG = {
    ("sampling_mask", "is not the ids that could be sampled"): [
        *(7, "abc", [[7.5], [8], [9]], [[True], [8], [9]], [[2**31], [8], [9]], {"ids": [7]}),
        *({"names": [7], "offsets": [0, 1, 1, 1]}, {"ids": [[7]], "offsets": [0, 1, 1, 1]}),
        {"ids": np.array([7.0]), "offsets": [0, 1, 1, 1]},
    ],
    ("sampling_mask", "has 3 offsets for 3 response tokens and 2 ids"): [[[7], [8]]],
    ("sampling_mask", "do not rise from 0 to 2"): [
        {"ids": [7, 8], "offsets": offsets} for offsets in ([0, 1, 1, 1], [1, 1, 1, 2], [0, 2, 1, 2])
    ],
    ("sampling_mask", "has 0 offsets for 3 response tokens"): [{"ids": [], "offsets": []}],
    ("sampling_mask", "contains a negative number.*response token 1"): [[[7], [8, -1], [9]]],
    ("sampling_mask", "names a token twice.*response token 1"): [[[7], [8, 4, 8], [9]]],
    ("teacher_topk", "are not ids and their log-probabilities"): [
        *([1], {"ids": [[1]]}, {"ids": [1, 2, 3], "logprobs": [-1, -1, -1]}),
        {"ids": [[1], [2], [3]], "logprobs": [[-1], [-1], []]},
        {"ids": np.zeros((3, 1)), "logprobs": np.zeros((3, 1))},
        *({"ids": [[value], [2], [3]], "logprobs": LOGPROBS} for value in (1.5, True, "a", 2**31)),
    ],
    ("teacher_topk", r"have ids \(2, 1\) and logprobs \(2, 1\) for 3 response tokens"): [
        {"ids": [[1], [2]], "logprobs": LOGPROBS[:2]}
    ],
    ("teacher_topk", "contain a negative number other than -1.*response token 1"): [
        {"ids": [[1], [-2], [3]], "logprobs": LOGPROBS}
    ],
    ("teacher_topk", "name a token twice.*response token 1"): [
        {"ids": [[1], [4, 4], [3]], "logprobs": [[-1], [-1, -2], [-1]]}
    ],
    ("teacher_topk", "sum to more than 1.01.*response token 1"): [
        {"ids": [[1], [4, 5], [3]], "logprobs": [[-1], [-0.1, -0.1], [-1]]}
    ],
    ("teacher_topk", "log-probability that is not finite.*response token 0"): [
        {"ids": [[1]] * 3, "logprobs": [[value]] * 3} for value in (float("nan"), float("-inf"))
    ],
    ("teacher_topk", "more than the 512"): [
        {"ids": np.zeros((3, MOST_IDS + 1), dtype=int), "logprobs": np.zeros((3, MOST_IDS + 1))}
    ],
    ("teacher_hidden", "are not hidden states. Give a tensor or array"): [
        *([[0.5, 1.0]] * 3, STATES.int(), STATES[0], np.array([["a"]]), torch.zeros(3, 2, dtype=torch.complex64)),
        {"width": 2, "float16": "AAAA"},
        *({"width": 2, "bfloat16": text} for text in ("AAAA", "AAAAA", "AA AAAA=")),  # the first: three bytes
        {"width": 4, "bfloat16": "gD8AwA=="},
        *({"width": width, "bfloat16": ""} for width in (0, True)),
        *({"bfloat16": ""}, "gD8AwA=="),
    ],
    ("teacher_hidden", r"have shape \(2, 2\) for 3 response tokens"): [STATES[:2]],
    ("teacher_hidden", r"have shape \(3, 0\) for 3 response tokens"): [STATES[:, :0]],
    ("teacher_hidden", "not finite at response token 1, which is trained"): [
        STATES + torch.tensor([[0.0], [torch.nan], [0.0]])
    ],
    ("teacher_hidden", "not finite at response token 0"): [
        STATES.bfloat16() + torch.tensor([[torch.inf], [0.0], [0.0]]).bfloat16()
    ],
    ("routed_experts", r"are a tensor of shape \(1, 1\), torch.int32, on cpu, not \[tokens - 1"): [[[1]]],
    ("routed_experts", "are not numbers of experts"): [
        *([[[0.5]], [[1.0]]], [[[True]], [[False]]], [[[1]], [[1, 2]]], [[[2**31]], [[1]]], [[], []])
    ],
    ("routed_experts", r"have shape \(1, 1, 1\) for 5 tokens"): [[[[1]]]],
    ("routed_experts", "an engine has experts for every token but the last"): [[[[1]]] * 5],
    ("routed_experts", "contain a negative number"): [[[[1]]] * 3 + [[[-1]]]],
    ("routed_experts", "name an expert twice at token 1, layer 0"): [[[[0, 1]], [[0, 0]], [[0, 1]], [[0, 1]]]],
}


@pytest.mark.parametrize(
    ("name", "message", "values"), [(*key, values) for key, listed in WRONG.items() for values in listed], ids=str
)
def test_other_values_are_refused(name, message, values):
    with pytest.raises(ValueError, match=f"{name}.* of sample 2 .*{message}"):
        built(name, values)


OTHER_TENSORS = {
    ("sampling_mask", r"is not a RecordedMask of \[n\] int32"): [
        *({"ids": torch.zeros(2)}, {"ids": torch.zeros(2, 2, dtype=torch.int32)}),
        *({"offsets": torch.zeros(4)}, {"ids": None}),
    ],
    ("teacher_topk", r"are not TokenSets of \[R, K\] int32"): [
        *({"ids": torch.zeros(3, 2)}, {"ids": torch.zeros(3, dtype=torch.int32)}),
        *({"logprobs": torch.zeros(3, 2, dtype=torch.float64)}, {"logprobs": None}),
    ],
}


@pytest.mark.parametrize(
    ("name", "message", "change"), [(*key, change) for key, changes in OTHER_TENSORS.items() for change in changes]
)
def test_records_of_other_tensors_are_refused(name, message, change):
    record = dataclasses.replace(built(name, VALUES[name]), **change)
    with pytest.raises(ValueError, match=f"{name} of sample 2 {message}"):
        built(name, record)


@pytest.mark.parametrize(
    "states", [STATES.double(), STATES[None], STATES.to("meta"), STATES.tolist(), STATES.to_sparse()], ids=range(5)
)
def test_a_sample_accepts_only_what_build_makes(states):
    with pytest.raises(ValueError, match=r"are not \[R, H\] bfloat16 or float32 on the CPU. Use Sample.build"):
        dataclasses.replace(Sample.build(**FIELDS), teacher_hidden=states)


def test_untrained_tokens_may_have_arbitrary_values():
    odd = [[7, 8], [8, 7], [4, 4, -7]]
    built("sampling_mask", odd)
    with pytest.raises(ValueError, match=r"names a token twice|contains a negative"):
        built("sampling_mask", odd, loss_mask=[1, 1, 1])
    supervised = {name: v for name, v in FIELDS.items() if name not in ("old_logprobs", "advantage", "reward")}
    Sample.build(**supervised | {"loss_mask": [1, 1, 1]}, term="sft", sampling_mask=odd)
    topk = {"ids": [[1, 2], [3, 4], [7, 7]], "logprobs": [[-1.0, -1.0], [-1.0, -1.0], [5.0, float("nan")]]}
    sample = Sample.build(**FIELDS, teacher_topk=topk)
    with pytest.raises(ValueError, match="name a token twice"):
        dataclasses.replace(sample, masks={"echo": torch.tensor([False, False, True])})


@pytest.mark.parametrize("name", ["teacher_topk", "rollout_topk"])
@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [
        ([[], [], []], [[], [], []]),
        (np.zeros((3, 0), dtype=np.int64), np.zeros((3, 0))),
        (torch.zeros(3, 0, dtype=torch.int32), torch.zeros(3, 0).bfloat16()),
    ],
    ids=["lists", "arrays", "tensors"],
)
def test_a_record_without_any_id_is_one_with_none_at_each_token(name, ids, logprobs, tmp_path):
    """It is written, read and packed; a term that trains one of its tokens refuses it."""
    sample = Sample.build(**FIELDS, **{name: {"ids": ids, "logprobs": logprobs}})
    with RolloutWriter(tmp_path / "rollouts.jsonl", version=2) as writer:
        writer.write([sample])
    (read,) = read_rollouts(tmp_path / "rollouts.jsonl")
    for record in (getattr(sample, name), getattr(read, name)):
        assert record.ids.shape == record.logprobs.shape == (3, 0)
        assert record.tails.tolist() == [1.0, 1.0, 1.0]
        with pytest.raises(ValueError, match=f"^{name} of sample 2 has no id at response token 1, which --pg-term"):
            PAYLOADS[name].check_read(record, torch.tensor([False, True, True]), "2", "--pg-term")
    if name == "teacher_topk":
        other = Sample.build(**FIELDS, teacher_topk=TOPK)
        for samples, width in (([sample], 1), ([read, other], 2)):
            batch = pack(samples, qkv_format="thd")
            tokens = {"weights": torch.zeros(3 * len(samples), dtype=torch.float64)}
            tokens["teacher_topk"] = torch.ones(3 * len(samples), dtype=torch.bool)
            rows = slice_batch(batch, tokens, cp_rank=0, cp_size=1).fields.teacher_topk
            assert rows.ids.shape[1] == width
            assert (rows.ids[batch.spread(torch.arange(3 * len(samples)) < 3).flatten()] == -1).all()


# ---- What is computed of them ----


def test_which_tokens_a_mask_contains():
    rng = random.Random(0)
    for _ in range(50):
        sets = [rng.sample(range(9), rng.randint(0, 4)) for _ in range(rng.randint(1, 6))]
        tokens = [rng.randrange(9) for _ in sets]
        record = PAYLOADS["sampling_mask"].of(sets, "s")
        assert isinstance(record, RecordedMask)
        expected = [not s or token in s for s, token in zip(sets, tokens, strict=True)]
        assert record.contains(torch.tensor(tokens)).tolist() == expected


def test_the_tail_is_the_probability_of_all_other_tokens():
    logprobs = torch.tensor([[0.5, 0.25], [0.125, 0.5], [0.5, 0.5]]).log()
    sets = TokenSets(ids=torch.tensor([[1, 2], [3, -1], [-1, -1]], dtype=torch.int32), logprobs=logprobs)
    assert sets.tails.dtype == torch.float64
    assert torch.allclose(sets.tails, torch.tensor([0.25, 0.875, 1.0], dtype=torch.float64), atol=1e-7)


def test_a_micro_batch_has_the_hidden_states_of_the_tokens_that_a_term_reads():
    """A sample in the middle has none, and one has another dtype, of which nothing is rounded."""
    given = {"teacher_hidden": STATES.bfloat16()}, {}, {"teacher_hidden": STATES + 10}
    samples = [Sample.build(**FIELDS, **each) for each in given]
    batch = pack(samples, qkv_format="thd")
    weights = torch.zeros(9, dtype=torch.float64)
    for numbers in ([0, 2, 7], []):
        is_read = torch.zeros(9, dtype=torch.bool).index_fill(0, torch.tensor(numbers, dtype=torch.int64), True)
        fields = slice_batch(batch, {"weights": weights, "teacher_hidden": is_read}, cp_rank=0, cp_size=1).fields
        found = fields.teacher_hidden
        if numbers:
            rows = batch.spread(is_read).flatten()
            expected = torch.stack([STATES[0], STATES[2], STATES[1] + 10])
            assert torch.equal(found.states[found.slots[rows]], expected)
        else:
            assert found.states.shape == (0, 1)


UNIFORM = {"sampling_mask": [[7]] * 3, "teacher_hidden": torch.ones(3, 2), "routed_experts": EXPERTS}
UNIFORM |= {name: {"ids": [[3, 9]] * 3, "logprobs": [[-2.0, -2.0]] * 3} for name in ("teacher_topk", "rollout_topk")}
LAYOUTS = {
    "strided": lambda values: torch.stack([values, values], dim=-1)[..., 0],
    "expanded": lambda values: values[:1].expand_as(values) if (values == values[:1]).all() else values,
}


def changed(values: torch.Tensor) -> torch.Tensor:
    return values.clone().index_put_(tuple(torch.tensor([n - 1]) for n in values.shape), values.flatten()[-1] + 1)


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_digest_follows_the_content_and_not_the_memory_layout(name):
    sample = Sample.build(**FIELDS, **{name: UNIFORM[name]})
    record = getattr(sample, name)
    fields = () if isinstance(record, torch.Tensor) else tuple(field.name for field in dataclasses.fields(record))

    def digest(function, *names):
        new = {each: function(getattr(record, each)) for each in names}
        copy = dataclasses.replace(sample)
        object.__setattr__(copy, name, dataclasses.replace(record, **new) if fields else function(record))
        return pack([copy], qkv_format="thd").digest

    (expected,) = {digest(layout, *fields) for layout in (*LAYOUTS.values(), torch.clone)}
    others = {digest(changed, *names) for names in ([(each,) for each in fields] or [()])}
    others |= {pack([Sample.build(**FIELDS)], qkv_format="thd").digest, expected}
    assert len(others) == 2 + max(len(fields), 1)


def test_a_digest_takes_one_column_of_an_expanded_tensor():
    states = torch.ones(3, 1).expand(3, 4)[:, :1]  # stride 0, and contiguous by torch's count
    assert states.is_contiguous()
    copy = dataclasses.replace(Sample.build(**FIELDS, teacher_hidden=states.clone()), teacher_hidden=states)
    copied = Sample.build(**FIELDS, teacher_hidden=states.clone(memory_format=torch.contiguous_format))
    assert pack([copy], qkv_format="thd").digest == pack([copied], qkv_format="thd").digest
