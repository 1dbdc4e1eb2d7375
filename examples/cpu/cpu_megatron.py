"""Run Megatron-LM on a machine without a GPU, over gloo. For demonstrations and tests only.

Megatron names "cuda" in some hundred places but needs little of it: its data parallelism, optimizers, schedules and
tensor parallelism are plain torch. `enable()` answers those names with the CPU for the rest of the process:

* a device named "cuda" in any torch call means the CPU; `.cuda()` returns the tensor, memory is never pinned;
* `Tensor.type()` says `torch.cuda.FloatTensor`, because Megatron's optimizer and gradient clipping compare that name;
* `torch.cuda.*` reports one device, no memory use, and streams and events that do nothing;
* `torch.accelerator` reports no accelerator: a CUDA build of torch would name CUDA, and optimizers would ask it for a
stream;
* the CUDA random states are the CPU's.

On a GPU nothing here is imported.
"""

import collections
import contextlib
import functools
import os
import types

import torch
from torch.overrides import TorchFunctionMode


class CudaMeansCPU(TorchFunctionMode):
    """Rewrites the device arguments of torch calls."""

    def __torch_function__(self, func, classes, args=(), kwargs=None):
        if not kwargs and func not in _SPECIAL:  # by far the most calls
            return func(*args)
        kwargs = kwargs or {}
        if func in _RETURN_SELF:
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to:
            args = tuple("cpu" if _is_cuda(a) else a for a in args)
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


_RETURN_SELF = (torch.Tensor.cuda, torch.Tensor.pin_memory)
_SPECIAL = {*_RETURN_SELF, torch.Tensor.to, torch.Tensor.type}


def _is_cuda(device: object) -> bool:
    # an index alone (torch.cuda.current_device()) counts too; booleans are arguments of Tensor.to, not devices
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _NoStream:
    """A stream or event that does nothing; the event that a stream records is one."""

    def __init__(self, *args, **kwargs):
        self.cuda_stream = 0

    def __getattr__(self, name):
        return lambda *args, **kwargs: self


@functools.cache  # a second call changes nothing
def enable() -> None:
    """Answer Megatron's CUDA names with the CPU. Call before megatron is imported."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Megatron's fused helpers are torch.compile functions
    _patch_torch_cuda()
    _patch_torch_accelerator()
    CudaMeansCPU().__enter__()
    _patch_megatron()


def _patch_torch_cuda() -> None:
    properties = types.SimpleNamespace(name="CPU", major=0, minor=0, total_memory=0, multi_processor_count=1)
    cpu = torch.device("cpu")
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": cpu,
        "get_device_properties": properties,
        "get_device_capability": (0, 0),
        "memory_stats": collections.defaultdict(int),
        "mem_get_info": (0, 0),
        "current_stream": _NoStream(),
        "default_stream": _NoStream(),
        "is_current_stream_capturing": False,
    }
    zero = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "device_memory_used")
    nothing = (
        "set_device",
        "synchronize",
        "empty_cache",
        "set_stream",
        "manual_seed",
        "manual_seed_all",
        "ipc_collect",
    )
    answers |= dict.fromkeys(zero, 0) | dict.fromkeys(nothing)
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, _answer=answer, **kwargs: _answer)
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.cuda.Stream = torch.cuda.Event = _NoStream
    torch.cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    torch.cuda.nvtx = types.SimpleNamespace(range_push=lambda *a: None, range_pop=lambda *a: None)


def _patch_torch_accelerator() -> None:
    answers = {"is_available": False, "device_count": 0, "current_accelerator": None, "current_stream": _NoStream()}
    answers |= dict.fromkeys(("synchronize", "set_stream", "set_device_index", "empty_cache"))
    for name, answer in answers.items():
        setattr(torch.accelerator, name, lambda *args, _answer=answer, **kwargs: _answer)


def _patch_megatron() -> None:
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    def move_to_cpu(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = move_to_cpu  # Megatron's leaves alone what is on the CPU already

    backward = random.CheckpointFunction.backward

    def recompute(ctx, *gradients):
        with CudaMeansCPU():  # torch suspends a mode while a backward runs
            return backward(ctx, *gradients)

    random.CheckpointFunction.backward = staticmethod(recompute)
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    # Megatron frees an activation that isend was given: NCCL reads it in the order of the stream, gloo later.
    schedules.deallocate_output_tensor = lambda *args, **kwargs: None
    schedules.custom_backward = torch.autograd.backward  # Megatron's own expects a freed activation
