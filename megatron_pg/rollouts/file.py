"""The neutral rollout file (docs/rollout_file.md): samples from its lines, and lines from samples."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_pg.rollouts.fields import FIELDS, OPTIONAL, REQUIRED
from megatron_pg.rollouts.lines import FORMAT, VERSION, RolloutFileError, read_records
from megatron_pg.rollouts.printable import printable, shorten
from megatron_pg.rollouts.sample import Sample


def read_rollouts(path: str | Path) -> list[Sample]:
    """Read and check a whole rollout file before anything is trained.

    Raises:
        RolloutFileError: with file and line, for whatever does not follow docs/rollout_file.md.
    """
    return list(iterate_rollouts(path))


def iterate_rollouts(path: str | Path, *, update: Callable[[int], None] | None = None) -> Iterator[Sample]:
    """The samples of a rollout file one by one, each checked; `update` is told how many bytes are read.

    Raises:
        RolloutFileError: as `read_rollouts`, when the reading comes to it.
    """
    path, is_empty = Path(path), True
    shown = printable(str(path), limit=None)
    for number, record in read_records(path, update=update):
        try:
            sample = sample_of(record, f"{path.name}:{number}")
        except ValueError as error:
            raise RolloutFileError(f"{shown}:{number}: {error}") from error
        yield sample
        is_empty = False
    if is_empty:
        raise RolloutFileError(
            f"{shown}: holds no sample, so there is nothing to train. Check that it was written whole."
        )


class RolloutWriter:
    """Writes samples to a rollout file, one line each and without a buffer.

    A process that is killed leaves whole lines; the kernel may cut the very last one, which then has no line end.
    """

    def __init__(self, path: str | Path):
        self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115, closed by close()
        self._lines([{"format": FORMAT, "version": VERSION}])

    def write(self, samples: Sequence[Sample]) -> None:
        """Append samples, all or none; `step`, `prompt_id`, `rollout_id` and `reward` must be set: the format needs them."""
        self._lines([_record(sample) for sample in samples])

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _lines(self, records: Sequence[dict[str, object]]) -> None:
        for line in [json.dumps(record, allow_nan=False).encode() + b"\n" for record in records]:
            while line:
                line = line[self._file.write(line) :]  # a full disk or a signal may cut one write short


def sample_of(record: dict, sample_id: str) -> Sample:
    """The sample of one line's object, checked; a ValueError says what is wrong with it."""
    if missing := [name for name in REQUIRED if name not in record]:
        raise ValueError(
            f"field {missing[0]!r} is missing, so the sample cannot be trained. Required: {', '.join(REQUIRED)}."
        )
    extra = {name: value for name, value in record.items() if name not in FIELDS}
    if unknown := [name for name in extra if not name.startswith("x_")]:
        raise ValueError(f"unknown field {shorten(unknown[0])}; is it misspelt? Your own fields begin with x_.")
    for name, each in FIELDS.items():
        if name in record and not each.accepts(record[name]):
            raise ValueError(f"{name}={shorten(record[name])} has the wrong type or range; see docs/rollout_file.md.")
    return Sample.build(**{name: record.get(name) for name in FIELDS}, sample_id=sample_id, extra=extra)


def _record(sample: Sample) -> dict[str, object]:
    needed = {name: getattr(sample, name) for name in ("step", "prompt_id", "rollout_id", "reward")}
    if missing := [name for name, value in needed.items() if value is None]:
        raise ValueError(
            f"sample {sample.sample_id} has no {missing[0]}, which the rollout file needs. Set it on the sample."
        )
    if not math.isfinite(sample.reward):
        raise ValueError(
            f"reward of sample {sample.sample_id} is {sample.reward}, which JSON cannot hold. Give a number."
        )
    advantages = _finite(sample.advantages)
    record = {
        **needed,
        "tokens": sample.tokens.tolist(),
        "response_length": sample.response_length,
        "loss_mask": sample.loss_mask.int().tolist(),
        "old_logprobs": _finite(sample.old_logprobs),
        "advantage": advantages[0] if len(set(advantages)) == 1 else advantages,
    }
    optional = {name: getattr(sample, name) for name in OPTIONAL}
    return record | {name: _finite(v) for name, v in optional.items() if v is not None} | sample.extra


def _finite(values: Tensor) -> list[float]:
    """Only masked tokens can hold values that are not finite, and nobody reads those: they are written as 0."""
    return torch.where(torch.isfinite(values), values, 0.0).tolist()
