"""`megatron-pg convert`: dumps of slime, miles, NeMo-RL, verl and JSON Lines as a rollout file (docs/rollout_file.md)."""

import argparse
import filecmp
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_pg.cli.rollouts.columns import FORMATS, check_complete, misspelt_columns
from megatron_pg.cli.terminal import InputError, check_output, progress, say, show_json, show_path, written_whole
from megatron_pg.rollouts.advantages import RULES, group_advantages
from megatron_pg.rollouts.fields import FIELDS, OPTIONAL, Id, is_id, is_number
from megatron_pg.rollouts.lines import VERSIONS, RolloutWriteError
from megatron_pg.rollouts.printable import printable, shorten

if TYPE_CHECKING:
    from megatron_pg.cli.rollouts.dumps import Row
    from megatron_pg.rollouts.sample import Sample

    Dumps = Callable[[], Iterable[tuple[str, list[Row]]]]  # path and rows of each dump

_OF_ONE_DUMP = {"slime": ("train_data",), "nemo_rl": ("step",)}  # options of a format that say what one dump holds


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `convert`."""
    dumps = "files of one format; a step may lie in several. Text may also be .gz, or - for the standard input"
    parser.add_argument("dumps", nargs="+", metavar="DUMP", help=dumps)
    parser.add_argument("--format", required=True, choices=FORMATS, help="who wrote them")
    parser.add_argument("--output", required=True, metavar="FILE", help="the rollout file")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE where it exists")
    engine = "old_logprobs are those of the rollout engine, if the dump has no other or in place of the other"
    parser.add_argument("--old-logprobs", choices=("rollout",), help=engine)
    rules = "; ".join(f"{name}: {rule.formula}" for name, rule in RULES.items())
    parser.add_argument(
        "--advantage",
        choices=RULES,
        help=f"advantage from the reward R, over the G rollouts of the prompt in all DUMPs. {rules}. If the dump has none, "
        "or in place of the dump's",
    )
    parser.add_argument("--loss-mask", choices=("ones",), help="verl, jsonl: every response token is trained")
    parser.add_argument("--train-data", metavar="FILE", help="slime: the --save-debug-train-data file of the one DUMP")
    parser.add_argument("--reward-key", metavar="KEY", help="slime, miles: which part of a reward that has several")
    group = "NeMo-RL, jsonl: consecutive samples of a prompt in one DUMP, NeMo-RL's num_generations_per_prompt"
    parser.add_argument("--group-size", type=int, metavar="N", help=group)
    step = (
        "jsonl: the step of all DUMPs, if no column has it; NeMo-RL: that of the one DUMP, if its name does not have it"
    )
    parser.add_argument("--step", type=int, metavar="N", help=step)
    column = (
        "verl, jsonl: the column of a field of the rollout file, or of prompt_ids and response_ids; may be repeated"
    )
    parser.add_argument("--column", action="append", metavar="FIELD=NAME", help=column)


def run(options: argparse.Namespace) -> int:
    """Convert, all or nothing."""
    _check_options(options)
    check_output(options.output, overwrite=options.overwrite)
    from megatron_pg.rollouts.file import RolloutWriter, lower_version, version_of

    units: dict[Any, tuple[int, str]] = {}
    count, needed, notes = 0, VERSIONS[0], list[str]()
    with (
        written_whole(options.output, overwrite=options.overwrite) as scratch,
        progress("converting", len(options.dumps), lambda n: f"{n} files") as update,
    ):
        dumps = _dumps(options)
        advantages = _advantages(dumps, options, notes) if options.advantage else {}
        with RolloutWriter(scratch, version=VERSIONS[-1]) as writer:
            for number, (shown, read) in enumerate(dumps(), start=1):
                rows, found = _complete(read, advantages, options)
                samples = [_sample(row) for row in rows]
                _check_logprobs(samples, options, shown)
                _check_units(rows, shown, units)
                try:
                    writer.write(samples)
                except RolloutWriteError:
                    raise
                except ValueError as error:
                    raise InputError(f"{shown}: {error}") from error
                count, needed = count + len(samples), max(needed, version_of(samples))
                notes += [f"{shown}: {note}" for note in found]
                update(number)
        lower_version(scratch, needed)
    prompts, steps = sum(kind == "prompt_id" for kind, _ in units), sorted({step for step, _ in units.values()})
    if options.json:
        show_json({"output": options.output, "samples": count, "prompts": prompts, "steps": steps, "notes": notes})
    else:
        summary = f"{show_path(options.output)}: {count} samples of {prompts} prompts in {len(steps)} steps"
        say("\n".join([summary, *notes]))
    return 0


def _dumps(options: argparse.Namespace) -> "Dumps":
    """What reads the dumps one by one; --advantage calls it twice, so a single dump is kept, and so is what is not a file."""
    if not options.advantage or (len(options.dumps) > 1 and all(map(os.path.isfile, options.dumps))):
        return lambda: _read(options)
    held = list(_read(options))
    return lambda: held


def _read(options: argparse.Namespace) -> "Iterator[tuple[str, list[Row]]]":
    """Path and rows of each dump.

    Raises:
        InputError: a dump holds no sample, or its ids and rewards are not such.
    """
    from megatron_pg.cli.rollouts import dumps  # imports torch

    names = dumps.Names()
    for path in options.dumps:
        rows = dumps.READERS[options.format](path, options, names)
        if not rows:
            raise InputError(f"{show_path(path)}: holds no sample, so there is nothing to convert.")
        for row in rows:
            _check_row(row)
        yield show_path(path), rows


def _advantages(dumps: "Dumps", options: argparse.Namespace, notes: list[str]) -> dict[tuple[Id, Id], float]:
    """The advantage of each rollout, by prompt and rollout, relative to its prompt group in all dumps.

    A prompt lies in one step, so its samples are those of the step. With --train-data the steps are the parts of one rollout batch.
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
        found = group_advantages(rewards, prompts, rule=options.advantage, rollout_ids=rollouts)
    except ValueError as error:
        raise InputError(f"--advantage {options.advantage}: {error}") from error
    if found.num_zero_variance and RULES[options.advantage].is_relative:
        notes.append(f"{found}, so they bring no gradient")
    return dict(zip(zip(prompts, rollouts, strict=True), found.values, strict=True))


def _complete(
    rows: "list[Row]", advantages: Mapping[tuple[Id, Id], float], options: argparse.Namespace
) -> "tuple[list[Row], list[str]]":
    """The rows of a dump that are samples, with all that the options choose, and what there is to say of them.

    Raises:
        InputError: a dump does not hold what a sample needs, and no option chooses it.
    """
    notes = [
        f"column {printable(name)} is kept as an x_ field. Did you mean --column {field}={printable(name)}?"
        for name, field in misspelt_columns((row.record, row.unused) for row in rows).items()
    ]
    for row in rows if options.advantage else ():
        unit = row.record["prompt_id"], row.record["rollout_id"]
        if row.is_of_policy:
            if unit not in advantages:
                raise InputError(
                    f"{row.where}: was not there when the rewards were read. Convert files that are complete."
                )
            row.record["advantage"] = advantages[unit]
    if options.train_data:
        rows, more = _as_scheduled(rows)
        notes += more
    for row in rows:
        check_complete(row.record, row.where, options)
        if options.old_logprobs and row.record.get("rollout_logprobs") is not None:
            row.record["old_logprobs"] = row.record["rollout_logprobs"]
    return rows, notes


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


def _check_row(row: "Row") -> None:
    """What grouping by prompt and rollout relies on."""
    for name in ("prompt_id", "rollout_id"):
        value = row.record[name]
        if not is_id(value):
            raise InputError(
                f"{row.where}: {name} is {shorten(value)}, not an integer of 62 bits or a string of printable characters. Name it by one."
            )
    reward = row.record.get("reward")
    if not is_number(reward) and (row.is_of_policy or reward is not None):
        raise InputError(f"{row.where}: its reward is {shorten(reward)}, not a finite number. Was it scored?")


def _sample(row: "Row") -> "Sample":
    """The row, through the checks of a rollout file's line."""
    from megatron_pg.rollouts.file import sample_of
    from megatron_pg.rollouts.support import support_of

    record = {name: value for name, value in row.record.items() if value is not None or name not in FIELDS}
    _clear_untrained(record)
    try:
        if "support" in record:
            record["support"] = support_of(record["support"], "of the dump").lists()
        return sample_of(record, "of the dump")
    except ValueError as error:
        raise InputError(f"{row.where}: {printable(str(error), limit=400)}") from error


def _clear_untrained(record: dict[str, Any]) -> None:
    """Write 0 for what is not a number at tokens that no stream trains: nothing reads it, and some dumps hold NaN there."""
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
    """Refuse log-probabilities that nobody computed."""
    given = [(sample.old_logprobs, sample.loss_mask) for sample in samples if sample.num_trained]
    trained = [values[mask] for values, mask in given if values is not None]
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
    for name in _OF_ONE_DUMP.get(options.format, ()):
        if getattr(options, name) is not None and len(options.dumps) > 1:
            raise InputError(
                f"--{name.replace('_', '-')} belongs to one dump, and {len(options.dumps)} are given. Convert them one by one."
            )
    if options.group_size is not None and options.group_size < 1:
        raise InputError(f"--group-size {options.group_size} is no number of samples. Give 1 or more.")
    if options.step is not None and options.step < 0:
        raise InputError(f"--step {options.step} is no number of a step. Give 0 or more.")
    _check_copies([path for path in options.dumps if os.path.isfile(path)])


def _check_copies(paths: Sequence[str]) -> None:
    """Refuse equal files: where a dump does not name its rollouts, nothing else would show that they count twice."""
    first: dict[int, list[str]] = {}
    for path in paths:
        equal = first.setdefault(os.path.getsize(path), [])
        if same := [other for other in equal if filecmp.cmp(other, path, shallow=False)]:
            raise InputError(
                f"{show_path(path)}: holds the same as {show_path(same[0])}, so its rollouts would count twice. Give every file once."
            )
        equal.append(path)
