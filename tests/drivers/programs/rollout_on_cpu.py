"""The drivers of slime and miles on a machine without a GPU. Not theirs: the engine's options, and the model.

No rollout needs a stand-in: both hosts train from recorded rollouts on request.
"""

import argparse
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import job

ABSENT = (
    *("sglang", "sglang_router", "megatron.bridge", "torch_memory_saver", "mooncake", "transformer_engine", "wandb"),
)
LATER = ("megatron.training.tokenizer",)  # which megatron-core 0.17.1 lacks
COLUMNS = {  # of a micro-batch, by the recorder's names
    "tokens": "tokens",
    "mask": "loss_masks",
    "advantages": "advantages",
    "old": "log_probs",
    "rollout": "rollout_log_probs",
}
SLICED = ("advantages", "old", "rollout")  # of which a context-parallel rank has its tokens only


class RouterArgs:
    """The options of an engine that no run starts."""

    @staticmethod
    def add_cli_args(parser: Any, **rest: Any) -> None:
        pass


def prepare(host: str, *, data: str, absent: Sequence[str] = (), contents: Mapping = {}, after: Mapping = {}) -> None:
    """Called before the host is imported. `data` names its module with `DataIterator`."""
    held = {
        "sglang_router.launch_router": {"RouterArgs": RouterArgs},
        "megatron.training.tokenizer.tokenizer": {"_vocab_size_with_padding": lambda size, args: size},
    }
    lacking = [name for name in LATER if not _has(name)]
    changes = {
        f"{host}.ray.placement_group": _start_ray,
        f"{host}.backends.megatron_utils.arguments": _set_older_names,
        data: _record_samples,
        **after,
    }
    job.prepare([*ABSENT, *lacking, *absent], held | dict(contents), changes)


def _has(name: str) -> bool:
    """Whether the Megatron of the job has this package; nothing is imported."""
    top, *below = name.split(".")
    return any(Path(place, *below).is_dir() for place in find_spec(top).submodule_search_locations)


def _start_ray(groups: ModuleType) -> None:
    import ray

    if not ray.is_initialized():
        ray.init(**job.RAY)


def _set_older_names(arguments: ModuleType) -> None:
    """miles, and slime before August 2026, read arguments that megatron-core 0.17.1 has renamed."""
    name = next(
        name for name in ("_set_default_megatron_args", "set_default_megatron_args") if hasattr(arguments, name)
    )
    set_defaults = getattr(arguments, name)

    def set_default_megatron_args(args: argparse.Namespace) -> Any:
        older = dict.fromkeys(("use_checkpoint_lr_scheduler", "override_lr_scheduler"), False)
        vars(args).update(older | {"enable_gloo_process_groups": True} | vars(args))
        return set_defaults(args)

    setattr(arguments, name, set_default_megatron_args)


def _record_samples(data: ModuleType) -> None:
    take = data.DataIterator.get_next

    def get_next(self: Any, keys: Sequence[str]) -> dict:
        batch = take(self, keys)
        if batch.get("advantages") is not None:  # the pass that trains, on the last pipeline stage
            columns = {name: batch[column] for name, column in COLUMNS.items()}
            of_ranks = {name: map(_whole, columns[name] or (), columns["tokens"], columns["mask"]) for name in SLICED}
            job.recorder.add_samples(**columns | of_ranks)
        return batch

    data.DataIterator.get_next = get_next


def _whole(values: Any, tokens: Any, mask: Any) -> Any:
    """[R] float32: a response's values of all context-parallel ranks, each of which has two chunks of the sequence."""
    import torch
    from megatron.core import parallel_state as groups

    size, rank = groups.get_context_parallel_world_size(), groups.get_context_parallel_rank()
    if size == 1:
        return values
    chunks = torch.arange(len(tokens) - 1)[-len(mask) :] // -(-len(tokens) // (2 * size))  # a token's logits precede it
    whole = torch.zeros(len(mask))
    whole[(chunks == rank) | (chunks == 2 * size - 1 - rank)] = values
    torch.distributed.all_reduce(whole, group=groups.get_context_parallel_group())
    return whole


def provide(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> Any:
    """The host's `--custom-model-provider-path`."""
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(get_args())
    return job.model.build(config, pre_process=pre_process, post_process=post_process)
