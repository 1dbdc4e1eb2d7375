"""Dynamic context parallelism: each micro-batch has its own ranks, many for long documents and one for short ones.

In every micro-batch of a step the ranks form runs of 1, 2, 4, … ranks, and each run has a packed row. The ranks of a
run compute attention together, and every rank has the same number of micro-batches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatron_pg.batch.zigzag import padded_length


@dataclass(frozen=True, slots=True)
class ContextRanks:
    """Ranks `first` … `first + size - 1` of Megatron's data-parallel group with context parallelism (D · C ranks).

    Raises:
        ValueError: `size` is not a power of two, or `first` is not a multiple of it.
    """

    first: int
    size: int

    def __post_init__(self):
        if self.size < 1 or self.size & (self.size - 1) or self.first < 0 or self.first % self.size:
            raise ValueError(
                f"ContextRanks(first={self.first}, size={self.size}): runs of ranks could overlap. Give a power of "
                "two as size and a multiple of it as first."
            )

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.first + self.size))


def run_sizes(num_ranks: int) -> list[int]:
    """1, 2, 4, … as long as runs of that many tile the ranks."""
    return [1 << n for n in range(num_ranks.bit_length()) if num_ranks % (1 << n) == 0]


@dataclass(slots=True)
class Row:
    """A packed row: documents by number, on a run of ranks in one micro-batch."""

    microbatch: int
    ranks: ContextRanks
    documents: list[int] = field(default_factory=list)
    tokens: int = 0  # padding included


def document_cost(length: int, attention_length: float) -> float:
    """Time of a document in units of a token without attention: n + n² / `attention_length`."""
    return length + length * length / attention_length


def slowest_rank(rows: Sequence[Row], lengths: Sequence[int], *, num_ranks: int, attention_length: float) -> float:
    """Time of a step, in units of `document_cost`; the ranks of a row start it together."""
    clock = [0.0] * num_ranks
    for row in sorted(rows, key=lambda row: row.microbatch):
        cost = sum(document_cost(lengths[i], attention_length) for i in row.documents) / row.ranks.size
        end = max(clock[rank] for rank in row.ranks) + cost
        for rank in row.ranks:
            clock[rank] = end
    return max(clock)


def assign_rows(
    lengths: Sequence[int], *, num_ranks: int, num_microbatches: int, max_tokens: int, attention_length: float
) -> list[Row]:
    """Assign documents to runs of ranks so that the slowest rank finishes early.

    A document lies on as few ranks as its length and a share of the step's cost allow. The share is the largest of four
    for which the step is within 2 % of the fastest. Rows on many ranks come first, before any rank has to wait. The
    arguments are those of `cut_over_ranks`.

    Raises:
        ValueError: the documents don't fit; none is dropped.
    """
    total = sum(document_cost(length, attention_length) for length in lengths)
    candidates = []
    for parts in (1, 2, 4, 8):
        grid = _Grid(lengths, num_ranks, num_microbatches, max_tokens, attention_length)
        if grid.place_all(total / num_ranks / parts):
            time = slowest_rank(grid.rows, lengths, num_ranks=num_ranks, attention_length=attention_length)
            candidates.append((time, grid.rows))
    if not candidates:
        raise ValueError(
            f"{len(lengths)} documents of {sum(lengths)} tokens, the longest of {max(lengths)}, do not fit into "
            f"{num_microbatches} micro-batches of {max_tokens} tokens on each of {num_ranks} ranks, and none may be "
            "dropped. Take more micro-batches, or raise max_tokens."
        )
    enough = 1.02 * min(time for time, _ in candidates)
    return next(rows for time, rows in candidates if time <= enough)


class _Grid:
    """At most one row for each pair of micro-batch and rank."""

    def __init__(
        self, lengths: Sequence[int], num_ranks: int, num_microbatches: int, max_tokens: int, attention_length: float
    ):
        self.rows: list[Row] = []
        self._lengths, self._max_tokens = lengths, max_tokens
        self._costs = [document_cost(length, attention_length) for length in lengths]
        self._loads = [0.0] * num_ranks
        self._places: list[list[Row | None]] = [[None] * num_ranks for _ in range(num_microbatches)]
        self._sizes = run_sizes(num_ranks)

    def place_all(self, share: float) -> bool:
        """Place every document on enough ranks to bring its cost per rank below `share`; False if one does not fit."""
        wanted = [self._size_of(i, share) for i in range(len(self._lengths))]
        order = sorted(range(len(wanted)), key=lambda i: (-wanted[i], -self._costs[i]))  # stable: equal on every rank
        return all(any(self._place(i, size) for size in self._sizes if size >= wanted[i]) for i in order)

    def _size_of(self, i: int, share: float) -> int:
        enough = (size for size in self._sizes if self._costs[i] <= size * share and self._fits(i, size))
        return next(enough, self._sizes[-1])

    def _fits(self, i: int, size: int, tokens: int = 0) -> bool:
        return tokens + padded_length(self._lengths[i], size) <= size * self._max_tokens

    def _place(self, i: int, size: int) -> bool:
        """Place a document on the least loaded run of that many ranks with room; False if no run has room."""
        loads = self._loads
        runs = [ContextRanks(first, size) for first in range(0, len(loads), size)]
        for ranks in sorted(runs, key=lambda ranks: max(loads[rank] for rank in ranks)):
            row = self._row_for(i, ranks)
            if row is None:
                continue
            row.documents.append(i)
            row.tokens += padded_length(self._lengths[i], size)
            for rank in ranks:
                loads[rank] += self._costs[i] / size
            return True
        return False

    def _row_for(self, i: int, ranks: ContextRanks) -> Row | None:
        """The shortest row of the run with room, else a new one; a single rank prefers a new one."""
        known = [
            row
            for places in self._places
            if (row := places[ranks.first]) is not None and row.ranks == ranks and self._fits(i, ranks.size, row.tokens)
        ]
        shortest = min(known, key=lambda row: row.tokens, default=None)
        free = (k for k, places in enumerate(self._places) if all(places[rank] is None for rank in ranks))
        if (shortest is not None and ranks.size > 1) or (k := next(free, None)) is None:
            return shortest
        if not self._fits(i, ranks.size):
            return None
        row = Row(k, ranks)
        self.rows.append(row)
        for rank in ranks:
            self._places[k][rank] = row
        return row
