"""slime's driver on a machine without a GPU."""

from types import ModuleType
from typing import Any

import job
import rollout_on_cpu


class OlderNumPy(ModuleType):
    """slime asks for a version below 2."""

    __version__ = "1.26.4"

    def __getattr__(self, name: str) -> Any:
        import numpy

        return getattr(numpy, name)


def prepare() -> None:
    """Called before slime is imported."""
    rollout_on_cpu.prepare(
        "slime",
        data="slime.backends.megatron_utils.data",
        contents={"sglang.srt.server_args": {"ServerArgs": rollout_on_cpu.RouterArgs}},
        after={
            **({} if job.IS_ON_GPU else {"slime.utils.accelerator": _name_the_cpu}),
            "slime.backends.megatron_utils.hf_to_megatron": _load_nothing,
            "slime.backends.megatron_utils.initialize": _show_older_numpy,
        },
    )


def _name_the_cpu(accelerator: ModuleType) -> None:
    import torch

    accelerator.device = accelerator.current_device = lambda index=None: torch.device("cpu")


def _load_nothing(weights: ModuleType) -> None:
    weights.load_hf_weights = lambda *rest, **more: None


def _show_older_numpy(initialize: ModuleType) -> None:
    initialize.np = OlderNumPy("numpy")
