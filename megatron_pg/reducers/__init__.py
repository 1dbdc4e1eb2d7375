"""Aggregations: one denominator per sample, from integer counts of the whole optimizer step.

A new one is a file like its neighbours, and its entry in `megatron_pg.declarations.aggregations` (docs/design.md).
"""
