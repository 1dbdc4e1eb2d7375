"""Megatron's two wrappers that shard parameters, on a CPU: Megatron-FSDP and torch's FSDP2."""

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed import torch_fully_sharded_data_parallel as torch_fsdp
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

# option: what Megatron-FSDP shards (--data-parallel-sharding-strategy)
STRATEGIES = {"mfsdp": "optim_grads_params", "mfsdp2": "optim_grads", "mfsdp1": "optim", "mfsdp0": "no_shard"}
OPTIONS = (*STRATEGIES, "fsdp2", "unit")


def _on_cpu() -> None:
    """What these wrappers ask of CUDA, beyond `cpu_megatron`."""
    make = DeviceMesh.__init__
    if getattr(make, "is_on_cpu", False):
        return

    def on_cpu(self: DeviceMesh, device_type: str, *rest: object, **more: object) -> None:
        make(self, "cpu", *rest, **more)

    on_cpu.is_on_cpu = True
    DeviceMesh.__init__ = on_cpu
    torch.Tensor.record_stream = lambda self, stream: None
    param_and_grad_buffer._coalescing_manager = _one_by_one


@contextlib.contextmanager
def _one_by_one(group: object, async_ops: bool = False) -> Iterator[SimpleNamespace]:
    """In the place of torch's `_coalescing_manager`: each collective is finished when its call returns.

    Megatron-FSDP goes on while a collective is in progress. On a GPU, streams keep the two in order. Over gloo, they
    run at the same time on the same buffers, and a rank crashed now and then with a corrupted heap.
    """
    gather = torch.distributed.all_gather_into_tensor

    def finished(*args: object, async_op: bool = False, **more: object) -> None:
        gather(*args, **more)

    with mock.patch.object(torch.distributed, "all_gather_into_tensor", finished):
        yield SimpleNamespace(wait=lambda: None)


def wrap_fsdp(config: Any, options: frozenset[str], model: Any) -> Any:
    """`model` under the wrapper of the options."""
    _on_cpu()
    if "fsdp2" in options:
        config.transformer_impl = "local"
        if "unit" in options:  # as it is with Transformer Engine: the output layer's weight is freed after its forward
            layer = model.output_layer
            layer.__class__ = type("OutputLayer", (type(layer),), {})  # the other layers' are of its type here
            model._fsdp_modules = [type(layer)]
        return torch_fsdp.TorchFullyShardedDataParallel(config, DistributedDataParallelConfig(), model)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=next(STRATEGIES[name] for name in STRATEGIES if name in options),
        overlap_grad_reduce="overlap" in options,
        overlap_param_gather="overlap" in options,
    )
    if hasattr(settings, "gradient_reduce_div_fusion"):
        settings.gradient_reduce_div_fusion = False  # a sum of products is NCCL's
    with mock.patch.object(torch.cuda, "current_device", return_value=0):  # written after "cuda:"
        return FullyShardedDataParallel(config, settings, model, device=torch.device("cpu"))


def whole_gradients(wrapped: Any) -> dict[str, torch.Tensor]:
    """Every parameter's gradient after finalize, by its name in the model, as far as tensor parallelism leaves it
    whole."""
    if isinstance(wrapped, torch_fsdp.TorchFullyShardedDataParallel):
        named = wrapped.module.named_parameters()
    else:
        named = wrapped.param_and_grad_buffer.optimizer_named_parameters
    return {name.removeprefix("module."): _whole(name, parameter) for name, parameter in named}


def _whole(name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    """From the ranks' parts: rows of FSDP2, any part of Megatron-FSDP, which may leave a rank none."""
    dense, expert = (
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_expert_data_parallel_group(),
    )
    group = expert if ".local_experts." in name else dense
    gradient = parameter.grad
    local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
    parts: list = [None] * group.size()
    torch.distributed.all_gather_object(
        parts, torch.zeros(0) if local is None else local.reshape(-1).clone(), group=group
    )
    shape = list(parameter.shape)
    if (
        getattr(parameter, "tensor_model_parallel", False)
        and isinstance(gradient, DTensor)
        and gradient.device_mesh.ndim > 1
    ):
        shape[parameter.partition_dim] //= parallel_state.get_tensor_model_parallel_world_size()
    if all(part.numel() == math.prod(shape) for part in parts):  # nothing is sharded
        return parts[group.rank()].reshape(shape)
    return torch.cat(parts).reshape(shape)
