"""`megatron-pg convert --format jsonl`: every field of the rollout file, under any column name, and what is missing."""

import json
from pathlib import Path

import pytest

from megatron_pg import read_rollouts
from megatron_pg.cli import main
from megatron_pg.rollouts.fields import FIELDS
from megatron_pg.rollouts.lines import read_records

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
OWN = {"prompt_ids": [1, 2], "response_ids": [5, 6]}
MINIMAL = {name: LINE[name] for name in ("step", "prompt_id", "tokens", "response_length", "loss_mask")} | {
    "old_logprobs": [-0.5, -0.25],
    "reward": 1.0,
    "advantage": 0.5,
}


@pytest.fixture
def convert(tmp_path, capsys):
    """Exit code, what is said, and the records of the file that a conversion of these lines makes."""

    def run(lines: list[dict], *words: str) -> tuple[int, str, list[dict]]:
        path, output = tmp_path / "mine.jsonl", tmp_path / "out.jsonl"
        output.unlink(missing_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        code = main(["convert", str(path), "--format", "jsonl", "--output", str(output), *words])
        said = capsys.readouterr()
        assert output.exists() == (code == 0)
        return code, said.out + said.err, [record for _, record in read_records(output)] if code == 0 else []

    return run


def test_every_field_of_the_rollout_file_is_kept(convert, tmp_path):
    code, said, (record,) = convert([LINE])
    assert code == 0, said
    assert record == LINE
    assert len(read_rollouts(tmp_path / "out.jsonl")) == 1


def test_every_field_is_read_from_the_column_that_is_named(convert):
    words = [f"--column={field}=my {field}" for field in FIELDS]
    code, said, (record,) = convert([{f"my {field}": value for field, value in LINE.items()}], *words)
    assert code == 0, said
    assert record == LINE


def test_a_sample_of_a_further_term_needs_no_objective_fields(convert):
    sft = {"term": "sft", **{name: MINIMAL[name] for name in ("step", "tokens", "response_length", "loss_mask")}}
    sft |= {"prompt_id": "demo"}
    rollouts = [MINIMAL | {"reward": reward, "rollout_logprobs": [-0.5, -0.5]} for reward in (1.0, 0.0)]
    code, said, records = convert([sft, *rollouts], "--old-logprobs", "rollout", "--advantage", "group_mean")
    assert code == 0, said
    assert records[0] == sft | {"rollout_id": "3/0"}
    assert [record["advantage"] for record in records[1:]] == [0.5, -0.5]


def test_values_of_tokens_that_a_further_term_trains_are_kept(convert):
    """What no loss term trains may be anything, and is written as 0 if JSON cannot hold it."""
    line = MINIMAL | {"loss_mask": [1, 0], "masks": {"ref": [0, 1]}, "ref_logprobs": [-0.75, -0.25]}
    assert convert([line])[2][0]["ref_logprobs"] == [-0.75, -0.25]
    nan = float("nan")
    untrained = MINIMAL | {"loss_mask": [1, 0], "ref_logprobs": [-0.75, nan], "old_entropies": [0.5, nan]}
    assert convert([untrained])[2][0]["ref_logprobs"] == [-0.75, 0.0]
    assert convert([untrained])[2][0]["old_entropies"] == [0.5, 0.0]
    code, said, _ = convert([line | {"ref_logprobs": [-0.75, nan]}])
    assert (code, "ref_logprobs=" in said) == (2, True)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("length", True), ("truncated", True), ("stop", False), ("tool_calls", False), ("completed", False), (True, True)],
)
def test_a_finish_reason_is_read_as_truncated(value, expected, convert):
    code, said, (record,) = convert([MINIMAL | {"finish_reason": value}], "--column", "truncated=finish_reason")
    assert code == 0, said
    assert record["truncated"] is expected
    assert "x_finish_reason" not in record


def test_an_unknown_finish_reason_is_refused_by_name(convert):
    code, said, _ = convert([MINIMAL | {"finish_reason": "abort"}], "--column", "truncated=finish_reason")
    assert code == 2
    assert (
        "mine.jsonl:1: truncated 'abort' is not a known finish reason (length: true; truncated: true; stop: false"
        in said
    )
    code, said, _ = convert([MINIMAL | {"finish_reason": {"type": "length"}}], "--column", "truncated=finish_reason")
    assert (code, "truncated={'type': 'length'} has the wrong type" in said) == (2, True)
    assert "truncated" not in convert([MINIMAL | {"finish_reason": None}], "--column=truncated=finish_reason")[2][0]


def test_names_of_vllm_are_explained_with_all_other_missing_choices(convert):
    line = {"prompt_token_ids": [1, 2], "token_ids": [5, 6], "logprobs": [-0.5, -0.25], "score": 1.0}
    code, said, _ = convert([line], "--loss-mask", "ones")
    assert code == 2
    assert said.endswith(
        "mine.jsonl:1: missing step, prompt_id, tokens, response_length, loss_mask, old_logprobs, advantage. Unused "
        "columns: "
        "prompt_token_ids, token_ids, logprobs. Give --column step=NAME or --step N; --column prompt_id=NAME or "
        "--group-size N; "
        "--column tokens=NAME or --column prompt_ids=NAME --column response_ids=NAME; --column response_length=NAME; "
        "--column "
        "loss_mask=NAME or --loss-mask ones; --column old_logprobs=NAME or --old-logprobs rollout (the rollout "
        "engine's); --column "
        "advantage=NAME or --advantage RULE. Did you mean --column prompt_ids=prompt_token_ids --column "
        "response_ids=token_ids?\n"
    )
    words = [
        "--loss-mask",
        "ones",
        "--step",
        "0",
        "--group-size",
        "1",
        "--old-logprobs",
        "rollout",
        "--advantage",
        "reward",
    ]
    columns = ("prompt_ids=prompt_token_ids", "response_ids=token_ids", "rollout_logprobs=logprobs")
    code, said, (record,) = convert([line], *words, *(f"--column={column}" for column in columns))
    assert code == 0, said
    assert (record["tokens"], record["response_length"], record["old_logprobs"]) == ([1, 2, 5, 6], 2, [-0.5, -0.25])


@pytest.mark.parametrize(
    ("field", "column"), [("loss_mask", "loss_masks"), ("old_logprobs", "old_log_probs"), ("reward", "rewards")]
)
def test_a_misspelled_column_of_a_required_field_is_named(field, column, convert):
    line = {column if name == field else name: value for name, value in MINIMAL.items()}
    code, said, _ = convert([line])
    assert code == 2
    assert f"missing {field}. Unused columns: {column}. Give --column {field}=NAME" in said
    assert f"Did you mean --column {field}={column}?" in said


def test_a_misspelled_column_of_an_optional_field_is_kept_and_named(convert):
    code, said, (record,) = convert([MINIMAL | {"weight_versions": 3, "source": "math"}])
    assert (code, record["x_weight_versions"], record["x_source"]) == (0, 3, "math")
    hint = "Did you mean --column weight_version=weight_versions?"
    note = f"mine.jsonl: column weight_versions is kept as an x_ field. {hint}\n"
    assert said.endswith(note)
    assert said.count("Did you mean") == 1


def test_a_column_that_no_line_has_is_refused(convert):
    lines = [MINIMAL | {"text": "a"}, MINIMAL | {"cut": True, "rollout_id": 7}]
    code, said, _ = convert(lines, "--column", "truncated=cutt")
    assert code == 2
    assert "--column truncated=cutt: no line of " in said
    assert said.endswith("has this column. The first line has: text. Correct it.\n")
    code, said, records = convert(lines, "--column", "truncated=cut")  # one line may lack it
    assert [record.get("truncated") for record in records] == [None, True], said


def test_an_unknown_field_of_an_option_is_named_with_the_one_that_is_meant(convert):
    code, said, _ = convert([MINIMAL], "--column", "trunctated=finish_reason")
    assert (code, said.endswith(" Did you mean truncated?\n")) == (2, True)
    assert all(field in said for field in FIELDS)


def test_columns_that_are_not_a_field_are_kept_whole(convert):
    line = MINIMAL | {"truncated": None, "note": None, "x_own": 1}
    record = convert([line])[2][0]
    assert {name: value for name, value in record.items() if name.startswith("x_")} == {"x_note": None, "x_own": 1}
    other = convert([MINIMAL | {"score": 9.0}], "--column", "reward=reward")[2][0]
    assert (other["reward"], other["x_score"]) == (1.0, 9.0)
    code, said, _ = convert([MINIMAL | {"own": 1, "x_own": 2}])
    assert (code, "its columns own and x_own would both be x_own. Rename one." in said) == (2, True)


def test_a_file_that_is_written_to_a_full_disk_names_the_output(convert, tmp_path, monkeypatch):
    import errno

    from megatron_pg.rollouts import file as rollout_file

    written = rollout_file.append_whole

    def full(file, data: bytes) -> None:
        if b'"tokens"' in data:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(file, data)

    monkeypatch.setattr(rollout_file, "append_whole", full)
    code, said, _ = convert([MINIMAL])
    assert code == 2
    assert said == (
        f"megatron-pg convert: {tmp_path / 'out.jsonl'}: cannot be written (No space left on device). "
        "Free disk space, or give another path.\n"
    )
    assert [path.name for path in Path(tmp_path).iterdir()] == ["mine.jsonl"]
