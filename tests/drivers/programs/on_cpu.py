"""What the job of every host needs on a machine without a GPU: gloo in place of NCCL, and absent packages."""

import functools
import importlib.abc
import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import stand_ins

GPUS = 2  # that Ray pretends to have
RAY = {"num_gpus": GPUS, "num_cpus": 16, "include_dashboard": False}

_modes = threading.local()


def prepare(
    absent: Sequence[str], contents: Mapping[str, dict[str, Any]], after: Mapping[str, Callable[[ModuleType], None]]
) -> None:
    """Answer CUDA's names with the CPU, and import the host's modules with changes.

    Args:
        absent: packages that are not installed, or that need a GPU; their names are empty classes.
        contents: what modules of absent packages contain, by name of the module.
        after: called with a module after its import, by name of the module.
    """
    from cpu import cpu_megatron

    cpu_megatron.enable()
    import recorder
    import torch

    _modes.has_entered = True
    torch.set_num_threads(1)
    _use_gloo(torch.distributed)
    sys.meta_path.insert(0, stand_ins.Classes(absent, contents))
    sys.meta_path.insert(0, _AfterImport({"megatron.core.optimizer": recorder.record_steps, **after}))


def _use_gloo(distributed: Any) -> None:
    start, new = distributed.init_process_group, distributed.new_group

    def init_process_group(backend: str | None = None, *rest: Any, **more: Any) -> Any:
        return start("gloo", *rest, **more)

    def new_group(*rest: Any, **more: Any) -> Any:
        return new(*rest, **(more | {"backend": "gloo"} if more.get("backend") == "nccl" else more))

    distributed.init_process_group, distributed.new_group = init_process_group, new_group


def enter_mode() -> None:
    """The CPU in place of CUDA in this thread. It is a function of a module, because Ray cannot pickle `_modes`."""
    if not getattr(_modes, "has_entered", False):
        from cpu import cpu_megatron

        cpu_megatron.CudaMeansCPU().__enter__()
        _modes.has_entered = True


def in_every_thread(function: Callable) -> Callable:
    """The function with the CPU in place of CUDA in its thread: modes of torch belong to a thread."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        enter_mode()
        return function(*args, **kwargs)

    @functools.wraps(function)
    async def run_async(*args: Any, **kwargs: Any) -> Any:
        enter_mode()
        return await function(*args, **kwargs)

    return run_async if inspect.iscoroutinefunction(function) else run


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
