"""`megatron-pg convert`: dumps with the field names of the frameworks' own writers, read back with `read_rollouts`."""

import gzip
import io
import json
import math
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from dumps_of_others import NEMO, SLIME, nemo_row, slime_sample
from rollout_files import Loud

from megatron_pg import read_rollouts

CHOICES = "--old-logprobs rollout --advantage group_norm"


@pytest.fixture
def save(tmp_path):
    def write(samples=SLIME, name="12.pt", **top) -> Path:
        torch.save({"rollout_id": 12, "samples": samples} | top, tmp_path / name)
        return tmp_path / name

    return write


def first_advantages(samples) -> list[float]:
    """Of the samples that train a token."""
    return [float(sample.advantages[0]) for sample in samples if sample.num_trained]


@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_a_rollout_dump_of_slime_or_miles(framework, save, convert):
    path = save(**({"metadata": {"prompt_group_sizes": [3, 3]}} if framework == "miles" else {}))
    samples, _, _, said = convert(f"--format {framework} {CHOICES}", path)
    assert "6 samples of 2 prompts in 1 steps" in said
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


@pytest.mark.parametrize("framework", ["slime", "miles"])
@pytest.mark.parametrize(
    ("status", "truncated"),
    [
        ("truncated", True),
        *((name, False) for name in ("pending", "completed", "aborted", "failed")),
        *((unknown, None) for unknown in ("late", None, ["truncated"])),
    ],
)
def test_a_status_tells_whether_the_response_was_truncated(status, truncated, framework, save, convert):
    """As `Sample.status == Sample.Status.TRUNCATED` of both trainers, and not known from other values."""
    path = save([slime_sample(0, 0, 1.0, status=status), slime_sample(1, 0, 0.0)])
    first, second = convert(f"--format {framework} {CHOICES}", path).samples
    assert (first.truncated, second.truncated) == (truncated, False)
    assert first.loss_mask.all()  # as in both trainers, where a status masks nothing
    assert first.extra["x_status"] == (status if isinstance(status, str) else str(status))


@pytest.mark.parametrize(
    ("rule", "expected"), [("group_mean", [0.5, -0.5, 0.5, 0.5, -0.5]), ("reward", [1, 0, 1, 1, 0])]
)
def test_advantages_follow_from_rewards_as_chosen(rule, expected, save, convert):
    samples = convert(f"--format slime --old-logprobs rollout --advantage {rule}", save()).samples
    assert first_advantages(samples) == pytest.approx(expected)


def train_dump(samples=SLIME, steps=(range(6),)) -> dict:
    """--save-debug-train-data of slime, format_version 2, of two ranks that trained these positions in each step."""
    lists = ("partition", "micro_batch_indices", "num_microbatches")
    shards = [{"rank": 2 * rank, "data_parallel_rank": rank} | {name: [] for name in lists} for rank in range(2)]
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


def test_the_training_dump_of_slime_gives_what_was_trained_with(save, tmp_path, convert):
    torch.save(train_dump(), tmp_path / "train.pt")
    samples, _, _, said = convert("--format slime --train-data", tmp_path / "train.pt", save())
    assert said.count("\n") == 1
    sample = samples[3]
    assert sample.step == 12
    assert sample.old_logprobs.tolist() == [-0.125, -0.75, -5.0]
    assert sample.ref_logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert sample.advantages.tolist() == [1.5, 1.0, -1.0]
    assert sample.rollout_logprobs.tolist() == [-0.5, -0.25, -4.0]


def test_the_training_dump_of_slime_says_which_step_trained_a_sample_and_which_none_did(save, tmp_path, convert):
    """12 rollouts of 4 prompts in steps of 5: the last two fill none, and the second prompt lies in both."""
    given = [slime_sample(i, i // 3, float(i)) for i in range(12)]
    torch.save(train_dump(given, (range(5), range(5, 10))), tmp_path / "train.pt")
    words = "--format slime --advantage group_mean --train-data", tmp_path / "train.pt"
    samples, _, _, said = convert(*words, save(given))
    assert "10 samples of 5 prompts in 2 steps" in said
    assert "2 samples of the last rollouts did not fill a step; they were not trained and are left out" in said
    assert "1 prompt groups were trained in several steps" in said
    assert [s.step for s in samples] == [24] * 5 + [25] * 5
    assert [s.prompt_id for s in samples] == [0, 0, 0, "1/24", "1/24", "1/25", 2, 2, 2, 3]
    assert first_advantages(samples) == [-1, 0, 1, -1, 0, 1, -1, 0, 1, -1]  # over the whole groups
    assert [float(s.old_logprobs[2]) for s in samples] == [-2.0 - i for i in range(10)]


FROM_ENGINE = "--old-logprobs rollout (the rollout engine's) or --train-data FILE"
TOO_FEW_CHOICES = {
    "": f"sample 0: missing old_logprobs, advantage. Give {FROM_ENGINE}; --advantage RULE or --train-data FILE.",
    "--advantage reward": f"missing old_logprobs. Give {FROM_ENGINE}.",
    "--old-logprobs rollout": "missing advantage. Give --advantage RULE or --train-data FILE.",
    f"{CHOICES} --reward-key math": "its reward 1.0 has no parts",
}


@pytest.mark.parametrize("words", TOO_FEW_CHOICES)
def test_a_slime_dump_needs_choices(words, save, refused):
    assert TOO_FEW_CHOICES[words] in refused(f"--format slime {words}", save())


def test_a_slime_dump_without_the_engines_values_needs_what_was_trained(save, refused):
    path = save([SLIME[0] | {"rollout_log_probs": None}, *SLIME[1:]])
    missing = "missing old_logprobs, advantage. Give --train-data FILE; --advantage RULE or --train-data FILE."
    assert missing in refused("--format slime", path)


BAD_SLIME = {
    "no group": ({"group_index": None}, "sample 0: group_index is not set"),
    "no index": ({"index": None}, "sample 0: rollout_id or index is not set"),
    "no log-probabilities": ({"rollout_log_probs": None}, "missing rollout_logprobs. Give a dump with rollout_logp"),
    "no reward": ({"reward": None}, "its reward is None, not a finite number"),
    "a reward of parts": ({"reward": {"math": 1.0}}, "several parts (math). Choose one with --reward-key"),
    "an empty response": ({"response_length": 0, "rollout_log_probs": []}, "sample 0: "),
    "a wrong length": ({"response_length": 2}, "old_logprobs of sample of the dump has 3 entries for 2"),
    "a length in words": ({"response_length": "3"}, "response_length is '3', not an integer"),
    "tokens in words": ({"tokens": "abc"}, "tokens='abc' has the wrong type"),
    "no tokens": ({"tokens": None}, "missing tokens. Give a dump with tokens."),
    "a mask of weights": ({"loss_mask": [0.5, 1, 1]}, "contains 0.5, and it must be 0 or 1"),
    "a positive log-probability": ({"rollout_log_probs": [1.0, -1, -1]}, "Log-probabilities are at most 0"),
    "a log-probability that is not finite": ({"rollout_log_probs": [math.nan, -1, -1]}, "old_logprobs="),
    "siblings with different rewards": (
        {"rollout_id": 40, "group_index": 1, "reward": 0.25},
        "rollout 40 of prompt 1 has samples with different rewards",
    ),
}


@pytest.mark.parametrize("name", BAD_SLIME)
def test_a_bad_sample_of_slime_is_refused(name, save, refused):
    changes, message = BAD_SLIME[name]
    assert message in refused(f"--format slime {CHOICES}", save([SLIME[0] | changes, *SLIME[1:]]))


def test_a_part_of_the_reward_is_chosen_by_its_key(save, convert):
    path = save([sample | {"reward": {"math": sample["reward"], "style": 9}} for sample in SLIME])
    samples = convert(f"--format slime {CHOICES} --reward-key math", path).samples
    assert [s.reward for s in samples][:3] == [1.0, 0.0, 0.5]


DUMP = train_dump()
ROWS, SHARDS = DUMP["samples"], DUMP["dp_shards"]
BAD_TRAIN_DATA = {
    "a dump of one rank": ({"rollout_id": 12, "rank": 0, "rollout_data": {}}, "is not a training dump of slime"),
    "too few samples": (DUMP | {"samples": ROWS[:-1]}, "its samples differ from its schedule"),
    "samples that are none": (DUMP | {"samples": None}, "samples is not a list"),
    "samples of a longer rollout": (train_dump([*SLIME, SLIME[0]], (range(7),)), "not in the rollout dump of 6"),
    "no schedule": (DUMP | {"dp_shards": []}, "its samples differ from its schedule"),
    "a schedule of another kind": (DUMP | {"dp_shards": 3}, "dp_shards does not list the micro-batches"),
    "half a schedule": (
        DUMP | {"dp_shards": [shard | {"num_microbatches": [10**30]} for shard in SHARDS]},
        "dp_shards does not list the micro-batches",
    ),
    "other tokens": (DUMP | {"samples": [row | {"tokens": torch.tensor([1])} for row in ROWS]}, "its tokens differ"),
    "no log_probs": (
        DUMP | {"samples": [{k: v for k, v in row.items() if k != "log_probs"} for row in ROWS]},
        "has no field 'log_probs'",
    ),
}


@pytest.mark.parametrize("name", BAD_TRAIN_DATA)
def test_a_training_dump_that_does_not_belong_is_refused(name, save, tmp_path, refused):
    dump, message = BAD_TRAIN_DATA[name]
    torch.save(dump, tmp_path / "train.pt")
    assert message in refused("--format slime --train-data", tmp_path / "train.pt", save())


@pytest.mark.parametrize("kind", ["torch.save", *map(str, range(pickle.HIGHEST_PROTOCOL + 1))])
def test_stored_code_is_never_run(kind, tmp_path, refused):
    path, flag = tmp_path / "dump.pt", tmp_path / "flag"
    payload = {"rollout_id": 1, "samples": [SLIME[0] | {"metadata": Loud(flag)}]}
    if kind == "torch.save":
        torch.save(payload, path)
    else:
        path.write_bytes(pickle.dumps(payload, int(kind)))
    assert "ensors and plain values" in refused(f"--format slime {CHOICES}", path)
    assert not flag.exists()


def test_an_array_in_a_dump_is_named(save, refused):
    path = save([SLIME[0] | {"rollout_routed_experts": np.zeros((2, 2), dtype=np.int32)}])
    message = refused(f"--format miles {CHOICES}", path)
    assert "has an object of numpy" in message
    assert "docs/cli.md shows how" in message


def test_routed_experts_are_kept_as_tensors_or_lists(save, convert):
    experts = torch.tensor([[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[5, 4], [1, 0]], [[0, 2], [2, 1]]])  # of 5 tokens
    given = (experts, experts.tolist(), None)
    path = save([one | {"rollout_routed_experts": experts} for one, experts in zip(SLIME[:3], given, strict=True)])
    records = convert(f"--format miles {CHOICES}", path).records
    assert [record.get("routed_experts") for record in records] == [experts.tolist(), experts.tolist(), None]


def test_what_slime_could_have_sampled_is_kept_as_tensors_or_lists(save, convert, refused):
    ids, offsets = torch.tensor([20, 4, 21, 7], dtype=torch.int32), torch.tensor([0, 2, 4, 4], dtype=torch.int32)
    given = ((ids, offsets), (ids.tolist(), offsets.tolist()), (None, None))
    names = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")
    path = save([one | dict(zip(names, values, strict=True)) for one, values in zip(SLIME[:3], given, strict=True)])
    records = convert(f"--format slime {CHOICES}", path).records
    flat = {"ids": ids.tolist(), "offsets": offsets.tolist()}
    assert [record.get("sampling_mask") for record in records] == [flat, flat, None]
    half = save([one | {names[0]: ids} for one in SLIME[:3]], name="13.pt")
    assert "is not the ids that could be sampled" in refused(f"--format slime {CHOICES}", half)


def test_a_teacher_comes_along(save, convert):
    taught = [{**one, "teacher_log_probs": [-0.1, -0.2, -0.3]} for one in SLIME]
    samples = convert(f"--format slime {CHOICES}", save(taught)).samples
    assert {tuple(sample.teacher_logprobs.tolist()) for sample in samples} == {(-0.1, -0.2, -0.3)}


def test_a_file_that_is_read_is_not_replaced(save, tmp_path, cli):
    (tmp_path / "link.pt").symlink_to(save())
    for output in ("12.pt", "link.pt"):
        words = f"convert --format slime {CHOICES} --overwrite --output", tmp_path / output, tmp_path / "12.pt"
        assert "is one of the files to read. Give another path." in cli.refused(*words)
    train = f"convert --format slime --overwrite --train-data {tmp_path}/t --output {tmp_path}/t"
    (tmp_path / "t").write_text("x")
    assert "is one of the files to read" in cli.refused(train, tmp_path / "12.pt")
    assert "--train-data is empty" in cli.refused(
        "convert --format slime --train-data '' --output a", tmp_path / "12.pt"
    )


def test_a_closed_standard_input_is_named(cli, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input: is closed." in cli.refused("convert --format jsonl --output a -")


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80", b"PK\x03\x04" + bytes(50), b"{}", b"\xff" * 1000, "truncated"],
    ids=["empty", "byte", "zip", "json", "noise", "truncated"],
)
def test_a_file_that_torch_did_not_save_is_refused(content, save, tmp_path, refused):
    path = tmp_path / "broken.pt"
    path.write_bytes(save().read_bytes()[:900] if content == "truncated" else content)
    message = "is not a file of torch.save, is truncated, or has objects other than tensors and plain values"
    assert message in refused(f"--format slime {CHOICES}", path)


@pytest.mark.parametrize(
    "value",
    [[], {}, 3, "text", {"rollout_id": 1}, {"rollout_id": "x", "samples": []}, {"rollout_id": 1, "samples": [1]}],
)
def test_a_saved_value_of_another_shape_is_refused(value, tmp_path, refused):
    torch.save(value, tmp_path / "dump.pt")
    assert "Check --format." in refused(f"--format slime {CHOICES}", tmp_path / "dump.pt")


# --- NeMo-RL ---

NEMO_NAME = "train_data_step7.jsonl"


def test_a_training_log_of_nemo_rl(lines, convert):
    samples = convert("--format nemo_rl --group-size 2", lines(NEMO, NEMO_NAME)).samples
    assert [s.step for s in samples] == [7] * 4
    assert [s.prompt_id for s in samples] == ["7/0", "7/0", "7/1", "7/1"]
    assert len({s.rollout_id for s in samples}) == 4
    assert samples[0].tokens.tolist() == [1, 2, 5, 6, 7]
    assert samples[0].response_length == 3
    assert samples[0].old_logprobs.tolist() == [-0.25, -1.25, -2.25]
    assert samples[0].rollout_logprobs.tolist() == [-0.5, -1.5, -2.5]
    assert samples[1].num_trained == 0
    assert samples[2].loss_mask.int().tolist() == [1, 0, 0, 1]
    assert first_advantages(samples) == [0.25, 0.75, 1.0]
    assert [s.reward for s in samples] == [0.0, 1.0, 0.0, 1.0]


def test_dynamic_sampling_uses_the_rewards_that_were_kept(lines, convert):
    path = lines([row | {"filtered_rewards": [0.75]} for row in NEMO], NEMO_NAME)
    assert {s.reward for s in convert("--format nemo_rl --group-size 2", path).samples} == {0.75}


def test_log_probabilities_that_nobody_computed_are_refused(lines, convert, refused):
    """force_on_policy_ratio leaves prev_logprobs at 0."""
    rows = [row | {"prev_logprobs": [[0.0] * 8]} for row in NEMO]
    words = "--format nemo_rl --group-size 2", lines(rows, NEMO_NAME)
    assert "all old_logprobs are 0" in (message := refused(*words))
    assert "Give --old-logprobs rollout" in message
    neither = lines([row | {"generation_logprobs": [[0.0] * 8]} for row in rows], "other.jsonl")
    assert "Record them" in refused("--format nemo_rl --group-size 2 --step 7 --old-logprobs rollout", neither)
    assert convert(*words, "--old-logprobs rollout").samples[0].old_logprobs.tolist() == [-0.5, -1.5, -2.5]


def test_a_sure_token_is_no_placeholder(lines, convert):
    rows = [NEMO[0] | {"prev_logprobs": [[0.0] * 4 + [-1.0] + [0.0] * 3]}, NEMO[1]]
    convert("--format nemo_rl --group-size 2", lines(rows, NEMO_NAME))


BAD_NEMO = {
    "no group size": (NEMO, "", "train_data_step7.jsonl: missing prompt_id. Give --group-size N."),
    "a wrong group size": (NEMO, "--group-size 4", ":3: its prompt differs from the first row of its group"),
    "a left-over row": (NEMO[:3], "--group-size 2", "3 rows are not a multiple of --group-size 2"),
    "no group": (NEMO, "--group-size 0", "--group-size 0 is not a number of samples"),
    "nothing": ([], "--group-size 1", "has no sample"),
}


@pytest.mark.parametrize("name", BAD_NEMO)
def test_a_nemo_rl_log_that_does_not_fit_is_refused(name, lines, refused):
    rows, words, message = BAD_NEMO[name]
    assert message in refused(f"--format nemo_rl {words}", lines(rows, NEMO_NAME))


BAD_ROWS = {
    ":1: its first token is trained": nemo_row(0, [], [5, 6]),
    ":1: no token is trained": nemo_row(0, [1], [5], [0]),
    "has no field 'input_lengths'": {"content": ["x"], "rewards": [1.0], "idx": 0},  # of the validation
    "rewards is 1.0, not a list of one value": NEMO[0] | {"rewards": 1.0},
    "prev_logprobs has fewer than 5 entries": NEMO[0] | {"prev_logprobs": [[-1.0]]},
    "sample_loss_mask is 0.5, but must be 0 or 1": NEMO[0] | {"sample_loss_mask": [0.5]},
    "its reward is 'x'": NEMO[0] | {"rewards": ["x"]},
    "is a list, not a sample with fields": [1, 2],
}


@pytest.mark.parametrize("message", BAD_ROWS)
def test_a_bad_row_of_nemo_rl_is_refused(message, lines, refused):
    assert message in refused("--format nemo_rl --group-size 1", lines([BAD_ROWS[message]], NEMO_NAME))


def test_the_step_comes_from_the_name_or_the_user(lines, convert, refused):
    path = lines(NEMO, "renamed.jsonl")
    assert "renamed.jsonl: missing step. Give --step N." in refused("--format nemo_rl --group-size 2", path)
    neither = refused("--format nemo_rl", path)
    assert "renamed.jsonl: missing step, prompt_id. Give --step N; --group-size N." in neither
    assert {s.step for s in convert("--format nemo_rl --group-size 2 --step 3", path).samples} == {3}


# --- verl: _write_generations of verl/trainer/ppo/ray_trainer.py ---


def verl_row(i: int, prompt: str, **changes) -> dict:
    extra = {"ids": [1, 2, 3 + i, 4], "n": 2, "mask": [1, 1], "logp": [-0.5, -0.25]}
    return {"input": prompt, "output": "4", "gts": "4", "score": float(i % 2), "step": 5} | extra | changes


VERL = [verl_row(0, "a"), verl_row(1, "b"), verl_row(2, "a"), verl_row(3, "b")]
COLUMNS = "--column=tokens=ids --column=response_length=n --column=loss_mask=mask --column=old_logprobs=logp"


def test_a_rollout_dump_of_verl_with_the_columns_that_a_sample_needs(lines, convert):
    path = lines([*VERL, verl_row(4, "c", score=1.0), verl_row(5, "c", score=0.0)])
    samples = convert(f"--format verl {COLUMNS} --advantage group_mean", path).samples
    assert [s.prompt_id for s in samples] == ["5/0", "5/1", "5/0", "5/1", "5/2", "5/2"]
    assert [s.step for s in samples] == [5] * 6
    assert samples[2].tokens.tolist() == [1, 2, 5, 4]
    assert first_advantages(samples) == [0, 0, 0, 0, 0.5, -0.5]


TEXTS_ONLY = (
    "5.jsonl:1: missing tokens, response_length, loss_mask, old_logprobs. Unused columns: input, output, gts, ids, n, "
    "mask, logp. Give --column tokens=NAME or --column prompt_ids=NAME --column response_ids=NAME; --column "
    "response_length=NAME; --column loss_mask=NAME or --loss-mask ones; --column old_logprobs=NAME or --old-logprobs "
    "rollout (the rollout engine's)."
)
NO_TOKENS = (
    "5.jsonl:1: missing tokens (no value in column missing). Unused columns: input, output, gts, ids. Give --column "
    "tokens=NAME"
)
REWARDED = f"{COLUMNS} --advantage reward"
OTHER_TOKENS = COLUMNS.replace("tokens=ids", "tokens=missing")
BAD_VERL = {
    "texts only": (VERL, "--advantage reward", TEXTS_ONLY),
    "a column that is not there": (VERL, f"{OTHER_TOKENS} --advantage reward", NO_TOKENS),
    "no advantages": (VERL, COLUMNS, "missing advantage. Unused columns: input, output, gts. Give --column"),
    "a list for an id": (VERL, f"{REWARDED} --column=prompt_id=ids", "prompt_id is [1, 2, 3, 4], not an"),
    "an unknown field": (VERL, "--column=token=ids", "--column token=ids is not FIELD=NAME"),
    "a field twice": (VERL, f"{COLUMNS} --column=tokens=n", "--column names tokens twice"),
    "a step in words": ([verl_row(0, "a", step="5")], REWARDED, "step='5' has the wrong type"),
    "no mask": ([verl_row(0, "a", mask=None)], REWARDED, "missing loss_mask (no value in column mask)"),
    "a text for a mask": ([verl_row(0, "a", mask="11")], REWARDED, "loss_mask='11' has the wrong type"),
}


@pytest.mark.parametrize("name", BAD_VERL)
def test_a_verl_dump_that_does_not_say_enough_is_refused(name, lines, refused):
    rows, words, message = BAD_VERL[name]
    assert message in refused(f"--format verl {words}", lines(rows, "5.jsonl"))


def test_the_uid_of_verl_names_the_prompt(lines, convert):
    path = lines([row | {"uid": f"u{i // 2}"} for i, row in enumerate(VERL)])
    samples = convert(f"--format verl {COLUMNS} --advantage group_mean", path).samples
    assert [s.prompt_id for s in samples] == ["u0", "u0", "u1", "u1"]
    assert samples[0].extra == {"x_input": "a", "x_output": "4", "x_gts": "4"}


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
OF_PAIR = {name: OURS[name] for name in ("prompt_id", "loss_mask", "old_logprobs", "reward", "advantage")}


def renamed(**names) -> dict:
    return {names.get(name, name): value for name, value in OURS.items()}


JSONL = {
    "our names": (OURS, ""),
    "custom names": (
        renamed(tokens="ids", reward="r", step="it"),
        "--column=tokens=ids --column=reward=r --column=step=it",
    ),
    "prompt and completion": (
        PAIR | {"response_mask": [1, 0], "advantages": 0.5, "uid": "q", "rollout_id": "q/0", "step": 3},
        "--old-logprobs rollout",
    ),
    "prompt and response": (
        OF_PAIR | {"prompt_ids": [1, 2], "response_ids": [5, 6], "id": "q/0"},
        "--step 3 --column=rollout_id=id",
    ),
    "two names for one field, and a choice": (OURS | {"score": 9.0}, "--column=reward=reward"),
    "a name that stands for another field": (
        renamed(old_logprobs="response_logprobs"),
        "--column=old_logprobs=response_logprobs",
    ),
}


@pytest.mark.parametrize("name", JSONL)
def test_lines_of_json_with_columns_of_any_names(name, lines, convert):
    row, words = JSONL[name]
    (record,) = convert(f"--format jsonl {words}", lines([row])).records
    assert record.items() >= OURS.items()


def test_a_file_without_ids_and_masks_is_read_as_chosen(lines, convert):
    rows = [PAIR | {"completion_ids": [5, 6 + i], "score": float(i == 1), "text": "…"} for i in range(4)]
    words = "--step 0 --group-size 2 --loss-mask ones --old-logprobs rollout --advantage rloo"
    samples, _, _, said = convert(f"--format jsonl {words}", lines(rows))
    assert "\n1 of 2 prompt groups (50%) have equal rewards; their advantages are 0\n" in said
    assert [s.prompt_id for s in samples] == ["0/0", "0/0", "0/1", "0/1"]
    assert len({s.rollout_id for s in samples}) == 4
    assert first_advantages(samples) == [-1.0, 1.0, 0.0, 0.0]
    assert {s.num_trained for s in samples} == {2}
    assert samples[0].extra == {"x_text": "…"}


SAMPLING_MASK = {"ids": [7, 3, 8], "offsets": [0, 2, 3]}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("sampling_mask", {"token_ids": [7, 3, 8], "offsets": [0, 2, 3]}),  # vLLM's SamplingMask
        ("sampling_mask", [[7, 3], [8]]),  # of its HTTP endpoint
        ("output_token_sampling_mask", [[7, 3], [8]]),  # SGLang's
        ("kept", [[7, 3], [8]]),
    ],
    ids=range(4),
)
def test_what_an_engine_could_have_sampled_is_read_in_each_of_its_forms(column, value, lines, convert, refused):
    row = OURS | {"tokens": [5, 7, 8], column: value}
    words = "--format jsonl --column sampling_mask=kept" if column == "kept" else "--format jsonl"
    (record,) = convert(words, lines([row])).records
    assert record["sampling_mask"] == SAMPLING_MASK
    assert record.keys() == {*OURS, "sampling_mask"}
    assert "is not the ids that could be sampled" in refused(words, lines([row | {column: [[7, 3], "8"]}]))


TEXT = json.dumps(OURS)
WAYS = {
    "a byte order mark": b"\xef\xbb\xbf" + TEXT.encode() + b"\n",
    "line ends of Windows": TEXT.encode() + b"\r\n" + json.dumps(OURS | {"rollout_id": "q/1"}).encode() + b"\r\n",
    "no last line end": TEXT.encode(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["file", "archive", "standard input"])
def test_text_is_read_as_it_comes(way, how, tmp_path, convert, monkeypatch):
    path = tmp_path / ("mine.jsonl.gz" if how == "archive" else "mine.jsonl")
    path.write_bytes(gzip.compress(WAYS[way]) if how == "archive" else WAYS[way])
    if how == "standard input":
        path = "-"
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(WAYS[way])))
    assert len(convert("--format jsonl", path).samples) == WAYS[way].count(b"rollout_id")


NOTHING_BUT_A_PAIR = (
    "rollouts.jsonl:1: missing step, prompt_id, loss_mask, advantage. Give --column step=NAME or --step N; --column "
    "prompt_id=NAME or --group-size N; --column loss_mask=NAME or --loss-mask ones; --column advantage=NAME or "
    "--advantage RULE."
)
NO_STEP = "rollouts.jsonl:1: missing step. Give --column step=NAME or --step N."
NO_TOKENS_AT_ALL = "missing tokens. Unused columns: t. Give --column tokens=NAME or --column prompt_ids=NAME"
TWO_REWARDS = "missing reward. Unused columns: reward, score. Give --column reward=reward or --column reward=score."
HALF_A_PAIR = "missing response_ids, step, prompt_id, loss_mask, old_logprobs"
BY_SCORE, NO_LENGTH = "--column=reward=score", {"response_length": -(10**400)}
NO_TOKENS_FOR_MANY = renamed(loss_mask="m", tokens="t") | NO_LENGTH
GROUP_OF_TEXTS = renamed(prompt_id="p") | {"tokens": "abc"}
BAD_JSONL = {
    "no step": ({k: v for k, v in OURS.items() if k != "step"}, "", NO_STEP),
    "nothing but a pair": (PAIR, "--old-logprobs rollout", NOTHING_BUT_A_PAIR),
    "a step twice": (OURS, "--step 1", "has a column for step, which --step contradicts"),
    "groups twice": (OURS, "--group-size 1", "has a column for prompt_id, which --group-size contradicts"),
    "masks twice": (OURS, "--loss-mask ones", "has a column for loss_mask, which --loss-mask contradicts"),
    "no mask": (renamed(loss_mask="m"), "", "Unused columns: m. Give --column loss_mask=NAME or --loss-mask ones"),
    "no prompt": (renamed(prompt_id="p"), "", "Unused columns: p. Give --column prompt_id=NAME or --group-size N"),
    "no tokens": (renamed(tokens="t"), "", NO_TOKENS_AT_ALL),
    "a null": (OURS | {"step": None}, "--column=step=step", "missing step (no value in column step)"),
    "two rewards": (OURS | {"score": 0.0}, "", TWO_REWARDS),
    "half a pair": (PAIR | {"completion_ids": None}, "", HALF_A_PAIR),
    "a pair of texts": (PAIR | {"completion_ids": "ab"}, "", "prompt_ids and response_ids are not two lists"),
    "a pair and other tokens": (OURS | PAIR | {"completion_ids": [5, 7]}, BY_SCORE, "tokens contradicts prompt_ids"),
    "a mask of the whole sample": (OURS | {"loss_mask": [0, 0, 1, 1]}, "", "has 4 entries for 2 response tokens"),
    "a group of texts": (GROUP_OF_TEXTS, "--group-size 1", "tokens is 'abc', not a list"),
    "a value that JSON has not": (OURS | {"note": math.nan}, "", "has a value that JSON cannot contain"),
    "a length below any": (PAIR | NO_LENGTH, "--loss-mask ones", "field response_length contradicts"),
    "no tokens for so many ones": (NO_TOKENS_FOR_MANY, "--loss-mask ones", "missing tokens. Unused columns: t, m."),
}


@pytest.mark.parametrize("name", BAD_JSONL)
def test_lines_of_json_that_do_not_say_enough_are_refused(name, lines, refused):
    row, words, message = BAD_JSONL[name]
    assert message in refused(f"--format jsonl {words}", lines([row]))


def test_a_rollout_in_two_steps_or_two_files_is_refused(lines, refused):
    two_steps = lines([OURS, OURS | {"step": 4}], "steps.jsonl")
    assert "prompt_id 'q' is also in step 3" in refused("--format jsonl", two_steps)
    first, second = lines([OURS], "a.jsonl"), lines([OURS | {"note": "b"}], "b.jsonl")
    assert "rollout_id 'q/0' is also in" in refused("--format jsonl", first, second)
    assert "rollout_id 'q/0' is also in" not in refused("--format jsonl", first, lines([], "b.jsonl"))


@pytest.mark.parametrize(
    "damage", [lambda b: b[:20], lambda b: b[:-9], lambda b: b[:12] + b"\xff" * 9 + b[21:], lambda b: b"{}"]
)
def test_a_damaged_archive_is_refused(damage, tmp_path, refused):
    path = tmp_path / "mine.jsonl.gz"
    path.write_bytes(damage(gzip.compress(TEXT.encode() * 50)))
    assert "cannot be read (" in refused("--format jsonl", path)


# --- every format ---

MINIMAL = {
    "jsonl": "--format jsonl",
    "nemo_rl": "--format nemo_rl --group-size 1 --step 1",
    "verl": f"--format verl {REWARDED}",
}


@pytest.mark.parametrize("words", MINIMAL.values(), ids=MINIMAL)
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
def test_a_damaged_text_dump_is_refused(words, content, message, tmp_path, refused):
    (tmp_path / "dump.jsonl").write_bytes(content)
    assert message in refused(words, tmp_path / "dump.jsonl")


@pytest.mark.parametrize("words", [*MINIMAL.values(), *(f"--format {name} {CHOICES}" for name in ("slime", "miles"))])
@pytest.mark.parametrize("name", ["absent", ".", "a\0b"])
def test_an_unreadable_path_is_refused(words, name, tmp_path, refused):
    assert refused(words, tmp_path / name).rstrip("\n").isprintable()


BAD_OPTIONS = {
    "--format trl": "--format 'trl' is not one of slime, miles, nemo_rl, verl, jsonl.",
    "": "the following arguments are required: --format",
    "--format slime --group-size 2": "--group-size has no effect with --format slime",
    "--format verl --group-size 2": "--group-size has no effect with --format verl",
    "--format miles --train-data x": "--train-data has no effect with --format miles",
    "--format nemo_rl --reward-key x": "--reward-key has no effect with --format nemo_rl",
    "more --format nemo_rl --step 1": "--step describes one dump, but 2 are given",
    "--format nemo_rl --step -1": "--step -1 is negative",
}


@pytest.mark.parametrize("words", BAD_OPTIONS)
def test_options_that_contradict_each_other_are_refused(words, lines, refused):
    assert BAD_OPTIONS[words] in refused(lines([]), words)


def test_an_existing_file_is_kept_unless_asked_and_when_the_conversion_fails(save, tmp_path, cli, refused):
    output = tmp_path / "out.jsonl"
    output.write_text("mine")
    assert "already exists" in refused(f"--format slime {CHOICES}", save())
    message = refused(f"--format slime {CHOICES} --overwrite", save([SLIME[0], {}]))
    assert "sample 1: has no field 'group_index'" in message
    cli.done("convert", save(), f"--format slime {CHOICES} --overwrite --output", output)
    assert len(read_rollouts(output)) == 6


def test_the_result_as_json(save, tmp_path, cli):
    output = tmp_path / "out.jsonl"
    said = cli.json("convert", save(), f"--format slime {CHOICES} --output", output)
    assert said == {"output": str(output), "samples": 6, "prompts": 2, "steps": [12], "notes": []}
