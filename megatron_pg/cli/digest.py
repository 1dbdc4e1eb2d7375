"""A rollout file as a few numbers per sample, read in parallel: what weights and gradient mass are made of.

A line is accepted by a screen that is cheap and never wrong in accepting; whatever the screen does not accept is given
to the checks of `read_rollouts`, which accept it or say what is wrong. So both refuse the same files, in the same words.
"""

import math
import multiprocessing
import os
import re
import sys
from array import array
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

from megatron_pg.cli.terminal import InputError, Progress, megabytes, show_path
from megatron_pg.rollouts.lines import RolloutFileError, check_header, no_samples_message, parse_line, raw_lines
from megatron_pg.rollouts.printable import printable

_REQUIRED = frozenset(
    ("step", "prompt_id", "rollout_id", "tokens", "response_length", "loss_mask", "old_logprobs", "reward", "advantage")
)
_OPTIONAL = frozenset(("rollout_logprobs", "ref_logprobs"))
# a number that is finite and at most 0; its usual form first, for speed
_NEGATIVE = rb"(?:-[0-9]\.[0-9]{1,25}|-(?:0|[1-9]\d{0,5})(?:\.\d{1,25})?(?:[eE][-+]?\d{1,2})?|0(?:\.0)?)"
_ITEMS = {"tokens": rb"(?:0|[1-9]\d{0,8})", "loss_mask": rb"[01]"}  # below 2^31
_PATTERNS = {
    name: re.compile(rb'"%b": ?(\[(?:%b, ?)*%b\])' % (name.encode(), item, item))
    for name in ("tokens", "loss_mask", "old_logprobs", *sorted(_OPTIONAL))
    for item in [_ITEMS.get(name, _NEGATIVE)]
}
_CHUNK = 8 * 2**20  # bytes that one task reads
_ALONE = 64 * 2**20  # bytes below which more processes gain nothing


@dataclass(slots=True)
class Digest:
    """Per sample: ids, lengths, and the sums of the advantages over its trained tokens."""

    steps: list[int] = field(default_factory=list)
    prompt_ids: list[int | str] = field(default_factory=list)
    rollout_ids: list[int | str] = field(default_factory=list)
    lengths: array = field(default_factory=lambda: array("q"))  # response tokens
    trained: array = field(default_factory=lambda: array("q"))  # trained tokens
    advantages: array = field(default_factory=lambda: array("d"))  # Σ A
    magnitudes: array = field(default_factory=lambda: array("d"))  # Σ |A|

    def add(self, step, prompt_id, rollout_id, length: int, trained: int, advantage: float, magnitude: float) -> None:
        """Append one sample."""
        self.steps.append(step)
        self.prompt_ids.append(prompt_id)
        self.rollout_ids.append(rollout_id)
        self.lengths.append(length)
        self.trained.append(trained)
        self.advantages.append(advantage)
        self.magnitudes.append(magnitude)

    def extend(self, other: "Digest") -> None:
        """Append the samples of another part of the file."""
        for name in self.__slots__:
            getattr(self, name).extend(getattr(other, name))


@dataclass(frozen=True, slots=True)
class _Part:
    digest: Digest
    num_lines: int  # read, a bad last one included
    is_good: bool


def digest_rollouts(path: str | Path) -> Digest:
    """The digest of a whole rollout file.

    Raises:
        RolloutFileError: the file that `read_rollouts` refuses, with its message.
    """
    path, whole, line = Path(path), Digest(), 0
    size = path.stat().st_size if path.is_file() else 0
    progress = Progress("reading", size, megabytes)
    for stop, part in _parts(path, size):
        line += part.num_lines
        if not part.is_good:
            raise _error_of(path, line)
        whole.extend(part.digest)
        progress.update(stop)
    progress.close()
    if not whole.steps:
        raise RolloutFileError(no_samples_message(path))
    return whole


def _parts(path: Path, size: int) -> Iterator[tuple[int, _Part]]:
    """The parts of the file, in order, with the byte where each ends."""
    if size <= _ALONE:
        yield size, _read_part(path, 0, None)
        return
    ranges = [(start, min(start + _CHUNK, size)) for start in range(0, size, _CHUNK)]
    workers = min(os.cpu_count() or 1, 8)
    context = multiprocessing.get_context("spawn")  # the parent may hold threads
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        try:
            futures = [pool.submit(_read_part, path, *each) for each in ranges]
            for (_, stop), future in zip(ranges, futures, strict=True):
                yield stop, future.result()
        except BrokenProcessPool as error:
            raise InputError(
                f"{show_path(path)}: a process that reads it was killed. Is there enough memory for its longest lines?"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _read_part(path: Path, start: int, stop: int | None) -> _Part:
    digest, number = Digest(), 0
    for number, line in enumerate(raw_lines(path, start, stop), start=1):
        try:
            if start == 0 and number == 1:
                check_header(parse_line(line, ""), "")
            elif not _screen(digest, line):
                _examine(digest, parse_line(line, ""))
        except ValueError:  # RolloutFileError is one
            return _Part(digest, number, is_good=False)
    return _Part(digest, number, is_good=True)


def _error_of(path: Path, number: int) -> RolloutFileError:
    """What `read_rollouts` says of the line."""
    from megatron_pg.rollouts.file import sample_of

    shown = printable(str(path), limit=None)
    line = next((text for i, text in enumerate(raw_lines(path), start=1) if i == number), b"")
    try:
        record = parse_line(line, f"{shown}:{number}")
        if number == 1:
            check_header(record, shown)
        sample_of(record, f"{path.name}:{number}")
    except RolloutFileError as error:
        return error
    except ValueError as error:
        return RolloutFileError(f"{shown}:{number}: {error}")
    return RolloutFileError(f"{shown}:{number}: changed while it was read. Read it again when it is complete.")


def _examine(digest: Digest, record: dict) -> None:
    """Add a line that the screen left open, by the checks of `read_rollouts`; a ValueError refuses it."""
    from megatron_pg.rollouts.file import sample_of

    sample = sample_of(record, "?")
    advantages = sample.advantages[sample.loss_mask]
    sums = float(advantages.sum()), float(advantages.abs().sum())
    digest.add(sample.step, sample.prompt_id, sample.rollout_id, sample.response_length, sample.num_trained, *sums)


def _screen(digest: Digest, line: bytes) -> bool:
    """Add the line and return True where it is certainly a good one.

    The long lists are matched as text and taken out, which is several times faster than making numbers of them.
    """
    lists: dict[str, bytes] = {}
    for name, pattern in _PATTERNS.items():
        key = b'"%b"' % name.encode()
        if key not in line and name in _OPTIONAL:
            continue
        match = pattern.search(line)
        if match is None or line.count(key) != 1:  # a second one may be nested, or a duplicate
            return False
        lists[name] = match.group(1)
        line = line[: match.start(1)] + b"0" + line[match.end(1) :]
    sizes = {name: text.count(b",") + 1 for name, text in lists.items()}
    record = parse_line(line, "")
    length = record.get("response_length")
    if any(size != length for name, size in sizes.items() if name != "tokens") or not length < sizes["tokens"]:
        return False
    return _has_good_fields(record) and _add(digest, record, lists["loss_mask"])


def _has_good_fields(record: dict) -> bool:
    """Whether everything but the long lists and the advantage is as docs/rollout_file.md has it."""
    known = record.keys() >= _REQUIRED and all(
        name in _REQUIRED or name in _OPTIONAL or name[:2] == "x_" for name in record
    )
    integers_fit = known and all(type(v) is int and 0 <= v < 2**62 for v in (record["step"], record["response_length"]))
    return (
        integers_fit and _is_number(record["reward"]) and _is_id(record["prompt_id"]) and _is_id(record["rollout_id"])
    )


def _is_id(value: object) -> bool:
    return value.isprintable() if type(value) is str else type(value) is int and abs(value) < 2**62


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _add(digest: Digest, record: dict, mask: bytes) -> bool:
    """Add a line whose other fields are good, if its advantage is."""
    advantage, trained = record["advantage"], mask.count(b"1")
    if type(advantage) is list:
        if len(advantage) != record["response_length"] or not all(map(_is_number, advantage)):
            return False
        values = [value for value, bit in zip(advantage, mask.translate(None, b"[], "), strict=True) if bit == ord("1")]
        sums = math.fsum(values), math.fsum(map(abs, values))
    elif _is_number(advantage):
        sums = advantage * trained, abs(advantage) * trained
    else:
        return False
    ids = record["step"], record["prompt_id"], record["rollout_id"]
    digest.add(*ids, record["response_length"], trained, *sums)
    return True
