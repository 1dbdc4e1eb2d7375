"""Columns of a dump as fields of the rollout file, missing fields and the options that give them. Needs no torch."""

import argparse
import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_pg.cli.terminal import InputError
from megatron_pg.rollouts.fields import FIELDS, POLICY, REQUIRED, REQUIRED_OF_ALL
from megatron_pg.rollouts.printable import listed, printable

FORMATS = {  # format -> the options that have an effect on it
    "slime": ("reward_key", "old_logprobs", "advantage", "train_data"),
    "miles": ("reward_key", "old_logprobs", "advantage"),
    "nemo_rl": ("group_size", "step", "old_logprobs", "advantage"),
    "verl": ("column", "old_logprobs", "advantage", "loss_mask"),
    "jsonl": ("column", "group_size", "step", "old_logprobs", "advantage", "loss_mask"),
}
_ELSEWHERE = {  # field -> names of its column in other trainers and engines
    "prompt_id": ("uid",),
    "response_ids": ("completion_ids",),
    "loss_mask": ("response_mask",),
    "old_logprobs": ("old_per_token_logps",),
    "rollout_logprobs": ("response_logprobs", "sampling_per_token_logps"),
    "ref_logprobs": ("ref_per_token_logps",),
    "teacher_logprobs": ("teacher_log_probs",),
    "sampling_mask": ("support", "output_token_sampling_mask"),
    "reward": ("score",),
    "advantage": ("advantages",),
}
PAIR = ("prompt_ids", "response_ids")  # together they give tokens and response_length
# field -> the columns that are read as this field, unless --column names one
COLUMNS = {name: (name, *_ELSEWHERE.get(name, ())) for name in (*FIELDS, *PAIR)}
_VLLM = {"prompt_ids": "prompt_token_ids", "response_ids": "token_ids"}  # in other engines token_ids include the prompt
_OPTIONS = {  # field -> the options that give it, and their spelling
    "step": {"step": "--step N"},
    "prompt_id": {"group_size": "--group-size N"},
    "loss_mask": {"loss_mask": "--loss-mask ones"},
    "old_logprobs": {
        "old_logprobs": "--old-logprobs rollout (the rollout engine's)",
        "train_data": "--train-data FILE",
    },
    "advantage": {"advantage": "--advantage RULE", "train_data": "--train-data FILE"},
}
_CLOSE = 0.85  # similarity of a misspelled column to the name of a field


@dataclass(frozen=True, slots=True)
class Row:
    """One sample of a dump."""

    where: str  # file and sample, for messages
    record: dict[str, Any]  # a line of the rollout file; missing fields are None or absent
    unused: tuple[str, ...] = ()  # columns of the line that are not a field

    @property
    def is_of_policy(self) -> bool:
        """Whether its loss mask marks tokens of the objective."""
        return self.record.get("term") in (None, POLICY)


def columns_of(options: argparse.Namespace) -> dict[str, str]:
    """Field -> the column that --column names for it."""
    columns: dict[str, str] = {}
    for text in options.column or ():
        name, equals, column = text.partition("=")
        if not equals or not column or name not in COLUMNS:
            close = difflib.get_close_matches(name, COLUMNS, n=1)
            hint = f"Did you mean {close[0]}?" if close and name not in COLUMNS else "Correct it."
            raise InputError(
                f"--column {printable(text)} is not FIELD=NAME with a field of {', '.join(COLUMNS)}. {hint}"
            )
        if name in columns:
            raise InputError(f"--column names {name} twice. Name it once.")
        columns[name] = column
    return columns


def check_complete(row: Row, options: argparse.Namespace) -> None:
    """Refuse a sample without a field that no option gives, or with several columns that have a name of it."""
    record = row.record
    wanted = list(REQUIRED if row.is_of_policy else REQUIRED_OF_ALL)
    if options.old_logprobs and (row.is_of_policy or record.get("old_logprobs") is not None):
        wanted = ["rollout_logprobs", *(name for name in wanted if name != "old_logprobs")]
    given = {
        "advantage": options.advantage,
        "prompt_id": options.group_size,
        "rollout_id": "column" in FORMATS[options.format],
    }
    missing = [name for name in wanted if record.get(name) is None and not given.get(name)]
    if half := [name for name in PAIR if name in record]:
        missing = [*({*PAIR} - {*half}), *(name for name in missing if name not in ("tokens", "response_length"))]
    unclear = [name for name in COLUMNS.keys() - columns_of(options).keys() if len(_alike(name, row)) > 1]
    if missing := list(dict.fromkeys([*missing, *sorted(unclear)])):
        raise missing_fields(missing, row, options)


def _alike(field: str, row: Row) -> list[str]:
    """The unused columns with a name of this field."""
    return [name for name in COLUMNS[field] if name in row.unused]


def missing_fields(fields: Sequence[str], row: Row, options: argparse.Namespace) -> InputError:
    """The error that lists missing fields and every way to give them."""
    chosen = columns_of(options)
    names = [
        f"{field} (no value in column {printable(chosen[field])})" if field in chosen else field for field in fields
    ]
    there = f" Unused columns: {listed(row.unused)}." if row.unused else ""
    ways = "; ".join(_ways(field, row, options) for field in fields)
    meant = "".join(f" --column {field}={printable(name)}" for field, name in _meant(fields, row.unused).items())
    hint = f" Did you mean{meant}?" if meant else ""
    return InputError(f"{row.where}: missing {', '.join(names)}.{there} Give {ways}.{hint}")


def _ways(field: str, row: Row, options: argparse.Namespace) -> str:
    """The ways to give a field: its column, or an option of the format."""
    ways, has_columns = [], "column" in FORMATS[options.format]
    if has_columns:
        alike = _alike(field, row)
        ways = [f"--column {field}={name}" for name in (alike if len(alike) > 1 else ["NAME"])]
        ways += ["--column prompt_ids=NAME --column response_ids=NAME"] * (field == "tokens")
    for option, text in _OPTIONS.get(field, {}).items():
        is_there = option != "old_logprobs" or has_columns or row.record.get("rollout_logprobs") is not None
        if option in FORMATS[options.format] and is_there:
            ways.append(text)
    return " or ".join(ways) or f"a dump with {field}"


def _meant(fields: Sequence[str], unused: Sequence[str]) -> dict[str, str]:
    """Field -> the unused column that may be meant: misspelled, or under vLLM's name."""
    meant = {}
    for field in (*fields, *(PAIR if "tokens" in fields else ())):
        alike = difflib.get_close_matches(field, unused, n=1, cutoff=_CLOSE)
        if named := [name for name in (_VLLM.get(field), *alike) if name in unused and name not in COLUMNS[field]]:
            meant[field] = named[0]
    return meant


def misspelled_columns(rows: Iterable[Row]) -> dict[str, str]:
    """Column that becomes an x_ field -> the field that it resembles, from lines without that field."""
    kinds = {(tuple(name for name in FIELDS if row.record.get(name) is None), row.unused) for row in rows}
    pairs = [pair for absent, unused in kinds for pair in _meant(absent, unused).items()]
    return {column: field for field, column in pairs if field in FIELDS}
