"""verl's driver on a machine without a GPU. Not verl's own: Megatron-Bridge, and a rollout from a table of logits."""

import importlib
import itertools
from types import ModuleType, SimpleNamespace
from typing import Any

import job
import on_cpu
import toy

COLUMNS = {  # of a mini-batch, by the recorder's names
    "tokens": "input_ids",
    "mask": "response_mask",
    "advantages": "advantages",
    "old": "old_log_probs",
    "rollout": "rollout_log_probs",
}
ABSENT = ("transformer_engine", "mbridge", "megatron.bridge", "nvtx")


def prepare() -> None:
    """Called before verl is imported."""
    job.prepare(
        ABSENT,
        BRIDGE,
        {
            **({} if job.IS_ON_GPU else _of_a_cpu()),
            "verl.workers.rollout.base": _add_rollout,
            "verl.workers.rollout.replica": _add_replica,
            "verl.workers.engine.megatron.transformer_impl": _record_samples,
            "verl.experimental.agent_loop.agent_loop": _name_sessions,
            "verl.trainer.ppo.v1.trainer_base": _number_prompts,
            "verl.trainer.ppo.v1.replay_buffer": _sort_samples,
        },
    )


def _of_a_cpu() -> dict:
    from torch import distributed
    from torch.distributed import device_mesh

    mesh = device_mesh.init_device_mesh
    device_mesh.init_device_mesh = distributed.init_device_mesh = lambda kind, *rest, **more: mesh("cpu", *rest, **more)
    return {"verl.single_controller.base.decorator": _enter_modes}


def _enter_modes(decorators: ModuleType) -> None:
    """Ray calls a worker's methods outside the main thread."""
    register = decorators.register

    def register_with_modes(*rest: Any, **more: Any) -> Any:
        decorate = register(*rest, **more)
        return lambda function: decorate(on_cpu.in_every_thread(function))

    decorators.register = register_with_modes


def _add_rollout(rollouts: ModuleType) -> None:
    rollouts._ROLLOUT_REGISTRY["table", "async"] = "verl_rollout.Receiver"


def _add_replica(replicas: ModuleType) -> None:
    replicas.RolloutReplicaRegistry.register("table", lambda: importlib.import_module("verl_rollout").Replica)


def _record_samples(engines: ModuleType) -> None:
    run = engines.MegatronEngine.forward_backward_batch

    def forward_backward_batch(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        if not forward_only:
            job.recorder.add_samples(**{name: data[column].unbind() for name, column in COLUMNS.items()})
        return run(self, data, loss_function, forward_only)

    engines.MegatronEngine.forward_backward_batch = forward_backward_batch


# --- the same samples in the same order in every run ---


def _name_sessions(loops: ModuleType) -> None:
    """The rollout receives which of a prompt's samples it makes."""
    run = loops.AgentLoopWorker._run_agent_loop

    async def run_agent_loop(self: Any, sampling_params: dict, *rest: Any, session_id: int = 0, **more: Any) -> Any:
        named = sampling_params | {"session": session_id}
        return await run(self, named, *rest, session_id=session_id, **more)

    loops.AgentLoopWorker._run_agent_loop = run_agent_loop


def _number_prompts(trainers: ModuleType) -> None:
    numbers = itertools.count()
    trainers.uuid = SimpleNamespace(uuid4=lambda: f"{next(numbers):06}")


def _sort_samples(buffers: ModuleType) -> None:
    """verl trains samples in the order in which they are done."""
    make = buffers.ReplayBuffer._materialize_batch

    def materialize(self: Any, partition: str, prompts: list[str], samples: dict[str, dict]) -> Any:
        return make(self, partition, sorted(prompts), dict(sorted(samples.items())))

    buffers.ReplayBuffer._materialize_batch = materialize


# --- a stand-in of Megatron-Bridge ---


class Provider(SimpleNamespace):
    """Makes the toy with Megatron's own DDP."""

    fp16 = bf16 = sequence_parallel = share_embeddings_and_output_weights = False
    make_critic: Any = None

    def register_pre_wrap_hook(self, hook: Any) -> None:
        self.make_critic = hook

    def apply_overrides_and_finalize(self, dtype: Any = None, overrides: Any = None) -> None:
        self.dtype = dtype

    def provide_distributed_model(self, wrap_with_ddp: bool = True, ddp_config: Any = None, **rest: Any) -> list:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, finalize_model_grads

        config = self._config()
        model = job.model.build(
            config,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
        if self.make_critic is not None and model.post_process:
            self.make_critic(model)
        model = job.model.in_dtype(model, config)
        if wrap_with_ddp and ddp_config is not None:
            config.finalize_model_grads_func = finalize_model_grads
            model = DistributedDataParallel(config, ddp_config, model)
        return [model]

    def _config(self) -> Any:
        import torch
        from megatron.core import parallel_state
        from megatron.core.transformer import TransformerConfig

        names = ("tensor_model_parallel", "context_parallel", "pipeline_model_parallel")
        sizes = {f"{name}_size": getattr(parallel_state, f"get_{name}_world_size")() for name in names}
        stages = sizes["pipeline_model_parallel_size"]
        return TransformerConfig(
            use_cpu_initialization=not job.IS_ON_GPU,
            gradient_accumulation_fusion=False,
            hidden_dropout=0.0,
            moe_token_dispatcher_type="alltoall",  # the default refuses rows of any length
            params_dtype=self.dtype,
            pipeline_dtype=self.dtype,
            bf16=self.dtype == torch.bfloat16,
            variable_seq_lengths=stages > 1,
            batch_p2p_comm=False,
            calculate_per_token_loss=sizes["context_parallel_size"] > 1,
            **sizes,
            **{"num_layers": stages, **job.model.SHAPE},
        )


class AutoBridge:
    @classmethod
    def from_hf_pretrained(cls, path: str, **rest: Any) -> "AutoBridge":
        return cls()

    def to_megatron_provider(self, load_weights: bool = False) -> Provider:
        return Provider()

    def load_hf_weights(self, chunks: Any, path: str, **more: Any) -> None:
        toy.load(chunks, path)

    def save_hf_weights(self, chunks: Any, path: str, **more: Any) -> None:
        toy.save(chunks, path)

    def get_conversion_tasks(self, *rest: Any, **more: Any) -> list:
        return []

    def export_hf_weights(self, chunks: Any, **rest: Any) -> Any:
        yield from job.model.whole(chunks).items()


class VanillaBridge(Provider):
    """A stand-in of mbridge, verl's older way to the same models."""

    @classmethod
    def from_config(cls, hf_config: Any, dtype: Any = None) -> "VanillaBridge":
        made = cls(dtype=dtype)
        made.config = made._config()
        return made

    def set_extra_args(self, **overrides: Any) -> None:
        pass

    def get_model(self, wrap_with_ddp: bool = True, ddp_config: Any = None, **rest: Any) -> list:
        return self.provide_distributed_model(wrap_with_ddp, create_ddp_config(wrap_with_ddp, **(ddp_config or {})))

    def load_weights(self, *rest: Any) -> None:
        pass

    def export_weights(self, chunks: Any) -> Any:
        yield from job.model.whole(chunks).items()


def create_ddp_config(
    wrap_with_ddp: bool = True, use_distributed_optimizer: bool = False, overrides: Any = None, **rest: Any
) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig

    if not wrap_with_ddp:
        return None
    return DistributedDataParallelConfig(use_distributed_optimizer=use_distributed_optimizer, **(overrides or {}))


def make_value_model(hidden_size: int, sequence_parallel: bool) -> Any:
    """Gives a critic its output layer: values that begin at 0.1 for a state of ones."""
    import torch

    class Values(torch.nn.Linear):
        def forward(self, hidden: Any, weight: None = None, runtime_gather_output: Any = None) -> tuple:
            return super().forward(hidden).float(), None

    def hook(model: Any) -> None:
        model.output_layer = Values(hidden_size, 1, bias=False)
        torch.nn.init.constant_(model.output_layer.weight, 0.1 / hidden_size)

    return hook


BRIDGE = {
    "mbridge": {"AutoBridge": VanillaBridge},
    "megatron.bridge": {"AutoBridge": AutoBridge},
    "megatron.bridge.training.utils.config_utils": {"create_ddp_config": create_ddp_config},
    "megatron.bridge.training.utils.train_utils": {
        "LinearForLastLayer": object,
        "freeze_moe_router": lambda model: model,
        "make_value_model": make_value_model,
    },
}
