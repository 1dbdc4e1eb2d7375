"""A training step of Megatron's loop as an open step; of layout_run.py."""

from collections.abc import Iterator
from typing import Any

from megatron.core import parallel_state as mpu

from megatron_pg import PolicyGradientStep

EXPECTED = 100  # a wrong guess of the step's rollouts


def in_open_step(
    step: PolicyGradientStep,
    function: None,
    *,
    weight_version: int | None,
    model: Any,
    data_iterator: Iterator | list[Iterator],
    num_microbatches: int,
    **given: Any,
) -> list[dict]:
    """In place of `PolicyGradientStep.forward_backward`: two adds, and the last micro-batch is given to close.

    Data-parallel ranks add different numbers of micro-batches at a time.
    """
    source = data_iterator[0] if isinstance(data_iterator, list) else data_iterator  # of virtual pipeline stages
    batches = [next(source) for _ in range(num_microbatches)]
    opened = step.open_step(model, expected=EXPECTED, weight_version=weight_version, **given)
    unit = mpu.get_pipeline_model_parallel_world_size() if source is not data_iterator else 1
    first = unit * (1 + mpu.get_data_parallel_rank())
    opened.add(batches[:first])
    opened.add(batches[first:-unit])
    opened.close(batches[-unit:])
    return [{}]  # losses for Megatron's log line, which our own replaces
