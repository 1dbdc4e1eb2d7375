"""From flags, or from the command line of a job, to the arguments that the startup checks read.

megatron_pg's own flags are parsed by its own parser. Of Megatron's hundreds of flags, only those are read that a check
or the layout needs. All other words are passed over.
"""

import argparse
import itertools
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NoReturn

from megatron_pg.args import add_arguments, own_arguments
from megatron_pg.cli.command_line import read_command_line
from megatron_pg.cli.terminal import InputError, argument_message, show_path
from megatron_pg.flags.megatron import ARGUMENTS, MEGATRON_FLAGS
from megatron_pg.flags.spelling import meant_flags
from megatron_pg.rollouts.printable import listed, printable, shorten

# verl: actor_rollout_ref.model.path=…, +PATH.megatron_pg={…}; the value of a flag may look like one
_OVERRIDE = re.compile(r"[+~]{0,2}(?P<key>[A-Za-z_]\w*(?:\.\w+)*)=")
_FLAG = re.compile(r"--?[A-Za-z]")  # not a negative number, which is another flag's value
MODEL_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


@dataclass(frozen=True, slots=True)
class Launch:
    """The arguments of a job, and where they come from."""

    args: argparse.Namespace
    source: str  # "flags", or the file and line of the command line
    world_size: int | None
    given: tuple[str, ...]  # names of the arguments that are given; the others have their defaults
    others: tuple[str, ...]  # words of other parsers

    @property
    def unread(self) -> str:
        """The flags of other parsers, as a row of text; empty if there are none."""
        flags = dict.fromkeys(word.partition("=")[0] for word in self.others if _FLAG.match(word))
        return f"{listed(flags)}; docs/migrating.md translates flags of other frameworks" if flags else ""


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of the job; None if its arguments do not give one."""

    world: int | None
    data: int | None  # D
    context: int | None  # C
    batch: int | None  # samples of one optimizer step
    micro: int | None
    microbatches: int | None  # K


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{argument_message(message)} megatron-pg explain --help lists the flags.")


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommands that take a launch, and the flags of megatron_pg in their help."""
    parser.usage = f"{parser.prog} [options] [--args-file FILE] [flags of the job]"
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="number of ranks, if torchrun's options do not give it"
    )
    args_file = (
        "text with the command line of the job, as a dry run or `set -x` prints it; - is standard input. Flags on this "
        "command line are added to it"
    )
    parser.add_argument("--args-file", metavar="FILE", help=args_file)
    shown = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    flags = add_arguments(shown).format_help().partition("\n")[2].strip()
    parser.epilog = (
        f"examples, with flags, and with the command line that a launch script prints:\n  {parser.prog} "
        "--loss-aggregation constant --loss-aggregation-divisor 8192\n  MEGATRON_PG_DRY_RUN=1 bash launch.sh | "
        f"{parser.prog} --args-file -\n\nflags of megatron_pg:\n  {flags}"
    )


def read_launch(options: argparse.Namespace) -> Launch:
    """The job that a subcommand's words describe: flags, or the command line in a file, or both."""
    words = [word for word in options.words if word != "--"]
    if options.world_size is not None and not 0 < options.world_size < 2**31:
        raise InputError(f"--world-size {shorten(options.world_size)} is not a number of ranks. Give 1 or more.")
    if words and not words[0].startswith("-"):
        raise InputError(
            f"{show_path(words[0])} is not a flag. For a launch script, start it with MEGATRON_PG_DRY_RUN=1 in the "
            "environment and give the line that it prints: --args-file FILE."
        )
    if options.args_file is None:
        if not words:
            raise InputError(
                "no flags are given. Give some, such as --loss-aggregation token_mean, or --args-file FILE."
            )
        args, given, others = _parse(words)
        return Launch(args, "flags", options.world_size, given, others)
    line = read_command_line(options.args_file)
    try:
        args, given, others = _parse([*line.words, *words])
    except InputError as error:
        raise InputError(f"{line.source}: {error}") from error
    _set_megatron_defaults(args)
    return Launch(args, line.source, options.world_size or line.world_size, given, others)


def layout_of(launch: Launch) -> Layout:
    """The sizes, from the flags and the world size; each at least 1, and divisible as Megatron needs it."""
    sizes = {name: value for name, value in vars(launch.args).items() if value is not None}
    for name in sizes.keys() & {*MODEL_SIZES, "micro_batch_size", "global_batch_size"}:
        if sizes[name] < 1:
            raise InputError(f"--{name.replace('_', '-')} {sizes[name]} must be at least 1.")
    world, model = launch.world_size, math.prod(sizes.get(name, 1) for name in MODEL_SIZES)
    if world is not None and (world < 1 or world % model):
        raise InputError(f"{world} ranks are not a multiple of TP·PP·CP = {model}. Correct one of the sizes.")
    data = world // model if world is not None else None
    context = sizes.get("context_parallel_size", 1 if data else None)
    batch, micro, microbatches = sizes.get("global_batch_size"), sizes.get("micro_batch_size"), None
    if documents := sizes.get("docs_per_step"):  # their number of micro-batches depends on their lengths
        batch = documents if sizes.get("docs_per_step_policy", "exact") == "exact" else None
    elif "rampup_batch_size" in sizes:
        batch = None
    elif batch is not None and micro is not None and data is not None:
        microbatches, rest = divmod(batch, micro * data)
        if rest:
            raise InputError(
                f"--global-batch-size {batch} is not a multiple of --micro-batch-size {micro} times {data} "
                "data-parallel ranks. Correct one of them."
            )
    return Layout(world, data, context, batch, micro, microbatches)


def read_arguments(launch: Launch) -> dict[str, object]:
    """Every argument that was read, with its value."""
    values = vars(launch.args)
    return {name: values[name] for name in (*own_arguments(), *ARGUMENTS) if name in values}


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, tuple[str, ...], tuple[str, ...]]:
    """The arguments with our defaults, the names of those that are given, and the words of other parsers."""
    parser = add_arguments(_Parser(prog="the launch", allow_abbrev=False, add_help=False))
    defaults = vars(parser.parse_args([]))
    our_flags = {f"--{name.replace('_', '-')}" for name in defaults}
    parser._option_string_actions["--loss-aggregation"].choices = None  # rule E3 has other frameworks' words
    for name, keywords in MEGATRON_FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **keywords)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    given, others = parser.parse_known_args(list(words))
    _check_overrides(others, defaults)
    _check_spelling(others, our_flags | {"--calculate-per-token-loss"})
    if "yaml_cfg" in given:
        raise InputError(
            "--yaml-cfg replaces all flags with those of a YAML file, which is not read here. Give the flags instead."
        )
    for name in MEGATRON_FLAGS.keys() & vars(given).keys():
        _check_numbers(name, vars(given)[name])
    args = argparse.Namespace(**defaults | vars(given))
    pattern = vars(args).get("hybrid_layer_pattern") or vars(args).get("hybrid_override_pattern") or ""
    if "/" in pattern:  # Megatron predicts at one depth for each
        args.mtp_num_layers = pattern.count("/")
    return args, tuple(vars(given)), tuple(others)


def _check_numbers(name: str, value: object) -> None:
    """Refuse numbers that are too large to compute with, and the empty list that argparse makes of `--flag=--`."""
    flag = f"--{name.replace('_', '-')}"
    if value == []:
        raise InputError(f"{flag} has no value: -- is not one. Give one.")
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, (int, float)) and not abs(number) < 2**62:
            raise InputError(f"{flag} {shorten(number)} is too large or not finite. Correct the flag.")


def _check_overrides(others: Sequence[str], our_names: Collection[str]) -> None:
    """Refuse overrides of Hydra, as in the command lines of verl and NeMo-RL: the host turns them into arguments."""
    for before, word in itertools.pairwise(["", *others]):
        override = _OVERRIDE.match(word)
        if override is None or (before.startswith("--") and "=" not in before):
            continue
        if "." in override["key"] or override["key"] in ("megatron_pg", *our_names):
            raise InputError(
                f"{shorten(word)} is an override of Hydra, which only the host reads. Start the job of verl or NeMo-RL "
                "itself: it checks its options before it builds a model."
            )


def _check_spelling(others: Sequence[str], our_flags: set[str]) -> None:
    for word in others:
        if re.match(r"[\u2010-\u2015\u2212]", word):
            raise InputError(f"{printable(word)} begins with a dash that is not a hyphen. Write --.")
        if (meant := meant_flags(word, our_flags)) is not None:
            hint = f" Did you mean {' or '.join(meant)}?" if meant else " Remove it."
            raise InputError(f"{printable(word.partition('=')[0])} is not a flag of megatron_pg.{hint}")


def _set_megatron_defaults(args: argparse.Namespace) -> None:
    """Set what Megatron derives from its flags before the checks run."""
    known = vars(args)
    known.setdefault("dataloader_type", "single")
    for name in MODEL_SIZES:
        known.setdefault(name, 1)
    if shards := known.get("tensor_parallel_num_weight_shards"):
        args.gtp_weight_remat_size = shards // max(args.tensor_model_parallel_size, 1)
