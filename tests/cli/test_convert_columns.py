"""`megatron-pg convert --format jsonl`: every field of the rollout file, under any column name, and what is missing."""

import errno
import math

import pytest

from megatron_pg.rollouts import lines as rollout_lines
from megatron_pg.rollouts.fields import FIELDS

TOP = {"ids": [[7, 3], [8, 9]], "logprobs": [[-0.5, -1.5], [-0.25, -2.0]]}
VALUES = {  # a value that a field can have in one sample; where a line has none, one of `ANY`
    "step": 3,
    "tokens": [5, 7, 8],
    "response_length": 2,
    "loss_mask": [1, 0],
    "old_logprobs": [-0.5, -0.25],
    "reward": 1.0,
    "advantage": [0.5, -0.5],
    "rollout_logprobs": [-0.5, -0.125],
    "ref_logprobs": [-0.75, -0.25],
    "teacher_logprobs": [-0.875, -0.375],
    "old_entropies": [0.5, 0.0],
    "values": [0.5, 0.25],
    "returns": [1.0, 0.75],
    "token_weights": [0.5, 0],
    "turns": [1, 1],
    "teacher_topk": TOP,
    "teacher_hidden": {"width": 1, "bfloat16": "gD8AwA=="},
    "sampling_mask": {"ids": [7, 3, 8], "offsets": [0, 2, 3]},
    "rollout_topk": TOP,
    "term": "sft",
    "masks": {"ref": [0, 1]},
    "routed_experts": [[[0, 1]], [[1, 2]]],
    "truncated": True,
    "data_parallel_rank": 3,
}
ANY = ("seven", 7, 0.5, True)


def value_of(field: str):
    return VALUES[field] if field in VALUES else next(value for value in ANY if FIELDS[field].accepts(value))


LINE = {field: value_of(field) for field in FIELDS}
REQUIRED = ("step", "prompt_id", "tokens", "response_length", "loss_mask", "old_logprobs", "reward")
MINIMAL = {name: LINE[name] for name in REQUIRED} | {"advantage": 0.5}


@pytest.fixture
def converted(convert, lines):
    """`converted(records, words)` converts them as lines of JSON."""
    return lambda records, *words: convert("--format jsonl", lines(records), *words)


@pytest.fixture
def refusal(refused, lines):
    return lambda records, *words: refused("--format jsonl", lines(records), *words)


def test_every_field_of_the_rollout_file_is_kept(converted):
    assert converted([LINE]).records == [LINE]


def test_every_field_is_read_from_the_column_that_is_named(converted):
    words = [f"--column='{field}=my {field}'" for field in FIELDS]
    assert converted([{f"my {field}": value for field, value in LINE.items()}], *words).records == [LINE]


def test_a_sample_of_a_further_term_needs_no_objective_fields(converted):
    sft = {"term": "sft", "prompt_id": "demo"}
    sft |= {name: MINIMAL[name] for name in ("step", "tokens", "response_length", "loss_mask")}
    rollouts = [MINIMAL | {"reward": reward, "rollout_logprobs": [-0.5, -0.5]} for reward in (1.0, 0.0)]
    records = converted([sft, *rollouts], "--old-logprobs rollout --advantage group_mean").records
    assert records[0] == sft | {"rollout_id": "3/0"}
    assert [record["advantage"] for record in records[1:]] == [0.5, -0.5]


def test_values_of_tokens_that_a_further_term_trains_are_kept(converted, refusal):
    """What no loss term trains may be anything, and is written as 0 if JSON cannot hold it."""
    line = MINIMAL | {"masks": {"ref": [0, 1]}, "ref_logprobs": [-0.75, -0.25]}
    assert converted([line]).records[0]["ref_logprobs"] == [-0.75, -0.25]
    (untrained,) = converted([MINIMAL | {"ref_logprobs": [-0.75, math.nan], "old_entropies": [0.5, math.nan]}]).records
    assert (untrained["ref_logprobs"], untrained["old_entropies"]) == ([-0.75, 0.0], [0.5, 0.0])
    assert "ref_logprobs=" in refusal([line | {"ref_logprobs": [-0.75, math.nan]}])


@pytest.mark.parametrize(
    ("value", "expected"),
    [("length", True), ("truncated", True), ("stop", False), ("tool_calls", False), ("completed", False), (True, True)],
)
def test_a_finish_reason_is_read_as_truncated(value, expected, converted):
    (record,) = converted([MINIMAL | {"finish_reason": value}], "--column truncated=finish_reason").records
    assert record["truncated"] is expected
    assert "x_finish_reason" not in record


def test_an_unknown_finish_reason_is_refused_by_name(converted, refusal):
    words = "--column truncated=finish_reason"
    message = "rollouts.jsonl:1: truncated 'abort' is not a known finish reason (length: true; truncated: true; stop: "
    assert f"{message}false" in refusal([MINIMAL | {"finish_reason": "abort"}], words)
    wrong = refusal([MINIMAL | {"finish_reason": {"type": "length"}}], words)
    assert "truncated={'type': 'length'} has the wrong type" in wrong
    assert "truncated" not in converted([MINIMAL | {"finish_reason": None}], words).records[0]


OF_VLLM = (
    "rollouts.jsonl:1: missing step, prompt_id, tokens, response_length, loss_mask, old_logprobs, advantage. Unused "
    "columns: prompt_token_ids, token_ids, logprobs. Give --column step=NAME or --step N; --column prompt_id=NAME or "
    "--group-size N; --column tokens=NAME or --column prompt_ids=NAME --column response_ids=NAME; --column "
    "response_length=NAME; --column loss_mask=NAME or --loss-mask ones; --column old_logprobs=NAME or --old-logprobs "
    "rollout (the rollout engine's); --column advantage=NAME or --advantage RULE. Did you mean --column "
    "prompt_ids=prompt_token_ids --column response_ids=token_ids?\n"
)


def test_names_of_vllm_are_explained_with_all_other_missing_choices(converted, refusal):
    line = {"prompt_token_ids": [1, 2], "token_ids": [5, 6], "logprobs": [-0.5, -0.25], "score": 1.0}
    assert refusal([line], "--loss-mask ones").endswith(OF_VLLM)
    columns = "--column prompt_ids=prompt_token_ids --column response_ids=token_ids --column rollout_logprobs=logprobs"
    choices = "--loss-mask ones --step 0 --group-size 1 --old-logprobs rollout --advantage reward"
    (record,) = converted([line], choices, columns).records
    assert (record["tokens"], record["response_length"], record["old_logprobs"]) == ([1, 2, 5, 6], 2, [-0.5, -0.25])


@pytest.mark.parametrize(
    ("field", "column"), [("loss_mask", "loss_masks"), ("old_logprobs", "old_log_probs"), ("reward", "rewards")]
)
def test_a_misspelled_column_of_a_required_field_is_named(field, column, refusal):
    message = refusal([{column if name == field else name: value for name, value in MINIMAL.items()}])
    assert f"missing {field}. Unused columns: {column}. Give --column {field}=NAME" in message
    assert f"Did you mean --column {field}={column}?" in message


def test_a_misspelled_column_of_an_optional_field_is_kept_and_named(converted):
    _, (record,), _, said = converted([MINIMAL | {"weight_versions": 3, "source": "math"}])
    assert (record["x_weight_versions"], record["x_source"]) == (3, "math")
    hint = "Did you mean --column weight_version=weight_versions?"
    assert said.endswith(f"rollouts.jsonl: column weight_versions is kept as an x_ field. {hint}\n")
    assert said.count("Did you mean") == 1


def test_a_column_that_no_line_has_is_refused(converted, refusal):
    records = [MINIMAL | {"text": "a"}, MINIMAL | {"cut": True, "rollout_id": 7}]
    message = refusal(records, "--column truncated=cutt")
    assert "--column truncated=cutt: no line of " in message
    assert message.endswith("has this column. The first line has: text. Correct it.\n")
    found = converted(records, "--column truncated=cut").records  # one line may lack it
    assert [record.get("truncated") for record in found] == [None, True]


def test_an_unknown_field_of_an_option_is_named_with_the_one_that_is_meant(refusal):
    message = refusal([MINIMAL], "--column trunctated=finish_reason")
    assert message.endswith(" Did you mean truncated?\n")
    assert all(field in message for field in FIELDS)


def test_columns_that_are_not_a_field_are_kept_whole(converted, refusal):
    (record,) = converted([MINIMAL | {"truncated": None, "note": None, "x_own": 1}]).records
    assert {name: value for name, value in record.items() if name.startswith("x_")} == {"x_note": None, "x_own": 1}
    (other,) = converted([MINIMAL | {"score": 9.0}], "--column reward=reward").records
    assert (other["reward"], other["x_score"]) == (1.0, 9.0)
    message = refusal([MINIMAL | {"own": 1, "x_own": 2}])
    assert "its columns own and x_own would both be x_own. Rename one." in message


def test_a_file_that_is_written_to_a_full_disk_names_the_output(refusal, tmp_path, monkeypatch):
    written = rollout_lines.append_whole

    def full(file, data: bytes) -> None:
        if b'"tokens"' in data:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(file, data)

    monkeypatch.setattr(rollout_lines, "append_whole", full)
    assert refusal([MINIMAL]) == (
        f"megatron-pg convert: {tmp_path / 'out.jsonl'}: cannot be written (No space left on device). "
        "Free disk space, or give another path.\n"
    )


@pytest.mark.parametrize("words", ["--column=--", "--column tokens=a --column=--"])
def test_a_column_that_argparse_reads_as_no_value_is_refused(cli, words):
    assert "--column has no value: -- is not one" in cli.refused(f"convert --format jsonl {words} --output a b")
