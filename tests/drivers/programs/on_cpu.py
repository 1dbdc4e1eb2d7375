"""A machine without a GPU: the CPU in place of CUDA, and gloo in place of NCCL."""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

_modes = threading.local()


def enable() -> None:
    """Answer CUDA's names with the CPU, and NCCL's with gloo."""
    from cpu import cpu_megatron

    cpu_megatron.enable()
    import torch

    _modes.has_entered = True
    torch.set_num_threads(1)
    _use_gloo(torch.distributed)


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
