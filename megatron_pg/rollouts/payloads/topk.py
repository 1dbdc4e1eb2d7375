"""The top-k tokens of a teacher or an engine at each response token, with their log-probabilities."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_pg.rollouts.payloads.base import Layout, Payload, Rows, first_trained, integers, is_plain

MOST_IDS = 512  # of a token
ABSENT = -1  # fills the row of a token that has fewer ids than another
_MOST_MASS = 1.01  # of rounded log-probabilities


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopK(Rows):
    """The teacher's top-k tokens at T rows; where no term reads them they may be arbitrary."""

    per_row = ("ids", "logprobs", "tails")
    ids: Tensor  # [T, K] int32, global ids, -1 for none
    logprobs: Tensor  # [T, K] float32, nats
    tails: Tensor  # [T] float64, the teacher's probability of all other tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSets:
    """At most K ids per response token with their log-probabilities, on the CPU; an id of -1 means none."""

    ids: Tensor  # [R, K] int32
    logprobs: Tensor  # [R, K] float32, nats; arbitrary where the id is -1

    @property
    def tails(self) -> Tensor:
        """[R] float64, the probability of all other tokens: 1 - Σ p, a little below 0 where p are rounded."""
        named = torch.where(self.ids >= 0, self.logprobs.double(), -torch.inf)
        return 1.0 - named.exp().sum(dim=1)

    def lists(self) -> dict[str, list[list]]:
        """The ids other than -1, and their log-probabilities, by response token."""
        ids, logprobs = self.ids.numpy(), self.logprobs.numpy()
        return {
            name: [row[named].tolist() for row, named in zip(values, ids >= 0, strict=True)]
            for name, values in (("ids", ids), ("logprobs", logprobs))
        }


class TopKTokens(Payload[TokenSets]):
    """`TokenSets`; at tokens that nothing trains they may be arbitrary."""

    form = (
        "are not ids and their log-probabilities, a list of each per response token, or arrays [R, K]. "
        'Give {"ids": …, "logprobs": …}.'
    )

    def parse(self, values: Any) -> TokenSets:
        """From a mapping of `ids` and `logprobs`: lists per token of lists, or arrays or tensors [R, K]."""
        if isinstance(values, TokenSets):
            return values
        if {*values} != {"ids", "logprobs"} or [*map(len, values["ids"])] != [*map(len, values["logprobs"])]:
            raise TypeError
        ids, logprobs = _table(values["ids"], ABSENT), _table(values["logprobs"], 0)
        if logprobs.dtype.kind not in "iuf":
            raise TypeError
        return TokenSets(ids=torch.from_numpy(integers(ids)), logprobs=torch.from_numpy(logprobs.astype(np.float32)))

    def check(self, record: Any, sample: Any) -> None:
        """Raise ValueError for other shapes or dtypes, and for a trained token with wrong ids or log-probabilities."""
        label = f"{self.name} of sample {sample.sample_id}"
        is_sets = isinstance(record, TokenSets) and is_plain(record.ids, 2, torch.int32)
        if not is_sets or not is_plain(record.logprobs, 2, torch.float32):
            raise ValueError(
                f"{label} are not TokenSets of [R, K] int32 and [R, K] float32 on the CPU. "
                "Use Sample.build, which takes lists."
            )
        if record.ids.shape != record.logprobs.shape or len(record.ids) != sample.response_length:
            raise ValueError(
                f"{label} have ids {tuple(record.ids.shape)} and logprobs {tuple(record.logprobs.shape)} for "
                f"{sample.response_length} response tokens, so they do not align. Give both per response token."
            )
        if record.ids.shape[1] > MOST_IDS:
            raise ValueError(
                f"{label} have {record.ids.shape[1]} ids per token, more than the {MOST_IDS} that are read. Keep the "
                "most likely; the others are counted as one."
            )
        for mistake, tokens in _mistakes(record).items():
            if (k := first_trained(tokens, sample.trained)) is not None:
                raise ValueError(
                    f"{label} {mistake}: at response token {k}. Mask the token or repair the record; -1 means no id."
                )

    def check_read(self, record: TokenSets, mask: Tensor, sample_id: str, flag: str) -> None:
        """Raise ValueError for a token without an id."""
        if (bad := mask & (record.ids < 0).all(dim=1)).any():
            raise ValueError(
                f"{self.name} of sample {sample_id} has no id at response token {int(bad.nonzero()[0])}, which {flag} "
                "trains. Take the token out of the mask, or record the teacher there."
            )

    def to_json(self, record: TokenSets) -> dict[str, list[list]]:
        """Lists per token; a number that is not finite, which only an untrained token can have, is written as 0."""
        logprobs = torch.where(torch.isfinite(record.logprobs), record.logprobs, 0.0)
        return TokenSets(ids=record.ids, logprobs=logprobs).lists()

    def rows(self, records: Sequence[TokenSets | None], layout: Layout, is_read: Tensor) -> TopK:
        """As wide as the widest record; no ids where a sample has none."""
        width = max((record.ids.shape[1] for record in records if record is not None), default=0) or 1
        size = sum(layout.lengths)
        whole = TopK(
            ids=torch.full((size, width), ABSENT, dtype=torch.int32),
            logprobs=torch.zeros(size, width),
            tails=torch.ones(size, dtype=torch.float64),
        )
        parts = zip(records, *(getattr(whole, name).split(layout.lengths) for name in TopK.per_row), strict=True)
        for record, ids, logprobs, tails in parts:
            if record is not None:
                ids[:, : record.ids.shape[1]] = record.ids
                logprobs[:, : record.ids.shape[1]] = record.logprobs
                tails.copy_(record.tails)
        return whole.map(layout.here)


def _table(rows: Any, filling: int) -> np.ndarray:
    """[R, K] from rows of any lengths, filled up."""
    if isinstance(rows, Tensor):  # numpy has no bfloat16
        rows = (rows.float() if rows.dtype.is_floating_point else rows).detach().cpu().numpy()
    if isinstance(rows, np.ndarray):
        if rows.ndim != 2:
            raise TypeError
        return rows
    width = max(map(len, rows), default=0)
    filled = [[*row, *[filling] * (width - len(row))] for row in rows]
    kinds = {type(value) for row in rows for value in row}
    if not kinds <= {int, float}:
        raise TypeError
    table = np.array(filled, dtype=np.float64 if float in kinds else np.int64)
    return table.reshape(len(rows), width)


def _mistakes(record: TokenSets) -> Mapping[str, Tensor]:
    """[R] bool each, the tokens of each mistake."""
    ids, logprobs, present = record.ids, record.logprobs, record.ids >= 0
    ordered = ids.sort(dim=1).values
    mass = torch.where(present, logprobs.double(), -torch.inf).exp().sum(dim=1)
    return {
        "contain a negative number other than -1, which is not a token": (ids < ABSENT).any(dim=1),
        "name a token twice, which would count twice": (
            (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        ).any(dim=1),
        "contain a log-probability that is not finite, so neither is the loss": (
            present & ~torch.isfinite(logprobs)
        ).any(dim=1),
        f"are probabilities that sum to more than {_MOST_MASS}, which is not a distribution": mass > _MOST_MASS,
    }
