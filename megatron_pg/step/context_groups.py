"""Context-parallel groups of single micro-batches (`dynamic_cp`): the process groups, and the models that go through them.

Attention learns of a micro-batch's group by `PackedSeqParams`. Its rotary embedding does not: it reads the group of the layer's
own `pg_collection`, in every release so far. So each layer has a copy of it while the step runs, with the group of the
micro-batch in it; without pipeline stages the backward follows its forward at once, and layers that are recomputed meet the same.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from megatron_pg.batch import ContextRanks, PackedBatch
from megatron_pg.batch.context_ranks import run_sizes
from megatron_pg.plan.collectives import all_gather_rows
from megatron_pg.plan.errors import ContractError


class ContextGroups:
    """A process group for every run of ranks that this rank is in. A collective: every rank makes it, at the same point.

    Args:
        plane: Megatron's data-parallel group with context parallelism.
    """

    def __init__(self, plane: ProcessGroup):
        self.plane = plane
        self._groups: dict[ContextRanks, ProcessGroup] = {}
        self._collections: list[Any] = []  # of the layers, while a step runs
        mine, ranks = plane.rank(), torch.distributed.get_process_group_ranks(plane)
        planes = (
            all_gather_rows(torch.tensor(ranks)).unique(dim=0).tolist()
        )  # every rank takes part in making every group
        for size in run_sizes(len(ranks)):
            runs = [other[i : i + size] for other in planes for i in range(0, len(ranks), size)]
            group, _ = torch.distributed.new_subgroups_by_enumeration(runs)
            self._groups[ContextRanks(mine - mine % size, size)] = group

    def check(self, batches: Sequence[PackedBatch]) -> None:
        """Refuse micro-batches that are not cut over ranks of their own, this one among them."""
        for k, batch in enumerate(batches):
            if batch.cp_ranks not in self._groups:
                raise ContractError(
                    f"micro-batch {k} has cp_ranks={batch.cp_ranks} under dynamic_cp, which is no run of {self.plane.size()} data- and "
                    f"context-parallel ranks that rank {self.plane.rank()} of them is in; pack with the rank's own, as cut_over_ranks does"
                )

    def of(self, batch: PackedBatch) -> ProcessGroup:
        """The group over which a micro-batch is cut."""
        return self._groups[batch.cp_ranks]

    def use(self, batch: PackedBatch) -> ProcessGroup:
        """The group, which the layers' rotary embeddings then go by."""
        group = self.of(batch)
        for collection in self._collections:
            collection.cp = group
        return group

    @contextmanager
    def in_layers(self, chunks: Iterable[nn.Module]) -> Iterator[None]:
        """While the step runs, the attention layers have collections of their own."""
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
