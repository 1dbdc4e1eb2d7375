"""`megatron-pg convert`: dumps with the field names of the frameworks' own writers, read back with `read_rollouts`."""

import gzip
import io
import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from dumps_of_others import NEMO, SLIME, nemo_row, slime_sample

from megatron_pg import read_rollouts, read_steps
from megatron_pg.cli import main


def run(capsys, *words) -> tuple[int, str, str]:
    code = main(["convert", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys, folder: Path, *words) -> str:
    """The one line of a conversion that fails and leaves nothing behind."""
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    code, out, err = run(capsys, *words, "--output", folder / "out.jsonl")
    assert (code, out) == (2, ""), err
    assert err.startswith("megatron-pg convert: ")
    assert err.count("\n") == 1
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before
    return err


CHOICES = ("--old-logprobs", "rollout", "--advantage", "group_norm")


@pytest.fixture
def save(tmp_path):
    def write(samples=SLIME, name="12.pt", **top) -> Path:
        torch.save({"rollout_id": 12, "samples": samples} | top, tmp_path / name)
        return tmp_path / name

    return write


@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_a_rollout_dump_of_slime_or_miles(framework, save, tmp_path, capsys):
    path = save(**({"metadata": {"prompt_group_sizes": [3, 3]}} if framework == "miles" else {}))
    output = tmp_path / "out.jsonl"
    code, out, err = run(capsys, path, "--format", framework, *CHOICES, "--output", output)
    assert (code, err) == (0, "")
    assert "6 samples of 2 prompts in 1 steps" in out
    samples = read_rollouts(output)
    assert [s.step for s in samples] == [12] * 6
    assert [s.prompt_id for s in samples] == [0, 0, 0, 1, 1, 1]
    assert [s.rollout_id for s in samples] == ["sample-0", "sample-1", "sample-2", 40, 40, 41]
    assert [s.loss_mask.int().tolist() for s in samples[:3]] == [[1, 1, 1], [1, 0, 1], [0, 0, 0]]
    assert samples[1].tokens.tolist() == SLIME[1]["tokens"]
    assert samples[0].old_logprobs.tolist() == samples[0].rollout_logprobs.tolist() == [-0.5, -0.25, -1.0]
    assert [s.reward for s in samples] == [1.0, 0.0, 0.5, 1.0, 1.0, 0.0]
    assert samples[2].extra == {"x_status": "truncated", "x_index": 2}
    # group 0: mean 1/2, unbiased std 1/2; group 1: two rollouts, mean 1/2, std 1/sqrt(2)
    assert samples[0].advantages.tolist() == pytest.approx([0.5 / (0.5 + 1e-6)] * 3)
    assert samples[5].advantages.tolist() == pytest.approx([-0.5 / (math.sqrt(0.5) + 1e-6)] * 3)


@pytest.mark.parametrize(
    ("rule", "expected"), [("group_mean", [0.5, -0.5, 0.0, 0.5, 0.5, -0.5]), ("reward", [1, 0, 0.5, 1, 1, 0])]
)
def test_advantages_follow_from_rewards_as_chosen(rule, expected, save, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    assert (
        run(capsys, save(), "--format", "slime", "--old-logprobs", "rollout", "--advantage", rule, "--output", output)[
            0
        ]
        == 0
    )
    read = read_rollouts(output)
    assert [float(s.advantages[0]) for s, e in zip(read, expected, strict=True) if s.num_trained] == pytest.approx(
        [e for s, e in zip(read, expected, strict=True) if s.num_trained]
    )


def train_dump(samples=SLIME, steps=(range(6),)) -> dict:
    """--save-debug-train-data of slime, format_version 2, of two ranks that trained these positions in each step."""
    shards = [
        {
            "rank": 2 * rank,
            "data_parallel_rank": rank,
            "partition": [],
            "micro_batch_indices": [],
            "num_microbatches": [],
        }
        for rank in range(2)
    ]
    for positions in steps:
        for rank, shard in enumerate(shards):
            mine = list(positions)[rank::2]
            first = len(shard["partition"])
            shard["partition"] += mine
            shard["micro_batch_indices"] += [[first + i] for i in range(len(mine))]
            shard["num_microbatches"].append(len(mine))
    rows = [
        {
            "data_parallel_rank": i % 2,
            "rollout_position": i,
            "tokens": torch.tensor(samples[i]["tokens"]),
            "response_lengths": 3,
            "log_probs": torch.tensor([-0.125, -0.75, -2.0 - i]),
            "ref_log_probs": torch.tensor([-0.1, -0.2, -0.3]),
            "advantages": torch.tensor([0.5 * i, 1.0, -1.0]),
        }
        for positions in steps
        for i in positions
    ]
    return {"format_version": 2, "rollout_id": 12, "rank": 0, "samples": rows, "dp_shards": shards}


def test_the_training_dump_of_slime_gives_what_was_trained_with(save, tmp_path, capsys):
    torch.save(train_dump(), tmp_path / "train.pt")
    output = tmp_path / "out.jsonl"
    code, out, err = run(capsys, save(), "--format", "slime", "--train-data", tmp_path / "train.pt", "--output", output)
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    sample = read_rollouts(output)[3]
    assert sample.step == 12
    assert sample.old_logprobs.tolist() == [-0.125, -0.75, -5.0]
    assert sample.ref_logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert sample.advantages.tolist() == [1.5, 1.0, -1.0]
    assert sample.rollout_logprobs.tolist() == [-0.5, -0.25, -4.0]


def test_the_training_dump_of_slime_says_which_step_trained_a_sample_and_which_none_did(save, tmp_path, capsys):
    """12 rollouts of 4 prompts in steps of 5: the last two fill none, and the second prompt lies in both."""
    samples = [slime_sample(i, i // 3, float(i)) for i in range(12)]
    torch.save(train_dump(samples, (range(5), range(5, 10))), tmp_path / "train.pt")
    output = tmp_path / "out.jsonl"
    words = (
        "--format",
        "slime",
        "--train-data",
        tmp_path / "train.pt",
        "--advantage",
        "group_mean",
        "--output",
        output,
    )
    code, out, err = run(capsys, save(samples), *words)
    assert (code, err) == (0, "")
    assert "10 samples of 5 prompts in 2 steps" in out
    assert "2 samples of the last rollouts did not fill a step; they were not trained and are left out" in out
    assert "1 prompt groups were trained in several steps" in out
    samples = [sample for step in read_steps(output) for sample in step]
    assert [s.step for s in samples] == [24] * 5 + [25] * 5
    assert [s.prompt_id for s in samples] == [0, 0, 0, "1/24", "1/24", "1/25", 2, 2, 2, 3]
    assert [float(s.advantages[0]) for s in samples] == [-1, 0, 1, -1, 0, 1, -1, 0, 1, -1]  # over the whole groups
    assert [float(s.old_logprobs[2]) for s in samples] == [-2.0 - i for i in range(10)]


BAD_SLIME = {
    "no choice of log-probabilities": (
        {},
        ("--advantage", "reward"),
        "missing old_logprobs. Give --old-logprobs rollout (the rollout engine's) or --train-data FILE.",
    ),
    "no choice of advantages": (
        {},
        ("--old-logprobs", "rollout"),
        "missing advantage. Give --advantage RULE or --train-data FILE.",
    ),
    "no choice at all": (
        {},
        (),
        "sample 0: missing old_logprobs, advantage. Give --old-logprobs rollout (the rollout engine's) or "
        "--train-data FILE; "
        "--advantage RULE or --train-data FILE.",
    ),
    "no choice, and nothing of the engine": (
        {"rollout_log_probs": None},
        (),
        "missing old_logprobs, advantage. Give --train-data FILE; --advantage RULE or --train-data FILE.",
    ),
    "no group": ({"group_index": None}, CHOICES, "sample 0: group_index is not set"),
    "no index": ({"index": None}, CHOICES, "sample 0: rollout_id or index is not set"),
    "no log-probabilities": (
        {"rollout_log_probs": None},
        CHOICES,
        "missing rollout_logprobs. Give a dump with rollout_logprobs.",
    ),
    "no reward": ({"reward": None}, CHOICES, "its reward is None, not a finite number"),
    "a reward of parts": ({"reward": {"math": 1.0}}, CHOICES, r"several parts (math). Choose one with --reward-key"),
    "a reward without parts": ({}, (*CHOICES, "--reward-key", "math"), "its reward 1.0 has no parts"),
    "a reward that is not finite": ({"reward": math.nan}, CHOICES, "its reward is nan, not a finite number"),
    "an empty response": ({"response_length": 0, "rollout_log_probs": []}, CHOICES, "sample 0: "),
    "a wrong length": ({"response_length": 2}, CHOICES, "old_logprobs of sample of the dump has 3 entries for 2"),
    "a length beyond memory": ({"response_length": 10**15}, CHOICES, "has 5 entries for 1000000000000000"),
    "a length of many digits": ({"response_length": 10**400}, CHOICES, "sample 0: "),
    "a length in words": ({"response_length": "3"}, CHOICES, "response_length is '3', not an integer"),
    "tokens in words": ({"tokens": "abc"}, CHOICES, "tokens='abc' has the wrong type"),
    "no tokens": ({"tokens": None}, CHOICES, "missing tokens. Give a dump with tokens."),
    "a mask of weights": ({"loss_mask": [0.5, 1, 1]}, CHOICES, "must be 0 or 1, got 0.5"),
    "a positive log-probability": ({"rollout_log_probs": [1.0, -1, -1]}, CHOICES, "log-probabilities are at most 0"),
    "a log-probability that is not finite": ({"rollout_log_probs": [math.nan, -1, -1]}, CHOICES, "old_logprobs="),
    "siblings with different rewards": (
        {"rollout_id": 40, "group_index": 1},
        (*CHOICES[:2], "--advantage", "group_mean"),
        None,
    ),
}


@pytest.mark.parametrize("name", BAD_SLIME)
def test_a_slime_dump_that_does_not_say_enough_is_refused(name, save, tmp_path, capsys):
    changes, options, message = BAD_SLIME[name]
    if name.startswith("siblings"):
        changes, message = changes | {"reward": 0.25}, "rollout 40 of prompt 1 has samples with different rewards"
    path = save([SLIME[0] | changes, *SLIME[1:]])
    assert message in refused(capsys, tmp_path, path, "--format", "slime", *options)


def test_a_part_of_the_reward_is_chosen_by_its_key(save, tmp_path, capsys):
    path = save([sample | {"reward": {"math": sample["reward"], "style": 9}} for sample in SLIME])
    output = tmp_path / "out.jsonl"
    assert run(capsys, path, "--format", "slime", *CHOICES, "--reward-key", "math", "--output", output)[0] == 0
    assert [s.reward for s in read_rollouts(output)][:3] == [1.0, 0.0, 0.5]


BAD_TRAIN_DATA = {
    "a dump of one rank": (
        lambda d: {"rollout_id": 12, "rank": 0, "rollout_data": {}},
        "is not a training dump of slime",
    ),
    "too few samples": (lambda d: d | {"samples": d["samples"][:-1]}, "its samples differ from its schedule"),
    "samples that are none": (lambda d: d | {"samples": None}, "samples is not a list"),
    "samples of a longer rollout": (
        lambda d: train_dump([*SLIME, SLIME[0]], (range(7),)),
        "not in the rollout dump of 6",
    ),
    "no schedule": (lambda d: d | {"dp_shards": []}, "its samples differ from its schedule"),
    "a schedule of another kind": (lambda d: d | {"dp_shards": 3}, "dp_shards does not list the micro-batches"),
    "half a schedule": (
        lambda d: d | {"dp_shards": [s | {"num_microbatches": [10**30]} for s in d["dp_shards"]]},
        "dp_shards does not list the micro-batches",
    ),
    "other tokens": (
        lambda d: d | {"samples": [s | {"tokens": torch.tensor([1])} for s in d["samples"]]},
        "its tokens differ",
    ),
    "no log_probs": (
        lambda d: d | {"samples": [{k: v for k, v in s.items() if k != "log_probs"} for s in d["samples"]]},
        "has no field 'log_probs'",
    ),
}


@pytest.mark.parametrize("name", BAD_TRAIN_DATA)
def test_a_training_dump_that_does_not_belong_is_refused(name, save, tmp_path, capsys):
    change, message = BAD_TRAIN_DATA[name]
    torch.save(change(train_dump()), tmp_path / "train.pt")
    assert message in refused(capsys, tmp_path, save(), "--format", "slime", "--train-data", tmp_path / "train.pt")


class Loud:
    """Leaves a file when it is unpickled."""

    def __init__(self, flag: Path):
        self.flag = flag

    def __reduce__(self):
        return Path.touch, (self.flag,)


@pytest.mark.parametrize("kind", ["torch.save", *map(str, range(pickle.HIGHEST_PROTOCOL + 1))])
def test_stored_code_is_never_run(kind, save, tmp_path, capsys):
    path, flag = tmp_path / "dump.pt", tmp_path / "flag"
    payload = {"rollout_id": 1, "samples": [SLIME[0] | {"metadata": Loud(flag)}]}
    if kind == "torch.save":
        torch.save(payload, path)
    else:
        path.write_bytes(pickle.dumps(payload, int(kind)))
    assert "ensors and plain values" in refused(capsys, tmp_path, path, "--format", "slime", *CHOICES)
    assert not flag.exists()


def test_an_array_in_a_dump_is_named(save, tmp_path, capsys):
    path = save([SLIME[0] | {"rollout_routed_experts": np.zeros((2, 2), dtype=np.int32)}])
    message = refused(capsys, tmp_path, path, "--format", "miles", *CHOICES)
    assert "has an object of numpy" in message
    assert "docs/cli.md shows how" in message


@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_routed_experts_are_kept_as_tensors_or_lists(framework, save, tmp_path, capsys):
    experts = torch.tensor([[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[5, 4], [1, 0]], [[0, 2], [2, 1]]])  # of 5 tokens
    given = (experts, experts.tolist(), None)
    path = save([one | {"rollout_routed_experts": experts} for one, experts in zip(SLIME[:3], given, strict=True)])
    output = tmp_path / "out.jsonl"
    assert run(capsys, path, "--format", framework, *CHOICES, "--output", output)[0] == 0
    routed = [sample.routed_experts for sample in read_rollouts(output)]
    assert [value if value is None else value.tolist() for value in routed] == [
        experts.tolist(),
        experts.tolist(),
        None,
    ]


def test_what_slime_could_have_sampled_is_kept_as_tensors_or_lists(save, tmp_path, capsys):
    ids, offsets = torch.tensor([20, 4, 21, 7], dtype=torch.int32), torch.tensor([0, 2, 4, 4], dtype=torch.int32)
    given = ((ids, offsets), (ids.tolist(), offsets.tolist()), (None, None))
    names = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")
    path = save([one | dict(zip(names, values, strict=True)) for one, values in zip(SLIME[:3], given, strict=True)])
    output = tmp_path / "kept.jsonl"
    assert run(capsys, path, "--format", "slime", *CHOICES, "--output", output)[0] == 0
    masks = [sample.sampling_mask for sample in read_rollouts(output)]
    flat = {"ids": ids.tolist(), "offsets": offsets.tolist()}
    assert [mask if mask is None else mask.lists() for mask in masks] == [flat, flat, None]
    half = save([one | {names[0]: ids} for one in SLIME[:3]], name="13.pt")
    assert "is not the ids that could be sampled" in refused(capsys, tmp_path, half, "--format", "slime", *CHOICES)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("sampling_mask", {"ids": [7, 3, 8], "offsets": [0, 2, 3]}),
        ("sampling_mask", {"token_ids": [7, 3, 8], "offsets": [0, 2, 3]}),  # vLLM's SamplingMask
        ("sampling_mask", [[7, 3], [8]]),  # of its HTTP endpoint
        ("output_token_sampling_mask", [[7, 3], [8]]),  # SGLang's
        ("kept", [[7, 3], [8]]),
    ],
    ids=range(5),
)
def test_what_an_engine_could_have_sampled_is_read_in_each_of_its_forms(column, value, tmp_path, capsys):
    row = {"prompt_id": 1, "tokens": [5, 7, 8], "response_length": 2, "loss_mask": [1, 1], "reward": 1.0, "step": 0}
    row |= {"old_logprobs": [-0.5, 0.0], "advantage": 1.0, column: value}
    path, output = tmp_path / "rows.jsonl", tmp_path / "kept.jsonl"
    path.write_text(json.dumps(row) + "\n")
    words = ("--column", "sampling_mask=kept") if column == "kept" else ()
    assert run(capsys, path, "--format", "jsonl", *words, "--output", output)[0] == 0
    (sample,) = read_rollouts(output)
    assert sample.sampling_mask.lists() == {"ids": [7, 3, 8], "offsets": [0, 2, 3]}
    assert sample.extra == {}
    path.write_text(json.dumps(row | {column: [[7, 3], "8"]}) + "\n")
    assert "is not the ids that could be sampled" in refused(capsys, tmp_path, path, "--format", "jsonl", *words)


def test_a_teacher_comes_along(save, tmp_path, capsys):
    taught = [{**one, "teacher_log_probs": [-0.1, -0.2, -0.3]} for one in SLIME]
    output = tmp_path / "taught.jsonl"
    assert run(capsys, save(taught), "--format", "slime", *CHOICES, "--output", output)[0] == 0
    assert {tuple(sample.teacher_logprobs.tolist()) for sample in read_rollouts(output)} == {(-0.1, -0.2, -0.3)}


def test_likeliest_tokens_come_along(tmp_path, capsys):
    row = {"prompt_id": 1, "tokens": [5, 7, 8], "response_length": 2, "loss_mask": [1, 1], "reward": 1.0, "step": 0}
    topk = {"ids": [[7, 3], [8, 9]], "logprobs": [[-0.5, -1.5], [-0.25, -2.0]]}
    row |= {"old_logprobs": [-0.5, 0.0], "advantage": 1.0, "teacher_topk": topk, "rollout_topk": topk}
    row |= {"teacher_hidden": {"width": 1, "bfloat16": "gD8AwA=="}}  # 1 and -2
    path, output = tmp_path / "rows.jsonl", tmp_path / "kept.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert run(capsys, path, "--format", "jsonl", "--output", output)[0] == 0
    (sample,) = read_rollouts(output)
    assert sample.teacher_hidden.tolist() == [[1.0], [-2.0]]
    assert sample.teacher_topk.lists() == sample.rollout_topk.lists() == topk


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80", b"PK\x03\x04" + bytes(50), b"{}", b"\xff" * 1000, "truncated"],
    ids=["empty", "byte", "zip", "json", "noise", "truncated"],
)
def test_a_file_that_torch_did_not_save_is_refused(content, save, tmp_path, capsys):
    path = tmp_path / "broken.pt"
    path.write_bytes(save().read_bytes()[:900] if content == "truncated" else content)
    assert "is not a file of torch.save, is truncated, or has objects other than tensors and plain values" in refused(
        capsys, tmp_path, path, "--format", "slime", *CHOICES
    )


@pytest.mark.parametrize(
    "value",
    [[], {}, 3, "text", {"rollout_id": 1}, {"rollout_id": "x", "samples": []}, {"rollout_id": 1, "samples": [1]}],
)
def test_a_saved_value_of_another_shape_is_refused(value, tmp_path, capsys):
    torch.save(value, tmp_path / "dump.pt")
    message = refused(capsys, tmp_path, tmp_path / "dump.pt", "--format", "slime", *CHOICES)
    assert "Check --format." in message


def test_one_dump_given_twice_or_units_in_two_steps_are_refused(save, tmp_path, capsys):
    first, second = save(name="1.pt", rollout_id=1), save(name="2.pt", rollout_id=2)
    message = refused(capsys, tmp_path, first, second, "--format", "slime", *CHOICES)
    assert "2.pt: sample 0: prompt_id 0 is also in step 1" in message
    later = [s | {"group_index": s["group_index"] + 9, "index": s["index"] + 9, "rollout_id": None} for s in SLIME]
    output = tmp_path / "both.jsonl"
    assert (
        run(capsys, first, save(later, "2.pt", rollout_id=2), "--format", "slime", *CHOICES, "--output", output)[0] == 0
    )
    assert {s.step for s in read_rollouts(output)} == {1, 2}


@pytest.fixture
def lines(tmp_path):
    def write(rows, name="train_data_step7.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def test_a_training_log_of_nemo_rl(lines, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    code, _, err = run(capsys, lines(NEMO), "--format", "nemo_rl", "--group-size", "2", "--output", output)
    assert (code, err) == (0, "")
    samples = read_rollouts(output)
    assert [s.step for s in samples] == [7] * 4
    assert [s.prompt_id for s in samples] == ["7/0", "7/0", "7/1", "7/1"]
    assert len({s.rollout_id for s in samples}) == 4
    assert samples[0].tokens.tolist() == [1, 2, 5, 6, 7]
    assert samples[0].response_length == 3
    assert samples[0].old_logprobs.tolist() == [-0.25, -1.25, -2.25]
    assert samples[0].rollout_logprobs.tolist() == [-0.5, -1.5, -2.5]
    assert samples[1].num_trained == 0
    assert samples[2].loss_mask.int().tolist() == [1, 0, 0, 1]
    assert [float(s.advantages[0]) for s in samples if s.num_trained] == [0.25, 0.75, 1.0]
    assert [s.reward for s in samples] == [0.0, 1.0, 0.0, 1.0]


def test_dynamic_sampling_uses_the_rewards_that_were_kept(lines, tmp_path, capsys):
    rows = [row | {"filtered_rewards": [0.75]} for row in NEMO]
    output = tmp_path / "out.jsonl"
    assert run(capsys, lines(rows), "--format", "nemo_rl", "--group-size", "2", "--output", output)[0] == 0
    assert {s.reward for s in read_rollouts(output)} == {0.75}


def test_log_probabilities_that_nobody_computed_are_refused(lines, tmp_path, capsys):
    """force_on_policy_ratio leaves prev_logprobs at 0."""
    rows = [row | {"prev_logprobs": [[0.0] * 8]} for row in NEMO]
    words = (lines(rows), "--format", "nemo_rl", "--group-size", "2")
    message = refused(capsys, tmp_path, *words)
    assert "all old_logprobs are 0" in message
    assert "Give --old-logprobs rollout" in message
    neither = (
        lines([row | {"generation_logprobs": [[0.0] * 8]} for row in rows], "other.jsonl"),
        *words[1:],
        "--step",
        "7",
    )
    assert "Record them" in refused(capsys, tmp_path, *neither, "--old-logprobs", "rollout")
    output = tmp_path / "out.jsonl"
    assert run(capsys, *words, "--old-logprobs", "rollout", "--output", output)[0] == 0
    assert read_rollouts(output)[0].old_logprobs.tolist() == [-0.5, -1.5, -2.5]


def test_a_sure_token_is_no_placeholder(lines, tmp_path, capsys):
    rows = [NEMO[0] | {"prev_logprobs": [[0.0] * 4 + [-1.0] + [0.0] * 3]}, NEMO[1]]
    words = ("--format", "nemo_rl", "--group-size", "2", "--output", tmp_path / "out.jsonl")
    assert run(capsys, lines(rows), *words)[0] == 0


BAD_NEMO = {
    "no group size": (NEMO, (), "train_data_step7.jsonl: missing prompt_id. Give --group-size N."),
    "a wrong group size": (NEMO, ("--group-size", "4"), ":3: its prompt differs from the first row of its group"),
    "a left-over row": (NEMO[:3], ("--group-size", "2"), "3 rows are not a multiple of --group-size 2"),
    "no prompt": ([nemo_row(0, [], [5, 6])], ("--group-size", "1"), ":1: its first token is trained"),
    "no trained token": ([nemo_row(0, [1], [5], [0])], ("--group-size", "1"), ":1: no token is trained"),
    "validation data": (
        [{"content": ["x"], "rewards": [1.0], "idx": 0}],
        ("--group-size", "1"),
        "has no field 'input_lengths'",
    ),
    "a number for a list": (
        [NEMO[0] | {"rewards": 1.0}],
        ("--group-size", "1"),
        "rewards is 1.0, not a list of one value",
    ),
    "a short row": (
        [NEMO[0] | {"prev_logprobs": [[-1.0]]}],
        ("--group-size", "1"),
        "prev_logprobs has fewer than 5 entries",
    ),
    "a weight for a mask": (
        [NEMO[0] | {"sample_loss_mask": [0.5]}],
        ("--group-size", "1"),
        "sample_loss_mask is 0.5, but must be 0 or 1",
    ),
    "a reward in words": ([NEMO[0] | {"rewards": ["x"]}], ("--group-size", "1"), "its reward is 'x'"),
    "an unknown line": ([[1, 2]], ("--group-size", "1"), "is a list, not a sample with fields"),
    "nothing": ([], ("--group-size", "1"), "has no sample"),
    "no group": (NEMO, ("--group-size", "0"), "--group-size 0 is not a number of samples"),
}


@pytest.mark.parametrize("name", BAD_NEMO)
def test_a_nemo_rl_log_that_does_not_fit_is_refused(name, lines, tmp_path, capsys):
    rows, options, message = BAD_NEMO[name]
    assert message in refused(capsys, tmp_path, lines(rows), "--format", "nemo_rl", *options)


def test_the_step_comes_from_the_name_or_the_user(lines, tmp_path, capsys):
    path = lines(NEMO, "renamed.jsonl")
    options = ("--format", "nemo_rl", "--group-size", "2")
    assert "renamed.jsonl: missing step. Give --step N." in refused(capsys, tmp_path, path, *options)
    neither = refused(capsys, tmp_path, path, *options[:2])
    assert "renamed.jsonl: missing step, prompt_id. Give --step N; --group-size N." in neither
    output = tmp_path / "out.jsonl"
    assert run(capsys, path, *options, "--step", "3", "--output", output)[0] == 0
    assert {s.step for s in read_rollouts(output)} == {3}


# --- verl: _write_generations of verl/trainer/ppo/ray_trainer.py ---


def verl_row(i: int, prompt: str, **changes) -> dict:
    extra = {"ids": [1, 2, 3 + i, 4], "n": 2, "mask": [1, 1], "logp": [-0.5, -0.25]}
    return {"input": prompt, "output": "4", "gts": "4", "score": float(i % 2), "step": 5} | extra | changes


VERL = [verl_row(0, "a"), verl_row(1, "b"), verl_row(2, "a"), verl_row(3, "b")]
COLUMNS = [f"--column={name}" for name in ("tokens=ids", "response_length=n", "loss_mask=mask", "old_logprobs=logp")]


def test_a_rollout_dump_of_verl_with_the_columns_that_a_sample_needs(lines, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    words = ("--format", "verl", *COLUMNS, "--advantage", "group_mean", "--output", output)
    code, _, err = run(
        capsys, lines([*VERL, verl_row(4, "c", score=1.0), verl_row(5, "c", score=0.0)], "5.jsonl"), *words
    )
    assert (code, err) == (0, "")
    samples = read_rollouts(output)
    assert [s.prompt_id for s in samples] == ["5/0", "5/1", "5/0", "5/1", "5/2", "5/2"]
    assert [s.step for s in samples] == [5] * 6
    assert samples[2].tokens.tolist() == [1, 2, 5, 4]
    assert [float(s.advantages[0]) for s in samples] == [0, 0, 0, 0, 0.5, -0.5]


def test_entropies_of_the_sampling_policy_make_a_file_of_version_2(lines, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    rows = [verl_row(i, "a", old_entropies=[0.5, 0.25 * i]) for i in range(2)]
    code, _, err = run(
        capsys, lines(rows, "5.jsonl"), "--format", "verl", *COLUMNS, "--advantage", "reward", "--output", output
    )
    assert (code, err) == (0, "")
    assert json.loads(output.read_text().splitlines()[0])["version"] == 2
    assert [s.old_entropies.tolist() for s in read_rollouts(output)] == [[0.5, 0.0], [0.5, 0.25]]


BAD_VERL = {
    "texts only": (
        VERL,
        ("--advantage", "reward"),
        "5.jsonl:1: missing tokens, response_length, loss_mask, old_logprobs. Unused columns: input, output, gts, "
        "ids, n, mask, logp. "
        "Give --column tokens=NAME or --column prompt_ids=NAME --column response_ids=NAME; --column "
        "response_length=NAME; --column "
        "loss_mask=NAME or --loss-mask ones; --column old_logprobs=NAME or --old-logprobs rollout (the rollout "
        "engine's).",
    ),
    "a column that is not there": (
        VERL,
        (*COLUMNS[1:], "--column=tokens=missing", "--advantage", "reward"),
        "5.jsonl:1: missing tokens (no value in column missing). Unused columns: input, output, gts, ids. Give "
        "--column tokens=NAME",
    ),
    "no advantages": (VERL, COLUMNS, "missing advantage. Unused columns: input, output, gts. Give --column"),
    "one rollout a prompt": ([verl_row(0, "a")], (*COLUMNS, "--advantage", "group_norm"), "has one rollout"),
    "a list for an id": (
        VERL,
        (*COLUMNS, "--column=prompt_id=ids", "--advantage", "reward"),
        "prompt_id is [1, 2, 3, 4], not an",
    ),
    "an unknown field": (VERL, ("--column=token=ids",), "--column token=ids is not FIELD=NAME"),
    "a field twice": (VERL, (*COLUMNS, "--column=tokens=n"), "--column names tokens twice"),
    "a step in words": (
        [verl_row(0, "a", step="5")],
        (*COLUMNS, "--advantage", "reward"),
        "step='5' has the wrong type",
    ),
    "no mask": (
        [verl_row(0, "a", mask=None)],
        (*COLUMNS, "--advantage", "reward"),
        "missing loss_mask (no value in column mask)",
    ),
    "a text for a mask": (
        [verl_row(0, "a", mask="11")],
        (*COLUMNS, "--advantage", "reward"),
        "loss_mask='11' has the wrong type",
    ),
}


@pytest.mark.parametrize("name", BAD_VERL)
def test_a_verl_dump_that_does_not_say_enough_is_refused(name, lines, tmp_path, capsys):
    rows, options, message = BAD_VERL[name]
    assert message in refused(capsys, tmp_path, lines(rows, "5.jsonl"), "--format", "verl", *options)


def test_the_uid_of_verl_names_the_prompt(lines, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    words = ("--format", "verl", *COLUMNS, "--advantage", "group_mean", "--output", output)
    assert run(capsys, lines([row | {"uid": f"u{i // 2}"} for i, row in enumerate(VERL)], "5.jsonl"), *words)[0] == 0
    assert [s.prompt_id for s in read_rollouts(output)] == ["u0", "u0", "u1", "u1"]
    assert read_rollouts(output)[0].extra == {"x_input": "a", "x_output": "4", "x_gts": "4"}


# --- JSON Lines ---

OURS = {
    "step": 3,
    "prompt_id": "q",
    "rollout_id": "q/0",
    "tokens": [1, 2, 5, 6],
    "response_length": 2,
    "loss_mask": [1, 0],
    "old_logprobs": [-0.5, -0.25],
    "reward": 1.0,
    "advantage": 0.5,
}
PAIR = {"prompt_ids": [1, 2], "completion_ids": [5, 6], "response_logprobs": [-0.5, -0.25], "score": 1.0}


def renamed(**names) -> dict:
    return {names.get(name, name): value for name, value in OURS.items()}


JSONL = {
    "our names": ([OURS], ()),
    "custom names": (
        [renamed(tokens="ids", response_length="n", loss_mask="mask", old_logprobs="logp", reward="r", step="it")],
        [
            f"--column={w}"
            for w in ("tokens=ids", "response_length=n", "loss_mask=mask", "old_logprobs=logp", "reward=r", "step=it")
        ],
    ),
    "prompt and completion": (
        [PAIR | {"response_mask": [1, 0], "advantages": 0.5, "uid": "q", "rollout_id": "q/0", "step": 3}],
        ("--old-logprobs", "rollout"),
    ),
    "prompt and response": (
        [
            {k: v for k, v in OURS.items() if k not in ("tokens", "response_length", "step", "rollout_id")}
            | {"prompt_ids": [1, 2], "response_ids": [5, 6], "id": "q/0"}
        ],
        ("--step", "3", "--column=rollout_id=id"),
    ),
    "two names for one field, and a choice": ([OURS | {"score": 9.0}], ("--column=reward=reward",)),
    "a name that stands for another field": (
        [renamed(old_logprobs="response_logprobs")],
        ("--column=old_logprobs=response_logprobs",),
    ),
}


@pytest.mark.parametrize("name", JSONL)
def test_lines_of_json_with_columns_of_any_names(name, lines, tmp_path, capsys):
    rows, words = JSONL[name]
    output = tmp_path / "out.jsonl"
    code, _, err = run(capsys, lines(rows, "mine.jsonl"), "--format", "jsonl", *words, "--output", output)
    assert (code, err) == (0, "")
    (sample,) = read_rollouts(output)
    fields = {name: getattr(sample, name) for name in ("step", "prompt_id", "rollout_id", "response_length", "reward")}
    assert fields == {name: OURS[name] for name in fields}
    assert sample.tokens.tolist() == OURS["tokens"]
    assert sample.loss_mask.int().tolist() == OURS["loss_mask"]
    assert float(sample.old_logprobs[0]) == -0.5
    assert float(sample.advantages[0]) == 0.5


def test_a_file_without_ids_and_masks_is_read_as_chosen(lines, tmp_path, capsys):
    rows = [PAIR | {"completion_ids": [5, 6 + i], "score": float(i == 1), "text": "…"} for i in range(4)]
    words = (
        "--step",
        "0",
        "--group-size",
        "2",
        "--loss-mask",
        "ones",
        "--old-logprobs",
        "rollout",
        "--advantage",
        "rloo",
    )
    output = tmp_path / "out.jsonl"
    code, out, err = run(capsys, lines(rows, "mine.jsonl"), "--format", "jsonl", *words, "--output", output)
    assert (code, err) == (0, "")
    assert "\n1 of 2 prompt groups (50%) have equal rewards; their advantages are 0\n" in out
    samples = read_rollouts(output)
    assert [s.prompt_id for s in samples] == ["0/0", "0/0", "0/1", "0/1"]
    assert len({s.rollout_id for s in samples}) == 4
    assert [float(s.advantages[0]) for s in samples] == [-1.0, 1.0, 0.0, 0.0]
    assert {s.num_trained for s in samples} == {2}
    assert samples[0].extra == {"x_text": "…"}


TEXT = json.dumps(OURS)
WAYS = {
    "a byte order mark": b"\xef\xbb\xbf" + TEXT.encode() + b"\n",
    "line ends of Windows": TEXT.encode() + b"\r\n" + json.dumps(OURS | {"rollout_id": "q/1"}).encode() + b"\r\n",
    "no last line end": TEXT.encode(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["file", "archive", "standard input"])
def test_text_is_read_as_it_comes(way, how, tmp_path, capsys, monkeypatch):
    path, output = tmp_path / "mine.jsonl.gz", tmp_path / "out.jsonl"
    if how == "archive":
        path.write_bytes(gzip.compress(WAYS[way]))
    elif how == "file":
        path = tmp_path / "mine.jsonl"
        path.write_bytes(WAYS[way])
    else:
        path = "-"
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(WAYS[way])))
    assert run(capsys, path, "--format", "jsonl", "--output", output)[::2] == (0, "")
    assert len(read_rollouts(output)) == WAYS[way].count(b"rollout_id")


BAD_JSONL = {
    "no step": (
        [{k: v for k, v in OURS.items() if k != "step"}],
        (),
        "mine.jsonl:1: missing step. Give --column step=NAME or --step N.",
    ),
    "nothing but a pair": (
        [PAIR],
        ("--old-logprobs", "rollout"),
        "mine.jsonl:1: missing step, prompt_id, loss_mask, advantage. Give --column step=NAME or --step N; --column "
        "prompt_id=NAME or "
        "--group-size N; --column loss_mask=NAME or --loss-mask ones; --column advantage=NAME or --advantage RULE.",
    ),
    "a step twice": ([OURS], ("--step", "1"), "has a column for step, which --step contradicts"),
    "groups twice": ([OURS], ("--group-size", "1"), "has a column for prompt_id, which --group-size contradicts"),
    "masks twice": ([OURS], ("--loss-mask", "ones"), "has a column for loss_mask, which --loss-mask contradicts"),
    "no mask": ([renamed(loss_mask="m")], (), "Unused columns: m. Give --column loss_mask=NAME or --loss-mask ones"),
    "no prompt": ([renamed(prompt_id="p")], (), "Unused columns: p. Give --column prompt_id=NAME or --group-size N"),
    "no tokens": (
        [renamed(tokens="t")],
        (),
        "missing tokens. Unused columns: t. Give --column tokens=NAME or --column prompt_ids=NAME",
    ),
    "a null": ([OURS | {"step": None}], ("--column=step=step",), "missing step (no value in column step)"),
    "two rewards": (
        [OURS | {"score": 0.0}],
        (),
        "missing reward. Unused columns: reward, score. Give --column reward=reward or --column reward=score.",
    ),
    "half a pair": (
        [PAIR | {"completion_ids": None}],
        (),
        "missing response_ids, step, prompt_id, loss_mask, old_logprobs",
    ),
    "a pair of texts": ([PAIR | {"completion_ids": "ab"}], (), "prompt_ids and response_ids are not two lists"),
    "a pair and other tokens": (
        [OURS | PAIR | {"completion_ids": [5, 7]}],
        ("--column=reward=score",),
        "field tokens contradicts prompt_ids",
    ),
    "a mask of the whole sample": ([OURS | {"loss_mask": [0, 0, 1, 1]}], (), "has 4 entries for 2 response tokens"),
    "a group of texts": (
        [renamed(prompt_id="p") | {"tokens": "abc"}],
        ("--group-size", "1"),
        "tokens is 'abc', not a list",
    ),
    "one rollout in two lines of two steps": ([OURS, OURS | {"step": 4}], (), "prompt_id 'q' is also in step 3"),
    "a value that JSON has not": (
        [OURS | {"note": math.nan}],
        (),
        "extra of sample of the dump has a value that JSON cannot contain",
    ),
    "a number of many digits": ([OURS | {"response_length": 10**400}], (), "mine.jsonl:1: "),
    "a length below any": (
        [PAIR | {"response_length": -(10**400)}],
        ("--loss-mask", "ones"),
        "field response_length contradicts",
    ),
    "no tokens for so many ones": (
        [renamed(loss_mask="m", tokens="t") | {"response_length": -(10**400)}],
        ("--loss-mask", "ones"),
        "missing tokens. Unused columns: t, m.",
    ),
    "a reward of many digits": ([OURS | {"reward": 10**400}], (), "not a finite number"),
    "a step of many digits": ([OURS | {"step": 10**400}], (), "has the wrong type or range"),
}


@pytest.mark.parametrize("name", BAD_JSONL)
def test_lines_of_json_that_do_not_say_enough_are_refused(name, lines, tmp_path, capsys):
    rows, words, message = BAD_JSONL[name]
    assert message in refused(capsys, tmp_path, lines(rows, "mine.jsonl"), "--format", "jsonl", *words)


def test_a_rollout_in_two_files_is_refused(lines, tmp_path, capsys):
    first, second = lines([OURS], "a.jsonl"), lines([OURS | {"note": "b"}], "b.jsonl")
    assert "rollout_id 'q/0' is also in" in refused(capsys, tmp_path, first, second, "--format", "jsonl")
    assert "rollout_id 'q/0' is also in" not in refused(
        capsys, tmp_path, first, lines([], "b.jsonl"), "--format", "jsonl"
    )


@pytest.mark.parametrize(
    "damage", [lambda b: b[:20], lambda b: b[:-9], lambda b: b[:12] + b"\xff" * 9 + b[21:], lambda b: b"{}"]
)
def test_a_damaged_archive_is_refused(damage, tmp_path, capsys):
    path = tmp_path / "mine.jsonl.gz"
    path.write_bytes(damage(gzip.compress(TEXT.encode() * 50)))
    assert "cannot be read (" in refused(capsys, tmp_path, path, "--format", "jsonl")


# --- every format ---

MINIMAL = {"jsonl": (), "nemo_rl": ("--group-size", "1", "--step", "1"), "verl": (*COLUMNS, "--advantage", "reward")}


@pytest.mark.parametrize("framework", MINIMAL)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1', "the line has no end"),
        (b'{"a": 1, "a": 2}\n', "duplicate field 'a'"),
        (b'{"a": \n', "is not a JSON object"),
        (b"\xff\n", "is not a JSON object"),
        (b"[" * 100_000 + b"\n", "is not a JSON object"),
        (b"9" * 5000 + b"\n", "is not a JSON object"),
        (b"", "has no sample"),
        (b"null\n", "is a NoneType, not a sample with fields"),
    ],
)
def test_a_damaged_text_dump_is_refused(framework, content, message, tmp_path, capsys):
    (tmp_path / "dump.jsonl").write_bytes(content)
    assert message in refused(capsys, tmp_path, tmp_path / "dump.jsonl", "--format", framework, *MINIMAL[framework])


@pytest.mark.parametrize("framework", MINIMAL)
def test_a_huge_line_is_refused(framework, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("megatron_pg.rollouts.lines.MAX_LINE_BYTES", 1000)
    (tmp_path / "dump.jsonl").write_text(json.dumps({"a": "b" * 2000}) + "\n")
    assert "no end" in refused(capsys, tmp_path, tmp_path / "dump.jsonl", "--format", framework, *MINIMAL[framework])


@pytest.mark.parametrize("framework", ["slime", "miles", "nemo_rl", "verl", "jsonl"])
@pytest.mark.parametrize("name", ["absent", ".", "a\0b"])
def test_an_unreadable_path_is_refused(framework, name, tmp_path, capsys):
    message = refused(capsys, tmp_path, tmp_path / name, "--format", framework, *MINIMAL.get(framework, CHOICES))
    assert message.rstrip("\n").isprintable()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--format", "trl"), "invalid choice: 'trl'"),
        ((), "the following arguments are required: --format"),
        (("--format", "slime", "--group-size", "2"), "--group-size has no effect with --format slime"),
        (("--format", "verl", "--group-size", "2"), "--group-size has no effect with --format verl"),
        (("--format", "miles", "--train-data", "x"), "--train-data has no effect with --format miles"),
        (("--format", "nemo_rl", "--reward-key", "x"), "--reward-key has no effect with --format nemo_rl"),
        (("more", "--format", "nemo_rl", "--step", "1"), "--step describes one dump, but 2 are given"),
        (("--format", "nemo_rl", "--step", "-1"), "--step -1 is negative"),
    ],
)
def test_options_that_contradict_each_other_are_refused(words, message, tmp_path, capsys):
    (tmp_path / "dump").write_text("")
    assert message in refused(capsys, tmp_path, tmp_path / "dump", *words)


def test_an_existing_file_is_kept_unless_asked(save, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    output.write_text("mine")
    assert "already exists" in refused(capsys, tmp_path, save(), "--format", "slime", *CHOICES)
    assert run(capsys, save(), "--format", "slime", *CHOICES, "--output", output, "--overwrite")[0] == 0
    assert len(read_rollouts(output)) == 6


def test_what_was_there_stays_when_a_conversion_fails(save, tmp_path, capsys):
    (tmp_path / "out.jsonl").write_text("mine")
    message = refused(capsys, tmp_path, save([SLIME[0], {}]), "--format", "slime", *CHOICES, "--overwrite")
    assert "sample 1: has no field 'group_index'" in message


def test_a_folder_that_does_not_exist_is_named(save, tmp_path, capsys):
    code, _, err = run(capsys, save(), "--format", "slime", *CHOICES, "--output", tmp_path / "no" / "out.jsonl")
    assert code == 2
    assert "its folder does not exist" in err


def test_the_result_as_json(save, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    code, out, _ = run(capsys, save(), "--format", "slime", *CHOICES, "--output", output, "--json")
    assert code == 0
    assert json.loads(out) == {"output": str(output), "samples": 6, "prompts": 2, "steps": [12], "notes": []}
