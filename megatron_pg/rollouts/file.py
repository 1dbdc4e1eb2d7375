"""The neutral rollout file (docs/rollout_file.md): samples from its lines, and lines from samples."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_pg.rollouts import lines
from megatron_pg.rollouts.fields import FIELDS, OLD_NAMES, POLICY, REQUIRED, REQUIRED_OF_ALL, REQUIRED_OF_CRITICS
from megatron_pg.rollouts.lines import FORMAT, VERSIONS, RolloutFileError, RolloutWriteError
from megatron_pg.rollouts.payloads import PAYLOADS
from megatron_pg.rollouts.printable import printable, reason_of, shorten, show_path
from megatron_pg.rollouts.sample import Sample

_ATTRIBUTES = {"advantage": "advantages"}  # of a sample, where they are not named as the field


def read_rollouts(path: str | Path) -> list[Sample]:
    """Read and check a whole rollout file before anything is trained.

    Raises:
        RolloutFileError: with file and line, if the file does not follow docs/rollout_file.md.
    """
    return list(iterate_rollouts(path))


def iterate_rollouts(path: str | Path, *, update: Callable[[int], None] | None = None) -> Iterator[Sample]:
    """The samples of a rollout file one by one, each checked; `update` receives the number of bytes read.

    Raises:
        RolloutFileError: as `read_rollouts`, when the line is reached.
    """
    path, is_empty = Path(path), True
    shown = show_path(path)
    for number, record in lines.read_records(path, update=update):
        try:
            sample = sample_of(record, f"{path.name}:{number}")
        except ValueError as error:
            raise RolloutFileError(f"{shown}:{number}: {error}") from error
        yield sample
        is_empty = False
    if is_empty:
        raise RolloutFileError(
            f"{shown}: contains no sample, so there is nothing to train. Check that it was written completely."
        )


class RolloutWriter:
    """Writes samples to a rollout file, one line each and without a buffer; in a `with` block it closes itself.

    A process that is killed leaves whole lines; the kernel may cut the very last one, which then has no line end.

    Args:
        path: the file. Each rank writes its own: two writers of one file would mix their lines.
        if_exists: what to do with a file that is not empty: `refuse`, `append` to its samples, or `replace` them.
        version: of the format: 2 for samples with further masks, a teacher or entropies, 3 for samples with a loss term
            or a sampling mask. A file that is appended to keeps its version.

    Raises:
        RolloutFileError: the file exists and is refused, or cannot be appended to.
        RolloutWriteError: it cannot be opened for writing, or the disk is full.
    """

    def __init__(
        self, path: str | Path, *, if_exists: Literal["refuse", "append", "replace"] = "refuse", version: int = 1
    ):
        path, self._version = Path(path), version
        self.needed_version = VERSIONS[0]  # the first one with all fields that were written
        if version not in VERSIONS:
            raise ValueError(f"version={shorten(version)} is none of {', '.join(map(str, VERSIONS))}. Choose one.")
        if if_exists not in ("refuse", "append", "replace"):
            raise ValueError(f"if_exists={shorten(if_exists)} is none of refuse, append and replace. Choose one.")
        try:
            appends = if_exists != "replace" and path.exists() and path.stat().st_size > 0
            if appends:
                self._version = _check_appendable(path, if_exists)
            self._file = path.open("wb" if if_exists == "replace" else "ab", buffering=0)
        except RolloutFileError:
            raise
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise RolloutWriteError(
                f"{show_path(path)}: cannot be opened for writing ({reason_of(error)}), so no sample is in it. Give "
                "another path."
            ) from error
        if not appends:
            self._put([_encoded({"format": FORMAT, "version": version})])

    def write(self, samples: Sequence[Sample]) -> None:
        """Append samples, all or none. They need `step`, `prompt_id`, `rollout_id` and, for the objective, `reward`."""
        encoded = [_encoded_sample(sample, self._version) for sample in samples]
        self._put([line for line, _ in encoded])
        self.needed_version = max([self.needed_version, *(version for _, version in encoded)])

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "RolloutWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _put(self, records: Sequence[bytes]) -> None:
        try:
            lines.append_whole(self._file, b"".join(records))
        except OSError as error:
            raise RolloutWriteError(
                f"{show_path(self._file.name)}: cannot be written ({error.strerror}), so none of these {len(records)} "
                "lines is in it; the earlier ones are. Make room."
            ) from error


def lower_version(path: str | Path, version: int) -> None:
    """Write an older version into the header of a complete file whose samples do not need a newer one.

    Spaces keep the length of the header, so the samples stay where they are.
    """
    with open(path, "r+b") as file:
        length = len(file.readline())
        file.seek(0)
        file.write(_encoded({"format": FORMAT, "version": version}).rstrip().ljust(length - 1))


def _check_appendable(path: Path, if_exists: str) -> int:
    """The version of a file to append to; refused if it is not complete, or not to be appended to."""
    shown = show_path(path)
    if if_exists == "refuse":
        raise RolloutFileError(
            f"{shown}: exists already and is kept. Give another path, or RolloutWriter(…, if_exists='append') or "
            "'replace'."
        )
    version = lines.check_header(lines.parse_line(next(lines.raw_lines(path)), f"{shown}:1"), shown)
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            raise RolloutFileError(f"{shown}: its last line has no end. Delete that line.")
    return version


def sample_of(record: dict, sample_id: str) -> Sample:
    """The sample of one line's object, checked; a ValueError describes what is wrong."""
    required = REQUIRED_OF_CRITICS if "returns" in record else REQUIRED
    required = required if record.get("term", POLICY) == POLICY else REQUIRED_OF_ALL
    if missing := [name for name in required if name not in record]:
        raise ValueError(
            f"field {missing[0]!r} is missing, so the sample cannot be trained. Required: {', '.join(required)}."
        )
    extra = {name: value for name, value in record.items() if name not in FIELDS}
    if unknown := [name for name in extra if not name.startswith("x_")]:
        hint = f"Did you mean {OLD_NAMES[unknown[0]]}?" if unknown[0] in OLD_NAMES else "Is it misspelt?"
        raise ValueError(f"unknown field {shorten(unknown[0])}. {hint} Your own fields begin with x_.")
    for name, field in FIELDS.items():
        if name in record and not field.accepts(record[name]):
            raise ValueError(f"{name}={shorten(record[name])} has the wrong type or range. See docs/rollout_file.md.")
    given = {name: record[name] for name in FIELDS if name in record}
    return Sample.build(**given, sample_id=sample_id, extra=extra)


def _encoded_sample(sample: Sample, version: int) -> tuple[bytes, int]:
    """The line of a sample, and the first version of the format with all its fields."""
    record = _record_of(sample)
    since = {name: FIELDS[name].since for name in record if name in FIELDS}
    if newer := [name for name in since if since[name] > version]:
        raise ValueError(
            f"sample {sample.sample_id} has {newer[0]}, which version {version} of the file does not have. Open it "
            f"with RolloutWriter(…, version={since[newer[0]]})."
        )
    try:
        line = _encoded(record)
    except (TypeError, ValueError, RecursionError) as error:  # of extra: the other fields have been checked
        raise ValueError(
            f"extra of sample {sample.sample_id} has a value that JSON cannot contain ({printable(str(error))}). Give "
            "plain values."
        ) from error
    if len(line) > lines.MAX_LINE_BYTES:
        raise ValueError(
            f"sample {sample.sample_id} would be a line of {len(line)} bytes, and no reader takes more than "
            f"{lines.MAX_LINE_BYTES}. Give hidden states in bfloat16, or cut the sample."
        )
    return line, max(since.values())


def _record_of(sample: Sample) -> dict[str, Any]:
    needed = ("step", "prompt_id", "rollout_id", *(("reward",) if sample.term == POLICY else ()))
    if missing := [name for name in needed if getattr(sample, name) is None]:
        raise ValueError(
            f"sample {sample.sample_id} has no {missing[0]}, which the rollout file needs. Set it on the sample."
        )
    if bad := [name for name in sample.extra if not str(name).startswith("x_")]:
        raise ValueError(
            f"extra field {shorten(bad[0])} of sample {sample.sample_id} does not begin with x_. Rename it."
        )
    if sample.reward is not None and not math.isfinite(sample.reward):
        raise ValueError(
            f"reward of sample {sample.sample_id} is {sample.reward}, which JSON cannot contain. Give a number."
        )
    values = {name: getattr(sample, _ATTRIBUTES.get(name, name)) for name in FIELDS}
    record = {name: _json_of(name, value) for name, value in values.items() if value is not None}
    if not sample.masks:
        del record["masks"]
    if sample.term == POLICY:
        del record["term"]
    return record | sample.extra


def _json_of(name: str, value: Any) -> Any:
    if name in PAYLOADS:
        return PAYLOADS[name].to_json(value)
    if isinstance(value, Mapping):
        return {term: mask.int().tolist() for term, mask in value.items()}
    if not isinstance(value, Tensor):
        return value
    if not value.is_floating_point():
        return value.int().tolist() if value.dtype == torch.bool else value.tolist()
    # only masked tokens can have values that are not finite, and nothing reads them
    numbers = torch.where(torch.isfinite(value), value, 0.0).tolist()
    return numbers[0] if name == "advantage" and len(set(numbers)) == 1 else numbers


def _encoded(record: dict[str, object]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"
