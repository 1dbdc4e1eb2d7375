"""What every process of a host's job does before it imports the host: absent packages, changes after imports.

DRIVER_GPUS is the number of real GPUs; without it the job runs on a CPU. DRIVER_MODEL and DRIVER_RECORDER name modules
in place of `toy` and `recorder`.
"""

import importlib
import importlib.abc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import stand_ins

IS_ON_GPU = "DRIVER_GPUS" in os.environ
GPUS = int(os.environ.get("DRIVER_GPUS", "2"))  # on a CPU, Ray pretends to have two
RAY = {"num_gpus": GPUS, "num_cpus": 16, "include_dashboard": False}
model = importlib.import_module(os.environ.get("DRIVER_MODEL", "toy"))
recorder = importlib.import_module(os.environ.get("DRIVER_RECORDER", "recorder"))
ASK_FOR_PACKAGES = (  # modules of Megatron that look for Transformer Engine, and must not find a stand-in
    *("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.models.gpt", "megatron.core.optimizer"),
    *("megatron.core.distributed", "megatron.training.arguments"),
)


def prepare(
    absent: Sequence[str], contents: Mapping[str, dict[str, Any]], after: Mapping[str, Callable[[ModuleType], None]]
) -> None:
    """Import the host's modules with changes; on a CPU, answer CUDA's names with the CPU.

    Args:
        absent: packages that are not installed, or that need a GPU; their names are empty classes.
        contents: what modules of absent packages contain, by name of the module.
        after: called with a module after its import, by name of the module.
    """
    if not IS_ON_GPU:
        import on_cpu

        on_cpu.enable()
    for name in ASK_FOR_PACKAGES:
        importlib.import_module(name)
    sys.meta_path.insert(0, stand_ins.Classes(absent, contents))
    sys.meta_path.insert(0, _AfterImport({"megatron.core.optimizer": recorder.record_steps, **after}))


class _AfterImport:
    """Calls a function with a module after its import."""

    def __init__(self, calls: Mapping[str, Callable[[ModuleType], None]]):
        self._calls = {name: call for name, call in calls.items() if name not in sys.modules}
        for name in calls.keys() - self._calls:
            calls[name](sys.modules[name])

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        if name not in self._calls:
            return None
        call = self._calls.pop(name)
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(found for finder in others if (found := finder.find_spec(name, path, target)) is not None)
        spec.loader = _Loader(spec.loader, call)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, call: Callable[[ModuleType], None]):
        self._loader, self._call = loader, call

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._call(module)
