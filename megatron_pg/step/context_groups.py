"""Context-parallel groups of single micro-batches (`dynamic_cp`).

Attention gets the group of a micro-batch from `PackedSeqParams`. Its rotary embedding reads the group of the layer's
`pg_collection` instead, in every release so far. So each layer has its own copy of the collection while the step runs,
and the copy holds the group of the micro-batch. Without pipeline stages the backward directly follows its forward, so
recomputed layers use the same group.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup

from megatron_pg.batch import ContextRanks, PackedBatch
from megatron_pg.batch.context_ranks import run_sizes
from megatron_pg.plan.collectives import all_gather_rows
from megatron_pg.plan.errors import ScheduleError


class ContextGroups:
    """A group for every run of ranks of Megatron's data- and context-parallel group `plane` with this rank in it.

    Making them is a collective of all ranks.
    """

    def __init__(self, plane: ProcessGroup):
        self.plane = plane
        self._groups: dict[ContextRanks | None, ProcessGroup] = {}
        self._collections: list[Any] = []  # of the layers, while a step runs
        mine, ranks = plane.rank(), torch.distributed.get_process_group_ranks(plane)
        # every rank takes part in making every group
        planes = all_gather_rows(torch.tensor(ranks)).unique(dim=0).tolist()
        for size in run_sizes(len(ranks)):
            runs = [other[i : i + size] for other in planes for i in range(0, len(ranks), size)]
            group, _ = torch.distributed.new_subgroups_by_enumeration(runs)
            self._groups[ContextRanks(mine - mine % size, size)] = cast(ProcessGroup, group)  # one has this rank

    def check(self, batches: Sequence[PackedBatch]) -> None:
        """Refuse micro-batches that are not split over a run of ranks with this one."""
        for k, batch in enumerate(batches):
            if batch.cp_ranks not in self._groups:
                raise ScheduleError(
                    f"micro-batch {k} has cp_ranks={batch.cp_ranks} under dynamic_cp, which is not a run of "
                    f"{self.plane.size()} data- and context-parallel ranks with rank {self.plane.rank()}. Pack with "
                    "the rank's own, as cut_over_ranks does."
                )

    def of(self, batch: PackedBatch) -> ProcessGroup:
        """The group that splits a micro-batch."""
        return self._groups[batch.cp_ranks]

    def use(self, batch: PackedBatch) -> ProcessGroup:
        """The group of a micro-batch, which the layers' rotary embeddings use from now on."""
        group = self.of(batch)
        for collection in self._collections:
            collection.cp = group
        return group

    @contextmanager
    def in_layers(self, chunks: Iterable[nn.Module]) -> Iterator[None]:
        """Give the attention layers their own collections while the step runs."""
        layers = [m for chunk in chunks for m in chunk.modules() if hasattr(m, "core_attention")]
        before = [layer.pg_collection for layer in layers]
        try:
            for layer in layers:
                layer.pg_collection = copy.copy(layer.pg_collection)
            self._collections = [layer.pg_collection for layer in layers]
            yield
        finally:
            for layer, collection in zip(layers, before, strict=True):
                layer.pg_collection = collection
            self._collections = []
