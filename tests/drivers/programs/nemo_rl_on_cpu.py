"""NeMo-RL's driver on a machine without a GPU. Not its own: Megatron-Bridge, the engine, and the reward's parser."""

import json
import os
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import job
import nemo_rl_bridge
import on_cpu
import toy

ABSENT = (
    *("math_verify", "mlflow", "modelopt", "nccl", "nemo_automodel", "swanlab", "tensorrt_llm", "vllm", "wandb"),
    *("nvtx", "transformer_engine", "megatron.bridge", "megatron.core.inference.shards"),
    "megatron.core.transformer.moe.moe_logging",
)
COLUMNS = {  # of a token, by the recorder's names
    "mask": "token_mask",
    "advantages": "advantages",
    "old": "prev_logprobs",
    "rollout": "generation_logprobs",
}
LOG = Path(os.environ["DRIVER_OUT"]).parent / "train.jsonl"  # NeMo-RL's own metrics of each train call


def prepare() -> None:
    """Called before NeMo-RL is imported."""
    import torch
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # pydantic asks for it below Python 3.12
    parser = {"math_verify.metric": {"math_metric": reward}, "math_verify.errors": {"TimeoutException": TimeoutError}}
    job.prepare(
        ABSENT,
        nemo_rl_bridge.CONTENTS | parser,
        {
            "ray": _pretend_gpus,
            "nemo_rl.models.generation.vllm": _replace_engine,
            "nemo_rl.models.policy.lm_policy": _record_policy,
            "nemo_rl.utils.logger": _write_metrics,
            "nemo_rl.models.policy.workers.base_policy_worker": _prepare_workers,
            "nemo_rl.models.megatron.data": _record_samples,
        },
    )
    torch.cuda.current_device = _current_device
    torch.cuda.get_device_name = lambda *rest: "CPU"
    torch.cuda.mem_get_info = lambda *rest: (8 << 30, 16 << 30)
    _add_newer_names()


def _current_device() -> Any:
    """A worker asserts that it is the local rank; all others want a device."""
    import torch

    caller = sys._getframe(1).f_code
    if caller.co_name == "__init__" and "policy_worker" in caller.co_filename:
        return int(os.environ["LOCAL_RANK"])
    return torch.device("cpu")


def reward(**rest: Any) -> Callable:
    """1 for about every second answer."""
    import zlib

    return lambda gold, answers: (float(zlib.crc32(answers[0].encode()) % 2), (gold, answers))


def _add_newer_names() -> None:
    """Names of a newer megatron-core, and a buffer that keeps its storage.

    On a CPU the copy of an offloaded buffer is the buffer itself, whose storage Megatron then frees.
    """
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from megatron.core.transformer import enums

    for module in (mcore_fsdp_adapter, enums):
        for name in ("FullyShardedDataParallelV1", "FullyShardedDataParallelV2", "InferenceCudaGraphScope"):
            vars(module).setdefault(name, type(name, (), {}))
    _ParamAndGradBuffer.offload_to_cpu = _ParamAndGradBuffer.reload_from_cpu = lambda self, *rest, **more: None


def _pretend_gpus(ray: ModuleType) -> None:
    init = ray.init

    def start(address: str | None = None, **given: Any) -> Any:
        if address == "auto":
            raise ConnectionError
        started = init(address, **(given | job.RAY))
        os.environ["RAY_ADDRESS"] = started.address_info["address"]  # else another job's Ray is an error
        return started

    ray.init = start


def _replace_engine(engines: ModuleType) -> None:
    import nemo_rl_generation

    engines.VllmGeneration = nemo_rl_generation.Generation


def _record_policy(policies: ModuleType) -> None:
    import nemo_rl_generation

    make = policies.Policy.__init__

    def __init__(self: Any, *rest: Any, **more: Any) -> None:
        make(self, *rest, **more)
        nemo_rl_generation.policy = self

    policies.Policy.__init__ = __init__
    policies.Policy.get_free_memory_bytes = lambda self: 8 << 30  # v0.7.0 calls it, and then:
    policies.Policy.stream_weights_via_ipc_zmq = lambda self, **rest: []  # `nemo_rl_generation` takes the weights


def _write_metrics(loggers: ModuleType) -> None:
    """All digits of a step's metrics, of which the driver prints four."""
    log = loggers.Logger.log_metrics

    def log_metrics(self: Any, metrics: Any, step: int, prefix: str = "", **more: Any) -> Any:
        if prefix == "train" and "loss" in metrics:
            names = ("loss", "grad_norm", "pg/pg_loss")
            line = {"step": step} | {name: float(metrics[name]) for name in names if name in metrics}
            with LOG.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return log(self, metrics, step, prefix, **more)

    loggers.Logger.log_metrics = log_metrics


def _prepare_workers(workers: ModuleType) -> None:
    """Ray runs the methods of an actor that has async ones outside the main thread."""

    def table(self: Any) -> Any:
        return toy.table_of(toy.whole([self.model]))

    def before_ray_wraps_it(cls: type, **rest: Any) -> None:
        if cls.__name__ != "MegatronPolicyWorkerImpl":
            return
        cls.table = table
        for name, function in list(vars(cls).items()):
            if isinstance(function, types.FunctionType) and (name == "__init__" or name[0] != "_"):
                setattr(cls, name, on_cpu.in_every_thread(function))

    workers.AbstractPolicyWorker.__init_subclass__ = classmethod(before_ray_wraps_it)


def _record_samples(data: ModuleType) -> None:
    import recorder

    take = data.process_global_batch

    def process_global_batch(*rest: Any, **more: Any) -> dict:
        found = take(*rest, **more)
        recorder.add_samples(**_responses(found["batch"]))
        return found

    data.process_global_batch = process_global_batch


def _responses(batch: Any) -> dict[str, list]:
    """The recorder's columns, of the rows that count."""
    columns = {name: [] for name in ("tokens", *COLUMNS)}
    for row in batch["sample_mask"].nonzero()[:, 0].tolist():
        length = int(batch["input_lengths"][row])
        response = slice(int(batch["token_mask"][row].int().argmax()), length)
        columns["tokens"].append(batch["input_ids"][row, :length])
        for name, theirs in COLUMNS.items():
            columns[name].append(batch[theirs][row, response])
    return columns
