"""`--docs-per-step`: an optimizer step is a number of documents, which determines its number of micro-batches.

A document is a sample. Every data-parallel rank has its own iterator of documents, in groups that stay together (a
rollout of several samples, a prompt group). A step is taken in rounds: each rank packs groups into the next
micro-batch, then one small all-gather exchanges the counts of all ranks. All ranks decide from the same table, so all
stop in the same round with the same number of micro-batches; a rank with fewer adds empty ones. The step is planned
after that.

A group is only pulled when it may be needed. One that does not fit waits for the next micro-batch or the next step.
"""

import functools
import json
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from megatron_pg.batch import PackedBatch, pack
from megatron_pg.batch.zigzag import padded_length
from megatron_pg.plan.collectives import gathered, rank_of
from megatron_pg.rollouts.fields import Id
from megatron_pg.rollouts.sample import Sample

Group = tuple[Sample, ...]
_END = object()


class EndOfDocuments(Exception):
    """There are no documents for another step: raised on every rank, before the step has begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The training data under `--docs-per-step`: the documents of one data-parallel rank.

    Args:
        begin: called once with the number of this rank's documents that the checkpoint has trained (0 in a new run);
            returns an iterator over the documents after those. It yields `Sample`s, or lists of samples that must be in
            one step. Every tensor-, context- and pipeline-parallel peer yields the same. The iterator must not wait for
            other data-parallel ranks, which pull different numbers of documents. Under `dynamic_cp` all ranks yield the
            documents of the whole run.
        qkv_format: "thd": a micro-batch is one packed row of up to `--micro-batch-size` x `--seq-length` tokens;
            "bshd": `--micro-batch-size` padded rows of `--seq-length` tokens, one document each.
    """

    begin: Callable[[int], Iterator[Sample | Sequence[Sample]]]
    qkv_format: str = "thd"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRule:
    """When a step is full, and what happens to the last documents."""

    num_documents: int  # N
    policy: str  # "exact": N documents; "at_least": whole micro-batches until there are N
    end: str  # of documents too few for a step: "partial" trains them in a last step, "stop" does not


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How a rank's documents are packed into micro-batches.

    Raises:
        ValueError: the sizes do not tile a row.
    """

    qkv_format: str  # "thd" or "bshd"
    seq_length: int
    micro_batch_size: int
    cp_size: int = 1
    multiple_of: int = 1  # of a packed row: TP · C under sequence parallelism
    is_static: bool = False  # pipeline stages exchange tensors of one shape

    def __post_init__(self):
        if self.qkv_format == "thd" and self.is_static and self.micro_batch_size != 1:
            raise ValueError(
                f"--micro-batch-size {self.micro_batch_size} with packed rows under pipeline parallelism: a "
                "micro-batch is one row, which the stages exchange. Use --micro-batch-size 1 and put the token budget "
                "into --seq-length."
            )
        width = self.capacity if self.qkv_format == "thd" else self.seq_length
        self._pack((), width)  # raises if the sizes do not tile a row

    @property
    def capacity(self) -> int:
        """Tokens (thd) or rows (bshd) of a micro-batch."""
        return self.micro_batch_size * (self.seq_length if self.qkv_format == "thd" else 1)

    def size_of(self, document: Sample) -> int:
        """The part of the capacity that a document needs.

        Raises:
            ValueError: it does not fit into a micro-batch.
        """
        tokens = len(document.tokens)
        if self.qkv_format == "bshd":
            size, limit, flags = tokens, self.seq_length, "--seq-length"
        else:
            size, limit, flags = padded_length(tokens, self.cp_size), self.capacity, "--micro-batch-size x --seq-length"
        if size > limit:
            padded = "" if size == tokens else f", padded to {size},"
            raise ValueError(
                f"document {document.sample_id} has {tokens} tokens{padded} and a micro-batch holds {limit} ({flags}). "
                "Raise the budget, or drop the document."
            )
        return size if self.qkv_format == "thd" else 1

    def pack(self, documents: Sequence[Sample]) -> PackedBatch:
        """One micro-batch; without documents an empty one, which still participates in every collective."""
        return self._pack(documents, self.seq_length if self.qkv_format == "bshd" or self.is_static else None)

    def _pack(self, documents: Sequence[Sample], width: int | None) -> PackedBatch:
        shape: dict[str, Any] = (
            {"multiple_of": self.multiple_of} if self.qkv_format == "thd" else {"rows": self.micro_batch_size}
        )
        return pack(documents, qkv_format=self.qkv_format, cp_size=self.cp_size, max_seq_len=width, **shape)


@dataclass(frozen=True, slots=True)
class Position:
    """The position in the documents, stored in checkpoints and equal on every rank."""

    documents_seen: int  # of all data-parallel ranks
    per_rank: tuple[int, ...]  # by data-parallel rank: documents of its iterator that were trained

    def to_text(self) -> str:
        """The position as one line, for the checkpoint."""
        return json.dumps({"documents_seen": self.documents_seen, "per_rank": self.per_rank})

    @classmethod
    def from_text(cls, text: str | None, num_ranks: int) -> "Position":
        """The position in a checkpoint; None: a run without earlier documents.

        Raises:
            ValueError: it was saved by another number of data-parallel ranks.
        """
        if text is None:
            return cls(0, (0,) * num_ranks)
        saved = json.loads(text)
        position = cls(saved["documents_seen"], tuple(saved["per_rank"]))
        if len(position.per_rank) != num_ranks:
            raise ValueError(
                f"the checkpoint has the document positions of {len(position.per_rank)} data-parallel ranks and this "
                f"run has {num_ranks}. Resume with {len(position.per_rank)}."
            )
        return position


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDocuments:
    """The documents of one step, over all ranks."""

    num_documents: int
    documents_seen: int  # with this step
    documents_surplus: int  # beyond N, trained in this step ("at_least")
    documents_waiting: int  # of groups that did not fit and wait for the next step
    num_microbatches: int  # K


class Counts(NamedTuple):
    """One rank's part of the step so far: one row of a round's all-gather."""

    documents: int = 0
    microbatches: int = 0
    next_group: int = 0  # documents of the pulled group that waits; 0: none
    has_ended: bool = False  # the iterator has no further group
    has_failed: bool = False


class Accumulator(ABC):
    """What the accumulators have in common; `capacity` and `size_of` are those of a draft's micro-batches."""

    def __init__(self, rule: StepRule, position: Position, *, capacity: int, size_of: Callable[[Sample], int]):
        self._rule = rule
        self._new_draft = functools.partial(Draft, capacity, size_of)
        self.position = position  # after the last step
        self._waiting: list[Group] = []  # pulled from the source, not taken by a step
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
        """The next step's micro-batches of this rank: one small all-gather per round over `group`.

        Args:
            source: this rank's documents. Where Megatron's rerun machinery has rewound it, the last step is taken
                again.
            group: every rank of it must call: the pure data-parallel group, or Megatron's data-parallel group with
                context parallelism if every rank has the same documents; None: this process alone.
            error: an earlier error of this rank; the first round reports it to the others.
            undivided: the kinds of groups that a step must not split.
            schedulable: the smallest number of micro-batches, at least the given one, that the schedule can run.

        Returns:
            Micro-batches, the same number on every rank; the step's documents; and this rank's error, which the
            metadata exchange reports to the others. After an error on any rank the first two are not valid.

        Raises:
            EndOfDocuments: on every rank of `group`.
        """
        if getattr(source, "replaying", False):
            (self.position, self._waiting), source = self._before, iter(())
        draft = self._new_draft(self._waiting, source, undivided)
        table, batches, error = self._fill(draft, group, error, schedulable)
        self._before = self.position, draft.taken + list(draft.waiting)
        if any(counts.has_failed for counts in table) or error is not None:
            return [], None, error
        total, wanted, seen = _total(table), self._rule.num_documents, self.position.documents_seen
        if total == 0 and seen == 0:
            return [], None, ValueError("there are no documents to train. Check the source.")
        if total == 0 or (total < wanted and self._rule.end == "stop"):
            few = f", {total} are too few for a step of {wanted} and were left (--docs-per-step-end stop)"
            raise EndOfDocuments(f"the documents have ended: {seen} were trained{few if total else ''}")
        self._waiting = list(draft.waiting)
        taken = tuple(p + counts.documents for p, counts in zip(self.position.per_rank, table, strict=True))
        self.position = Position(seen + total, taken)
        documents = StepDocuments(
            num_documents=total,
            documents_seen=seen + total,
            documents_surplus=max(total - wanted, 0),
            documents_waiting=sum(counts.next_group for counts in table),
            num_microbatches=len(batches),
        )
        return batches, documents, None

    @abstractmethod
    def _fill(
        self, draft: "Draft", group: ProcessGroup | None, error: Exception | None, schedulable: Callable[[int], int]
    ) -> tuple[list[Counts], list[PackedBatch], Exception | None]:
        """Take the step's documents: the counts of all ranks that take their own, this rank's micro-batches and error.

        The counts report a failure of any rank; the micro-batches are only valid without one.
        """

    def _rounds(
        self, draft: "Draft", group: ProcessGroup | None, error: Exception | None
    ) -> tuple[list[Counts], Exception | None]:
        """Take documents until the step is full, they have ended, or a rank has failed; all ranks' counts.

        Without a group this rank takes the whole step.
        """
        rank = rank_of(group)
        size = 1 if group is None else torch.distributed.get_world_size(group)
        table, has_progressed = [Counts()] * size, True
        while (limits := self._limits(table, has_progressed=has_progressed)) is not None:
            try:
                if error is None:
                    draft.take(limits[rank])
            except Exception as failure:  # travels to the other ranks, so that all of them stop
                error = failure
            before, table = _total(table), _gather_counts(draft, group, error)
            has_progressed = _total(table) > before
            if any(counts.has_failed for counts in table) or all(counts.has_ended for counts in table):
                return table, error
            if _total(table) >= self._rule.num_documents:
                return table, None
        return self._searched(draft, group, table)

    def _searched(
        self, draft: "Draft", group: ProcessGroup | None, table: list[Counts]
    ) -> tuple[list[Counts], Exception | None]:
        """Search for whole groups with N documents in total, if taking them in turn has missed N; all ranks' counts."""
        wanted, rank = self._rule.num_documents, rank_of(group)
        row, error = torch.zeros(1 + wanted, dtype=torch.int64), None
        try:
            row[draft.reachable(wanted)] = 1
        except Exception as failure:  # reported by a first element of 0
            error = failure
        rows = gathered(row, group, error)
        try:
            if rows[:, 0].all():
                shares = whole_groups([each.nonzero().flatten().tolist() for each in rows], wanted)
                if shares is None:
                    of_rank = " on rank {}" if len(table) > 1 else ""  # else every rank takes the same documents
                    next_groups = ", ".join(
                        f"{counts.next_group}{of_rank.format(r)}"
                        for r, counts in enumerate(table)
                        if not counts.has_ended
                    )
                    raise ValueError(
                        f"--docs-per-step {wanted} with --docs-per-step-policy exact: {wanted - _total(table)} "
                        f"documents are missing, and the next groups, which are never split, have {next_groups}. "
                        "Choose a multiple of the group size, or at_least."
                    )
                draft.take_exactly(shares[rank], wanted)
        except Exception as failure:
            error = failure
        return _gather_counts(draft, group, error), error

    def _limits(self, table: Sequence[Counts], *, has_progressed: bool) -> list[float] | None:
        """The most documents of each rank in the next round; None: no next group fits into a step of exactly N."""
        if self._rule.policy == "at_least":
            return [math.inf] * len(table)
        size, missing = len(table), self._rule.num_documents - _total(table)
        first = self.position.documents_seen % size  # the ranks that take the remainder rotate
        active = [r for i in range(size) if not table[r := (first + i) % size].has_ended]
        limits: list[float] = [0] * size
        if has_progressed:
            share, rest = divmod(missing, len(active))
            for i, rank in enumerate(active):
                limits[rank] = share + (i < rest)
            return limits
        able = [rank for rank in active if table[rank].next_group <= missing]  # 0: not pulled yet
        if not able:
            return None
        limits[able[0]] = missing
        return limits


class DocumentAccumulator(Accumulator):
    """Takes a rank's documents step by step.

    Args:
        rule: the same on every rank.
        packing: how documents become micro-batches; the same on every rank.
        position: the position at which the run begins.
    """

    def __init__(self, *, rule: StepRule, packing: Packing, position: Position):
        super().__init__(rule, position, capacity=packing.capacity, size_of=packing.size_of)
        self._packing = packing

    def _fill(
        self, draft: "Draft", group: ProcessGroup | None, error: Exception | None, schedulable: Callable[[int], int]
    ) -> tuple[list[Counts], list[PackedBatch], Exception | None]:
        table, error = self._rounds(draft, group, error)
        if any(counts.has_failed for counts in table):
            return table, [], error
        count = schedulable(max(counts.microbatches for counts in table))
        empty: list[list[Sample]] = [[]] * (count - len(draft.microbatches))
        return table, [self._packing.pack(part) for part in [*draft.microbatches, *empty]], None


class Draft:
    """This rank's part of the current step."""

    def __init__(
        self,
        capacity: int,
        size_of: Callable[[Sample], int],
        waiting: Iterable[Group],
        source: Iterator,
        kinds: Sequence[str],
    ):
        self.microbatches: list[list[Sample]] = []
        self.taken: list[Group] = []
        self.waiting = deque(waiting)
        self._capacity, self._size_of, self._source = capacity, size_of, source
        self._room = 0  # of the last micro-batch
        self._next_group, self._has_ended = 0, False  # of this step only, as in a resumed run
        self._kinds = kinds
        self._units: set[tuple[str, Id]] = set()

    def take(self, limit: float) -> None:
        """One round: the next group, and further groups that fit into its micro-batch, up to `limit` documents."""
        taken = 0
        while taken < limit and (group := self._next()) is not None and taken + len(group) <= limit:
            sizes = [self._size_of(document) for document in group]
            if taken and sum(sizes) > self._room:
                return
            self._check_units(group)
            for document, size in zip(group, sizes, strict=True):
                if not self.microbatches or size > self._room:
                    self.microbatches.append([])
                    self._room = self._capacity
                self.microbatches[-1].append(document)
                self._room -= size
            self.taken.append(self.waiting.popleft())
            self._next_group = 0
            taken += len(group)

    def counts(self, *, has_failed: bool = False) -> Counts:
        """The row of this rank."""
        return Counts(
            documents=sum(len(part) for part in self.microbatches),
            microbatches=len(self.microbatches),
            next_group=self._next_group,
            has_ended=self._has_ended,
            has_failed=has_failed,
        )

    def reachable(self, limit: int) -> list[int]:
        """Return all groups to the queue; the numbers of documents of its first groups, up to `limit`."""
        self.waiting.extendleft(reversed(self.taken))
        self.microbatches, self.taken, self._room, self._units = [], [], 0, set()
        sums = [0]
        while sums[-1] < limit and (len(sums) <= len(self.waiting) or self._pull()):
            sums.append(sums[-1] + len(self.waiting[len(sums) - 1]))
        return [total for total in sums if total <= limit]

    def take_exactly(self, count: int, limit: int) -> None:
        """Take `count` documents, one of the numbers of `reachable(limit)`."""
        while (taken := self.counts().documents) < count:
            self.take(count - taken)
        # of the groups that were pulled
        self._next_group = len(self.waiting[0]) if count < limit and self.waiting else 0

    def _pull(self) -> bool:
        """Add the source's next group to the queue; False at the end."""
        if (item := next(self._source, _END)) is _END:
            return False
        group = tuple(item) if isinstance(item, (list, tuple)) else (item,)
        if not group or not all(isinstance(document, Sample) for document in group):
            raise ValueError(
                f"the documents gave {'an empty list' if item in ([], ()) else f'a {type(item).__name__}'}, not a "
                "Sample or a list of Samples. Use Sample.build."
            )
        self.waiting.append(group)
        return True

    def _next(self) -> Group | None:
        """The next group, which stays in the queue; None at the end."""
        if not self.waiting:
            self._pull()
        self._has_ended = not self.waiting
        self._next_group = len(self.waiting[0]) if self.waiting else 0
        return self.waiting[0] if self.waiting else None

    def _check_units(self, group: Group) -> None:
        units = {
            (kind, unit) for document in group for kind in self._kinds if (unit := getattr(document, kind)) is not None
        }
        if again := sorted(units & self._units, key=repr):
            kind, unit = again[0]
            raise ValueError(
                f"{kind} {unit!r} of document {group[0].sample_id} is already in another group of this step. Yield all "
                "its samples as one list."
            )
        self._units |= units


def _gather_counts(draft: Draft, group: ProcessGroup | None, error: Exception | None) -> list[Counts]:
    row = torch.tensor(draft.counts(has_failed=error is not None), dtype=torch.int64)
    return [Counts(*counts) for counts in gathered(row, group, error).tolist()]


def whole_groups(reachable: Sequence[Sequence[int]], wanted: int) -> list[int] | None:
    """The number of documents of each rank, out of its reachable ones: `wanted` in total, near equal shares; or None.

    Bit k of `rests[r]`: the ranks from r on can take k documents in total.
    """
    rests = [1]
    for sums in reversed(reachable):
        rests.append(functools.reduce(int.__or__, (rests[-1] << total for total in sums), 0) & (2 << wanted) - 1)
    rests.reverse()
    if not rests[0] >> wanted & 1:
        return None
    shares: list[int] = []
    for rank, sums in enumerate(reachable):
        left = wanted - sum(shares)
        share = left / (len(reachable) - rank)
        possible = [total for total in sums if total <= left and rests[rank + 1] >> (left - total) & 1]
        shares.append(min(possible, key=lambda total: abs(total - share)))
    return shares


def _total(table: Iterable[Counts]) -> int:
    return sum(counts.documents for counts in table)


def schedulable_count(count: int, *, num_stages: int, group_size: int | None) -> int:
    """The smallest number of micro-batches, at least `count`, that Megatron's schedule can run on `num_stages` stages.

    `group_size` is `microbatch_group_size_per_vp_stage` under virtual stages, else None: any number can be run.
    """
    if group_size is None:
        return count
    count = max(count, group_size)
    rest = count % group_size  # must be 0 or at least num_stages
    return count if rest == 0 or rest >= num_stages else count + num_stages - rest
