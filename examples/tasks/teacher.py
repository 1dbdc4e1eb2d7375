"""A teacher for on-policy distillation: the policy of another run of the example, from its checkpoint."""

import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.training.arguments import core_transformer_config_from_args
from tasks.sampling import Policy
from torch import nn


def load_teacher(path: str, build: Callable[..., nn.Module], args) -> Policy:
    """The policy that a run of the example saved with `--save path`.

    Its flags of the model are this run's, but for `--teacher-num-layers` and `--teacher-hidden-size`, with as many more
    heads and feed-forward channels.

    Args:
        path: the run's `--save`; its latest checkpoint is read.
        build: makes a model like the student's, as Megatron's model provider.
        args: the arguments of this run.

    Raises:
        ValueError: the checkpoint does not exist, or this run has several virtual stages.
    """
    tracker = Path(path) / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        raise ValueError(f"--teacher {path} holds no checkpoint. Give the --save of a run that has saved one.")
    if args.virtual_pipeline_model_parallel_size:
        raise ValueError("--teacher does not support virtual pipeline stages here. Leave them out.")
    config = core_transformer_config_from_args(_with_sizes(args))
    model = build(config=config, pre_process=mpu.is_pipeline_first_stage(), post_process=mpu.is_pipeline_last_stage())
    saved = {"model": model.sharded_state_dict()}
    folder = Path(path) / f"iter_{int(tracker.read_text()):07d}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's about its own ShardedTensor
        model.load_state_dict(dist_checkpointing.load(saved, str(folder))["model"])
    model.to(torch.cuda.current_device(), args.params_dtype)  # as Megatron does with the student
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return Policy([model], width=args.seq_length, temperature=args.pg_temperature)


def _with_sizes(args) -> Namespace:
    """This run's arguments with the teacher's sizes."""
    width = args.teacher_hidden_size or args.hidden_size
    return Namespace(
        **vars(args)
        | {
            "num_layers": args.teacher_num_layers or args.num_layers,
            "hidden_size": width,
            "ffn_hidden_size": args.ffn_hidden_size * width // args.hidden_size,
            "num_attention_heads": args.num_attention_heads * width // args.hidden_size,
        }
    )
