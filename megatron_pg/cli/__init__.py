"""`megatron-pg explain | validate | compare | mismatch | plot | report | convert | doctor`.

Each subcommand is one module with `add_options(parser)` and `run(options) -> exit code`, imported when it is asked
for: `explain` needs no torch. Bad input is one line on standard error and exit code 2, and no file is written.
"""

# PYTHON_ARGCOMPLETE_OK

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_pg import __version__
from megatron_pg.cli.terminal import InputError, OutputError, argument_message, output_taken
from megatron_pg.rollouts.lines import RolloutFileError
from megatron_pg.rollouts.printable import printable, reason_of

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

SUBCOMMANDS = {
    "explain": "show the loss that flags or the command line of a job describe, as formulas with numbers",
    "validate": "run the startup checks on flags or the command line of a job; exit code 2 if one fails",
    "compare": "compare the aggregations on a rollout file: loss, gradient mass by length and prompt, effective tokens",
    "mismatch": "find out why the trainer's log-probabilities differ from the rollout engine's, from rollout files",
    "plot": "draw curves of the metrics.jsonl of one or several runs",
    "report": "write an HTML page of one or several runs: effective objective, red flags, curves",
    "convert": "convert dumps of slime, miles, NeMo-RL, verl and JSON Lines into rollout files",
    "doctor": "check what is installed, which kernels a job will use, and what would fail",
}
FOLDERS = {  # of the subcommands' modules, below megatron_pg/cli
    **dict.fromkeys(("compare", "mismatch", "convert"), "rollouts."),
    **dict.fromkeys(("plot", "report"), "runs."),
}
LAUNCHES = ("explain", "validate")  # take the flags of a job, which other parsers define
NEED_TORCH = ("compare", "mismatch", "convert")


def module_of(subcommand: str) -> ModuleType:
    """The subcommand's module, imported."""
    return import_module(f"megatron_pg.cli.{FOLDERS.get(subcommand, '')}{subcommand}")


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error as every subcommand does: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{argument_message(message)} {self.prog} --help shows the options.")

    def _print_message(self, message: str, file: "SupportsWrite[str] | None" = None) -> None:
        """Print help or version; argparse would ignore a standard output that cannot be written."""
        with output_taken():
            (file or sys.stderr).write(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; exit code 0: done, 1: `doctor` reports a failure, 2: bad input or a full disk."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller, `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Σ, a path that is not UTF-8
    if "_ARGCOMPLETE" in os.environ:
        return _complete(os.environ["COMP_LINE"])
    argv = list(sys.argv[1:] if argv is None else argv)
    subcommand = next((word for word in argv if word in SUBCOMMANDS), None)
    command = f"megatron-pg {subcommand}" if subcommand else "megatron-pg"
    try:
        try:
            return _run(argv, subcommand)
        finally:
            with output_taken():
                sys.stdout.flush()
    except (InputError, RolloutFileError) as error:
        message = str(error)
    except OutputError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the output that is not flushed yet
        reason = error.__cause__
        if isinstance(reason, BrokenPipeError):  # the reader of our output has exited
            return 128 + signal.SIGPIPE
        message = f"standard output cannot be written ({reason_of(reason)}) and is incomplete. Free disk space."
    except OSError as error:  # about a path that no check has read before, or from the system
        where = "the system" if error.filename is None else os.fsdecode(error.filename)
        message = f"{where}: {reason_of(error)}. Give another path, or free disk space."
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    sys.stderr.write(f"{command}: {printable(message, limit=None)}\n")
    return 2


def _run(argv: list[str], name: str | None) -> int:
    try:
        options = _parse(argv, name)
        if name in NEED_TORCH:
            _import_torch(name)
        return module_of(options.subcommand).run(options)
    except ModuleNotFoundError as error:
        if error.name not in ("numpy", "torch"):
            raise
        raise InputError(
            f"{name} needs {error.name}, which is not installed. Install it; megatron-pg doctor lists missing packages."
        ) from error


def _import_torch(name: str) -> None:
    try:
        import_module("torch")
    except Exception as error:  # also of a driver or a dependency that does not fit
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            raise
        raise InputError(
            f"{name} needs torch, which cannot be imported ({type(error).__name__}: {error}). Repair the installation; "
            "megatron-pg doctor checks it."
        ) from error


def _parse(argv: list[str], name: str | None) -> argparse.Namespace:
    parser = _parser(name)
    options, words = parser.parse_known_args(argv)
    for option, value in vars(options).items():
        flag, parts = f"--{option.replace('_', '-')}", value if isinstance(value, list) else [value]
        if value == [] or [] in parts or "--" in parts:  # argparse reads --flag=-- as [], newer ones as --
            raise InputError(f"{flag} has no value: -- is not one. Give one.")
        if "" in parts:
            shown = flag if any(word.startswith(flag) for word in argv) else option.upper()
            raise InputError(f"{shown} is empty. Give a value.")
    if name in LAUNCHES:
        options.words = words
    elif words:
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    return options


def _parser(name: str | None, *more: Callable[[argparse.ArgumentParser], object]) -> argparse.ArgumentParser:
    """The command's parser, with the options of subcommand `name` only, and those that `more` adds."""
    parser = _Parser(prog="megatron-pg", description="Exactly normalized policy-gradient losses for Megatron-LM.")
    parser.add_argument("--version", action="version", version=f"megatron-pg {__version__}")
    choices = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    for subcommand, summary in SUBCOMMANDS.items():
        shape: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        sub = choices.add_parser(subcommand, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", **shape)
        if subcommand == name:
            for add in (module_of(subcommand).add_options, *more):
                add(sub)
            sub.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    return parser


def _complete(line: str) -> int:
    """Print the completions of `line`; exit code 1, after which the shell completes by itself, without argcomplete."""
    name = next((word for word in line.split() if word in SUBCOMMANDS), None)
    try:
        flags = [import_module("megatron_pg.args").add_arguments] if name in LAUNCHES else []
        import_module("argcomplete").autocomplete(_parser(name, *flags), exit_method=sys.exit)
    except ModuleNotFoundError:
        return 1
    return 0
