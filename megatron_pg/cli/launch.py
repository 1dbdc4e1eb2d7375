"""From flags or a launch script to the arguments that the startup checks read.

megatron_pg's own flags are parsed by its own parser. Of Megatron's hundreds of flags only those are read that a check
or the layout needs; the rest of a launch belongs to other parsers and is left alone.
"""

import argparse
import itertools
import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import basename
from pathlib import Path
from typing import Any, NoReturn

from megatron_pg.args import add_arguments, own_arguments
from megatron_pg.cli.recorder import Command, Recording, record
from megatron_pg.cli.terminal import InputError, read_text, show_path
from megatron_pg.flags.megatron import ARGUMENTS, MEGATRON_FLAGS
from megatron_pg.flags.spelling import meant_flags
from megatron_pg.rollouts.printable import printable, shorten

_LAUNCHERS = {"torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed"}
_STARTING = {"-m", "--module"}  # the next word is a module in the place of a .py file
_MENTIONING = {  # recorded commands that may name a launcher and start none
    *("chmod", "cp", "git", "install", "killall", "ln", "mkdir", "mv", "pip", "pip3", "pkill", "rm", "rsync", "scp"),
    *("sed", "sort", "tail", "tee", "touch"),
}
_OURS = re.compile(r"--(pg-|loss-aggregation|custom-pg-)")
MODEL_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_TIME_LIMIT = 30.0
_SCRIPT_OPTIONS: dict[str, dict[str, Any]] = {  # those of ours that only a script can have
    "--nth": {"type": int, "metavar": "N", "help": "the N-th training that SCRIPT starts, of several"},
    "--line": {"type": int, "metavar": "N", "help": "the training that line N of SCRIPT starts, of several"},
    "--show-output": {"action": "store_true", "help": "show what SCRIPT prints, on the standard error"},
    "--time-limit": {"type": float, "metavar": "SECONDS", "help": f"when SCRIPT is ended (default {_TIME_LIMIT:g})"},
}
_OPTIONS = ("--json", "--world-size", *_SCRIPT_OPTIONS)


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launch says: its arguments, and what reading it has shown."""

    args: argparse.Namespace
    source: str  # where the arguments come from, for a reader
    world_size: int | None
    given: tuple[str, ...]  # names of the arguments that it gives; the others are defaults
    others: tuple[str, ...]  # words that belong to other parsers
    notes: tuple[str, ...] = ()
    ran: str | None = None  # how its script was run: the first line of what is printed


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes that the launch gives; None where it does not."""

    world: int | None
    data: int | None  # D
    context: int | None  # C
    batch: int | None  # samples of one optimizer step
    micro: int | None
    microbatches: int | None  # K


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}. Correct the flag; megatron-pg explain --help lists those of megatron_pg.")


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommands that take a launch, and the flags of megatron_pg in their help."""
    parser.usage = (
        f"{parser.prog} [options] [flags of the launch]\n"
        f"       {parser.prog} [options] --run SCRIPT [arguments of SCRIPT]"
    )
    parser.add_argument("--world-size", type=int, metavar="N", help="number of ranks, where the launch does not say it")
    parser.add_argument(
        "--run",
        nargs=argparse.REMAINDER,
        help="only for a script that you would run: bash runs SCRIPT with recorders in the place of its commands, and the "
        "training that it would start gives the flags. Builtins, redirections and commands with a path are real; where the "
        "system allows it, what they write goes to a scratch layer. All further words are arguments of SCRIPT",
    )
    for name, keywords in _SCRIPT_OPTIONS.items():
        parser.add_argument(name, **keywords)
    shown = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    flags = add_arguments(shown).format_help().partition("\n")[2].strip()
    parser.epilog = (
        "The certain way for a script is a dry run of the job itself: MEGATRON_PG_DRY_RUN=1 bash launch.sh. Examples:\n"
        f"  {parser.prog} --loss-aggregation constant --loss-aggregation-divisor 8192\n"
        f"  NUM_GPUS=8 {parser.prog} --run launch.sh --pg-temperature 0.9\n\n"
        f"flags of megatron_pg:\n  {flags}"
    )


def read_launch(options: argparse.Namespace) -> Launch:
    """The launch that a subcommand's words describe: flags, or a script and its arguments.

    Raises:
        InputError: a flag is misspelt or malformed, or the script starts no training.
    """
    words = [word for word in options.words if word != "--"]
    if options.world_size is not None and not 0 < options.world_size < 2**31:
        raise InputError(f"--world-size {shorten(options.world_size)} is no number of ranks. Give 1 or more.")
    if options.run is not None:
        return _from_script(words, options)
    if words and not words[0].startswith("-"):
        raise InputError(
            f"{show_path(words[0])} is no flag. A script shows its flags only when it runs. Start the job with MEGATRON_PG_DRY_RUN=1 "
            "in the environment (or --pg-dry-run), which is certain; or give --run and the script, only if you would run it."
        )
    if misplaced := [name for name in _SCRIPT_OPTIONS if vars(options)[name[2:].replace("-", "_")]]:
        raise InputError(f"{misplaced[0]} is for a script, and none is given. Leave it out, or add --run SCRIPT.")
    if not words:
        raise InputError(
            "neither flags nor --run SCRIPT are given. Give one of them, for instance --loss-aggregation token_mean."
        )
    args, given, others = _parse(words)
    return Launch(args, "flags", options.world_size, given, others)


def layout_of(launch: Launch) -> Layout:
    """The sizes, from the flags and the world size.

    Raises:
        InputError: they do not divide each other.
    """
    found = {name: value for name, value in vars(launch.args).items() if value is not None}
    for name in found.keys() & {*MODEL_SIZES, "micro_batch_size", "global_batch_size"}:
        if found[name] < 1:
            raise InputError(f"--{name.replace('_', '-')} {found[name]} must be at least 1.")
    world, model = launch.world_size, math.prod(found.get(name, 1) for name in MODEL_SIZES)
    if world is not None and (world < 1 or world % model):
        raise InputError(
            f"{world} ranks are no multiple of TP·PP·CP = {model}, so there is no data-parallel size. Correct one of the sizes."
        )
    data = world // model if world is not None else None
    context = found.get("context_parallel_size", 1 if data else None)
    batch, micro, microbatches = found.get("global_batch_size"), found.get("micro_batch_size"), None
    if documents := found.get("docs_per_step"):  # as many micro-batches as they take
        batch = documents if found.get("docs_per_step_policy", "exact") == "exact" else None
    elif "rampup_batch_size" in found:
        batch = None
    elif batch is not None and micro is not None and data is not None:
        microbatches, rest = divmod(batch, micro * data)
        if rest:
            raise InputError(
                f"--global-batch-size {batch} is no multiple of --micro-batch-size {micro} times {data} data-parallel ranks, so Megatron "
                "would not start. Correct one of them."
            )
    return Layout(world, data, context, batch, micro, microbatches)


def read_arguments(launch: Launch) -> dict[str, object]:
    """Every flag that was read, with its value, for a machine."""
    found = vars(launch.args)
    return {name: found[name] for name in (*own_arguments(), *ARGUMENTS) if name in found}


def _from_script(words: list[str], options: argparse.Namespace) -> Launch:
    if words or not options.run:
        raise InputError(
            f"--run takes a script and its arguments, and nothing else stands before it{': ' + printable(words[0]) if words else ''}. "
            "Write --run SCRIPT, then the flags that the script passes on."
        )
    path, *arguments = options.run
    limit = _TIME_LIMIT if options.time_limit is None else options.time_limit
    if not limit > 0:
        raise InputError(f"--time-limit {limit:g} leaves no time to run. Give a number of seconds above 0.")
    if not Path(path).is_file():
        raise InputError(f"{show_path(path)}: is not a file, so bash cannot run it. Give a launch script.")
    if "\r\n" in read_text(path):
        raise InputError(
            f"{show_path(path)}: has CRLF line ends, which bash takes into the arguments. Convert it with `sed -i 's/\\r$//'`."
        )
    recording = record(path, arguments, limit=limit)
    if options.show_output:
        sys.stderr.write(recording.output)
    try:
        found = _trainings(recording, limit)
        chosen, choice = _choose(found, options)
        before, after = _split(chosen.words)
        args, given, others = _parse(after)
    except InputError as error:
        raise InputError(f"{show_path(path)}: {error}") from error
    _fill_in(args)
    notes = [
        f"{word} stands behind the script and went to it; megatron-pg's own options stand before --run"
        for word in arguments
        if word in _OPTIONS
    ]
    notes += [*choice, *_notes(recording, found, limit)]
    world_size = options.world_size or _world_size(before)
    if world_size == 0 and _unanswered(recording.commands):
        world_size = None  # as `nvidia-smi --list-gpus | wc -l` counts them where it was not run
    return Launch(args, _place(chosen), world_size, given, others, tuple(notes), _how(path, recording))


def _how(path: str, recording: Recording) -> str:
    layer, stays = "what it wrote went to a scratch layer", "NOT isolated: what it wrote itself stays"
    kept = layer if recording.is_isolated else stays
    return f"{show_path(path)} was run by bash, commands recorded instead of started; {kept}; only for a script that you would run"


# --- which command is the training ---


def _trainings(recording: Recording, limit: float) -> list[Command]:
    """The commands that start one: those of a launcher, of Ray or with our flags; where there are none, python's."""
    unique: dict[tuple[str, ...], Command] = {}
    for command in recording.commands:
        if not command.is_followed and _split(command.words):
            unique.setdefault(command.words, command)
    if found := list(unique.values()):
        return [command for command in found if _is_likely(command)] or found
    raise InputError(_no_training_message(recording, limit))


def _no_training_message(recording: Recording, limit: float) -> str:
    names = _summary(recording.commands)
    said = [f"Recorded: {names}", *_unanswered(recording.commands)[-1:]] if names else []
    recorded = "".join(f" {text}." for text in said)
    if recording.is_cut:
        return (
            f"it was ended after {limit:g} s, before it started a training.{recorded} Does it wait for a command's output? Start the job "
            "with MEGATRON_PG_DRY_RUN=1, or give the flags themselves."
        )
    if recording.code:
        said = [line for line in recording.output.splitlines() if line.strip() and not line.startswith("+")]  # set -x
        last = f", and printed last: {printable(said[-1], limit=300)!r}" if said else ""
        return (
            f"it ended with exit code {recording.code} before it started a training{last}.{recorded} Give it the arguments, variables "
            "and files that it needs."
        )
    return f"no command starts a training: neither torchrun nor python with a .py file.{recorded} Give the flags themselves."


def _choose(found: list[Command], options: argparse.Namespace) -> tuple[Command, list[str]]:
    """The training that is meant, and a note where there are several."""
    places = ", ".join(f"{n}: line {command.line}" for n, command in enumerate(found, start=1))
    if options.line is not None:
        found = [command for command in found if command.line == options.line]
        if not found:
            raise InputError(f"line {options.line} starts no training. These are started: {places}.")
    nth = 1 if options.nth is None else options.nth
    if not 1 <= nth <= len(found):
        raise InputError(f"--nth {nth} is not one of the {len(found)} trainings. These are started: {places}.")
    note = f"{len(found)} different trainings are started ({places}); this is number {nth}. --nth or --line chooses another"
    return found[nth - 1], [note] if len(found) > 1 else []


def _is_likely(command: Command) -> bool:
    """Whether it is no mere tool."""
    names = [basename(word) for word in command.words]
    return names[0] == "ray" or not _LAUNCHERS.isdisjoint(names) or any(map(_OURS.match, command.words))


def _split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]] | None:
    """What the launcher reads and what the training reads; None where the command starts none."""
    names = [basename(word) for word in words]
    if names[0] in _MENTIONING:
        return None
    launcher = next((i for i, name in enumerate(names) if name in _LAUNCHERS), None)
    python = next((i for i, name in enumerate(names) if re.fullmatch(r"python[\d.]*|uv", name)), None)
    start = python if launcher is None else launcher
    if start is None:
        return None
    for i, word in enumerate(words[start + 1 :], start=start + 1):
        if word == "-c" and launcher is None:
            return None
        if word in _STARTING:
            is_training = launcher is not None or any(map(_OURS.match, words))
            return (words[start + 1 : i], words[i + 2 :]) if is_training else None
        if word.endswith(".py"):
            return words[start + 1 : i], words[i + 1 :]
    return None if launcher is None or names[launcher] == "accelerate" else (words[start + 1 :],) * 2


def _place(command: Command) -> str:
    return show_path(command.file) + ("" if command.line is None else f", line {command.line}")


def _world_size(words: Sequence[str]) -> int | None:
    """Ranks that torchrun's options name, where they are numbers."""
    sizes = {"nproc-per-node": None, "nnodes": 1}
    parts = [part for word in words for part in word.split("=", 1)]
    for flag, value in itertools.pairwise(parts):
        short = flag[2:].replace("_", "-")  # argparse takes the beginning of a name for it
        for name in sizes if flag.startswith("--n") else ():
            if name.startswith(short):
                sizes[name] = int(value) if value.isdecimal() and len(value) < 10 else None
    return None if None in sizes.values() else sizes["nproc-per-node"] * sizes["nnodes"]


# --- what the reader is told about the run ---


def _notes(recording: Recording, trainings: list[Command], limit: float) -> list[str]:
    stubbed = [each for each in recording.commands if each not in trainings and not each.is_followed]
    notes = [f"not run, only recorded: {_summary(stubbed)}"] if stubbed else []
    notes += _unanswered(stubbed)
    if recording.is_cut:
        notes.append(f"the script was ended after {limit:g} s; what it would start later is not known")
    elif recording.code:
        notes.append(f"the script ended with exit code {recording.code}")
    return notes


def _unanswered(commands: Sequence[Command]) -> list[str]:
    read = [each for each in commands if each.is_read and not each.is_followed]
    calls = dict.fromkeys((_place(each), printable(" ".join(each.words), limit=60)) for each in read)
    return [f"{place}: a pipe or $(…) got nothing from `{shown}`, which was not run" for place, shown in calls]


def _summary(commands: Sequence[Command]) -> str:
    """Names of commands with how often each was called."""
    counts = Counter(printable(basename(command.words[0])) for command in commands)
    return ", ".join(name if count == 1 else f"{name} ×{count}" for name, count in counts.items())


# --- what the arguments say ---


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, tuple[str, ...], tuple[str, ...]]:
    """The arguments with our defaults, the names of those that are given, and the words of other parsers."""
    parser = add_arguments(_Parser(prog="the launch", allow_abbrev=False, add_help=False))
    defaults, own = vars(parser.parse_args([])), set(parser._option_string_actions)
    parser._option_string_actions["--loss-aggregation"].choices = None  # rule E3 knows other frameworks' words
    for name, keywords in MEGATRON_FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **keywords)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    given, others = parser.parse_known_args(list(words))
    _check_spelling(others, own | {"--calculate-per-token-loss"})
    if "yaml_cfg" in given:
        raise InputError(
            "--yaml-cfg replaces all flags by those of a YAML file, which is not read here. Give the flags themselves."
        )
    for name in MEGATRON_FLAGS.keys() & vars(given).keys():
        _check_numbers(name, vars(given)[name])
    args = argparse.Namespace(**defaults | vars(given))
    _count_depths(args)
    return args, tuple(vars(given)), tuple(others)


def _count_depths(args: argparse.Namespace) -> None:
    """Megatron takes the layers of multi-token prediction from the pattern of a HybridModel, which has one part for each."""
    pattern = vars(args).get("hybrid_layer_pattern") or vars(args).get("hybrid_override_pattern") or ""
    if "/" in pattern:
        args.mtp_num_layers = pattern.count("/")


def _check_numbers(name: str, value: object) -> None:
    """Refuse numbers with which nothing can be computed, and the empty list that argparse makes of `--flag=--`."""
    flag = f"--{name.replace('_', '-')}"
    if value == []:
        raise InputError(f"{flag} has no value: -- is none. Give one.")
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, (int, float)) and not abs(each) < 2**62:
            raise InputError(f"{flag} {shorten(each)} is no number that a training can have. Correct the flag.")


def _check_spelling(others: Sequence[str], own: set[str]) -> None:
    for word in others:
        if re.match(r"[\u2010-\u2015\u2212]", word):
            raise InputError(f"{printable(word)} begins with a dash that is no hyphen, so it is no flag. Write --.")
        if (meant := meant_flags(word, own)) is not None:
            hint = f" Did you mean {' or '.join(meant)}?" if meant else ""
            raise InputError(
                f"{printable(word.partition('=')[0])} is no flag of megatron_pg, so training would not start or would ignore it.{hint}"
            )


def _fill_in(args: argparse.Namespace) -> None:
    """What Megatron derives from its flags before the checks run."""
    found = vars(args)
    found.setdefault("dataloader_type", "single")
    for name in MODEL_SIZES:
        found.setdefault(name, 1)
    if shards := found.get("tensor_parallel_num_weight_shards"):
        args.gtp_weight_remat_size = shards // max(args.tensor_model_parallel_size, 1)
