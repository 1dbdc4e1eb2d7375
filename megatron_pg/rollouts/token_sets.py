"""A few token ids of the vocabulary per response token, and how likely another policy finds each: a teacher's top-k."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_pg.rollouts.printable import shorten

TOKEN_SETS = ("teacher_topk", "rollout_topk")  # fields of a sample
MOST_IDS = 512  # of a token
ABSENT = -1  # where a token has fewer ids than the longest
_MOST_MASS = 1.01  # of rounded log-probabilities


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSets:
    """K or fewer ids per response token with their log-probabilities, on the CPU; an id of -1 stands for none."""

    ids: Tensor  # [R, K] int32
    logprobs: Tensor  # [R, K] float32, nats; anything where there is no id

    @property
    def tails(self) -> Tensor:
        """[R] float64, the probability of all tokens that are not named: 1 - Σ p, a little below 0 where p are rounded."""
        named = torch.where(self.ids >= 0, self.logprobs.double(), -torch.inf)
        return 1.0 - named.exp().sum(dim=1)

    def lists(self) -> dict[str, list[list]]:
        """The ids that there are, and their log-probabilities, by response token, as the rollout file has them."""
        present = [[k for k, token in enumerate(row) if token >= 0] for row in self.ids.tolist()]
        found = {"ids": self.ids.tolist(), "logprobs": self.logprobs.tolist()}
        return {
            name: [[row[k] for k in kept] for row, kept in zip(rows, present, strict=True)]
            for name, rows in found.items()
        }


def token_sets_of(name: str, values: Any, label: str) -> TokenSets:
    """From a mapping of `ids` and `logprobs`: lists per token of lists, or arrays or tensors [R, K].

    Raises:
        ValueError: they are no such thing.
    """
    if isinstance(values, TokenSets):
        return values
    try:
        if {*values} != {"ids", "logprobs"}:
            raise TypeError
        ids, logprobs = _table(values["ids"], ABSENT), _table(values["logprobs"], 0)
        lengths = [_lengths(values[key]) for key in ("ids", "logprobs")]
        are_numbers = _fit_int32(ids) and logprobs.dtype.kind in "iuf"
        if are_numbers and lengths[0] == lengths[1]:
            tables = ids.astype(np.int32), logprobs.astype(np.float32)  # copies
            return TokenSets(ids=torch.from_numpy(tables[0]), logprobs=torch.from_numpy(tables[1]))
    except Exception:  # of whatever else was given
        ids = None
    raise ValueError(
        f"{name}={shorten(values)} of sample {label} are not ids and their log-probabilities, a list of each per response token, or arrays "
        '[R, K]. Give {"ids": …, "logprobs": …}.'
    )


def _table(rows: Any, filling: int) -> np.ndarray:
    """[R, K] from rows of any lengths, filled up."""
    if isinstance(rows, (Tensor, np.ndarray)):
        if isinstance(rows, Tensor):  # numpy has no bfloat16
            rows = rows.detach().cpu()
            rows = rows.float() if rows.dtype.is_floating_point else rows
        array = np.asarray(rows)
        if array.ndim != 2:
            raise TypeError
        return array
    width = max(map(len, rows), default=0)
    filled = [[*row, *[filling] * (width - len(row))] for row in rows]
    kinds = {type(value) for row in rows for value in row}
    if not kinds <= {int, float}:
        raise TypeError
    table = np.array(filled, dtype=np.float64 if float in kinds else np.int64)
    return table.reshape(len(rows), width)


def _fit_int32(ids: np.ndarray) -> bool:
    return ids.dtype.kind in "iu" and (ids.size == 0 or (int(ids.min()) >= -(2**31) and int(ids.max()) < 2**31))


def _lengths(rows: Any) -> Sequence[int]:
    return [len(row) for row in rows]


def check_token_sets(name: str, sets: Any, length: int, trained: Tensor, label: str) -> None:
    """Refuse what is no set of ids per response token; at tokens that nothing trains it may hold anything.

    Args:
        name: of the field.
        sets: the field.
        length: R.
        trained: [R] bool.
        label: what messages call the sample.

    Raises:
        ValueError: shapes or dtypes cannot be, or ids or log-probabilities at a trained token.
    """
    if (
        not isinstance(sets, TokenSets)
        or not _is_table(sets.ids, torch.int32)
        or not _is_table(sets.logprobs, torch.float32)
    ):
        raise ValueError(
            f"{name} of sample {label} are not TokenSets of [R, K] int32 and [R, K] float32 on the CPU. Use Sample.build, which takes lists."
        )
    if sets.ids.shape != sets.logprobs.shape or len(sets.ids) != length:
        raise ValueError(
            f"{name} of sample {label} have ids {tuple(sets.ids.shape)} and logprobs {tuple(sets.logprobs.shape)} for {length} response "
            "tokens, so they would not align. Give both per response token."
        )
    if sets.ids.shape[1] > MOST_IDS:
        raise ValueError(
            f"{name} of sample {label} have {sets.ids.shape[1]} ids per token, more than the {MOST_IDS} that are read. Keep the likeliest; "
            "the others are counted as one."
        )
    _check_values(name, sets.ids, sets.logprobs, trained, label)


def _is_table(values: Any, dtype: torch.dtype) -> bool:
    is_plain = isinstance(values, Tensor) and values.layout == torch.strided and not values.is_nested
    return is_plain and values.dim() == 2 and values.dtype == dtype and values.device.type == "cpu"


def _check_values(name: str, ids: Tensor, logprobs: Tensor, trained: Tensor, label: str) -> None:
    present = ids >= 0
    ordered = ids.sort(dim=1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(dim=1)
    mass = torch.where(present, logprobs.double(), -torch.inf).exp().sum(dim=1)
    wrong: Mapping[str, Tensor] = {
        "hold a negative number other than -1, which is no token": (ids < ABSENT).any(dim=1),
        "name a token twice, which would count twice": twice,
        "hold a log-probability that is not finite, so the loss would not be": (
            present & ~torch.isfinite(logprobs)
        ).any(dim=1),
        f"are probabilities that sum to more than {_MOST_MASS}, so they are of no distribution": mass > _MOST_MASS,
    }
    for what, rows in wrong.items():
        if (bad := (rows & trained).nonzero()).numel():
            raise ValueError(
                f"{name} of sample {label} {what}: at response token {int(bad[0])}. Mask the token or repair the record; -1 stands for no id."
            )
