"""Aggregations: one denominator per sample, from integer counts of the whole optimizer step.

A new one is a file like its neighbours, a line in `REDUCERS` and a row of hand-worked values in its test.
"""

from megatron_pg.reducers.base import Reducer, StepCounts
from megatron_pg.reducers.constant import constant
from megatron_pg.reducers.prompt_mean import prompt_mean
from megatron_pg.reducers.sample_mean import sample_mean
from megatron_pg.reducers.token_mean import token_mean

REDUCERS: dict[str, Reducer] = {
    "sample_mean": sample_mean,
    "prompt_mean": prompt_mean,
    "token_mean": token_mean,
    "constant": constant,
}

__all__ = ["REDUCERS", "Reducer", "StepCounts", "constant", "prompt_mean", "sample_mean", "token_mean"]
