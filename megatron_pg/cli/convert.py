"""`megatron-pg convert`: dumps of slime, miles, NeMo-RL and verl as a rollout file (docs/rollout_file.md)."""

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from megatron_pg.cli.terminal import InputError, Progress, check_output, say, show_json, show_path, written_whole
from megatron_pg.rollouts.printable import printable, shorten

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
    parser.add_argument(
        "--old-logprobs",
        choices=("rollout",),
        help="old_logprobs are those of the rollout engine, where the dump has no other or in place of the other",
    )
    parser.add_argument(
        "--advantage",
        choices=ADVANTAGES,
        help="advantage from the reward R: group_norm (R - mean)/(std + 1e-6) over the rollouts of the prompt, "
        "group_mean R - mean, reward R; where the dump has none or in place of the dump's",
    )
    parser.add_argument("--train-data", metavar="FILE", help="slime: the --save-debug-train-data file of the one DUMP")
    parser.add_argument("--reward-key", metavar="KEY", help="slime, miles: which part of a reward that has several")
    parser.add_argument("--group-size", type=int, metavar="N", help="NeMo-RL: num_generations_per_prompt of the run")
    parser.add_argument(
        "--step", type=int, metavar="N", help="NeMo-RL: the step of the one DUMP, where its name does not say it"
    )
    parser.add_argument(
        "--column",
        action="append",
        metavar="FIELD=NAME",
        help="verl: the column that holds a field of ours; may be repeated",
    )


def run(options: argparse.Namespace) -> int:
    """Convert, all or nothing."""
    _check_options(options)
    check_output(options.output, overwrite=options.overwrite)
    from megatron_pg.cli import dumps  # imports torch
    from megatron_pg.rollouts.file import RolloutWriter

    choices = dumps.Choices(
        reward_key=options.reward_key,
        group_size=options.group_size,
        step=options.step,
        columns=_columns(options.column or [], dumps.VERL_TAKES),
        train_data=options.train_data,
    )
    units, steps, count = {}, set(), 0
    with written_whole(options.output, overwrite=options.overwrite) as scratch:
        writer = RolloutWriter(scratch)
        try:
            progress = Progress("converting", len(options.dumps), lambda n: f"{n} files")
            for number, path in enumerate(options.dumps):
                rows = complete(dumps.READERS[options.format](path, choices), options)
                samples = _samples(rows)
                _check_units(rows, units)
                writer.write(samples)
                steps |= {row.step for row in rows}
                count += len(rows)
                progress.update(number + 1)
            progress.close()
        finally:
            writer.close()
        if not count:
            raise InputError(f"{show_path(options.dumps[0])}: holds no sample, so there is nothing to convert.")
    prompts = sum(kind == "prompt_id" for kind, _ in units)
    if options.json:
        show_json({"output": options.output, "samples": count, "prompts": prompts, "steps": sorted(steps)})
    else:
        say(f"{show_path(options.output)}: {count} samples of {prompts} prompts in {len(steps)} steps")
    return 0


def complete(rows: Sequence, options: argparse.Namespace) -> list:
    """The rows with the log-probabilities and advantages that the options choose.

    Raises:
        InputError: a dump does not hold them and none is chosen, or siblings of one rollout have different rewards.
    """
    for row in rows:
        _check_row(row)
    if options.advantage:
        rows = [replace(row, advantage=a) for row, a in zip(rows, _advantages(rows, options.advantage), strict=True)]
    done = []
    for row in rows:
        if options.old_logprobs:
            row = replace(row, old_logprobs=row.rollout_logprobs)
        if row.old_logprobs is None:
            what = "rollout_log_probs" if options.old_logprobs else "log-probabilities under the trainer's own weights"
            way = (
                "Record them"
                if options.old_logprobs
                else "Give --old-logprobs rollout to train from the engine's, or --train-data (slime)"
            )
            raise InputError(f"{row.where}: the dump has no {what}, and old_logprobs cannot be derived. {way}.")
        if row.advantage is None:
            raise InputError(
                f"{row.where}: the dump has no advantages. Choose how they follow from the rewards: --advantage."
            )
        done.append(row)
    return done


def _check_row(row) -> None:
    """What grouping by prompt and rollout relies on."""
    for name in ("prompt_id", "rollout_id"):
        if isinstance(getattr(row, name), bool) or not isinstance(getattr(row, name), (int, str)):
            raise InputError(
                f"{row.where}: {name} is {shorten(getattr(row, name))}, not an integer or a string. Name it by one."
            )
    if isinstance(row.reward, bool) or not isinstance(row.reward, (int, float)) or not math.isfinite(row.reward):
        raise InputError(f"{row.where}: its reward is {shorten(row.reward)}, not a finite number. Was it scored?")


def _advantages(rows: Sequence, rule: str) -> list[float]:
    rewards: dict[object, dict[object, float]] = {}
    for row in rows:
        group = rewards.setdefault(row.prompt_id, {})
        if group.setdefault(row.rollout_id, row.reward) != row.reward:
            raise InputError(
                f"{row.where}: samples of one rollout have different rewards, so --advantage {rule} is not defined."
            )
    if rule == "reward":
        return [row.reward for row in rows]
    return [_centred(row, list(rewards[row.prompt_id].values()), rule) for row in rows]


def _centred(row, group: list[float], rule: str) -> float:
    if len(group) < 2:
        raise InputError(
            f"{row.where}: its prompt has one rollout, so --advantage {rule} would be 0. Use --advantage reward."
        )
    centred = row.reward - math.fsum(group) / len(group)
    return centred / (statistics.stdev(group) + 1e-6) if rule == "group_norm" else centred


def _samples(rows: Sequence) -> list:
    """The rows as checked samples, through the checks of a rollout file's line."""
    from megatron_pg.rollouts.file import sample_of

    samples = []
    for row in rows:
        values = {name: getattr(row, name) for name in _FIELDS if getattr(row, name) is not None}
        for name in _PER_TOKEN & values.keys():
            values[name] = _without_masked(values[name], row.loss_mask)
        try:
            samples.append(sample_of(values | dict(row.extra), "of the dump"))
        except ValueError as error:
            raise InputError(f"{row.where}: {printable(str(error), limit=400)}") from error
    return samples


_PER_TOKEN = {"old_logprobs", "advantage", "rollout_logprobs", "ref_logprobs"}
_FIELDS = ("step", "prompt_id", "rollout_id", "tokens", "response_length", "loss_mask", "reward", *sorted(_PER_TOKEN))


def _without_masked(values: object, mask: object) -> object:
    """Per-token values with 0 at masked tokens, where nobody reads them and some dumps hold NaN."""
    if not (isinstance(values, list) and isinstance(mask, list) and len(values) == len(mask)):
        return values
    return [value if bit else 0.0 for value, bit in zip(values, mask, strict=True)]


def _check_units(rows: Sequence, units: dict[tuple[str, object], int]) -> None:
    for row in rows:
        for kind in ("prompt_id", "rollout_id"):
            name = getattr(row, kind)
            if units.setdefault((kind, name), row.step) != row.step:
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


def _columns(given: Sequence[str], known: Sequence[str]) -> dict[str, str]:
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
