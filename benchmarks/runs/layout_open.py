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
    data_iterator: Iterator,
    num_microbatches: int,
    **given: Any,
) -> list[dict]:
    """In place of `PolicyGradientStep.forward_backward`: two adds, and the last micro-batch is given to close.

    Data-parallel ranks add different numbers of micro-batches at a time.
    """
    batches = [next(data_iterator) for _ in range(num_microbatches)]
    opened = step.open_step(model, expected=EXPECTED, weight_version=weight_version, **given)
    first = 1 + mpu.get_data_parallel_rank()
    opened.add(batches[:first])
    opened.add(batches[first:-1])
    opened.close(batches[-1:])
    return [{}]  # losses for Megatron's log line, which our own replaces
