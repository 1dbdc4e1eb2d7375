"""`megatron-pg convert`: dumps of slime, miles, NeMo-RL, verl and JSON Lines to a rollout file."""

import argparse
import filecmp
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_pg.cli.rollouts.columns import FORMATS, Row, check_complete, misspelled_columns
from megatron_pg.cli.terminal import InputError, check_output, progress, say, show_json, show_path, written_whole
from megatron_pg.rollouts.advantages import RULES, group_advantages
from megatron_pg.rollouts.fields import FIELDS, OPTIONAL, Id, is_id, is_number
from megatron_pg.rollouts.lines import VERSIONS, RolloutWriteError
from megatron_pg.rollouts.printable import printable, shorten

if TYPE_CHECKING:
    from megatron_pg.rollouts.sample import Sample

Dumps = Callable[[], Iterable[tuple[str, list[Row]]]]  # path and rows of each dump
_OF_ONE_DUMP = {"slime": ("train_data",), "nemo_rl": ("step",)}  # options that describe one dump


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `convert`."""
    dumps = "files of one format; a step may be in several files. Text may be .gz, or - for standard input"
    parser.add_argument("dumps", nargs="+", metavar="DUMP", help=dumps)
    parser.add_argument("--format", required=True, choices=FORMATS, help="framework that wrote the DUMPs")
    parser.add_argument("--output", required=True, metavar="FILE", help="the rollout file")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    engine = "use the rollout engine's log-probabilities as old_logprobs, also if the dump has others"
    parser.add_argument("--old-logprobs", choices=("rollout",), help=engine)
    rules = "; ".join(f"{name}: {rule.formula}" for name, rule in RULES.items())
    parser.add_argument(
        "--advantage",
        choices=RULES,
        help="compute advantages from the rewards R of a prompt's G rollouts in all DUMPs, also if a dump has some: "
        + rules,
    )
    parser.add_argument("--loss-mask", choices=("ones",), help="verl, jsonl: train every response token")
    parser.add_argument("--train-data", metavar="FILE", help="slime: the --save-debug-train-data file of the one DUMP")
    parser.add_argument("--reward-key", metavar="KEY", help="slime, miles: the part to use of a reward with several")
    group = "NeMo-RL, jsonl: number of consecutive samples per prompt (NeMo-RL's num_generations_per_prompt)"
    parser.add_argument("--group-size", type=int, metavar="N", help=group)
    step = "jsonl: the step of all DUMPs, if no column gives it; NeMo-RL: the step of the DUMP, if its name does not"
    parser.add_argument("--step", type=int, metavar="N", help=step)
    column = "verl, jsonl: the column of a rollout field, or of prompt_ids or response_ids; may be repeated"
    parser.add_argument("--column", action="append", metavar="FIELD=NAME", help=column)


def run(options: argparse.Namespace) -> int:
    """Convert the dumps; on an error no file is written."""
    _check_options(options)
    check_output(options.output, overwrite=options.overwrite)
    from megatron_pg.rollouts.file import RolloutWriter, lower_version

    units: dict[Any, tuple[int, str]] = {}
    count, notes = 0, list[str]()
    with (
        written_whole(options.output, overwrite=options.overwrite) as scratch,
        progress("converting", len(options.dumps), lambda n: f"{n} files") as update,
    ):
        dumps = _dumps(options)
        advantages = _advantages(dumps, options, notes) if options.advantage else {}
        with RolloutWriter(scratch, version=VERSIONS[-1]) as writer:
            for number, (shown, read) in enumerate(dumps(), start=1):
                rows, dump_notes = _complete(read, advantages, options)
                samples = [_sample(row) for row in rows]
                _check_logprobs(samples, options, shown)
                _check_units(rows, shown, units)
                try:
                    writer.write(samples)
                except RolloutWriteError:
                    raise
                except ValueError as error:
                    raise InputError(f"{shown}: {error}") from error
                count += len(samples)
                notes += [f"{shown}: {note}" for note in dump_notes]
                update(number)
        lower_version(scratch, writer.needed_version)
    prompts, steps = sum(kind == "prompt_id" for kind, _ in units), sorted({step for step, _ in units.values()})
    if options.json:
        show_json({"output": options.output, "samples": count, "prompts": prompts, "steps": steps, "notes": notes})
    else:
        summary = f"{show_path(options.output)}: {count} samples of {prompts} prompts in {len(steps)} steps"
        say("\n".join([summary, *notes]))
    return 0


def _dumps(options: argparse.Namespace) -> Dumps:
    """A function that reads the dumps. --advantage calls it twice, so a single dump, or a pipe, stays in memory."""
    if not options.advantage or (len(options.dumps) > 1 and all(map(os.path.isfile, options.dumps))):
        return lambda: _read(options)
    held = list(_read(options))
    return lambda: held


def _read(options: argparse.Namespace) -> Iterator[tuple[str, list[Row]]]:
    """Path and rows of each dump, at least one, with valid ids and rewards."""
    from megatron_pg.cli.rollouts import dumps  # imports torch

    names = dumps.Names()
    for path in options.dumps:
        rows = dumps.READERS[options.format](path, options, names)
        if not rows:
            raise InputError(f"{show_path(path)}: has no sample. Leave it out.")
        for row in rows:
            _check_row(row)
        yield show_path(path), rows


def _advantages(dumps: Dumps, options: argparse.Namespace, notes: list[str]) -> dict[tuple[Id, Id], float]:
    """The advantage of each rollout, by prompt and rollout, relative to its prompt group in all dumps.

    All samples of a prompt are in one step. With --train-data the steps are the parts of one rollout batch.
    """
    rewards, prompts, rollouts = list[float](), list[Id](), list[Id]()
    units: dict[Any, tuple[int, str]] = {}
    for shown, rows in dumps():
        if not options.train_data:
            _check_units(rows, shown, units)
        for row in rows:
            if row.is_of_policy:
                rewards.append(row.record["reward"])
                prompts.append(row.record["prompt_id"])
                rollouts.append(row.record["rollout_id"])
    try:
        groups = group_advantages(rewards, prompts, rule=options.advantage, rollout_ids=rollouts)
    except ValueError as error:
        raise InputError(f"--advantage {options.advantage}: {error}") from error
    if groups.num_zero_variance and RULES[options.advantage].is_relative:
        notes.append(f"{groups}; their advantages are 0")
    return dict(zip(zip(prompts, rollouts, strict=True), groups.values, strict=True))


def _complete(
    rows: list[Row], advantages: Mapping[tuple[Id, Id], float], options: argparse.Namespace
) -> tuple[list[Row], list[str]]:
    """The samples of a dump with the fields that the options choose, and notes."""
    notes = [
        f"column {printable(name)} is kept as an x_ field. Did you mean --column {field}={printable(name)}?"
        for name, field in misspelled_columns(rows).items()
    ]
    for row in rows if options.advantage else ():
        unit = row.record["prompt_id"], row.record["rollout_id"]
        if row.is_of_policy:
            if unit not in advantages:
                raise InputError(
                    f"{row.where}: was added after the rewards were read. Convert files that are complete."
                )
            row.record["advantage"] = advantages[unit]
    if options.train_data:
        rows, more = _as_scheduled(rows)
        notes += more
    for row in rows:
        check_complete(row, options)
        if options.old_logprobs and row.record.get("rollout_logprobs") is not None:
            row.record["old_logprobs"] = row.record["rollout_logprobs"]
    return rows, notes


def _as_scheduled(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """The rows that slime trained. A prompt group of several steps becomes one prompt per step."""
    trained, notes = [row for row in rows if row.record["step"] is not None], []
    if left := len(rows) - len(trained):
        notes.append(f"{left} samples of the last rollouts did not fill a step; they were not trained and are left out")
    steps: dict[Any, set[int]] = {}
    for row in trained:
        steps.setdefault(row.record["prompt_id"], set()).add(row.record["step"])
    for row in trained:
        if len(steps[prompt := row.record["prompt_id"]]) > 1:
            row.record["prompt_id"] = f"{prompt}/{row.record['step']}"
    if cut := sum(len(numbers) > 1 for numbers in steps.values()):
        notes.append(f"{cut} prompt groups were trained in several steps; each part is a separate prompt")
    return trained, notes


def _check_row(row: Row) -> None:
    """Check the fields that grouping by prompt and rollout reads."""
    for name in ("prompt_id", "rollout_id"):
        value = row.record[name]
        if not is_id(value):
            raise InputError(
                f"{row.where}: {name} is {shorten(value)}, not an integer of 62 bits or a printable string. Correct it."
            )
    reward = row.record.get("reward")
    if not is_number(reward) and (row.is_of_policy or reward is not None):
        raise InputError(f"{row.where}: its reward is {shorten(reward)}, not a finite number. Score the sample.")


def _sample(row: Row) -> "Sample":
    """The row as a sample, with the checks of a rollout file's line."""
    from megatron_pg.rollouts.file import sample_of
    from megatron_pg.rollouts.payloads import PAYLOADS

    record = {name: value for name, value in row.record.items() if value is not None or name not in FIELDS}
    _clear_untrained(record)
    try:
        if "sampling_mask" in record:
            sampling_mask = PAYLOADS["sampling_mask"]
            record["sampling_mask"] = sampling_mask.to_json(sampling_mask.of(record["sampling_mask"], "of the dump"))
        return sample_of(record, "of the dump")
    except ValueError as error:
        raise InputError(f"{row.where}: {printable(str(error), limit=400)}") from error


def _clear_untrained(record: dict[str, Any]) -> None:
    """Replace values that are not numbers by 0 at tokens that no loss term trains; some dumps have NaN there."""
    further = record.get("masks")
    masks = [record.get("loss_mask"), *(further.values() if isinstance(further, dict) else ())]
    if not all(FIELDS["loss_mask"].accepts(mask) and len(mask) == len(masks[0]) for mask in masks):
        return
    is_trained = [any(bits) for bits in zip(*masks, strict=True)]
    for name in {"advantage", "old_logprobs", *OPTIONAL} & record.keys():
        values = record[name]
        if isinstance(values, list) and len(values) == len(is_trained):
            pairs = zip(values, is_trained, strict=True)
            record[name] = [value if trained or is_number(value) else 0.0 for value, trained in pairs]


def _check_logprobs(samples: "Sequence[Sample]", options: argparse.Namespace, shown: str) -> None:
    """Refuse placeholders instead of log-probabilities."""
    given = [(sample.old_logprobs, sample.loss_mask) for sample in samples if sample.num_trained]
    trained = [values[mask] for values, mask in given if values is not None]
    if trained and not any(values.any() for values in trained):
        fix = "Record them." if options.old_logprobs else "Give --old-logprobs rollout to use the rollout engine's."
        raise InputError(
            f"{shown}: all old_logprobs are 0, placeholders that NeMo-RL writes with force_on_policy_ratio. {fix}"
        )


def _check_units(rows: Sequence[Row], shown: str, units: dict[tuple[str, Any], tuple[int, str]]) -> None:
    for row in rows:
        for kind in ("prompt_id", "rollout_id"):
            name, step = row.record[kind], row.record["step"]
            first, file = units.setdefault((kind, name), (step, shown))
            if first != step:
                raise InputError(
                    f"{row.where}: {kind} {printable(repr(name))} is also in step {first}, but must be in one step. "
                    "Give the files of one run, each once."
                )
            if kind == "rollout_id" and file != shown:
                raise InputError(
                    f"{row.where}: rollout_id {printable(repr(name))} is also in {file}. Give every file once, and "
                    "every rollout its own id."
                )


def _check_options(options: argparse.Namespace) -> None:
    every = dict.fromkeys(name for names in FORMATS.values() for name in names)
    for name in every:
        if getattr(options, name) is not None and name not in FORMATS[options.format]:
            raise InputError(f"--{name.replace('_', '-')} has no effect with --format {options.format}. Leave it out.")
    for name in _OF_ONE_DUMP.get(options.format, ()):
        if getattr(options, name) is not None and len(options.dumps) > 1:
            raise InputError(
                f"--{name.replace('_', '-')} describes one dump, but {len(options.dumps)} are given. "
                "Convert them one by one."
            )
    if options.group_size is not None and options.group_size < 1:
        raise InputError(f"--group-size {options.group_size} is not a number of samples. Give 1 or more.")
    if options.step is not None and options.step < 0:
        raise InputError(f"--step {options.step} is negative. Give 0 or more.")
    files = [path for path in options.dumps if os.path.isfile(path)]
    _check_copies(files)
    for path in [*files, *([options.train_data] if options.train_data else [])]:
        if os.path.exists(path) and os.path.exists(options.output) and os.path.samefile(path, options.output):
            raise InputError(f"--output {show_path(options.output)} is one of the files to read. Give another path.")


def _check_copies(paths: Sequence[str]) -> None:
    """Refuse equal files: without rollout ids in a dump, no later check would notice that they count twice."""
    first: dict[int, list[str]] = {}
    for path in paths:
        equal = first.setdefault(os.path.getsize(path), [])
        if same := [other for other in equal if filecmp.cmp(other, path, shallow=False)]:
            raise InputError(f"{show_path(path)}: is equal to {show_path(same[0])}. Give every file once.")
        equal.append(path)
