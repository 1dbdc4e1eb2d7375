"""Writes what every optimizer step was given and did, whichever loss the host trains with.

`DRIVER_OUT` gets `RANK_STEP.npz` (weights before and after the step, gradient norm) and `RANK_STEP.json` (the rank's
place in the layout, and the samples that it trained).
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_IS_QUIET = "DRIVER_QUIET" in os.environ  # nothing is recorded, as a job may train two models
_step = 0  # of this process
_samples: list[Mapping[str, Any]] = []  # of the step in progress


def record_steps(optimizers: ModuleType) -> None:
    """Record the steps of every optimizer that `megatron.core.optimizer` makes."""
    make = optimizers.get_megatron_optimizer
    if _IS_QUIET:
        return

    def get_megatron_optimizer(config: Any, model_chunks: Sequence[Any], *rest: Any, **more: Any) -> Any:
        optimizer = make(config, model_chunks, *rest, **more)
        optimizer.step = _recorded(optimizer.step, model_chunks)
        return optimizer

    optimizers.get_megatron_optimizer = get_megatron_optimizer


def _recorded(step: Callable[[], tuple], chunks: Sequence[Any]) -> Callable[[], tuple]:
    def step_and_record() -> tuple:
        global _step
        before = _weights(chunks, "before")
        is_successful, norm, zeros = step()
        import numpy as np

        arrays = before | _weights(chunks, "after") | {"grad_norm": np.array(float(norm))}
        np.savez(_file("npz"), **arrays)
        content = {"pid": os.getpid(), "place": _place(), "samples": _samples}
        _file("json").write_text(json.dumps(content), encoding="utf-8")
        _samples.clear()
        _step += 1
        return is_successful, norm, zeros

    return step_and_record


def add_samples(**columns: Sequence[Any]) -> None:
    """Record samples of the step in progress: `tokens`, `mask`, `advantages`, `old` and `rollout` of each."""
    if _IS_QUIET:
        return
    values = [[value.tolist() for value in column] for column in columns.values()]
    _samples.extend(dict(zip(columns, sample, strict=True)) for sample in zip(*values, strict=True))


def _file(suffix: str) -> Path:
    import torch

    return Path(os.environ["DRIVER_OUT"]) / f"{torch.distributed.get_rank()}_{_step}.{suffix}"


def _place() -> list[int]:
    """Ranks in the data-, tensor-, context- and pipeline-parallel groups."""
    from megatron.core import parallel_state as groups

    return [
        groups.get_data_parallel_rank(),
        groups.get_tensor_model_parallel_rank(),
        groups.get_context_parallel_rank(),
        groups.get_pipeline_model_parallel_rank(),
    ]


def _weights(chunks: Sequence[Any], when: str) -> dict[str, Any]:
    """This rank's part of embedding and head, float32."""
    named = (pair for chunk in chunks for pair in chunk.named_parameters())
    return {
        f"{when}/{'head' if 'output_layer' in name else 'embedding'}": weight.detach().float().clone().numpy()
        for name, weight in named
    }
