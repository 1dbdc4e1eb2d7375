"""`megatron-pg convert`: dumps of slime, miles, NeMo-RL, verl and JSON Lines as a rollout file (docs/rollout_file.md)."""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from megatron_pg.cli.terminal import InputError, check_output, progress, say, show_json, show_path, written_whole
from megatron_pg.rollouts.advantages import RULES, group_advantages
from megatron_pg.rollouts.fields import FIELDS, LOGPROBS, is_id, is_number
from megatron_pg.rollouts.printable import printable, shorten

if TYPE_CHECKING:
    from megatron_pg.cli.dumps import Row
    from megatron_pg.rollouts.sample import Sample

FORMATS = {  # and the options that have an effect on each
    "slime": ("reward_key", "old_logprobs", "advantage", "train_data"),
    "miles": ("reward_key", "old_logprobs", "advantage"),
    "nemo_rl": ("group_size", "step", "old_logprobs", "advantage"),
    "verl": ("column", "old_logprobs", "advantage", "loss_mask"),
    "jsonl": ("column", "group_size", "step", "old_logprobs", "advantage", "loss_mask"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `convert`."""
    dumps = "files of one format, in the order of their steps; of text also .gz, and - for the standard input"
    parser.add_argument("dumps", nargs="+", metavar="DUMP", help=dumps)
    parser.add_argument("--format", required=True, choices=FORMATS, help="who wrote them")
    parser.add_argument("--output", required=True, metavar="FILE", help="the rollout file")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE where it exists")
    engine = "old_logprobs are those of the rollout engine, where the dump has no other or in place of the other"
    parser.add_argument("--old-logprobs", choices=("rollout",), help=engine)
    rules = "; ".join(f"{name}: {rule.formula}" for name, rule in RULES.items())
    parser.add_argument(
        "--advantage",
        choices=RULES,
        help=f"advantage from the reward R, over the G rollouts of the prompt. {rules}. Where the dump has none, or in place "
        "of the dump's",
    )
    parser.add_argument("--loss-mask", choices=("ones",), help="verl, jsonl: every response token is trained")
    parser.add_argument("--train-data", metavar="FILE", help="slime: the --save-debug-train-data file of the one DUMP")
    parser.add_argument("--reward-key", metavar="KEY", help="slime, miles: which part of a reward that has several")
    group = "NeMo-RL, jsonl: consecutive samples of a prompt, NeMo-RL's num_generations_per_prompt"
    parser.add_argument("--group-size", type=int, metavar="N", help=group)
    step = "NeMo-RL, jsonl: the step of the one DUMP, where its name or columns do not say it"
    parser.add_argument("--step", type=int, metavar="N", help=step)
    column = "verl, jsonl: the column that holds a field of ours, or prompt_ids and response_ids; may be repeated"
    parser.add_argument("--column", action="append", metavar="FIELD=NAME", help=column)


def run(options: argparse.Namespace) -> int:
    """Convert, all or nothing."""
    _check_options(options)
    check_output(options.output, overwrite=options.overwrite)
    from megatron_pg.cli import dumps  # imports torch
    from megatron_pg.rollouts.file import RolloutWriter, version_of

    units: dict[Any, tuple[int, str]] = {}
    count, notes = 0, []
    with (
        written_whole(options.output, overwrite=options.overwrite) as scratch,
        ExitStack() as stack,
        progress("converting", len(options.dumps), lambda n: f"{n} files") as update,
    ):
        for number, path in enumerate(options.dumps, start=1):
            shown = show_path(path)
            rows, found = _complete(dumps.READERS[options.format](path, options), options, shown)
            samples = [_sample(row) for row in rows]
            _check_logprobs(samples, options, shown)
            _check_units(rows, shown, units)
            if number == 1:
                writer = stack.enter_context(RolloutWriter(scratch, version=version_of(samples)))
            try:
                writer.write(samples)
            except ValueError as error:
                raise InputError(f"{shown}: {error}") from error
            count += len(samples)
            notes += [f"{shown}: {note}" for note in found]
            update(number)
    prompts, steps = sum(kind == "prompt_id" for kind, _ in units), sorted({step for step, _ in units.values()})
    if options.json:
        show_json({"output": options.output, "samples": count, "prompts": prompts, "steps": steps, "notes": notes})
    else:
        summary = f"{show_path(options.output)}: {count} samples of {prompts} prompts in {len(steps)} steps"
        say("\n".join([summary, *notes]))
    return 0


def _complete(rows: "list[Row]", options: argparse.Namespace, shown: str) -> "tuple[list[Row], list[str]]":
    """The rows of a dump that are samples, with all that the options choose, and what there is to say of them.

    Raises:
        InputError: there are none, or a dump does not hold what a sample needs and no option chooses it.
    """
    if not rows:
        raise InputError(f"{shown}: holds no sample, so there is nothing to convert.")
    for row in rows:
        _check_row(row)
    notes = _choose_advantages(rows, options, shown) if options.advantage else []
    if options.train_data:
        rows, more = _as_scheduled(rows)
        notes += more
    _choose_logprobs(rows, options)
    return rows, notes


def _choose_advantages(rows: "Sequence[Row]", options: argparse.Namespace, shown: str) -> list[str]:
    """Give the rows the advantages that --advantage chooses, and say how many groups bring no gradient."""
    names = ("reward", "prompt_id", "rollout_id")
    rewards, prompts, rollouts = ([row.record[name] for row in rows] for name in names)
    try:
        found = group_advantages(rewards, prompts, rule=options.advantage, rollout_ids=rollouts)
    except ValueError as error:
        raise InputError(f"{shown}: {error}") from error
    for row, advantage in zip(rows, found.values, strict=True):
        row.record["advantage"] = advantage
    is_said = found.num_zero_variance and RULES[options.advantage].is_relative
    return [f"{found}, so they bring no gradient"] if is_said else []


def _as_scheduled(rows: "Sequence[Row]") -> "tuple[list[Row], list[str]]":
    """The rows that slime trained. A prompt group that its schedule cut is named by step: in a file it lies in one."""
    trained, notes = [row for row in rows if row.record["step"] is not None], []
    if left := len(rows) - len(trained):
        notes.append(
            f"{left} samples of the last rollouts, which did not fill a step, were not trained and are left out"
        )
    steps: dict[Any, set[int]] = {}
    for row in trained:
        steps.setdefault(row.record["prompt_id"], set()).add(row.record["step"])
    for row in trained:
        if len(steps[prompt := row.record["prompt_id"]]) > 1:
            row.record["prompt_id"] = f"{prompt}/{row.record['step']}"
    if cut := sum(len(found) > 1 for found in steps.values()):
        notes.append(f"{cut} prompt groups were trained in several steps, so their parts are prompts of their own")
    return trained, notes


def _choose_logprobs(rows: "Sequence[Row]", options: argparse.Namespace) -> None:
    """Give the rows the log-probabilities that --old-logprobs chooses.

    Raises:
        InputError: a dump does not hold them, or no advantages, and none are chosen.
    """
    for row in rows:
        if options.old_logprobs:
            row.record["old_logprobs"] = row.record.get("rollout_logprobs")
        if row.record.get("old_logprobs") is None:
            if options.old_logprobs:
                raise InputError(
                    f"{row.where}: the dump has no log-probabilities of the rollout engine, and old_logprobs cannot be derived. Record them."
                )
            raise InputError(
                f"{row.where}: the dump has no log-probabilities under the trainer's own weights, and old_logprobs cannot be derived. "
                "Name their column (jsonl, verl: --column old_logprobs=NAME), give --old-logprobs rollout to train from the engine's, or "
                "--train-data (slime)."
            )
        if row.record.get("advantage") is None:
            raise InputError(
                f"{row.where}: the dump has no advantages. Choose how they follow from the rewards (--advantage {'|'.join(RULES)}), or name "
                "their column (jsonl, verl: --column advantage=NAME)."
            )


def _check_row(row: "Row") -> None:
    """What grouping by prompt and rollout relies on."""
    for name in ("prompt_id", "rollout_id"):
        value = row.record[name]
        if not is_id(value):
            raise InputError(
                f"{row.where}: {name} is {shorten(value)}, not an integer of 62 bits or a string of printable characters. Name it by one."
            )
    reward = row.record["reward"]
    if not is_number(reward):
        raise InputError(f"{row.where}: its reward is {shorten(reward)}, not a finite number. Was it scored?")


def _sample(row: "Row") -> "Sample":
    """The row, through the checks of a rollout file's line."""
    from megatron_pg.rollouts.file import sample_of
    from megatron_pg.rollouts.support import support_of

    record = {name: value for name, value in row.record.items() if value is not None or name not in FIELDS}
    mask = record.get("loss_mask")
    for name in {"advantage", *LOGPROBS} & record.keys():
        values = record[name]
        if isinstance(values, list) and isinstance(mask, list) and len(values) == len(mask):
            # nobody reads what is masked, and some dumps hold NaN there
            record[name] = [value if bit else 0.0 for value, bit in zip(values, mask, strict=True)]
    try:
        if "support" in record:
            record["support"] = support_of(record["support"], "of the dump").lists()
        return sample_of(record, "of the dump")
    except ValueError as error:
        raise InputError(f"{row.where}: {printable(str(error), limit=400)}") from error


def _check_logprobs(samples: "Sequence[Sample]", options: argparse.Namespace, shown: str) -> None:
    """Refuse log-probabilities that nobody computed."""
    trained = [sample.old_logprobs[sample.loss_mask] for sample in samples if sample.num_trained]
    if trained and not any(values.any() for values in trained):
        way = "Record them." if options.old_logprobs else "Give --old-logprobs rollout to take the rollout engine's."
        raise InputError(
            f"{shown}: every old_logprobs is 0, that is probability 1: placeholders, as NeMo-RL writes with force_on_policy_ratio, and the "
            f"ratio would be π itself. {way}"
        )


def _check_units(rows: "Sequence[Row]", shown: str, units: dict[tuple[str, Any], tuple[int, str]]) -> None:
    for row in rows:
        for kind in ("prompt_id", "rollout_id"):
            name, step = row.record[kind], row.record["step"]
            first, file = units.setdefault((kind, name), (step, shown))
            if first != step:
                raise InputError(
                    f"{row.where}: {kind} {printable(repr(name))} is also in step {first}, and a unit must lie in one step. Do the "
                    "files belong to one run, each once?"
                )
            if kind == "rollout_id" and file != shown:
                raise InputError(
                    f"{row.where}: rollout_id {printable(repr(name))} is also in {file}, so two rollouts would count as one. Name them apart, "
                    "and give every file once."
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
