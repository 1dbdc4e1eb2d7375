"""One `Policy.train` of NeMo-RL, from a checkout, on real ranks: the driver's sharding and packing, each rank's whole
`MegatronPolicyWorkerImpl.train` with its micro-batches, loss wrappers and metrics, and the driver's aggregation.

Not theirs: the model, an optimizer that keeps the gradients, and the group of workers, which are this job's ranks;
every rank plays the driver, too. Packages that are not installed are stand-ins, and so is what newer releases of
Megatron have.
"""

import importlib
import pickle
import sys
import typing
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import stand_ins
import torch
import typing_extensions
from cpu import cpu_megatron
from megatron.core import parallel_state
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.transformer import enums
from torch import Tensor

PACKAGES = (
    *("aiohttp", "datasets", "fastapi", "huggingface_hub", "hydra", "mlflow", "nvtx", "omegaconf", "pandas"),
    *("prometheus_client", "pynvml", "ray", "rich", "scipy", "soundfile", "swanlab", "tensordict", "torchdata"),
    *("tqdm", "transformers", "uvicorn", "vllm", "wandb", "zmq"),
)
ABSENT = (
    "megatron.bridge",
    "megatron.core.inference.shards",
    "megatron.core.transformer.moe.moe_logging",
    "megatron.training",
)


def _remote(*classes: type, **options: object) -> Any:
    return classes[0] if classes else (lambda decorated: decorated)


REAL: dict[str, dict[str, object]] = {
    "ray": {"remote": _remote, "get": lambda value: value, "exceptions": SimpleNamespace(RayActorError=RuntimeError)},
    "transformers": {"__version__": "5.0.0"},
    "megatron.training.utils": {"get_ltor_masks_and_position_ids": lambda **given: (None, None, None)},
    "megatron.bridge.training.utils.train_utils": {
        "logical_and_across_model_parallel_group": lambda value, mp_group: value,
        "reduce_max_stat_across_model_parallel_group": lambda value, mp_group: value,
    },
    "megatron.bridge.training.utils": {
        "flop_utils": SimpleNamespace(num_floating_point_operations=lambda config, batch_size: 0.0)
    },
}


class _Missing:
    """Finds what the installed Megatron lacks, after all that it has."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        return ModuleSpec(name, self._finder, is_package=True) if name.startswith(ABSENT) else None


def load(checkout: str) -> None:
    """Make NeMo-RL importable from its checkout, on a CPU, with any Python and Megatron."""
    typing.TypedDict = typing_extensions.TypedDict  # pydantic asks for it below Python 3.12
    sys.path.insert(0, checkout)
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_Missing(stand_ins.install(*missing, **REAL)))
    for name in ("FullyShardedDataParallelV1", "FullyShardedDataParallelV2"):
        vars(mcore_fsdp_adapter).setdefault(name, type(name, (), {}))
    vars(enums).setdefault("InferenceCudaGraphScope", type("InferenceCudaGraphScope", (), {}))
    torch.cuda.get_device_name = lambda *index: "CPU"
    gather = importlib.import_module("nemo_rl.distributed.model_utils").AllGatherCPTensor
    backward = gather.backward

    def on_the_cpu(ctx: Any, gradient: Tensor) -> Any:
        with cpu_megatron.CudaMeansCPU():  # torch suspends a mode while a backward runs
            return backward(ctx, gradient)

    gather.backward = staticmethod(on_the_cpu)


class Optimizer:
    """Keeps the gradients of every step, and moves nothing."""

    param_groups: typing.ClassVar = [{}]
    grad_norms_by_group: typing.ClassVar = {}

    def __init__(self, gradients: Callable[[], list[Tensor]]) -> None:
        self._gradients = gradients
        self.found: list[list[Tensor]] = []

    def zero_grad(self) -> None:
        pass

    def step(self) -> tuple[bool, float, int]:
        self.found.append(self._gradients())
        return True, 0.0, 0


class Workers:
    """This job's ranks for the driver: shard i is for data-parallel rank i, and its first rank answers."""

    cluster = SimpleNamespace(world_size=lambda: torch.distributed.get_world_size())

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def run_all_workers_sharded_data(
        self, method: str, *, data: list, common_kwargs: Mapping[str, Any], **axes: object
    ) -> dict:
        mine = data[parallel_state.get_data_parallel_rank()]
        return getattr(self._worker, method)(mine, **pickle.loads(pickle.dumps(common_kwargs)))

    def shutdown(self, **options: object) -> bool:
        return True

    def get_all_worker_results(self, result: dict) -> list[dict]:
        ranks = [None] * torch.distributed.get_world_size()
        is_copy = parallel_state.get_context_parallel_rank() + parallel_state.get_tensor_model_parallel_rank() > 0
        torch.distributed.all_gather_object(ranks, (is_copy, result))
        return [found for is_copy, found in ranks if not is_copy]


def config(*, rows: str, steps_of: int, fuse_loss: bool, fused_linear: bool) -> dict[str, Any]:
    """What their code reads of their policy's configuration."""
    sizes = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "pipeline_model_parallel_size": 1,
    }
    return {
        "model_name": "toy",
        "train_global_batch_size": steps_of,
        "train_micro_batch_size": 2,
        "make_sequence_length_divisible_by": 4,
        "max_total_sequence_length": 64,
        "dynamic_batching": {"enabled": rows == "dynamic", "train_mb_tokens": 36},
        "sequence_packing": {
            "enabled": rows == "packed",
            "train_mb_tokens": 36,
            "algorithm": "modified_first_fit_decreasing",
            "fuse_loss": fuse_loss,
        },
        "megatron_cfg": {
            "enabled": True,
            "sequence_parallel": False,
            "empty_unused_memory_level": 0,
            "use_fused_linear_logprobs": fused_linear,
            **sizes,
        },
        "draft": {"enabled": False},
    }


def worker_of(model: Any, optimizer: Optimizer, cfg: dict[str, Any], top_p: float) -> Any:
    module = importlib.import_module("nemo_rl.models.policy.workers.megatron_policy_worker")
    sampling = importlib.import_module("nemo_rl.algorithms.logits_sampling_utils").TrainingSamplingParams
    worker = module.MegatronPolicyWorkerImpl.__new__(module.MegatronPolicyWorkerImpl)
    state = SimpleNamespace(straggler_timer=None, cfg=SimpleNamespace(model=SimpleNamespace(seq_length=64)))
    for name, value in {
        "model": model,
        "optimizer": optimizer,
        "cfg": cfg,
        "dp_size": parallel_state.get_data_parallel_world_size(),
        "scheduler": SimpleNamespace(get_lr=lambda group: 1e-6, get_wd=lambda: 0.0, step=lambda increment: None),
        "timer": SimpleNamespace(start=lambda name: None, stop=lambda name: None),
        "mcore_state": state,
        "sampling_params": sampling(temperature=1.0, top_p=top_p),
        "draft_model": None,
        "dtype": torch.float32,
        "defer_fp32_logits": False,
        "delegate_pack_to_model": False,
        "delegate_mtp_loss_mask_to_model": False,
        "model_slices_context_parallel_inputs": False,
        "media_placeholder_token_id": None,
        "should_disable_forward_pre_hook": False,
        "_router_replay_enabled": False,
        "_first_train_step_forward_pre_hook_disabled": False,
        "_copy_main_params_to_param_buffer": lambda: None,
    }.items():
        object.__setattr__(worker, name, value)
    return worker


def train(
    model: Any,
    gradients: Callable[[], list[Tensor]],
    batch: Mapping[str, Tensor],
    loss_fn: Any,
    *,
    rows: str,
    steps_of: int,
    fuse_loss: bool = False,
    top_p: float = 1.0,
    fused_linear: bool = False,
) -> tuple[list[list[Tensor]], dict[str, Any]]:
    """Gradients of every optimizer step, and what `Policy.train` returned to the driver.

    Args:
        model: under Megatron's DDP, which adds gradients up.
        gradients: the model's, after finalize.
        batch: the driver's rows.
        loss_fn: theirs or ours.
        rows: how they make micro-batches: "padded" (two each), "dynamic" (as many as tokens allow) or "packed".
        steps_of: rows of an optimizer step.
        fuse_loss: their policy.sequence_packing.fuse_loss.
        top_p: their policy.generation.top_p.
        fused_linear: their policy.megatron_cfg.use_fused_linear_logprobs.
    """
    cfg = config(rows=rows, steps_of=steps_of, fuse_loss=fuse_loss, fused_linear=fused_linear)
    module = importlib.import_module("nemo_rl.models.policy.lm_policy")
    rows_of = importlib.import_module("nemo_rl.distributed.batched_data_dict").BatchedDataDict
    optimizer = Optimizer(gradients)
    policy = module.Policy.__new__(module.Policy)
    lengths = {"input_key": "input_ids", "input_lengths_key": "input_lengths"}
    packing = {
        "algorithm": cfg["sequence_packing"]["algorithm"],
        "sequence_length_pad_multiple": cfg["make_sequence_length_divisible_by"],
    }
    vars(policy).update(
        cfg=cfg,
        sharding_annotations=SimpleNamespace(get_axis_size=lambda axis: parallel_state.get_data_parallel_world_size()),
        use_dynamic_batches=rows == "dynamic",
        dynamic_batching_args=lengths | {"sequence_length_round": 4},
        use_sequence_packing=rows == "packed",
        sequence_packing_args=lengths | packing,
        flops_tracker=None,
        debug_payload_metrics=False,
        worker_group=Workers(worker_of(model, optimizer, cfg, top_p)),
    )
    found = policy.train(rows_of({name: values.clone() for name, values in batch.items()}), loss_fn)
    return optimizer.found, found
