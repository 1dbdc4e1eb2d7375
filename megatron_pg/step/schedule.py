"""One call of Megatron's forward-backward function, as a record."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from megatron_pg.batch import LocalBatch
from megatron_pg.plan.collectives import device_of
from megatron_pg.plan.documents import schedulable_count


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleCall:
    """The keyword arguments of Megatron's forward-backward function, and what the step reads of them most."""

    chunks: list[Any]  # the model's virtual pipeline stages on this rank
    forward_only: bool
    keywords: Mapping[str, Any]  # all of them, as given
    weight_version: int | None  # optimizer steps that the model's weights have seen, for the ages of tokens

    @classmethod
    def of(cls, keywords: Mapping[str, Any], weight_version: int | None = None) -> "ScheduleCall":
        """From the keyword arguments."""
        model = keywords["model"]
        return cls(
            chunks=model if isinstance(model, list) else [model],
            forward_only=bool(keywords.get("forward_only")),
            keywords=keywords,
            weight_version=weight_version,
        )

    @property
    def config(self) -> Any:
        """The TransformerConfig of the model."""
        return self.chunks[0].config

    @property
    def device(self) -> torch.device:
        """The device of this rank's parameters; its pipeline stages may be empty, the first one or all."""
        first = next(chain.from_iterable(chunk.parameters() for chunk in self.chunks), None)
        return device_of(None) if first is None else first.device

    def schedulable(self, num_stages: int) -> Callable[[int], int]:
        """Returns the smallest number of micro-batches, at least the given one, that `num_stages` stages can run."""
        size = self.config.microbatch_group_size_per_vp_stage if len(self.chunks) > 1 else None
        return partial(schedulable_count, num_stages=num_stages, group_size=size)

    def over(self, microbatches: Sequence[LocalBatch]) -> dict[str, object]:
        """The keyword arguments with the planned micro-batches, over which every virtual stage runs."""
        iterators = [iter(microbatches) for _ in self.chunks]
        data_iterator = iterators if isinstance(self.keywords["data_iterator"], list) else iterators[0]
        return {**self.keywords, "data_iterator": data_iterator, "num_microbatches": len(microbatches)}
