"""Samples, and the neutral rollout file that holds them (docs/rollout_file.md).

A sample is one training sequence: prompt and response tokens, and what reinforcement learning knows about the
response. Everything is checked here, at the door, so that nothing later has to.
"""

import json
import math
import numbers
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megatron_pg.cp_utils import check_lengths
from megatron_pg.rollouts.printable import printable
from megatron_pg.rollouts.lines import FORMAT, VERSION, RolloutFileError, no_samples_message, read_records, shorten

_REQUIRED = (
    "step",
    "prompt_id",
    "rollout_id",
    "tokens",
    "response_length",
    "loss_mask",
    "old_logprobs",
    "reward",
    "advantage",
)
_OPTIONAL = ("rollout_logprobs", "ref_logprobs")

Id = int | str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One training sequence, whole, on the CPU. Response-aligned fields have one entry per response token (R).

    Values at masked tokens may be anything, NaN included: they are selected away. At trained tokens they must be
    finite.

    Raises:
        ValueError: shapes, dtypes or lengths disagree, the mask is not 0/1, or a trained token has a value that is
            not finite.
    """

    tokens: Tensor  # [n] int64, prompt then response
    loss_mask: Tensor  # [R] bool, True where the token is trained
    old_logprobs: Tensor  # [R] float64, nats, of the sampling policy at the training temperature
    advantages: Tensor  # [R] float64
    sample_id: str = "?"  # what error messages call it
    prompt_id: Id | None = None  # samples of one prompt share it
    rollout_id: Id | None = None  # samples of one trajectory share it
    rollout_logprobs: Tensor | None = None  # [R] float64, nats, as the rollout engine reported them
    ref_logprobs: Tensor | None = None  # [R] float64, nats, of the reference policy
    step: int | None = None  # optimizer step that it belongs to
    reward: float | None = None
    extra: dict[str, object] = field(default_factory=dict)  # the user's own x_ fields

    def __post_init__(self):
        object.__setattr__(self, "sample_id", printable(self.sample_id))
        _check_tokens(self.tokens, self.sample_id)
        _check_mask(self.loss_mask, self.sample_id)
        check_lengths(len(self.tokens), len(self.loss_mask))
        for name in ("prompt_id", "rollout_id"):
            value = getattr(self, name)
            if value is not None and not _is_id(value):
                raise ValueError(
                    f"{name}={shorten(value)} of sample {self.sample_id} is neither a string of printable characters nor an integer "
                    "of 62 bits, so units could not be counted or named. Give one."
                )
        for name in ("old_logprobs", "advantages", *_OPTIONAL):
            _check_values(name, getattr(self, name), self.loss_mask, self.sample_id)
        for name in ("old_logprobs", *_OPTIONAL):
            _check_not_positive(name, getattr(self, name), self.loss_mask, self.sample_id)

    @classmethod
    def build(
        cls,
        *,
        tokens: Sequence[int],
        response_length: int,
        loss_mask: Sequence[int],
        old_logprobs: Sequence[float],
        advantage: float | Sequence[float],
        **rest: object,
    ) -> "Sample":
        """A sample from plain lists; `advantage` is one number for the whole response or one per response token.

        Args:
            tokens: prompt and response token ids.
            response_length: R, the number of response tokens.
            loss_mask: R entries, 0 or 1.
            old_logprobs: R log-probabilities in nats.
            advantage: a number or R numbers.
            rest: any other field of `Sample`; log-probability fields may be lists.
        """
        label = printable(rest.setdefault("sample_id", str(rest.get("rollout_id") or rest.get("prompt_id") or "?")))
        if len(loss_mask) != response_length:
            raise ValueError(_length_message("loss_mask", len(loss_mask), response_length, label))
        if isinstance(advantage, numbers.Real):
            advantage = [float(advantage)] * response_length
        if torch.as_tensor(tokens).dtype.is_floating_point:
            raise ValueError(
                f"tokens of sample {label} are fractions, not token ids, and none may be rounded. Give integers."
            )
        for name in _OPTIONAL:
            if rest.get(name) is not None:
                rest[name] = torch.as_tensor(rest[name], dtype=torch.float64)
        return cls(
            tokens=torch.as_tensor(tokens, dtype=torch.int64),
            loss_mask=_as_mask(loss_mask, label),
            old_logprobs=torch.as_tensor(old_logprobs, dtype=torch.float64),
            advantages=torch.as_tensor(advantage, dtype=torch.float64),
            **rest,
        )

    @property
    def response_length(self) -> int:
        """R, the number of response tokens, trained or not."""
        return len(self.loss_mask)

    @property
    def num_trained(self) -> int:
        """M_i, the number of trained tokens."""
        return int(self.loss_mask.sum())


def read_rollouts(path: str | Path) -> list[Sample]:
    """Read and check a whole rollout file before anything is trained.

    Raises:
        RolloutFileError: with file and line, for whatever does not follow docs/rollout_file.md.
    """
    path = Path(path)
    shown = printable(str(path), limit=None)
    samples = []
    for number, record in read_records(path):
        try:
            samples.append(sample_of(record, f"{path.name}:{number}"))
        except ValueError as error:
            raise RolloutFileError(f"{shown}:{number}: {error}") from error
    if not samples:
        raise RolloutFileError(no_samples_message(path))
    return samples


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
    if missing := [name for name in _REQUIRED if name not in record]:
        raise ValueError(
            f"field {missing[0]!r} is missing, so the sample cannot be trained. Required: {', '.join(_REQUIRED)}."
        )
    extra = {name: value for name, value in record.items() if name not in _REQUIRED and name not in _OPTIONAL}
    if unknown := [name for name in extra if not name.startswith("x_")]:
        raise ValueError(f"unknown field {shorten(unknown[0])}; is it misspelt? Your own fields begin with x_.")
    for name, check in _FIELD_TYPES.items():
        if name in record and not check(record[name]):
            raise ValueError(f"{name}={shorten(record[name])} has the wrong type or range; see docs/rollout_file.md.")
    return Sample.build(
        tokens=record["tokens"],
        response_length=record["response_length"],
        loss_mask=record["loss_mask"],
        old_logprobs=record["old_logprobs"],
        advantage=record["advantage"],
        sample_id=sample_id,
        extra=extra,
        **{name: record.get(name) for name in ("prompt_id", "rollout_id", "step", "reward", *_OPTIONAL)},
    )


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
    optional = {name: getattr(sample, name) for name in _OPTIONAL}
    return record | {name: _finite(v) for name, v in optional.items() if v is not None} | sample.extra


def _finite(values: Tensor) -> list[float]:
    """Only masked tokens can hold values that are not finite, and nobody reads those: they are written as 0."""
    return torch.where(torch.isfinite(values), values, 0.0).tolist()


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= sys.float_info.max  # an integer may be larger than any float


def _is_list(check) -> object:
    return lambda value: isinstance(value, list) and all(check(item) for item in value)


def _is_id(value: object) -> bool:
    if isinstance(value, str):
        return value.isprintable()  # ids reach logs and are hashed as UTF-8: no control character, no lone surrogate
    return _is_int(value) and abs(value) < 2**62


_FIELD_TYPES = {
    "step": lambda value: _is_int(value) and 0 <= value < 2**62,
    "prompt_id": _is_id,
    "rollout_id": _is_id,
    "tokens": _is_list(lambda value: _is_int(value) and 0 <= value < 2**31),
    "response_length": _is_int,
    "loss_mask": _is_list(_is_number),
    "old_logprobs": _is_list(_is_number),
    "reward": _is_number,
    "advantage": lambda value: _is_number(value) or _is_list(_is_number)(value),
    "rollout_logprobs": _is_list(_is_number),
    "ref_logprobs": _is_list(_is_number),
}


def _as_mask(loss_mask: Sequence[int], label: object) -> Tensor:
    mask = torch.as_tensor(loss_mask)
    if mask.numel() and not torch.isin(mask, torch.tensor([0, 1], dtype=mask.dtype)).all():
        bad = next(float(value) for value in mask if value not in (0, 1))
        raise ValueError(f"loss_mask of sample {label} must be 0 or 1, got {bad:g}; put weights into the advantages")
    return mask.bool()


def _length_message(name: str, length: int, response_length: int, label: object) -> str:
    return (
        f"{name} of sample {label} has {length} entries for {response_length} response tokens, so they would not align. "
        "Give one per response token."
    )


def _check_tokens(tokens: Tensor, label: str) -> None:
    if tokens.dim() != 1 or tokens.dtype != torch.int64:
        raise ValueError(
            f"tokens of sample {label} have shape {tuple(tokens.shape)} and dtype {tokens.dtype}, not [n] int64. Give one "
            "flat list of token ids."
        )
    if len(tokens) and tokens.min() < 0:
        raise ValueError(
            f"tokens of sample {label} hold {int(tokens.min())}, which is no token id. Remove padding first."
        )


def _check_mask(mask: Tensor, label: str) -> None:
    if mask.dim() != 1 or mask.dtype != torch.bool:
        raise ValueError(
            f"loss_mask of sample {label} has shape {tuple(mask.shape)} and dtype {mask.dtype}, not [R] bool. "
            "Use Sample.build, which also takes 0 and 1."
        )


def _check_not_positive(name: str, logprobs: Tensor | None, mask: Tensor, label: str) -> None:
    if logprobs is None or not (logprobs[mask] > 1e-3).any():  # rounding may leave a little above 0
        return
    raise ValueError(
        f"{name} of sample {label} reach {float(logprobs[mask].max()):g}, log-probabilities are at most 0, so the ratio would be "
        "wrong. Were probabilities or negative log-likelihoods given?"
    )


def _check_values(name: str, values: Tensor | None, mask: Tensor, label: str) -> None:
    if values is None:
        return
    if values.shape != mask.shape:
        raise ValueError(_length_message(name, len(values) if values.dim() else 1, len(mask), label))
    if not values.dtype.is_floating_point:
        raise ValueError(f"{name} of sample {label} have dtype {values.dtype}, not a floating-point one. Convert them.")
    bad = (mask & ~torch.isfinite(values)).nonzero()
    if len(bad):
        position = int(bad[0])
        raise ValueError(
            f"{name} of sample {label} is {float(values[position])} at response token {position}, which is trained, so the loss "
            "would not be finite. Mask the token or repair the value."
        )
