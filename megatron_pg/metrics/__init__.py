"""Diagnostics of a policy-gradient step: declared in `table`, reduced exactly in `reduction`, described in `docs`."""

from megatron_pg.metrics.reduction import Reduction
from megatron_pg.metrics.table import METRICS, Metric, TokenValues

__all__ = ["METRICS", "Metric", "Reduction", "TokenValues"]
