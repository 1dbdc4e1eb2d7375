"""What the subcommands share: errors of one line, progress, and output files that are complete or absent."""

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from megatron_pg.declarations.declaration import one_of
from megatron_pg.rollouts.lines import RolloutWriteError
from megatron_pg.rollouts.printable import printable, reason_of, show_path

DELAY = 2.0  # seconds before the first line of progress
PERIOD = 1.0  # seconds between two lines on a terminal
LOG_PERIOD = 5.0  # seconds between two lines in a log


class InputError(ValueError):
    """Invalid input. Its one line names what is wrong and how to fix it; the command ends with exit code 2."""


class OutputError(Exception):
    """Standard output cannot be written; the cause is the system's error."""


def argument_message(message: str) -> str:
    """An error of argparse in the form of our messages: the flag, the value, and what is accepted."""
    if match := re.fullmatch(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message, re.DOTALL):
        flag, value, choices = match.groups()
        names = one_of(value, choices.replace("'", "").split(", "))
        return f"{flag} {value!r} is not one of {names}"
    if match := re.fullmatch(r"argument (\S+): invalid (int|float) value: (.*)", message, re.DOTALL):
        flag, kind, value = match.groups()
        return f"{flag} {value} is not a {'whole number' if kind == 'int' else 'number'}."
    message = re.sub(r"^argument (\S+): (?=')", r"\1 ", message)  # a value in quotes
    message = re.sub(r"^argument (\S+): expected (.*)", r"\1 has no value, expected \2", message)
    return message.removeprefix("argument ").removesuffix(".") + "."


def say(text: str) -> None:
    """Write lines to standard output, with control characters escaped."""
    with output_taken():
        sys.stdout.write("\n".join(printable(line, limit=None) for line in text.split("\n")) + "\n")


def show_json(value: object) -> None:
    """Write one JSON document to standard output."""
    text = json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False)
    with output_taken():  # JSON escapes only some unprintable characters
        sys.stdout.write("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text) + "\n")


@contextmanager
def output_taken() -> Iterator[None]:
    """Turn a system error in the block into an `OutputError`: standard output cannot be written."""
    try:
        yield
    except OSError as error:
        raise OutputError from error


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, the first one left-aligned, the others right-aligned."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    return "\n".join("  " + "  ".join(cells).rstrip() for cells in aligned)


@contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file to read; an `InputError` names the file if it cannot be opened, or if the block cannot read it."""
    try:
        with open(path, "rb") as file:
            yield file
    except InputError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise InputError(f"{show_path(path)}: cannot be read ({reason_of(error)}). Give an existing file.") from error


@contextmanager
def standard_input() -> Iterator[BinaryIO]:
    """Standard input, which stays open."""
    if sys.stdin is None:
        raise InputError("standard input: is closed. Give a file, or pipe the text in.")
    yield sys.stdin.buffer


@contextmanager
def written_whole(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A scratch path next to `path`, renamed to `path` if the block succeeds and removed if it fails."""
    path = Path(path)
    check_output(path, overwrite=overwrite)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield scratch
        os.replace(scratch, path)
    except (OSError, RolloutWriteError) as error:
        why = reason_of(error if isinstance(error, OSError) else error.__cause__)
        raise InputError(
            f"{show_path(path)}: cannot be written ({why}). Free disk space, or give another path."
        ) from error
    finally:
        scratch.unlink(missing_ok=True)


def check_output(path: str | Path, *, overwrite: bool, suffixes: Sequence[str] = ()) -> None:
    """Refuse an output path that may not or cannot be written, before any work is done."""
    path = Path(path)
    if suffixes and path.suffix.lower() not in suffixes:
        known = f"one of {', '.join(suffixes)}" if suffixes[1:] else suffixes[0]
        raise InputError(f"{show_path(path)}: the suffix is not {known}. Give another path.")
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # too long, not reachable, or not a valid name
        raise InputError(f"{show_path(path)}: cannot be written ({reason_of(error)}). Give another path.") from error
    if not path.parent.is_dir():
        raise InputError(f"{show_path(path)}: its folder does not exist. Create it first.")
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a device or a pipe"
        raise InputError(f"{show_path(path)}: is {what}, not a file. Give the path of a file.")
    if path.exists() and not overwrite:
        raise InputError(f"{show_path(path)}: already exists. Give another path, or --overwrite.")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{show_path(path)}: its folder cannot be written to. Give another path.")


@contextmanager
def progress(
    what: str, total: int = 0, show: Callable[[int], str] = lambda size: f"{size / 1e6:,.0f} MB"
) -> Iterator[Callable[[int], None]]:
    """Report on standard error how long `what` has taken, from the second second on.

    In a log each report is a line; on a terminal one line changes. The block receives a function to call with the
    amount of `total` that is done, which `show` formats.
    """
    done, text, start, is_over, is_terminal = 0, "", time.monotonic(), threading.Event(), sys.stderr.isatty()

    def update(amount: int) -> None:
        nonlocal done
        done = amount

    def tick() -> None:
        nonlocal text
        wait = DELAY
        while not is_over.wait(wait):
            seconds, wait = time.monotonic() - start, PERIOD if is_terminal else LOG_PERIOD
            text = f"{what}: {seconds:.0f} s"
            if done and total:
                text = f"{what}: {show(done)} of {show(total)}, {seconds / done * (total - done):.0f} s left"
            sys.stderr.write(f"{text}\x1b[K\r" if is_terminal else f"{text}\n")
            sys.stderr.flush()
        if text and is_terminal:
            sys.stderr.write("\r\x1b[K")

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield update
    finally:
        is_over.set()
        thread.join()
