"""Dumps of other frameworks, read as rows of what they hold. Nothing is executed, and nothing is made up.

slime, miles   --save-debug-rollout-data, torch.save of {rollout_id, samples: [...]}; slime also --save-debug-train-data
nemo_rl        train_data_step{N}.jsonl, one padded row per sample, every value a list of one
verl           trainer.rollout_data_dir, {step}.jsonl: texts and scores, and the columns that a reward function adds
"""

import argparse
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pg.cli.terminal import InputError, opened, show_path
from megatron_pg.rollouts.fields import FIELDS, REQUIRED, is_int
from megatron_pg.rollouts.lines import raw_lines
from megatron_pg.rollouts.printable import printable, shorten


@dataclass(frozen=True, slots=True)
class Row:
    """One sample of a dump."""

    where: str  # file and sample, for messages
    record: dict[str, Any]  # a line of the rollout file; what the dump does not hold is None or absent


def _field(record: Any, name: str, where: str) -> Any:
    """A field that must be there."""
    if not isinstance(record, Mapping):
        raise _foreign(where, f"is a {type(record).__name__}, not a sample with fields")
    if name not in record:
        raise _foreign(where, f"has no field {name!r}, which this format has (it has: {_names(record)})")
    return record[name]


def _integer(record: Any, name: str, where: str) -> int:
    value = _field(record, name, where)
    if not is_int(value):
        raise _foreign(where, f"{name} is {shorten(value)}, not an integer")
    return value


def _names(record: Mapping) -> str:
    return ", ".join(printable(str(key), limit=32) for key in list(record)[:12])


def _foreign(where: str, what: str) -> InputError:
    return InputError(f"{where}: {what}. Is the file of another format?")


# --- slime and miles ---


def read_slime(path: str, options: argparse.Namespace) -> list[Row]:
    """The samples of a rollout dump of slime or miles, joined with slime's training dump where that is given.

    Raises:
        InputError: the file is no such dump, or holds something else than tensors and plain values.
    """
    dump, shown = load_tensors(path), show_path(path)
    step, samples = _field(dump, "rollout_id", shown), _field(dump, "samples", shown)
    if not isinstance(samples, list) or not is_int(step):
        raise _foreign(shown, "rollout_id and samples are no number and list")
    rows = [_slime_row(sample, step, f"{shown}: sample {i}", options.reward_key) for i, sample in enumerate(samples)]
    if options.train_data:
        _add_train_data(rows, options.train_data)
    return rows


def _slime_row(sample: Any, step: int, where: str, reward_key: str | None) -> Row:
    prompt_id, index = _field(sample, "group_index", where), _field(sample, "index", where)
    rollout_id = sample.get("rollout_id")
    unit = index if rollout_id is None else rollout_id
    for name, value in (("group_index", prompt_id), ("rollout_id and index", unit)):
        if value is None:
            raise InputError(
                f"{where}: {name} is not set, so its unit cannot be counted. Set it in the rollout function."
            )
    length, mask = _integer(sample, "response_length", where), _plain_list(sample.get("loss_mask"))
    fields = {
        "step": step,
        "prompt_id": prompt_id,
        "rollout_id": f"sample-{index}" if rollout_id is None else rollout_id,
        "tokens": _plain_list(_field(sample, "tokens", where)),
        "response_length": length,
        "loss_mask": [0] * length if sample.get("remove_sample") else [1] * length if mask is None else mask,
        "reward": _reward(_field(sample, "reward", where), where, reward_key),
        "rollout_logprobs": _plain_list(sample.get("rollout_log_probs")),
        "x_status": str(sample.get("status")),
        "x_index": index,
    }
    return Row(where, fields)


def _reward(reward: Any, where: str, key: str | None) -> Any:
    if isinstance(reward, Mapping):
        if key not in reward:
            raise InputError(f"{where}: its reward has several parts ({_names(reward)}). Choose one with --reward-key.")
        reward = reward[key]
    elif key is not None:
        raise InputError(f"{where}: its reward {shorten(reward)} has no parts. Leave --reward-key out.")
    return reward.item() if isinstance(reward, Tensor) and reward.numel() == 1 else reward


def _add_train_data(rows: Sequence[Row], path: str) -> None:
    """Give the rows the log-probabilities and advantages that slime trained with."""
    dump, shown = load_tensors(path), show_path(path)
    if not isinstance(dump, Mapping) or dump.get("format_version") != 2:
        raise InputError(
            f"{shown}: is no training dump of slime (format_version 2), whose samples name their position in the rollout dump. The "
            "dumps that miles writes per rank cannot be joined; choose --old-logprobs and --advantage instead."
        )
    trained = {str(_field(sample, "rollout_position", shown)): sample for sample in _field(dump, "samples", shown)}
    for position, row in enumerate(rows):
        where, sample = f"{shown}: sample {position}", trained.get(str(position))
        if sample is None:
            raise InputError(
                f"{row.where}: {shown} holds no sample of this position. Do both files belong to one rollout?"
            )
        if _plain_list(_field(sample, "tokens", where)) != row.record["tokens"]:
            raise InputError(
                f"{where}: its tokens differ from those of {row.where}. Do both files belong to one rollout?"
            )
        row.record["old_logprobs"] = _plain_list(_field(sample, "log_probs", where))
        row.record["advantage"] = _plain_list(_field(sample, "advantages", where))
        row.record["ref_logprobs"] = _plain_list(sample.get("ref_log_probs"))


def load_tensors(path: str) -> Any:
    """What `torch.save` wrote, as tensors and plain values; an object of any class is refused, and never built.

    Raises:
        InputError: the file cannot be read, is no such file, or holds other objects.
    """
    shown = show_path(path)
    with opened(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the loader, about files that it then refuses
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a damaged or foreign file makes of the loader
            if refused := re.search(r"(?:GLOBAL |<class ')([\w.]+)", str(error)):
                raise InputError(
                    f"{shown}: holds {refused.group(1)}, and only tensors and plain values are loaded, because building anything else can "
                    "run code. Write the dump again without it (docs/cli.md shows how)."
                ) from error
            text = str(error).rpartition("WeightsUnpickler error:")[2].strip() or type(error).__name__
            raise InputError(
                f"{shown}: is no file of torch.save, was cut short, or holds objects ({printable(text.partition(chr(10))[0])}); only tensors "
                "and plain values are loaded. Give a dump."
            ) from error


def _plain_list(values: Any) -> list | None:
    """A list of numbers from a list, a tuple or a tensor; None stays None."""
    if isinstance(values, Tensor):
        return values.reshape(-1).tolist()
    return list(values) if isinstance(values, (list, tuple)) else values


# --- NeMo-RL ---


def read_nemo_rl(path: str, options: argparse.Namespace) -> list[Row]:
    """The samples of a train_data_step{N}.jsonl.

    A row is padded and cut at its input length; its response begins at the first trained token, so the prompt is what
    lies before. Groups are consecutive rows: --group-size of them share a prompt, which is compared.

    Raises:
        InputError: the file is no such file, its step or group size is not known, or a group has two prompts.
    """
    shown, size, step = show_path(path), options.group_size, options.step
    if step is None and (named := re.search(r"train_data_step(\d+)\.jsonl$", str(path))):
        step = int(named.group(1))
    if step is None:
        raise InputError(f"{shown}: its name does not say the step, as train_data_step12.jsonl does. Give --step.")
    if size is None:
        raise InputError(
            f"{shown}: this format does not say which samples share a prompt. Give --group-size, the run's num_generations_per_prompt."
        )
    rows, prompts = [], []
    for i, (record, where) in enumerate(_json_lines(path)):
        fields = _nemo_rl_fields(record, where)
        prompts.append(fields["tokens"][: -fields["response_length"]])
        if prompts[i] != prompts[i - i % size]:
            raise InputError(
                f"{where}: its prompt differs from that of its group's first row, so --group-size {size} is wrong."
            )
        ids = {"step": step, "prompt_id": f"{step}/{i // size}", "rollout_id": f"{step}/{i}"}
        rows.append(Row(where, ids | fields))
    if len(rows) % size:
        raise InputError(f"{shown}: {len(rows)} rows are no multiple of --group-size {size}. Correct it.")
    return rows


def _nemo_rl_fields(record: Any, where: str) -> dict[str, Any]:
    def one(name: str) -> Any:
        values = _field(record, name, where)
        if not isinstance(values, list) or len(values) != 1:
            raise _foreign(where, f"{name} is {shorten(values)}, not a list of one value")
        return values[0]

    def cut(name: str) -> list:
        values = one(name)
        if not isinstance(values, list) or not isinstance(length, int) or len(values) < length:
            raise _foreign(where, f"{name} has no {shorten(length)} entries (input_lengths)")
        return values[:length]

    length = one("input_lengths")
    tokens, mask, old, engine = map(cut, ("token_ids", "token_loss_mask", "prev_logprobs", "generation_logprobs"))
    first = next((k for k, bit in enumerate(mask) if bit), None)
    if not first:
        what = "no token is trained" if first is None else "its first token is trained"
        raise InputError(f"{where}: {what}, so prompt and response cannot be told apart. Remove the group.")
    advantage, keep = one("advantages"), one("sample_loss_mask")
    if keep not in (0, 1):
        raise InputError(
            f"{where}: sample_loss_mask is {shorten(keep)}, not 0 or 1, and the loss mask cannot hold weights."
        )
    return {
        "tokens": tokens,
        "response_length": length - first,
        "loss_mask": [bit * keep for bit in mask[first:]],
        "reward": one("filtered_rewards" if "filtered_rewards" in record else "rewards"),
        "old_logprobs": old[first:],
        "advantage": advantage[first:length] if isinstance(advantage, list) else advantage,
        "rollout_logprobs": engine[first:],
    }


# --- verl ---

VERL_HOLDS = ("step", "prompt_id", "rollout_id", "reward")  # the rest of a sample, if any, is in columns of the user's


def read_verl(path: str, options: argparse.Namespace) -> list[Row]:
    """The samples of a {step}.jsonl of verl's rollout_data_dir, with the columns that --column names.

    Samples of one step with equal `input` share a prompt.

    Raises:
        InputError: the file is no such file, or does not hold what a sample needs: texts are no tokens.
    """
    columns = _columns(options.column or [])
    if missing := [name for name in REQUIRED if name not in (*VERL_HOLDS, "advantage", *columns)]:
        raise InputError(
            f"{show_path(path)}: verl writes texts and scores; {', '.join(missing)} cannot be derived from them. Have the reward function "
            f"return them as extra columns, and name these: --column {missing[0]}=NAME."
        )
    prompts: dict[str, int] = {}
    rows = []
    for i, (record, where) in enumerate(_json_lines(path)):
        step, text = _integer(record, "step", where), _field(record, "input", where)
        group = prompts.setdefault(str(text), len(prompts))
        fields = {"step": step, "prompt_id": f"{step}/{group}", "rollout_id": f"{step}/{i}"}
        if "reward" not in columns:
            fields["reward"] = _field(record, "score", where)
        rows.append(Row(where, fields | {name: _field(record, column, where) for name, column in columns.items()}))
    return rows


def _columns(given: Sequence[str]) -> dict[str, str]:
    known = [name for name in FIELDS if name != "step"]
    columns: dict[str, str] = {}
    for text in given:
        name, equals, column = text.partition("=")
        if not equals or not column or name not in known:
            raise InputError(
                f"--column {printable(text)} is not FIELD=NAME with a field of {', '.join(known)}. Correct it."
            )
        if name in columns:
            raise InputError(f"--column names {name} twice. Name it once.")
        columns[name] = column
    return columns


def _json_lines(path: str) -> Iterator[tuple[Any, str]]:
    for number, line in enumerate(raw_lines(path), start=1):
        where = f"{show_path(path)}:{number}"
        if not line.endswith(b"\n"):
            raise InputError(f"{where}: the line has no end, so the file was cut short. Write it again.")
        try:
            record = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: is not one JSON object per line ({printable(str(error))}).") from error
        yield record, where


READERS = {"slime": read_slime, "miles": read_slime, "nemo_rl": read_nemo_rl, "verl": read_verl}
