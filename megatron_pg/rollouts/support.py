"""The tokens that the rollout engine could have sampled in the place of each response token: what top-p and top-k have left."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_pg.rollouts.fields import is_int
from megatron_pg.rollouts.printable import shorten

_IDS = ("ids", "token_ids")  # ours, and vLLM's


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Support:
    """One set of ids per response token, one behind the other, on the CPU: token k's is ids[offsets[k] : offsets[k + 1]].

    An empty one stands for the whole vocabulary.
    """

    ids: Tensor  # [n] int32
    offsets: Tensor  # [R + 1] int64, from 0 to n

    @property
    def counts(self) -> Tensor:
        """[R] int64, ids of each token; 0: the whole vocabulary."""
        return self.offsets.diff()

    @property
    def positions(self) -> Tensor:
        """[n] int64, which response token an id is of."""
        return torch.repeat_interleave(torch.arange(len(self.offsets) - 1), self.counts)

    def any_of(self, wrong: Tensor) -> Tensor:
        """[R] bool, whether one of a token's ids is wrong [n] bool."""
        return torch.zeros(len(self.offsets) - 1, dtype=torch.bool).index_fill(0, self.positions[wrong], True)

    def holds(self, tokens: Tensor) -> Tensor:
        """[R] bool, whether each of the tokens [R] is in its set."""
        return self.any_of(self.ids == tokens[self.positions]) | (self.counts == 0)

    def lists(self) -> dict[str, list[int]]:
        """As the rollout file has it."""
        return {"ids": self.ids.tolist(), "offsets": self.offsets.tolist()}


def support_of(values: Any, label: str) -> Support:
    """From a list of ids per response token, or a mapping of `ids` (vLLM: `token_ids`) and `offsets`, lists, arrays or tensors.

    Raises:
        ValueError: they are no such thing.
    """
    if isinstance(values, Support):
        return values
    try:
        if isinstance(values, Mapping):
            ids, offsets = _flat(values)
        else:
            rows = [row.tolist() if isinstance(row, (Tensor, np.ndarray)) else list(row) for row in values]
            ids, offsets = [token for row in rows for token in row], np.cumsum([0, *map(len, rows)])
        found = {"ids": _integers(ids, np.int32), "offsets": _integers(offsets, np.int64)}
        return Support(**{name: torch.from_numpy(array) for name, array in found.items()})
    except Exception:  # of whatever else was given
        ids = None
    raise ValueError(
        f"support={shorten(values)} of sample {label} is not the ids that could be sampled. Give a list of them per response token, or "
        '{"ids": …, "offsets": …}: all lists, one behind the other, and where each begins and the last ends.'
    )


def _flat(values: Mapping) -> tuple[Any, Any]:
    (name,) = {*values} - {"offsets"}
    if name not in _IDS:
        raise TypeError
    return values[name], values["offsets"]


def _integers(values: Any, dtype: Any) -> np.ndarray:
    """A copy, of one dimension."""
    if isinstance(values, (Tensor, np.ndarray)):
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
        is_plain = array.dtype.kind in "iu"
    else:
        array, is_plain = np.array(values, dtype=np.int64), all(map(is_int, values))
    bounds = np.iinfo(dtype)
    if not is_plain or array.ndim != 1 or (array.size and not bounds.min <= array.min() <= array.max() <= bounds.max):
        raise TypeError
    return array.astype(dtype)


def check_support(support: Any, length: int, trained: Tensor, label: str) -> None:
    """Refuse what is no set of ids per response token; at tokens that the objective does not train it may hold any integers.

    Args:
        support: the field.
        length: R.
        trained: [R] bool.
        label: what messages call the sample.

    Raises:
        ValueError: shapes or dtypes cannot be, or ids at a trained token.
    """
    if (
        not isinstance(support, Support)
        or not _is_vector(support.ids, torch.int32)
        or not _is_vector(support.offsets, torch.int64)
    ):
        raise ValueError(
            f"support of sample {label} is no Support of [n] int32 and [R + 1] int64 on the CPU. Use Sample.build, which takes lists."
        )
    offsets = support.offsets
    ends = (int(offsets[0]), int(offsets[-1])) if len(offsets) else None
    if len(offsets) != length + 1 or ends != (0, len(support.ids)) or (support.counts < 0).any():
        raise ValueError(
            f"support of sample {label} has {len(offsets)} offsets for {length} response tokens and {len(support.ids)} ids, or they do not "
            f"rise from 0 to {len(support.ids)}, so sets and tokens would not align. Give one more than there are response tokens."
        )
    check_ids(support, trained, label)


def check_ids(support: Support, trained: Tensor, label: str) -> None:
    """Refuse negative ids and ids that are there twice, at the `trained` tokens [R].

    Raises:
        ValueError: for the first of them.
    """
    keys = (support.positions * 2**32 + support.ids).sort()
    twice = torch.zeros(len(keys.values), dtype=torch.bool)
    twice[keys.indices[1:]] = keys.values[1:] == keys.values[:-1]
    for what, wrong in {
        "holds a negative number, which is no token": support.ids < 0,
        "names a token twice, which would count twice": twice,
    }.items():
        if (bad := (support.any_of(wrong) & trained).nonzero()).numel():
            raise ValueError(
                f"support of sample {label} {what}: at response token {int(bad[0])}. Mask the token or repair the record."
            )


def _is_vector(values: Any, dtype: torch.dtype) -> bool:
    is_plain = isinstance(values, Tensor) and values.layout == torch.strided and not values.is_nested
    return is_plain and values.dim() == 1 and values.dtype == dtype and values.device.type == "cpu"
