"""The lines of a rollout file: one header, then one JSON object each. Needs no torch."""

import functools
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from megatron_pg.rollouts.fields import FIELDS, OLD_NAMES
from megatron_pg.rollouts.printable import reason_of, shorten, show_path

FORMAT = "megatron_pg.rollouts"
VERSIONS = (1, 2, 3)  # 2: with masks, teachers and entropies; 3: loss terms and sampling masks under these names
MAX_LINE_BYTES = 256 * 2**20  # several million tokens; a longer line is not a sample


class RolloutFileError(ValueError):
    """A rollout file is malformed; the message begins with file and line."""


class RolloutWriteError(RolloutFileError):
    """A rollout file cannot be written; its cause is the system's error."""


def read_records(path: str | Path, *, update: Callable[[int], None] | None = None) -> Iterator[tuple[int, dict]]:
    """Line number and object of every sample. The header is checked, and that its version has the fields.

    `update` receives the number of bytes read.

    Raises:
        RolloutFileError: the file cannot be read, or a line is not one JSON object.
    """
    shown, version = show_path(path), 0
    for number, line in enumerate(raw_lines(path, update=update), start=1):
        record = parse_line(line, f"{shown}:{number}")
        if number == 1:
            version = check_header(record, shown)
            continue
        if newer := sorted(_since(version).intersection(record)):
            since = FIELDS[newer[0]].since
            raise RolloutFileError(
                f"{shown}:{number}: field {newer[0]!r} needs version {since}, and the header has version {version}. "
                f'Write "version": {since} into the first line.'
            )
        yield number, {OLD_NAMES.get(n, n): v for n, v in record.items()} if version == 2 else record


@functools.cache
def _since(version: int) -> frozenset[str]:
    """The fields of later versions."""
    return frozenset(name for name, field in FIELDS.items() if field.since > version)


def raw_lines(
    path: str | Path, *, update: Callable[[int], None] | None = None, opener: Callable[..., Any] = open
) -> Iterator[bytes]:
    """The lines of a file, cut after MAX_LINE_BYTES + 1 bytes; `opener` has the interface of `open`.

    Raises:
        RolloutFileError: the file cannot be read.
    """
    shown = show_path(path)
    if "\0" in str(path):
        raise RolloutFileError(f"{shown}: no file can have this name. Give an existing rollout file.")
    try:
        with opener(path, "rb") as file:
            done = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                yield line
                done += len(line)
                if update is not None:
                    update(done)
    except (OSError, UnicodeEncodeError, EOFError, zlib.error) as error:  # the latter two of a damaged archive
        message = f"{shown}: cannot be read ({reason_of(error)}). Give an existing file."
        raise RolloutFileError(message) from error


def parse_line(line: bytes, where: str) -> dict:
    """The object of one line; `where` is how messages name it."""
    if len(line) > MAX_LINE_BYTES:
        raise RolloutFileError(
            f"{where}: line is longer than {MAX_LINE_BYTES} bytes, so it is not a sample of this format."
        )
    try:
        record = json.loads(line.decode("utf-8"), object_pairs_hook=unique_keys, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise RolloutFileError(
            f"{where}: is not UTF-8 (byte {error.start}), so it cannot be read. Re-export it."
        ) from error
    except (ValueError, RecursionError) as error:
        fix = "Write one object per line, without empty lines."
        if not line.endswith(b"\n"):
            fix = "The line has no end: if its writer was killed, delete it."
        raise RolloutFileError(f"{where}: is not one JSON object per line ({error}). {fix}") from error
    if not isinstance(record, dict):
        raise RolloutFileError(f"{where}: is a JSON {type(record).__name__}, not an object. Write one object per line.")
    return record


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The object of a JSON text without duplicate fields."""
    record = dict(pairs)
    if len(record) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"duplicate field {shorten(next(name for name in record if counts[name] > 1))}")
    return record


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def check_header(record: dict, shown: str) -> int:
    """The version in a file's first line, which must have our format; `shown` is the name of the file."""
    if record.get("format") != FORMAT or record.get("version") not in VERSIONS:
        later, given = ", ".join(map(str, VERSIONS[1:])), [shorten(record.get(name)) for name in ("format", "version")]
        raise RolloutFileError(
            f"{shown}:1: header has format {given[0]}, version {given[1]}, so the fields below cannot be trusted. The "
            f'first line must be {{"format": "{FORMAT}", "version": {VERSIONS[0]}}} (or {later}).'
        )
    if unknown := [name for name in record if name not in ("format", "version") and not name.startswith("x_")]:
        raise RolloutFileError(
            f"{shown}:1: unknown header field {shorten(unknown[0])}. Remove it. Your own fields begin with x_."
        )
    return record["version"]


def append_whole(file: IO[bytes], data: bytes) -> None:
    """Append to an unbuffered file all of `data` or nothing: a full disk may cut a write short."""
    end, rest = file.seek(0, os.SEEK_END), data
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        file.truncate(end)
        raise
