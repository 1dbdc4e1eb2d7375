"""Streams of documents for `--docs-per-step`, and what data-parallel ranks, as threads, make of them."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import threads
import torch
from samples import make_sample

from megatron_pg.batch import PackedBatch
from megatron_pg.plan.documents import DocumentAccumulator, EndOfDocuments, Packing, Position, StepDocuments, StepRule
from megatron_pg.rollouts.sample import Sample

Stream = list[list[Sample]]  # groups


def stream(
    rng: random.Random, *, rank: int, num_groups: int, group_sizes: Sequence[int] = (1,), longest: int = 20
) -> Stream:
    """Groups of random sizes and lengths; sample ids tell rank, group and document."""
    groups = []
    for g in range(num_groups):
        size = rng.choice(group_sizes)
        groups.append([document(rng, f"{rank}/{g}/{i}", f"{rank}/{g}", longest) for i in range(size)])
    return groups


def document(rng: random.Random, name: str, group: str, longest: int = 20) -> Sample:
    length = rng.randint(2, longest)
    response = rng.randint(1, length - 1)
    return make_sample(
        prompt_length=length - response, mask=[1] * response, rng=rng, sample_id=name, rollout_id=name, prompt_id=group
    )


def documents_behind(groups: Stream, position: int) -> Iterator[list[Sample]]:
    """The stream from a position on, which lies between two groups."""
    for group in groups:
        if position <= 0:
            yield group
        else:
            position -= len(group)
    assert position <= 0


@dataclass
class Rewindable:
    """An iterator that can be rewound as Megatron's is: while it replays nothing may be read past what was saved."""

    source: Iterator
    replaying: bool = False

    def __iter__(self):
        return self

    def __next__(self):
        assert not self.replaying, "read past the saved documents"
        return next(self.source)


@dataclass
class Taken:
    """One step on one rank."""

    batches: list[PackedBatch]
    documents: StepDocuments

    @property
    def names(self) -> list[list[str]]:
        return [[sample.sample_id for sample in batch.samples] for batch in self.batches]


@dataclass
class Run:
    """What a rank did: its steps, where it stopped, and why."""

    steps: list[Taken] = field(default_factory=list)
    again: dict[int, Taken] = field(default_factory=dict)  # steps that were replayed, as they were taken then
    position: Position | None = None
    farewell: str | None = None
    error: str | None = None


def take_all(
    streams: Sequence[Stream],
    rule: StepRule,
    packing: Packing,
    *,
    position: Position | None = None,
    most_steps: float = float("inf"),
    undivided: Sequence[str] = ("rollout_id",),
    replays: Callable[[int], bool] = lambda step: False,
    schedulable: Callable[[int], int] = lambda count: count,
    change: Callable[[int, Iterator], Iterator] = lambda rank, source: source,
) -> list[Run]:
    """Every rank's steps until the documents end, one rank per stream; `replays` says which steps are taken twice."""
    begin = position or Position(0, (0,) * len(streams))

    def work(rank: int) -> Run:
        group = torch.distributed.group.WORLD
        source = Rewindable(change(rank, documents_behind(streams[rank], begin.per_rank[rank])))
        accumulator = DocumentAccumulator(rule=rule, packing=packing, position=begin)
        run = Run()
        while len(run.steps) < most_steps:
            try:
                batches, documents, error = accumulator.take(
                    source, group=group, undivided=undivided, schedulable=schedulable
                )
                if replays(len(run.steps)):
                    source.replaying = True
                    again = accumulator.take(source, group=group, undivided=undivided, schedulable=schedulable)
                    run.again[len(run.steps)] = Taken(*again[:2])
                    source.replaying = False
            except EndOfDocuments as end:
                run.farewell = str(end)
                break
            if documents is None:
                run.error = str(error)
                break
            run.steps.append(Taken(batches, documents))
        run.position = accumulator.position
        return run

    return threads.run(len(streams), work)
