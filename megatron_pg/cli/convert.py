"""`megatron-pg convert`: dumps of slime, miles, NeMo-RL and verl as a rollout file (docs/rollout_file.md)."""

import argparse
import math
import statistics
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from megatron_pg.cli.terminal import InputError, check_output, progress, say, show_json, show_path, written_whole
from megatron_pg.rollouts.fields import FIELDS, LOGPROBS, is_int, is_number
from megatron_pg.rollouts.printable import printable, shorten

if TYPE_CHECKING:
    from megatron_pg.cli.dumps import Row
    from megatron_pg.rollouts.sample import Sample

FORMATS = {  # and the options that have an effect on each
    "slime": ("reward_key", "old_logprobs", "advantage", "train_data"),
    "miles": ("reward_key", "old_logprobs", "advantage"),
    "nemo_rl": ("group_size", "step", "old_logprobs", "advantage"),
    "verl": ("column", "advantage"),
}
ADVANTAGES = ("group_norm", "group_mean", "reward")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `convert`."""
    parser.add_argument("dumps", nargs="+", metavar="DUMP", help="files of one format, in the order of their steps")
    parser.add_argument("--format", required=True, choices=FORMATS, help="who wrote them")
    parser.add_argument("--output", required=True, metavar="FILE", help="the rollout file")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE where it exists")
    engine = "old_logprobs are those of the rollout engine, where the dump has no other or in place of the other"
    parser.add_argument("--old-logprobs", choices=("rollout",), help=engine)
    parser.add_argument(
        "--advantage",
        choices=ADVANTAGES,
        help="advantage from the reward R: group_norm (R - mean)/(std + 1e-6) over the rollouts of the prompt, "
        "group_mean R - mean, reward R; where the dump has none or in place of the dump's",
    )
    parser.add_argument("--train-data", metavar="FILE", help="slime: the --save-debug-train-data file of the one DUMP")
    parser.add_argument("--reward-key", metavar="KEY", help="slime, miles: which part of a reward that has several")
    parser.add_argument("--group-size", type=int, metavar="N", help="NeMo-RL: num_generations_per_prompt of the run")
    step = "NeMo-RL: the step of the one DUMP, where its name does not say it"
    parser.add_argument("--step", type=int, metavar="N", help=step)
    column = "verl: the column that holds a field of ours; may be repeated"
    parser.add_argument("--column", action="append", metavar="FIELD=NAME", help=column)


def run(options: argparse.Namespace) -> int:
    """Convert, all or nothing."""
    _check_options(options)
    check_output(options.output, overwrite=options.overwrite)
    from megatron_pg.cli import dumps  # imports torch
    from megatron_pg.rollouts.file import RolloutWriter

    units: dict[Any, int] = {}
    count = 0
    with written_whole(options.output, overwrite=options.overwrite) as scratch:
        with (
            closing(RolloutWriter(scratch)) as writer,
            progress("converting", len(options.dumps), lambda n: f"{n} files") as update,
        ):
            for number, path in enumerate(options.dumps, start=1):
                rows = dumps.READERS[options.format](path, options)
                complete(rows, options)
                samples = [_sample(row) for row in rows]
                _check_units(rows, units)
                writer.write(samples)
                count += len(samples)
                update(number)
        if not count:
            raise InputError(f"{show_path(options.dumps[0])}: holds no sample, so there is nothing to convert.")
    prompts, steps = sum(kind == "prompt_id" for kind, _ in units), sorted(set(units.values()))
    if options.json:
        show_json({"output": options.output, "samples": count, "prompts": prompts, "steps": steps})
    else:
        say(f"{show_path(options.output)}: {count} samples of {prompts} prompts in {len(steps)} steps")
    return 0


def complete(rows: "Sequence[Row]", options: argparse.Namespace) -> None:
    """Give the rows the log-probabilities and advantages that the options choose.

    Raises:
        InputError: a dump does not hold them and none is chosen, or siblings of one rollout have different rewards.
    """
    for row in rows:
        _check_row(row)
    if options.advantage:
        for row, advantage in zip(rows, _advantages(rows, options.advantage), strict=True):
            row.record["advantage"] = advantage
    for row in rows:
        if options.old_logprobs:
            row.record["old_logprobs"] = row.record.get("rollout_logprobs")
        if row.record.get("old_logprobs") is None:
            if options.old_logprobs:
                raise InputError(
                    f"{row.where}: the dump has no rollout_log_probs, and old_logprobs cannot be derived. Record them."
                )
            raise InputError(
                f"{row.where}: the dump has no log-probabilities under the trainer's own weights, and old_logprobs cannot be derived. "
                "Give --old-logprobs rollout to train from the engine's, or --train-data (slime)."
            )
        if row.record.get("advantage") is None:
            raise InputError(
                f"{row.where}: the dump has no advantages. Choose how they follow from the rewards: --advantage."
            )


def _check_row(row: "Row") -> None:
    """What grouping by prompt and rollout relies on."""
    for name in ("prompt_id", "rollout_id"):
        value = row.record[name]
        if not is_int(value) and not isinstance(value, str):
            raise InputError(f"{row.where}: {name} is {shorten(value)}, not an integer or a string. Name it by one.")
    reward = row.record["reward"]
    if not is_number(reward):
        raise InputError(f"{row.where}: its reward is {shorten(reward)}, not a finite number. Was it scored?")


def _advantages(rows: "Sequence[Row]", rule: str) -> list[float]:
    groups: dict[Any, dict[Any, float]] = {}
    for row in rows:
        reward, group = row.record["reward"], groups.setdefault(row.record["prompt_id"], {})
        if group.setdefault(row.record["rollout_id"], reward) != reward:
            raise InputError(
                f"{row.where}: samples of one rollout have different rewards, so --advantage {rule} is not defined."
            )
    return [_advantage(row, list(groups[row.record["prompt_id"]].values()), rule) for row in rows]


def _advantage(row: "Row", group: Sequence[float], rule: str) -> float:
    if rule == "reward":
        return row.record["reward"]
    if len(group) < 2:
        raise InputError(
            f"{row.where}: its prompt has one rollout, so --advantage {rule} would be 0. Use --advantage reward."
        )
    centred = row.record["reward"] - math.fsum(group) / len(group)
    return centred / (statistics.stdev(group) + 1e-6) if rule == "group_norm" else centred


def _sample(row: "Row") -> "Sample":
    """The row, through the checks of a rollout file's line."""
    from megatron_pg.rollouts.file import sample_of

    record = {name: value for name, value in row.record.items() if value is not None or name not in FIELDS}
    mask = record.get("loss_mask")
    for name in {"advantage", *LOGPROBS} & record.keys():
        values = record[name]
        if isinstance(values, list) and isinstance(mask, list) and len(values) == len(mask):
            # nobody reads what is masked, and some dumps hold NaN there
            record[name] = [value if bit else 0.0 for value, bit in zip(values, mask, strict=True)]
    try:
        return sample_of(record, "of the dump")
    except ValueError as error:
        raise InputError(f"{row.where}: {printable(str(error), limit=400)}") from error


def _check_units(rows: "Sequence[Row]", units: dict[tuple[str, Any], int]) -> None:
    for row in rows:
        for kind in ("prompt_id", "rollout_id"):
            name, step = row.record[kind], row.record["step"]
            if units.setdefault((kind, name), step) != step:
                raise InputError(
                    f"{row.where}: {kind} {printable(repr(name))} is also in step {units[kind, name]}, and a unit must lie in one step. Do the "
                    "files belong to one run, each once?"
                )


def _check_options(options: argparse.Namespace) -> None:
    every = dict.fromkeys(name for names in FORMATS.values() for name in names)
    for name in every:
        if getattr(options, name) is not None and name not in FORMATS[options.format]:
            raise InputError(f"--{name.replace('_', '-')} has no effect with --format {options.format}. Leave it out.")
    for name in ("train_data", "step"):
        if getattr(options, name) is not None and len(options.dumps) > 1:
            raise InputError(
                f"--{name.replace('_', '-')} belongs to one dump, and {len(options.dumps)} are given. Convert them one by one."
            )
    if options.group_size is not None and options.group_size < 1:
        raise InputError(f"--group-size {options.group_size} is no number of samples. Give 1 or more.")
    if options.step is not None and options.step < 0:
        raise InputError(f"--step {options.step} is no number of a step. Give 0 or more.")
