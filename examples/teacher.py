"""A teacher for on-policy distillation: the policy of another run of the example, from its checkpoint."""

import warnings
from collections.abc import Callable
from pathlib import Path

from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from sampling import Policy
from torch import nn


def load_teacher(path: str, build: Callable[..., nn.Module], args) -> Policy:
    """The policy that a run of the example saved with `--save path`; its flags of the model are this run's.

    Args:
        path: the run's `--save`; its latest checkpoint is read.
        build: makes a model like the student's, as Megatron's model provider.
        args: the arguments of this run.

    Raises:
        ValueError: there is no such checkpoint, or this run has several virtual stages.
    """
    tracker = Path(path) / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        raise ValueError(f"--teacher {path} holds no checkpoint. Give the --save of a run that has saved one.")
    if args.virtual_pipeline_model_parallel_size:
        raise ValueError("--teacher does not go with virtual pipeline stages here. Leave them out.")
    model = build(pre_process=mpu.is_pipeline_first_stage(), post_process=mpu.is_pipeline_last_stage())
    saved = {"model": model.sharded_state_dict()}
    folder = Path(path) / f"iter_{int(tracker.read_text()):07d}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's about its own ShardedTensor
        model.load_state_dict(dist_checkpointing.load(saved, str(folder))["model"])
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return Policy([model], width=args.seq_length, temperature=args.pg_temperature)
