"""From a step's micro-batches to what its plan counts, and from the plan to their slices with weights."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from megatron_pg.batch import LocalBatch, PackedBatch, slice_batch
from megatron_pg.plan.plan import StepPlan
from megatron_pg.plan.settings import LossSettings
from megatron_pg.plan.table import LocalTable, local_table_of
from megatron_pg.plan.weights import TokenFactors, depth_weights, token_factors, token_weights


class Counted(NamedTuple):
    """This rank's part of the plan's exchange, and what is known of its tokens before that."""

    table: LocalTable | None  # None: this rank has failed
    factors: list[TokenFactors]  # of each micro-batch


def count(batches: Sequence[PackedBatch], settings: LossSettings, group: ProcessGroup | None) -> Counted:
    """What this rank's micro-batches bring to the plan; it checks fields and runs the user's reducer.

    Args:
        batches: the step's micro-batches.
        settings: the loss settings.
        group: the ranks that bring samples of their own; None: this process alone.

    Raises:
        ValueError: a sample lacks what the loss needs, or the user's reducer fails.
    """
    factors = [token_factors(batch, settings) for batch in batches]
    kept = [n for batch, own in zip(batches, factors, strict=True) for n in own.kept_per_sample(batch, settings.policy)]
    return Counted(local_table_of(batches, settings.plan_rule, group, kept), factors)


def slice_step(
    batches: Sequence[PackedBatch],
    plan: StepPlan,
    factors: Sequence[TokenFactors],
    settings: LossSettings,
    *,
    group_of: Callable[[PackedBatch], ProcessGroup | None],
    device: torch.device,
) -> list[LocalBatch]:
    """This rank's slices of a planned step's micro-batches.

    Args:
        batches: as in `count`.
        plan: the step's plan.
        factors: of `count`.
        settings: the loss settings.
        group_of: the context-parallel group over which a micro-batch is cut; None: this rank has it whole.
        device: where the model runs.
    """
    local, first = [], 0
    for batch, own in zip(batches, factors, strict=True):
        group = group_of(batch)
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        sliced = slice_batch(
            batch,
            token_weights(batch, plan, first, factors=own, settings=settings),
            cp_rank=rank,
            cp_size=size,
            device=device,
            sequences=settings.terms.reads_sequences,
            cp_group=group if size > 1 else None,
            depth_weights=depth_weights(batch, plan, first, settings=settings),
        )
        local.append(sliced)
        first += len(batch.samples)
    return local
