"""Dumps of other frameworks, read as rows of what they hold. Nothing is executed, and nothing is made up.

slime, miles   --save-debug-rollout-data, torch.save of {rollout_id, samples: [...]}; slime also --save-debug-train-data
nemo_rl        train_data_step{N}.jsonl, one padded row per sample, every value a list of one
verl           trainer.rollout_data_dir, {step}.jsonl: texts and scores, and the columns that a reward function adds
"""

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_pg.cli.terminal import InputError, busy, show_path, unreadable_message
from megatron_pg.rollouts.fields import Id
from megatron_pg.rollouts.lines import RolloutFileError, raw_lines
from megatron_pg.rollouts.printable import printable, shorten


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sample of a dump, under our names; None where the dump does not hold it."""

    where: str  # file and sample, for messages
    step: int
    prompt_id: Id
    rollout_id: Id
    tokens: Sequence[int]
    response_length: int
    loss_mask: Sequence[int]
    reward: float
    old_logprobs: Sequence[float] | None = None
    advantage: float | Sequence[float] | None = None
    rollout_logprobs: Sequence[float] | None = None
    ref_logprobs: Sequence[float] | None = None
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the user says about a dump that does not say it itself."""

    reward_key: str | None = None
    group_size: int | None = None
    step: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    train_data: str | None = None


def field_of(record: object, name: str, where: str) -> object:
    """A field that must be there.

    Raises:
        InputError: it is not, or `record` has no fields.
    """
    if not isinstance(record, Mapping):
        raise InputError(
            f"{where}: is a {type(record).__name__}, not a sample with fields. Is the file of another format?"
        )
    if name not in record:
        held = ", ".join(printable(str(key), limit=32) for key in list(record)[:12])
        raise InputError(
            f"{where}: has no field {name!r}, which this format has (it has: {held}). Is the file of another format?"
        )
    return record[name]


# --- slime and miles ---


def read_slime(path: str, choices: Choices) -> list[Row]:
    """The samples of a rollout dump of slime or miles, joined with slime's training dump where that is given.

    Raises:
        InputError: the file is no such dump, or holds something else than tensors and plain values.
    """
    dump, shown = load_tensors(path), show_path(path)
    step = field_of(dump, "rollout_id", shown)
    samples = field_of(dump, "samples", shown)
    if not isinstance(samples, list) or isinstance(step, bool) or not isinstance(step, int):
        raise InputError(f"{shown}: rollout_id and samples are no number and list. Is the file of another format?")
    rows = [_slime_row(sample, step, f"{shown}: sample {i}", choices) for i, sample in enumerate(samples)]
    return _with_train_data(rows, choices.train_data) if choices.train_data else rows


def _slime_row(sample: object, step: int, where: str, choices: Choices) -> Row:
    prompt_id, index = field_of(sample, "group_index", where), field_of(sample, "index", where)
    rollout_id = sample.get("rollout_id")
    for name, value in (
        ("group_index", prompt_id),
        ("rollout_id and index", index if rollout_id is None else rollout_id),
    ):
        if value is None:
            raise InputError(
                f"{where}: {name} is not set, so its unit cannot be counted. Set it in the rollout function."
            )
    length = field_of(sample, "response_length", where)
    if isinstance(length, bool) or not isinstance(length, int):
        raise InputError(
            f"{where}: response_length is {shorten(length)}, not an integer. Is the file of another format?"
        )
    mask = sample.get("loss_mask")
    mask = [1] * length if mask is None else plain_list(mask)
    return Row(
        where=where,
        step=step,
        prompt_id=prompt_id,
        rollout_id=f"sample-{index}" if rollout_id is None else rollout_id,
        tokens=plain_list(field_of(sample, "tokens", where)),
        response_length=length,
        loss_mask=[0] * length if sample.get("remove_sample") else mask,
        reward=_reward(field_of(sample, "reward", where), where, choices.reward_key),
        rollout_logprobs=plain_list(sample.get("rollout_log_probs")),
        extra={"x_status": str(sample.get("status")), "x_index": index},
    )


def _reward(reward: object, where: str, key: str | None) -> float:
    if isinstance(reward, Mapping):
        if key not in reward:
            names = ", ".join(printable(str(name), limit=32) for name in list(reward)[:12])
            raise InputError(f"{where}: its reward has several parts ({names}). Choose one with --reward-key.")
        reward = reward[key]
    elif key is not None:
        raise InputError(f"{where}: its reward {shorten(reward)} has no parts. Leave --reward-key out.")
    if isinstance(reward, Tensor) and reward.numel() == 1:
        reward = reward.item()
    if isinstance(reward, bool) or not isinstance(reward, (int, float)):
        raise InputError(f"{where}: its reward is {shorten(reward)}, not a number. Was it scored?")
    return float(reward)


def _with_train_data(rows: list[Row], path: str) -> list[Row]:
    """The rows with the log-probabilities and advantages that slime trained with."""
    dump, shown = load_tensors(path), show_path(path)
    if not isinstance(dump, Mapping) or dump.get("format_version") != 2:
        raise InputError(
            f"{shown}: is no training dump of slime (format_version 2), whose samples name their position in the rollout dump. The "
            "dumps that miles writes per rank cannot be joined; choose --old-logprobs and --advantage instead."
        )
    trained = {str(field_of(sample, "rollout_position", shown)): sample for sample in field_of(dump, "samples", shown)}
    joined = []
    for position, row in enumerate(rows):
        if str(position) not in trained:
            raise InputError(
                f"{row.where}: {shown} holds no sample of this position. Do both files belong to one rollout?"
            )
        joined.append(_joined(row, trained[str(position)], f"{shown}: sample {position}"))
    return joined


def _joined(row: Row, sample: Mapping, where: str) -> Row:
    if plain_list(field_of(sample, "tokens", where)) != row.tokens:
        raise InputError(f"{where}: its tokens differ from those of {row.where}. Do both files belong to one rollout?")
    return replace(
        row,
        old_logprobs=plain_list(field_of(sample, "log_probs", where)),
        advantage=plain_list(field_of(sample, "advantages", where)),
        ref_logprobs=plain_list(sample.get("ref_log_probs")),
    )


def load_tensors(path: str) -> object:
    """What `torch.save` wrote, as tensors and plain values; an object of any class is refused, and never built.

    Raises:
        InputError: the file cannot be read, is no such file, or holds other objects.
    """
    shown = show_path(path)
    try:
        with open(path, "rb"):
            pass
    except (OSError, ValueError) as error:
        raise InputError(unreadable_message(path, error)) from error
    try:
        with busy(f"loading {shown}"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the loader, about files that it then refuses
            return torch.load(path, map_location="cpu", weights_only=True)
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


def plain_list(values: object) -> list | None:
    """A list of numbers from a list, a tuple or a tensor; None stays None."""
    if isinstance(values, Tensor):
        return values.reshape(-1).tolist()
    return list(values) if isinstance(values, (list, tuple)) else values


# --- NeMo-RL ---


def read_nemo_rl(path: str, choices: Choices) -> list[Row]:
    """The samples of a train_data_step{N}.jsonl.

    A row is padded and cut at its input length; its response begins at the first trained token, so the prompt is what
    lies before. Groups are consecutive rows: --group-size of them share a prompt, which is compared.

    Raises:
        InputError: the file is no such file, its step or group size is not known, or a group has two prompts.
    """
    shown, size = show_path(path), choices.group_size
    named = re.search(r"train_data_step(\d+)\.jsonl$", str(path))
    step = choices.step if choices.step is not None else int(named.group(1)) if named else None
    if step is None:
        raise InputError(f"{shown}: its name does not say the step, as train_data_step12.jsonl does. Give --step.")
    if size is None:
        raise InputError(
            f"{shown}: this format does not say which samples share a prompt. Give --group-size, the run's num_generations_per_prompt."
        )
    rows = [_nemo_rl_row(record, step, where, size, i) for i, (record, where) in enumerate(_json_lines(path))]
    if len(rows) % size:
        raise InputError(f"{shown}: {len(rows)} rows are no multiple of --group-size {size}. Correct it.")
    for i, row in enumerate(rows):
        if _prompt(row) != _prompt(rows[i - i % size]):
            raise InputError(
                f"{row.where}: its prompt differs from that of its group's first row, so --group-size {size} is wrong."
            )
    return rows


def _nemo_rl_row(record: object, step: int, where: str, group_size: int, i: int) -> Row:
    def one(name: str) -> object:
        values = field_of(record, name, where)
        if not isinstance(values, list) or len(values) != 1:
            raise InputError(
                f"{where}: {name} is {shorten(values)}, not a list of one value. Is the file of another format?"
            )
        return values[0]

    length = one("input_lengths")
    cut = {}
    for name in ("token_ids", "token_loss_mask", "prev_logprobs", "generation_logprobs"):
        cut[name] = one(name)
        if not isinstance(cut[name], list) or not isinstance(length, int) or len(cut[name]) < length:
            raise InputError(
                f"{where}: {name} has no {shorten(length)} entries (input_lengths). Is the file of another format?"
            )
    mask = cut["token_loss_mask"][:length]
    first = next((k for k, bit in enumerate(mask) if bit), None)
    if not first:
        what = "no token is trained" if first is None else "its first token is trained"
        raise InputError(f"{where}: {what}, so prompt and response cannot be told apart. Remove the group.")
    advantage, keep = one("advantages"), one("sample_loss_mask")
    if keep not in (0, 1):
        raise InputError(
            f"{where}: sample_loss_mask is {shorten(keep)}, not 0 or 1, and the loss mask cannot hold weights."
        )
    return Row(
        where=where,
        step=step,
        prompt_id=f"{step}/{i // group_size}",
        rollout_id=f"{step}/{i}",
        tokens=cut["token_ids"][:length],
        response_length=length - first,
        loss_mask=[bit * keep for bit in mask[first:]],
        reward=one("filtered_rewards" if "filtered_rewards" in record else "rewards"),
        old_logprobs=cut["prev_logprobs"][first:length],
        advantage=advantage[first:length] if isinstance(advantage, list) else advantage,
        rollout_logprobs=cut["generation_logprobs"][first:length],
    )


def _prompt(row: Row) -> Sequence[int]:
    return row.tokens[: len(row.tokens) - row.response_length]


# --- verl ---

VERL_NEEDS = ("tokens", "response_length", "loss_mask", "old_logprobs")
VERL_TAKES = (*VERL_NEEDS, "prompt_id", "rollout_id", "reward", "advantage", "rollout_logprobs", "ref_logprobs")


def read_verl(path: str, choices: Choices) -> list[Row]:
    """The samples of a {step}.jsonl of verl's rollout_data_dir, with the columns that --column names.

    Samples of one step with equal `input` share a prompt.

    Raises:
        InputError: the file is no such file, or does not hold what a sample needs: texts are no tokens.
    """
    if missing := [name for name in VERL_NEEDS if name not in choices.columns]:
        raise InputError(
            f"{show_path(path)}: verl writes texts and scores; {', '.join(missing)} cannot be derived from them. Have the reward function "
            f"return them as extra columns, and name these: --column {missing[0]}=NAME."
        )
    prompts: dict[str, int] = {}
    return [
        _verl_row(record, where, choices.columns, prompts, i) for i, (record, where) in enumerate(_json_lines(path))
    ]


def _verl_row(record: object, where: str, columns: Mapping[str, str], prompts: dict[str, int], i: int) -> Row:
    step, text = field_of(record, "step", where), field_of(record, "input", where)
    if isinstance(step, bool) or not isinstance(step, int):
        raise InputError(f"{where}: step is {shorten(step)}, not an integer. Is the file of another format?")
    group = prompts.setdefault(str(text), len(prompts))
    values = {name: field_of(record, column, where) for name, column in columns.items()}
    fields = {
        "prompt_id": f"{step}/{group}",
        "rollout_id": f"{step}/{i}",
        "reward": None if "reward" in columns else field_of(record, "score", where),
    }
    return Row(where=where, step=step, **fields | values)


def _json_lines(path: str):
    shown = show_path(path)
    try:
        for number, line in enumerate(raw_lines(path), start=1):
            where = f"{shown}:{number}"
            if not line.endswith(b"\n"):
                raise InputError(f"{where}: the line has no end, so the file was cut short. Write it again.")
            try:
                yield json.loads(line.decode("utf-8")), where
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}: is not one JSON object per line ({printable(str(error))}).") from error
    except RolloutFileError as error:
        raise InputError(str(error)) from error


READERS: Mapping[str, Callable[[str, Choices], list[Row]]] = {
    "slime": read_slime,
    "miles": read_slime,
    "nemo_rl": read_nemo_rl,
    "verl": read_verl,
}
