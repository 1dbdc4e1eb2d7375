"""The tokens that the rollout engine could have sampled at each response token: what top-p and top-k leave."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_pg.rollouts.fields import POLICY, is_int
from megatron_pg.rollouts.payloads.base import Layout, Payload, Rows, first_trained, integers, is_plain

_IDS = ("ids", "token_ids")  # ours, and vLLM's


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingMask(Rows):
    """What could have been sampled at T rows: row t's ids are ids[starts[t] : starts[t] + counts[t]]."""

    per_row = ("starts", "counts")
    starts: Tensor  # [T] int64
    counts: Tensor  # [T] int64; 0: the whole vocabulary
    ids: Tensor  # [n] int32, global ids, of these rows and possibly of others
    longest: int  # most ids of a row

    @classmethod
    def of(cls, ids: Tensor, offsets: Tensor) -> "SamplingMask":
        """Of T rows, from ids [n] int32 and offsets [T + 1] int64; the host waits for their device.

        Raises:
            ValueError: the offsets do not rise from 0 to n.
        """
        counts = offsets.diff()
        if len(offsets) == 0 or [int(offsets[0]), int(offsets[-1])] != [0, len(ids)] or (counts < 0).any():
            raise ValueError(
                f"offsets do not rise from 0 to {len(ids)}, the number of ids. Give T + 1 of them: where each row "
                "begins, and where the last one ends."
            )
        longest = int(counts.max()) if len(counts) else 0
        return cls(starts=offsets[:-1], counts=counts, ids=ids, longest=longest)

    def table(self) -> Tensor:
        """[T, longest] int32, -1 where a row has fewer ids."""
        k = torch.arange(self.longest, device=self.ids.device)
        is_id = k < self.counts[:, None]
        return torch.where(is_id, self.ids[torch.where(is_id, self.starts[:, None] + k, 0)], -1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedMask:
    """One set of ids per response token, concatenated, on the CPU: token k's set is ids[offsets[k] : offsets[k + 1]].

    An empty set means the whole vocabulary.
    """

    ids: Tensor  # [n] int32
    offsets: Tensor  # [R + 1] int64, from 0 to n

    @property
    def counts(self) -> Tensor:
        """[R] int64, ids of each token; 0: the whole vocabulary."""
        return self.offsets.diff()

    @property
    def positions(self) -> Tensor:
        """[n] int64, the response token of each id."""
        # torch.repeat_interleave splits even a few tokens over all threads, which wait for each other on busy cores.
        return torch.from_numpy(np.repeat(np.arange(len(self.offsets) - 1), self.counts.numpy()))

    def any_of(self, wrong: Tensor) -> Tensor:
        """[R] bool, whether one of a token's ids is wrong [n] bool."""
        return torch.zeros(len(self.offsets) - 1, dtype=torch.bool).index_fill(0, self.positions[wrong], True)

    def contains(self, tokens: Tensor) -> Tensor:
        """[R] bool, whether each of the tokens [R] is in its set."""
        return self.any_of(self.ids == tokens[self.positions]) | (self.counts == 0)

    def lists(self) -> dict[str, list[int]]:
        """The JSON form."""
        return {"ids": self.ids.tolist(), "offsets": self.offsets.tolist()}


class SampledTokens(Payload[RecordedMask]):
    """`RecordedMask`; at tokens that the objective does not train its ids may be arbitrary."""

    form = (
        "is not the ids that could be sampled. Give a list of ids per response token, or "
        '{"ids": …, "offsets": …}: all lists, concatenated, and where each begins and the last ends.'
    )

    def parse(self, values: Any) -> RecordedMask:
        """From a list of ids per response token, or a mapping of `ids` (vLLM: `token_ids`) and `offsets`."""
        if isinstance(values, RecordedMask):
            return values
        if isinstance(values, Mapping):
            (name,) = {*values} - {"offsets"}
            if name not in _IDS:
                raise TypeError
            ids, offsets = values[name], values["offsets"]
        else:
            rows = [row.tolist() if isinstance(row, (Tensor, np.ndarray)) else list(row) for row in values]
            ids, offsets = [token for row in rows for token in row], np.cumsum([0, *map(len, rows)])
        return RecordedMask(ids=_vector(ids, np.int32), offsets=_vector(offsets, np.int64))

    def check(self, record: Any, sample: Any) -> None:
        """Raise ValueError for other shapes or dtypes, and for a token of the objective with wrong ids."""
        label = f"{self.name} of sample {sample.sample_id}"
        is_record = isinstance(record, RecordedMask) and is_plain(record.ids, 1, torch.int32)
        if not is_record or not is_plain(record.offsets, 1, torch.int64):
            raise ValueError(
                f"{label} is not a RecordedMask of [n] int32 and [R + 1] int64 on the CPU. Use Sample.build, which "
                "takes lists."
            )
        offsets, length = record.offsets, sample.response_length
        ends = (int(offsets[0]), int(offsets[-1])) if len(offsets) else None
        if len(offsets) != length + 1 or ends != (0, len(record.ids)) or (record.counts < 0).any():
            raise ValueError(
                f"{label} has {len(offsets)} offsets for {length} response tokens and {len(record.ids)} ids, or they "
                f"do not rise from 0 to {len(record.ids)}, so sets and tokens do not align. Give one more than there "
                "are response tokens."
            )
        check_ids(record, sample.loss_mask & (sample.term == POLICY), sample.sample_id)

    def to_json(self, record: RecordedMask) -> dict[str, list[int]]:
        """Ids and offsets."""
        return record.lists()

    def rows(self, records: Sequence[RecordedMask | None], layout: Layout, is_read: Tensor) -> SamplingMask | None:
        """Rows at which no term reads it have the whole vocabulary; None if all rows do."""
        if all(record is None for record in records):
            return None
        without = [torch.zeros(length, dtype=torch.int64) for length in layout.lengths]
        counts = torch.cat([n if record is None else record.counts for record, n in zip(records, without, strict=True)])
        ids = torch.cat([record.ids for record in records if record is not None])
        whole = SamplingMask.of(ids, torch.nn.functional.pad(counts.cumsum(0), (1, 0))).map(layout.here)
        whole = replace(whole, counts=torch.where(is_read, whole.counts, 0))
        return whole if whole.counts.any() else None


def _vector(values: Any, dtype: Any) -> Tensor:
    if not isinstance(values, (Tensor, np.ndarray)):
        if not all(map(is_int, values)):
            raise TypeError
        values = np.array(values, dtype=np.int64)
    array = integers(values, dtype)
    if array.ndim != 1:
        raise TypeError
    return torch.from_numpy(array)


def check_ids(record: RecordedMask, trained: Tensor, label: str) -> None:
    """Refuse negative ids and repeated ids at the `trained` tokens [R].

    Raises:
        ValueError: for the first of them.
    """
    keys = (record.positions * 2**32 + record.ids).sort()
    twice = torch.zeros(len(keys.values), dtype=torch.bool)
    twice[keys.indices[1:]] = keys.values[1:] == keys.values[:-1]
    for mistake, wrong in {
        "contains a negative number, which is not a token": record.ids < 0,
        "names a token twice, which would count twice": twice,
    }.items():
        if (k := first_trained(record.any_of(wrong), trained)) is not None:
            raise ValueError(
                f"sampling_mask of sample {label} {mistake}: at response token {k}. Mask the token or repair the "
                "record."
            )
