"""Aggregations: one denominator per sample, from integer counts of the whole optimizer step.

A new one is a file like its neighbours, and its entry in `megatron_pg.declarations.aggregations` (docs/design.md).
"""

from megatron_pg.declarations.aggregations import AGGREGATIONS
from megatron_pg.reducers.base import Reducer, StepCounts


def reducer_of(aggregation: str) -> Reducer:
    """The reducer of a declared aggregation."""
    return AGGREGATIONS[aggregation].load()


__all__ = ["Reducer", "StepCounts", "reducer_of"]
