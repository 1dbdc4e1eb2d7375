"""Measures every optimizer step of a host's job, in place of the tests' recorder.

`DRIVER_OUT` gets `RANK.jsonl`, a line per step: seconds from `zero_grad` to the end of `step`, seconds since the
previous step, gradient norm, samples and tokens, and the peak of allocated memory in the step and before it, in bytes.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


class Meter:
    """What one process has measured of the step in progress."""

    def __init__(self) -> None:
        self.begun, self.ended = 0.0, 0.0  # the step in progress, and the previous one
        self.samples, self.tokens, self.before = 0, 0, 0

    def begin(self) -> None:
        """Gradients are zero: the step begins."""
        self.before = max(self.before, _peak())
        self.begun = time.perf_counter()

    def end(self, grad_norm: float) -> None:
        """The weights have changed."""
        peak, now = _peak(), time.perf_counter()
        line = {
            "seconds": now - self.begun,
            "since": now - self.ended if self.ended else None,
            "grad_norm": grad_norm,
            "samples": self.samples,
            "tokens": self.tokens,
            "peak": peak,
            "before": self.before,
        }
        with (Path(os.environ["DRIVER_OUT"]) / f"{torch.distributed.get_rank()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.ended, self.samples, self.tokens, self.before = now, 0, 0, 0


def _peak() -> int:
    """Most bytes allocated since the last call, after what the GPU still has to do."""
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    if peak:
        torch.cuda.reset_peak_memory_stats()
    return peak


_meter = Meter()


def record_steps(optimizers: ModuleType) -> None:
    """Measure the steps of every optimizer that `megatron.core.optimizer` makes."""
    make = optimizers.get_megatron_optimizer

    def get_megatron_optimizer(*rest: Any, **more: Any) -> Any:
        optimizer = make(*rest, **more)
        optimizer.zero_grad = _begun(optimizer.zero_grad)
        optimizer.step = _ended(optimizer.step)
        return optimizer

    optimizers.get_megatron_optimizer = get_megatron_optimizer


def _begun(zero_grad: Callable) -> Callable:
    def begin(*rest: Any, **more: Any) -> None:
        _meter.begin()
        zero_grad(*rest, **more)

    return begin


def _ended(step: Callable[[], tuple]) -> Callable[[], tuple]:
    def step_and_end() -> tuple:
        is_successful, norm, zeros = step()
        _meter.end(float(norm))
        return is_successful, norm, zeros

    return step_and_end


def add_samples(tokens: Sequence[Any], **columns: Sequence[Any]) -> None:
    """Count samples of the step in progress."""
    _meter.samples += len(tokens)
    _meter.tokens += sum(len(row) for row in tokens)
