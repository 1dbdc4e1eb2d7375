"""The drivers of slime and miles on a machine without a GPU. Not theirs: the engine's options, and the model.

No rollout needs a stand-in: both hosts train from recorded rollouts on request.
"""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import on_cpu
import toy

ABSENT = ("sglang", "sglang_router", "megatron.bridge", "torch_memory_saver", "mooncake", "transformer_engine")
COLUMNS = {  # of a micro-batch, by the recorder's names
    "tokens": "tokens",
    "mask": "loss_masks",
    "advantages": "advantages",
    "old": "log_probs",
    "rollout": "rollout_log_probs",
}


class RouterArgs:
    """The options of an engine that no run starts."""

    @staticmethod
    def add_cli_args(parser: Any, **rest: Any) -> None:
        pass


def prepare(host: str, *, data: str, absent: Sequence[str] = (), contents: Mapping = {}, after: Mapping = {}) -> None:
    """Called before the host is imported. `data` names its module with `DataIterator`."""
    router = {"sglang_router.launch_router": {"RouterArgs": RouterArgs}}
    changes = {f"{host}.ray.placement_group": _start_ray, data: _record_samples, **after}
    on_cpu.prepare([*ABSENT, *absent], router | dict(contents), changes)


def _start_ray(groups: ModuleType) -> None:
    import ray

    if not ray.is_initialized():
        ray.init(**on_cpu.RAY)


def _record_samples(data: ModuleType) -> None:
    import recorder

    take = data.DataIterator.get_next

    def get_next(self: Any, keys: Sequence[str]) -> dict:
        batch = take(self, keys)
        if "advantages" in keys:  # the pass that trains
            recorder.add_samples(**{name: batch[column] for name, column in COLUMNS.items()})
        return batch

    data.DataIterator.get_next = get_next


def provide(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> Any:
    """The host's `--custom-model-provider-path`."""
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(get_args())
    return toy.build(config, pre_process=pre_process, post_process=post_process)
