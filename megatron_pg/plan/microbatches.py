"""The counts of a step's micro-batches on this rank."""

from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed import ProcessGroup

from megatron_pg.batch import PackedBatch
from megatron_pg.plan.settings import LossSettings
from megatron_pg.plan.table import LocalTable, local_table_of
from megatron_pg.plan.weights import TokenFactors, token_factors


class CountedStep(NamedTuple):
    """This rank's part of the metadata exchange, and what is known of its tokens before the exchange."""

    table: LocalTable | None  # None: this rank has failed
    factors: list[TokenFactors]  # of each micro-batch


def count_step(batches: Sequence[PackedBatch], settings: LossSettings, group: ProcessGroup | None) -> CountedStep:
    """Count this rank's micro-batches. It checks their fields and runs the user's reducer.

    Raises:
        ValueError: a sample lacks what the loss needs, or the user's reducer fails.
    """
    factors = [token_factors(batch, settings) for batch in batches]
    return CountedStep(local_table_of(batches, settings.plan_rule, group, [own.kept for own in factors]), factors)
