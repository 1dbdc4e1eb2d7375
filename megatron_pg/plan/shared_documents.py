"""`--docs-per-step` under `dynamic_cp`: every rank has all documents, and each micro-batch is split over its own ranks.

The lengths of the whole step determine which ranks hold a document, so ranks have no separate iterators. All ranks take
the same documents and compute the same number of micro-batches; one small all-gather compares both.
"""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch.distributed import ProcessGroup

from megatron_pg.batch import PackedBatch
from megatron_pg.plan.collectives import gathered
from megatron_pg.plan.documents import Accumulator, Counts, Draft, Group, Position, StepRule
from megatron_pg.rollouts.sample import Sample

# This rank's K micro-batches of a step; raises ValueError if K is too small.
Cut = Callable[[Sequence[Sample], int], list[PackedBatch]]


class SharedDocumentAccumulator(Accumulator):
    """Takes documents step by step if every rank has the same documents.

    Args:
        rule: the same on every rank.
        cut: makes a given number of micro-batches of a step for this rank (`cut_over_ranks`).
        room: tokens of a micro-batch over all ranks.
        position: the position at which the run begins.
    """

    def __init__(self, *, rule: StepRule, cut: Cut, room: int, position: Position):
        super().__init__(rule, position, capacity=0, size_of=lambda _: 1)  # a round takes one group of any size
        self._cut, self._room = cut, room

    def _fill(
        self, draft: Draft, group: ProcessGroup | None, error: Exception | None, schedulable: Callable[[int], int]
    ) -> tuple[list[Counts], list[PackedBatch], Exception | None]:
        (mine,), error = self._rounds(draft, None, error)
        batches: list[PackedBatch] = []
        try:
            if error is None:
                batches = self._fewest([document for taken in draft.taken for document in taken], schedulable)
        except Exception as failure:  # travels to the other ranks, so that all of them stop
            error = failure
        row = [error is not None, mine.documents, mine.next_group, len(batches), _digest(draft.taken)]
        rows = gathered(torch.tensor(row, dtype=torch.int64), group, error).tolist()
        if any(has_failed for has_failed, *_ in rows):
            return [mine._replace(has_failed=True)], [], error
        if strays := [rank for rank, values in enumerate(rows) if values != rows[0]]:
            error = ValueError(
                f"ranks 0 and {strays[0]} have different documents ({rows[0][1]} and {rows[strays[0]][1]} in this "
                "step). Under dynamic_cp `Documents.begin` must give every rank the documents of the whole run, in the "
                "same order."
            )
        return [mine], batches, error

    def _fewest(self, samples: Sequence[Sample], schedulable: Callable[[int], int]) -> list[PackedBatch]:
        """The fewest micro-batches that hold the step."""
        least = -(-sum(len(sample.tokens) for sample in samples) // self._room)  # each trial may take a second
        for count in range(max(1, min(least, len(samples))), len(samples) + 1):
            try:
                return self._cut(samples, schedulable(count))
            except ValueError:
                if count == len(samples):
                    raise
        return []


def _digest(groups: Sequence[Group]) -> int:
    content = hashlib.blake2b(digest_size=7)
    for group in groups:
        for document in group:
            content.update(document.tokens.numpy().tobytes() + document.loss_mask.numpy().tobytes())
    return int.from_bytes(content.digest(), "big")
