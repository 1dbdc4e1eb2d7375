"""Documents for `--docs-per-step`: sampled batch by batch on every rank for itself, or read from a rollout file.

A rank samples its next batch when the last one is used up, without waiting for the others, who may need theirs a step
later. Every batch is written to the rank's own file before it is trained: weights that have moved on cannot sample it
again, so a resumed run reads back what its checkpoint has not trained.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from loop.run_folder import continue_rollouts

from megatron_pg import RolloutFileError, Sample, read_rollouts

BATCH = "x_batch"  # field of the rollout file


class SampledDocuments:
    """One data-parallel rank's documents, as its model samples them.

    Args:
        path: the rank's rollout file; its model-parallel peers read it and one of them writes it.
        sample_batch: batch number -> samples, with `step` set to the optimizer steps that the run has done; called on
            every model-parallel peer.
        iteration: optimizer steps that the run has done; batches that were sampled later are dropped, and sampled
            again.
        is_writer: whether this process writes the file.
        group_by: the field whose equal values make a group.
        version: of the rollout file.
    """

    def __init__(
        self,
        path: Path,
        sample_batch: Callable[[int], list[Sample]],
        *,
        iteration: int,
        is_writer: bool,
        group_by: str,
        version: int = 1,
    ):
        self._path, self._sample_batch, self._group_by = path, sample_batch, group_by
        self._writer = continue_rollouts(path, iteration, version) if is_writer else None
        self.batch: list[Sample] = []  # the last one

    def begin(self, position: int) -> Iterator[list[Sample]]:
        """Groups after the first `position` documents; the file must have been continued by then."""
        recorded = _samples_of(self._path)
        if len(recorded) < position:
            raise ValueError(
                f"{self._path} holds {len(recorded)} documents and the checkpoint has trained {position}, so what it "
                "had sampled further is not known. Resume with the --run-dir of that run."
            )
        next_batch = recorded[-1].extra[BATCH] + 1 if recorded else 0
        self.batch = [sample for sample in recorded if sample.extra[BATCH] == next_batch - 1]
        return self._documents(recorded[position:], next_batch)

    def _documents(self, left: list[Sample], next_batch: int) -> Iterator[list[Sample]]:
        yield from groups_of(left, self._group_by)
        for number in itertools.count(next_batch):
            self.batch = self._sample_batch(number)
            for sample in self.batch:
                sample.extra[BATCH] = number
            if self._writer is not None:
                self._writer.write(self.batch)
            yield from groups_of(self.batch, self._group_by)

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


def groups_of(samples: list[Sample], field: str) -> list[list[Sample]]:
    """Neighbours with the same value of a field."""
    return [list(group) for _, group in itertools.groupby(samples, key=lambda sample: getattr(sample, field))]


def skip_documents(groups: list[list[Sample]], position: int) -> Iterator[list[Sample]]:
    """The groups after the first `position` documents, which end with a group."""
    for group in groups:
        if position <= 0:
            yield group
        position -= len(group)


def _samples_of(path: Path) -> list[Sample]:
    try:
        return read_rollouts(path)
    except RolloutFileError:  # a header alone: nothing was sampled yet
        return []
