"""Dumps of other frameworks, read as rows. No code in them is executed, and no value is invented.

slime, miles   --save-debug-rollout-data, torch.save of {rollout_id, samples: [...]}; slime also --save-debug-train-data
nemo_rl        train_data_step{N}.jsonl, one padded row per sample, every value a list of one
verl           trainer.rollout_data_dir, {step}.jsonl: texts, scores, and the columns that a reward function adds
jsonl          one JSON object per sample, in columns of any names
"""

import argparse
import gzip
import json
import operator
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from megatron_pg.cli.rollouts.columns import COLUMNS, PAIR, Row, check_complete, columns_of, missing_fields
from megatron_pg.cli.terminal import InputError, opened, show_path, standard_input
from megatron_pg.rollouts.fields import FIELDS, is_int, plain
from megatron_pg.rollouts.lines import raw_lines, unique_keys
from megatron_pg.rollouts.printable import listed, printable, shorten


class Names:
    """Names for rollouts and prompts that have none: numbers within each step, over all dumps."""

    def __init__(self) -> None:
        self._rollouts: Counter[str] = Counter()
        self._prompts: dict[str, dict[Any, int]] = {}

    def rollout(self, step: Any) -> str:
        """The name of the next rollout of a step."""
        self._rollouts[f"{step}"] += 1
        return f"{step}/{self._rollouts[f'{step}'] - 1}"

    def prompt(self, step: Any, key: Any) -> str:
        """The name of the prompt with this key in a step."""
        known = self._prompts.setdefault(f"{step}", {})
        return f"{step}/{known.setdefault(key, len(known))}"


def _field(record: Any, name: str, where: str) -> Any:
    if not isinstance(record, Mapping):
        raise _foreign(where, f"is a {type(record).__name__}, not a sample with fields")
    if name not in record:
        raise _foreign(where, f"has no field {name!r}, which this format requires (it has: {listed(record)})")
    return record[name]


def _integer(record: Any, name: str, where: str) -> int:
    value = _field(record, name, where)
    if not is_int(value):
        raise _foreign(where, f"{name} is {shorten(value)}, not an integer")
    return value


def _constant_mask(bit: int, length: int, tokens: Any) -> list[int]:
    """A mask of equal bits of a response's length, at most the length of the sample."""
    return [bit] * max(0, min(length, len(tokens) if isinstance(tokens, list) else 0))


def _foreign(where: str, what: str) -> InputError:
    return InputError(f"{where}: {what}. Check --format.")


# --- slime and miles ---

# Sample.Status of both: each but `truncated` is 0 in the `truncated` that they train with
_STATUSES = ("pending", "completed", "truncated", "aborted", "failed")


def read_slime(path: str, options: argparse.Namespace, _: Names) -> list[Row]:
    """The samples of a rollout dump of slime or miles, joined with slime's training dump if --train-data gives it."""
    dump, shown = load_tensors(path), show_path(path)
    step, samples = _field(dump, "rollout_id", shown), _field(dump, "samples", shown)
    if not isinstance(samples, list) or not is_int(step):
        raise _foreign(shown, "rollout_id is not an integer, or samples is not a list")
    rows = [_slime_row(sample, step, f"{shown}: sample {i}", options.reward_key) for i, sample in enumerate(samples)]
    if options.train_data:
        _add_train_data(rows, options.train_data)
    return rows


def _slime_row(sample: Any, step: int, where: str, reward_key: str | None) -> Row:
    prompt_id, index = (plain(_field(sample, name, where)) for name in ("group_index", "index"))
    rollout_id, status = plain(sample.get("rollout_id")), sample.get("status")
    removed = plain(sample.get("remove_sample", False))
    if removed is not None and not isinstance(removed, bool):
        raise _foreign(where, f"remove_sample is {shorten(removed)}, not true or false")
    if index is not None and not is_int(index):
        raise _foreign(where, f"index is {shorten(index)}, not an integer")
    unit = index if rollout_id is None else rollout_id
    for name, value in (("group_index", prompt_id), ("rollout_id or index", unit)):
        if value is None:
            raise InputError(f"{where}: {name} is not set. Set it in the rollout function.")
    tokens, mask = _plain_list(_field(sample, "tokens", where), where), _plain_list(sample.get("loss_mask"), where)
    length = _integer(sample, "response_length", where)
    if mask is None or removed:
        mask = _constant_mask(0 if removed else 1, length, tokens)
    kept = {name: _plain_list(sample.get(f"rollout_top_p_token_{name}"), where) for name in ("ids", "offsets")}
    fields = {
        "step": step,
        "prompt_id": prompt_id,
        "rollout_id": f"sample-{index}" if rollout_id is None else rollout_id,
        "tokens": tokens,
        "response_length": length,
        "loss_mask": mask,
        "reward": _reward(_field(sample, "reward", where), where, reward_key),
        "rollout_logprobs": _plain_list(sample.get("rollout_log_probs"), where),
        "teacher_logprobs": _plain_list(sample.get("teacher_log_probs"), where),
        "routed_experts": _nested_list(sample.get("rollout_routed_experts"), where),
        "sampling_mask": None if all(values is None for values in kept.values()) else kept,
        "truncated": status == "truncated" if status in _STATUSES else None,
        "x_status": status if isinstance(status, str) else shorten(status),
        "x_index": index,
    }
    return Row(where, fields)


def _reward(reward: Any, where: str, key: str | None) -> Any:
    if isinstance(reward, Mapping):
        if key not in reward:
            raise InputError(f"{where}: its reward has several parts ({listed(reward)}). Choose one with --reward-key.")
        reward = reward[key]
    elif key is not None:
        raise InputError(f"{where}: its reward {shorten(reward)} has no parts. Leave --reward-key out.")
    return _plain_list(reward, where)[0] if isinstance(reward, Tensor) and reward.numel() == 1 else reward


def _add_train_data(rows: Sequence[Row], path: str) -> None:
    """Give the rows the steps, log-probabilities and advantages that slime trained with; step None: not trained."""
    dump, shown = load_tensors(path), show_path(path)
    version = plain(dump.get("format_version")) if isinstance(dump, Mapping) else None
    if not is_int(version) or version != 2:
        raise InputError(
            f"{shown}: is not a training dump of slime (format_version 2), in which samples name their position in the "
            "rollout dump. For the dumps that miles writes per rank, use --old-logprobs and --advantage instead."
        )
    samples = _field(dump, "samples", shown)
    if not isinstance(samples, list):
        raise _foreign(shown, "samples is not a list")
    trained = {_integer(sample, "rollout_position", shown): sample for sample in samples}
    steps = _steps_of(_field(dump, "dp_shards", shown), shown)
    if trained.keys() != steps.keys() or not all(0 <= position < len(rows) for position in steps):
        raise InputError(
            f"{shown}: its samples differ from its schedule, or are not in the rollout dump of {len(rows)} samples. "
            "Give two files of one rollout."
        )
    num_steps = 1 + max(steps.values(), default=0)
    for position, row in enumerate(rows):
        if position not in steps:  # a rollout that did not fill a step
            row.record["step"] = None
            continue
        where, sample = f"{shown}: sample {position}", trained[position]
        both = _plain_list(_field(sample, "tokens", where), where), row.record["tokens"]
        if not all(map(FIELDS["tokens"].accepts, both)) or both[0] != both[1]:
            raise InputError(
                f"{where}: its tokens differ from the tokens of {row.where}. Give two files of one rollout."
            )
        row.record["step"] = row.record["step"] * num_steps + steps[position]
        row.record["old_logprobs"] = _plain_list(_field(sample, "log_probs", where), where)
        row.record["advantage"] = _plain_list(_field(sample, "advantages", where), where)
        row.record["ref_logprobs"] = _plain_list(sample.get("ref_log_probs"), where)


def _steps_of(shards: Any, shown: str) -> dict[int, int]:
    """Position in the rollout dump -> the optimizer step of the dump that trained it, from slime's schedule."""
    steps: dict[int, int] = {}
    try:
        for shard in _plain_list(shards, shown):
            names = ("num_microbatches", "micro_batch_indices", "partition")
            counts, microbatches, partition = (_plain_list(_field(shard, name, shown), shown) for name in names)
            numbers = chain.from_iterable(repeat(step, count) for step, count in enumerate(counts))
            for step, microbatch in zip(numbers, microbatches, strict=True):
                steps |= {operator.index(partition[i]): step for i in _plain_list(microbatch, shown)}
    except (TypeError, KeyError, IndexError, ValueError, OverflowError) as error:
        raise _foreign(shown, "dp_shards does not list the micro-batches and steps of every sample") from error
    return steps


def load_tensors(path: str) -> Any:
    """The content of a `torch.save` file: tensors and plain values. Other objects are refused and never constructed."""
    shown = show_path(path)
    with opened(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the loader warns about files that it then refuses
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged or foreign file may raise any error
            if refused := re.search(r"(?:GLOBAL |<class ')([\w.]+)", str(error)):
                raise InputError(
                    f"{shown}: has an object of {refused.group(1)}. Only tensors and plain values are loaded, because "
                    "other objects can run code. Write the dump again without it (docs/cli.md shows how)."
                ) from error
            text = str(error).rpartition("WeightsUnpickler error:")[2].strip() or type(error).__name__
            raise InputError(
                f"{shown}: is not a file of torch.save, is truncated, or has objects other than tensors and plain "
                f"values ({printable(text.partition(chr(10))[0])}). Give a dump."
            ) from error


def _plain_list(values: Any, where: str) -> Any:
    """A list of numbers from a list, a tuple or a tensor; anything else as it is.

    A tensor without numbers, or with more of them than the file contains, is refused.
    """
    if not isinstance(values, Tensor):
        return list(values) if isinstance(values, (list, tuple)) else values
    try:
        if values.numel() * values.element_size() > values.untyped_storage().nbytes():
            raise ValueError
        return values.reshape(-1).tolist()
    except Exception as error:  # sparse, without data, or of a future kind
        kind = f"{values.layout} on {values.device} of shape {tuple(values.shape)}"
        raise InputError(
            f"{where}: has a tensor ({kind}) that is not dense. Write it dense, on the CPU and with its own memory."
        ) from error


def _nested_list(values: Any, where: str) -> Any:
    """Nested lists from a tensor of several dimensions; anything else as it is."""
    if not isinstance(values, Tensor):
        return values
    _plain_list(values, where)  # refuses tensors whose numbers cannot be listed
    return values.tolist()


# --- NeMo-RL ---


def read_nemo_rl(path: str, options: argparse.Namespace, names: Names) -> list[Row]:
    """The samples of a train_data_step{N}.jsonl.

    A row is padded and is cut at its input length. Its response begins at the first trained token; the tokens before
    are the prompt. --group-size consecutive rows are a group, whose prompts are compared.
    """
    shown, size, step = show_path(path), options.group_size, options.step
    if step is None and (named := re.search(r"train_data_step(\d{1,18})\.jsonl$", str(path))):
        step = int(named.group(1))
    if missing := [name for name, value in (("step", step), ("prompt_id", size)) if value is None]:
        raise missing_fields(missing, Row(shown, {}), options)
    rows = [
        Row(where, {"step": step, "rollout_id": f"{step}/{i}"} | _nemo_rl_fields(record, where))
        for i, (record, where) in enumerate(_json_lines(path))
    ]
    _group_rows(rows, size, shown, names)
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
            raise _foreign(where, f"{name} has fewer than {shorten(length)} entries (input_lengths)")
        return values[:length]

    length = one("input_lengths")
    tokens, mask, old, engine = map(cut, ("token_ids", "token_loss_mask", "prev_logprobs", "generation_logprobs"))
    first = next((k for k, bit in enumerate(mask) if bit), None)
    if not first:
        what = "no token is trained" if first is None else "its first token is trained"
        raise InputError(f"{where}: {what}, so the end of the prompt is unknown. Remove the group.")
    advantage, keep = one("advantages"), one("sample_loss_mask")
    if keep not in (0, 1):
        raise InputError(f"{where}: sample_loss_mask is {shorten(keep)}, but must be 0 or 1. Remove the weights.")
    return {
        "tokens": tokens,
        "response_length": length - first,
        "loss_mask": [bit if keep else 0 for bit in mask[first:]],
        "reward": one("filtered_rewards" if "filtered_rewards" in record else "rewards"),
        "old_logprobs": old[first:],
        "advantage": advantage[first:length] if isinstance(advantage, list) else advantage,
        "rollout_logprobs": engine[first:],
    }


# --- JSON Lines of any trainer, including verl ---

_FINISH_REASONS = {"length": True, "truncated": True, "stop": False, "tool_calls": False, "completed": False}


def read_jsonl(path: str, options: argparse.Namespace, names: Names) -> list[Row]:
    """The samples of a file with one JSON object per sample, whose columns `COLUMNS` and --column name.

    A line without a rollout_id is a separate rollout. verl: without a uid, samples of a step with equal `input` share a
    prompt. Columns that are not a field become x_ fields.
    """
    chosen = columns_of(options)
    absent = set(chosen.values())
    rows: list[Row] = []
    for record, where in _json_lines(path):
        fields, unused = _named(record, chosen, where)
        absent -= record.keys()
        for name, option in (("step", "step"), ("prompt_id", "group_size"), ("loss_mask", "loss_mask")):
            if name in fields and getattr(options, option) is not None:
                raise InputError(
                    f"{where}: has a column for {name}, which --{option.replace('_', '-')} contradicts. "
                    "Leave out one of them."
                )
        if options.step is not None:
            fields["step"] = options.step
        if options.loss_mask is not None and "response_length" in fields:
            fields["loss_mask"] = _constant_mask(1, _integer(fields, "response_length", where), fields.get("tokens"))
        if options.format == "verl" and "prompt_id" not in fields and "input" in record:
            fields["prompt_id"] = names.prompt(fields.get("step"), f"{record['input']}")
        rows.append(Row(where, fields, tuple(unused)))
        check_complete(rows[-1], options)
        fields.setdefault("rollout_id", names.rollout(fields["step"]))
    if rows and absent:
        first = printable(next(f"{field}={name}" for field, name in chosen.items() if name in absent))
        raise InputError(
            f"--column {first}: no line of {show_path(path)} has this column. The first line has: "
            f"{listed(rows[0].unused)}. Correct it."
        )
    if options.group_size is not None:
        _group_rows(rows, options.group_size, show_path(path), names)
    return rows


def _named(record: Any, chosen: Mapping[str, str], where: str) -> tuple[dict[str, Any], list[str]]:
    """The columns of a line under our names, other columns under x_ names; and the names of the other columns.

    A column that is null counts as absent. If several columns have a name of one field, none is read.
    """
    if not isinstance(record, Mapping):
        raise _foreign(where, f"is a {type(record).__name__}, not a sample with fields")
    free = {name: value for name, value in record.items() if name not in chosen.values()}
    taken = {field: name for field, name in chosen.items() if record.get(name) is not None}
    for field in COLUMNS.keys() - chosen.keys():
        if len(names := [name for name in COLUMNS[field] if free.get(name) is not None]) == 1:
            taken[field] = names[0]
    fields = {field: record[taken[field]] for field in COLUMNS if field in taken}
    if "truncated" in fields:
        fields["truncated"] = _truncated(fields["truncated"], where)
    if all(name in fields for name in PAIR):
        _join(fields, where)
    unused = {name: value for name, value in free.items() if name not in taken.values()}
    for name, value in unused.items():
        x_name = name if name.startswith("x_") else f"x_{name}"
        if (value is not None or name not in COLUMNS) and fields.setdefault(x_name, value) is not value:
            raise InputError(f"{where}: its columns {x_name[2:]} and {x_name} would both be {x_name}. Rename one.")
    return fields, [name for name, value in unused.items() if value is not None]


def _join(fields: dict[str, Any], where: str) -> None:
    """Replace prompt_ids and response_ids by tokens and response_length."""
    prompt, response = map(fields.pop, PAIR)
    if not isinstance(prompt, list) or not isinstance(response, list):
        raise _foreign(where, "prompt_ids and response_ids are not two lists")
    for name, value in (("tokens", prompt + response), ("response_length", len(response))):
        if fields.setdefault(name, value) != value:
            raise InputError(f"{where}: field {name} contradicts prompt_ids and response_ids. Leave out one of them.")


def _truncated(value: Any, where: str) -> Any:
    """Whether a finish reason means that the response was truncated; a value that is not a text stays as it is."""
    if isinstance(value, str) and value not in _FINISH_REASONS:
        known = "; ".join(f"{name}: {str(is_cut).lower()}" for name, is_cut in _FINISH_REASONS.items())
        raise InputError(
            f"{where}: truncated {shorten(value)} is not a known finish reason ({known}). Write true or false, or "
            "leave out the column."
        )
    return _FINISH_REASONS[value] if isinstance(value, str) else value


def _group_rows(rows: Sequence[Row], size: int, shown: str, names: Names) -> None:
    """Name the prompts of groups of consecutive rows, after comparing their steps and prompts."""
    prompts = []
    for row in rows:
        tokens, length = _field(row.record, "tokens", row.where), _integer(row.record, "response_length", row.where)
        if not isinstance(tokens, list):
            raise _foreign(row.where, f"tokens is {shorten(tokens)}, not a list")
        prompts.append((tokens[: len(tokens) - length], _field(row.record, "step", row.where)))
    for i, row in enumerate(rows):
        for name, value, first in zip(("prompt", "step"), prompts[i], prompts[i - i % size], strict=True):
            if value != first:
                raise InputError(
                    f"{row.where}: its {name} differs from the first row of its group. Correct --group-size {size}."
                )
        row.record["prompt_id"] = names.prompt(prompts[i][1], (shown, i // size))
    if len(rows) % size:
        raise InputError(f"{shown}: {len(rows)} rows are not a multiple of --group-size {size}. Correct it.")


def _json_lines(path: str) -> Iterator[tuple[Any, str]]:
    for number, line in enumerate(raw_lines(path, opener=_open_text), start=1):
        where = f"{show_path(path)}:{number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            record = json.loads(text, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            if not line.endswith(b"\n"):
                raise InputError(f"{where}: the line has no end; the file is truncated. Write it again.") from error
            raise InputError(f"{where}: is not a JSON object ({printable(str(error))}). Check --format.") from error
        yield record, where


def _open_text(path: str, mode: str) -> Any:
    """A file, a compressed file (.gz), or standard input (-)."""
    if path == "-":
        return standard_input()
    return gzip.open(path, mode) if path.endswith(".gz") else open(path, mode)


READERS = {"slime": read_slime, "miles": read_slime, "nemo_rl": read_nemo_rl, "verl": read_jsonl, "jsonl": read_jsonl}
