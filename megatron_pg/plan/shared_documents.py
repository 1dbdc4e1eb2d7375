"""`--docs-per-step` under `dynamic_cp`: every rank has all documents, and each micro-batch is split over its own ranks.

The lengths of the whole step determine which ranks hold a document, so ranks have no separate iterators. All ranks take
the same documents and compute the same number of micro-batches; one small all-gather compares both.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.distributed import ProcessGroup

from megatron_pg.batch import PackedBatch
from megatron_pg.plan.collectives import all_gather_rows
from megatron_pg.plan.documents import Draft, Group, Position, StepDocuments, StepRule, check_end
from megatron_pg.rollouts.sample import Sample

# This rank's K micro-batches of a step; raises ValueError if K is too small.
Cut = Callable[[Sequence[Sample], int], list[PackedBatch]]


class _OneGroup:
    """A packing with which a round takes one group of any size."""

    capacity = 0

    def size_of(self, document: Sample) -> int:
        return 1


class SharedDocumentAccumulator:
    """Takes documents step by step if every rank has the same documents.

    Args:
        rule: the same on every rank.
        cut: makes a given number of micro-batches of a step for this rank (`cut_over_ranks`).
        room: tokens of a micro-batch over all ranks.
        position: the position at which the run begins.
    """

    def __init__(self, *, rule: StepRule, cut: Cut, room: int, position: Position):
        self._rule, self._cut, self._room = rule, cut, room
        self.position = position  # after the last step
        self._waiting: list[Group] = []
        self._before = position, self._waiting  # position and pulled groups of the last step

    def take(
        self,
        source: Iterator,
        *,
        group: ProcessGroup | None,
        error: Exception | None = None,
        undivided: Sequence[str] = ("rollout_id",),
        schedulable: Callable[[int], int] = lambda count: count,
    ) -> tuple[list[PackedBatch], StepDocuments | None, Exception | None]:
        """The next step's micro-batches of this rank, as `DocumentAccumulator.take`.

        `group` is Megatron's data-parallel group with context parallelism, every rank of which must call.

        Raises:
            EndOfDocuments: on every rank of `group`.
        """
        if getattr(source, "replaying", False):
            (self.position, self._waiting), source = self._before, iter(())
        draft = Draft(_OneGroup(), self._waiting, source, undivided)
        batches: list[PackedBatch] = []
        try:
            if error is None:
                self._fill(draft)
                batches = self._fewest([document for taken in draft.taken for document in taken], schedulable)
        except Exception as failure:  # travels to the other ranks, so that all of them stop
            error = failure
        counts = draft.counts(has_failed=error is not None)
        error = self._compare([counts.documents, counts.next_group, len(batches), _digest(draft.taken)], error, group)
        if error is not None or counts.has_failed:
            return [], None, error
        seen, total = self.position.documents_seen, counts.documents
        if nothing := check_end(self._rule, total, seen):
            return [], None, nothing
        self._before = self.position, draft.taken + list(draft.waiting)
        self._waiting, self.position = list(draft.waiting), Position(seen + total, (seen + total,))
        documents = StepDocuments(
            num_documents=total,
            documents_seen=seen + total,
            documents_surplus=max(total - self._rule.num_documents, 0),
            documents_waiting=counts.next_group,
            num_microbatches=len(batches),
        )
        return batches, documents, None

    def _fill(self, draft: Draft) -> None:
        """Take groups until the step is full, or the documents have ended.

        Raises:
            ValueError: the next group does not fit into a step of exactly N documents.
        """
        wanted, is_exact = self._rule.num_documents, self._rule.policy == "exact"
        while (count := draft.counts(has_failed=False).documents) < wanted:
            draft.take(wanted - count if is_exact else math.inf)
            after = draft.counts(has_failed=False)
            if after.documents == count and after.has_ended:
                return
            if after.documents == count:
                raise ValueError(
                    f"--docs-per-step {wanted} with --docs-per-step-policy exact: {wanted - count} documents are "
                    f"missing, and the next group, which is never split, has {after.next_group}. Choose a multiple of "
                    "the group size, or at_least."
                )

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

    def _compare(self, mine: list[int], error: Exception | None, group: ProcessGroup | None) -> Exception | None:
        """This rank's error, or one on every rank if their documents differ."""
        row = torch.tensor([*mine, error is not None], dtype=torch.int64)
        rows = (row[None] if group is None else all_gather_rows(row, group, error=error)).tolist()
        if failed := [rank for rank, values in enumerate(rows) if values[-1]]:
            return error or ValueError(f"rank {failed[0]} could not take its documents, see its own message")
        if strays := [rank for rank, values in enumerate(rows) if values != rows[0]]:
            return ValueError(
                f"ranks 0 and {strays[0]} have different documents ({rows[0][0]} and {rows[strays[0]][0]} in this "
                "step). Under dynamic_cp `Documents.begin` must give every rank the documents of the whole run, in the "
                "same order."
            )
        return None


def _digest(groups: Sequence[Group]) -> int:
    content = hashlib.blake2b(digest_size=7)
    for group in groups:
        for document in group:
            content.update(document.tokens.numpy().tobytes() + document.loss_mask.numpy().tobytes())
    return int.from_bytes(content.digest(), "big")
