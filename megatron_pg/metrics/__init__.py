"""Diagnostics of a policy-gradient step: declared in `table`, reduced in `reduction`, written by `reporting`."""

from megatron_pg.metrics.reduction import Reduction
from megatron_pg.metrics.table import METRICS, Metric
from megatron_pg.metrics.values import TokenValues

__all__ = ["METRICS", "Metric", "Reduction", "TokenValues"]
