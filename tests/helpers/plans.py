"""The plan of a step from its micro-batches."""

from collections.abc import Sequence

import torch.distributed as dist

from megatron_pg import StepPlan
from megatron_pg.batch import PackedBatch
from megatron_pg.plan.plan import plan_from_table
from megatron_pg.plan.table import PlanRule, local_table_of


def planned(batches: Sequence[PackedBatch], rule: PlanRule, group: dist.ProcessGroup | None = None) -> StepPlan:
    """Of this rank's micro-batches."""
    return plan_from_table(local_table_of(batches, rule, group), rule, error=None, group=group)
