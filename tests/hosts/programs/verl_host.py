"""verl's own training step on a toy model, from its wheel: `TrainingWorker.train_mini_batch` and everything below it.

Theirs: the cut into mini-batches and micro-batches, the engine with its forward pass, loss function and contract, the
optimizer step, the metrics on their way to the driver. Not theirs: the model, an optimizer that keeps the gradients,
and packages that are not installed and that nothing here needs (`stand_ins`).
"""

import importlib
import logging
import os
import pickle
import sys
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import stand_ins
import torch
from host_cases import ValueLayer
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import ModuleSpec as LayerSpec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megatron_pg.rollouts.sample import Sample

VOCABULARY, WIDTH = 14, 6
PACKAGES = (
    *("accelerate", "datasets", "fastapi", "flash_attn", "pandas", "peft", "ray", "torchdata"),
    *("transformer_engine", "transformers", "uvicorn"),
)


def load() -> SimpleNamespace:
    """verl's modules, imported."""
    logging.Logger.warning_once = logging.Logger.warning  # transformers adds it
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # the platform is a GPU, on any machine
    output = type("CausalLMOutput", (SimpleNamespace,), {})
    held = {
        "ray": {"remote": lambda decorated=None, **options: decorated or (lambda each: each)},
        "transformers.modeling_outputs": {"CausalLMOutputWithPast": output},
    }
    sys.meta_path.insert(0, stand_ins.Classes(PACKAGES, held))
    names = {
        "engine": "verl.workers.engine.megatron.transformer_impl",
        "workers": "verl.workers.engine_workers",
        "registry": "verl.workers.engine.base",
        "config": "verl.workers.config",
        "losses": "verl.workers.utils.losses",
        "core_algos": "verl.trainer.ppo.core_algos",
        "fused": "verl.models.mcore.model_forward_fused",
        "metrics": "verl.utils.metric.utils",
        "tensordicts": "verl.utils.tensordict_utils",
    }
    found = {name: importlib.import_module(path) for name, path in names.items()}
    found["fused"].CausalLMOutputForPPO = lambda **fields: SimpleNamespace(**fields)  # a dataclass of transformers
    found["engine"].MegatronCheckpointManager = MagicMock()
    return SimpleNamespace(**found)


# --- the model: embedding and head, with a layer that does nothing, so that context parallelism needs no attention ---


class Nothing(torch.nn.Module):
    def __init__(self, config: TransformerConfig, layer_number: int = 1, **rest):
        super().__init__()
        self.layer_number = layer_number

    def forward(self, hidden_states: Tensor, **rest) -> tuple[Tensor, None]:
        return hidden_states, None


SEQUENCE_PARALLEL = True  # under tensor parallelism, as verl has it by default


def config(*, per_token: bool) -> TransformerConfig:
    sizes = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
    }
    return TransformerConfig(
        num_layers=sizes["pipeline_model_parallel_size"],
        pipeline_dtype=torch.float32,
        variable_seq_lengths=sizes["pipeline_model_parallel_size"] > 1,
        batch_p2p_comm=False,
        moe_token_dispatcher_type="alltoall",  # the default refuses rows of any length
        hidden_size=WIDTH,
        num_attention_heads=2,
        num_query_groups=2,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        sequence_parallel=SEQUENCE_PARALLEL and sizes["tensor_model_parallel_size"] > 1,
        calculate_per_token_loss=per_token,
        hidden_dropout=0.0,
        **sizes,
    )


def parameters(*, critic: bool = False) -> tuple[Tensor, Tensor]:
    """[V, H] float32 each: embedding and head; of a critic the head is [1, H]."""
    generator = torch.Generator().manual_seed(3)
    embedding, head = (torch.randn(VOCABULARY, WIDTH, generator=generator) * 0.6 for _ in range(2))
    return embedding, head[:1] if critic else head


def mine(whole: Tensor) -> Tensor:
    """This tensor-parallel rank's rows; every rank has the head of a critic."""
    if len(whole) == 1:
        return whole
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    return whole.chunk(size)[rank]


def build(*, per_token: bool, critic: bool = False) -> DistributedDataParallel:
    layers = TransformerBlockSubmodules(layer_specs=[LayerSpec(module=Nothing)])
    model = GPTModel(
        config(per_token=per_token),
        layers,
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    if critic and model.post_process:  # as Megatron-Bridge's make_value_model
        weight = parameters(critic=True)[1]
        model.output_layer = ValueLayer(weight, sequence_parallel=model.config.sequence_parallel)
    for name, weight in model.named_parameters():
        weight.data.copy_(mine(parameters(critic=critic)[name.startswith("output_layer")]))
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)


class Optimizer:
    """Keeps the gradients of each step: those of embedding (0) and head (1) that this rank has."""

    def __init__(self, model: DistributedDataParallel):
        self._model, self.found, self.param_groups = model, [], [{"lr": 0.5}]
        model.config.finalize_model_grads_func = finalize_model_grads

    def zero_grad(self) -> None:
        pass

    def step(self) -> tuple[bool, float, int]:
        named = self._model.module.named_parameters()
        self.found.append({name.startswith("output_layer"): each.main_grad.clone() for name, each in named})
        return True, 0.0, 0


# --- the worker ---


def actor_config(verl: SimpleNamespace, *, options: dict | None = None, **changes: Any) -> Any:
    """Their actor's config; `options` are ours."""
    megatron = _engine_config(verl, options, changes.pop("engine", {}))
    return verl.config.McoreActorConfig(rollout_n=2, use_dynamic_bsz=True, megatron=megatron, **changes)


def critic_config(verl: SimpleNamespace, *, options: dict | None = None, **changes: Any) -> Any:
    """Their critic's config in the process of its worker."""
    megatron = _engine_config(verl, options, {})
    model = SimpleNamespace(external_lib="megatron_pg.verl")
    made = verl.config.McoreCriticConfig(rollout_n=2, use_dynamic_bsz=True, megatron=megatron, model=model, **changes)
    return pickle.loads(pickle.dumps(made))


def _engine_config(verl: SimpleNamespace, options: dict | None, changes: dict[str, Any]) -> Any:
    engine = {"override_mcore_model_config": {} if options is None else {"megatron_pg": options}}
    engine |= {"max_token_len_per_gpu": 24, "infer_max_token_len_per_gpu": 24} | changes
    sizes = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_context_parallel_world_size()
    return verl.config.McoreEngineConfig(
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        tensor_model_parallel_size=sizes[0],
        context_parallel_size=sizes[1],
        use_dynamic_bsz=True,
        use_distributed_optimizer=False,
        **engine,
    )


def worker(
    verl: SimpleNamespace,
    actor: Any,
    *,
    per_token: bool = False,
    fused: bool = False,
    padded: bool = False,
    engine: type | None = None,
    model: DistributedDataParallel | None = None,
    optimizer: Any = None,
) -> Any:
    """verl's TrainingWorker with a given engine or the registered one, and a given model or the toy."""
    name = SimpleNamespace(enable=False, enable_train=False)
    is_critic = isinstance(actor, verl.config.CriticConfig)
    model_config = {
        "model_type": "value_model" if is_critic else "language_model",
        "hf_config": SimpleNamespace(architectures=["Qwen2ForCausalLM"], model_type="qwen2"),
        "tokenizer": SimpleNamespace(pad_token_id=0),
        "mtp": name,
        "local_path": "",
        "architectures": ["Qwen2ForCausalLM"],
        "get_processor": lambda: None,
    }
    actor.engine.use_fused_kernels, actor.engine.use_remove_padding = fused, not padded
    cls = engine or verl.registry.EngineRegistry.get_engine_cls(model_config["model_type"], "megatron")

    class Engine(cls):
        """Has the toy or that model in place of one from the hub."""

        def _build_tf_config(self) -> None:
            self.is_value_model, self.share_embeddings_and_output_weights = is_critic, False
            self.bridge = self.provider = self.peft_cls = self.tf_config = None
            self.param_dtype, self.vanilla_bridge = torch.float32, False

        def _build_megatron_module(self) -> list[DistributedDataParallel]:
            found = model or build(per_token=per_token, critic=is_critic)
            self.tf_config = found.config
            return [found]

        def _build_optimizer(self) -> Any:
            return optimizer or Optimizer(self.module[0])

        def _build_lr_scheduler(self) -> SimpleNamespace:
            return SimpleNamespace(step=lambda increment: None)

        def lr_scheduler_step(self) -> float:
            return 0.0

        def _routed_num_tokens(self, data) -> Tensor:
            return super()._routed_num_tokens(data).clone()  # as the copy to a GPU is: what follows is in place

    engine = Engine(
        model_config=SimpleNamespace(**model_config, get=lambda key, default=None: default),
        engine_config=actor.engine,
        optimizer_config=SimpleNamespace(use_checkpoint_opt_param_scheduler=False),
        checkpoint_config=None,
    )
    engine.initialize()
    made = verl.workers.TrainingWorker.__new__(verl.workers.TrainingWorker)
    made.engine, made.engine_config, made.model_config = engine, engine.engine_config, engine.model_config
    made.device_name, made.flops_counter = "cpu", None
    made.profiler = SimpleNamespace(rank=0, check_enable=lambda: False, step=lambda: None)
    made.loss_fn = partial(verl.losses.value_loss if is_critic else verl.losses.ppo_loss, config=actor)
    return made


# --- the data ---


def nested(rows: Sequence[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def stack(values: Sequence[Any]) -> Any:
    from tensordict.tensorclass import NonTensorData, NonTensorStack

    return NonTensorStack.from_list([NonTensorData(value) for value in values])


def batch_of(verl: SimpleNamespace, samples: Sequence[Sample], actor: Any, *, mini_batch_size: int) -> Any:
    """A rank's part of a batch, as verl's trainer sends it to its actor."""
    from tensordict import TensorDict

    tokens = [sample.tokens for sample in samples]
    starts = [len(sample.tokens) - sample.response_length for sample in samples]
    masks = nested([sample.loss_mask.long() for sample in samples])
    columns = {
        "input_ids": nested(tokens),
        "position_ids": nested([torch.arange(len(each)) for each in tokens]),
        "prompts": nested([each[:start] for each, start in zip(tokens, starts, strict=True)]),
        "responses": nested([each[start:] for each, start in zip(tokens, starts, strict=True)]),
        "response_mask": masks,
        "loss_mask": masks,
        "old_log_probs": nested([sample.old_logprobs.float() for sample in samples]),
        "rollout_log_probs": nested([sample.rollout_logprobs.float() for sample in samples]),
        "advantages": nested([sample.advantages.float() for sample in samples]),
        "rm_scores": nested([_scores(sample) for sample in samples]),
        "uid": stack([str(sample.prompt_id) for sample in samples]),
        "session_id": stack([int(str(sample.rollout_id).rpartition("/")[2]) for sample in samples]),
    }
    if samples[0].ref_logprobs is not None:
        columns["ref_log_prob"] = nested([sample.ref_logprobs.float() for sample in samples])
    if samples[0].returns is not None:
        columns |= {name: nested([getattr(each, name).float() for each in samples]) for name in ("values", "returns")}
    data = TensorDict(columns, batch_size=len(samples))
    verl.tensordicts.assign_non_tensor(
        data,
        temperature=1.0,
        calculate_entropy=actor.get("calculate_entropy", False) or actor.get("entropy_coeff", 0) != 0,
        distillation_use_topk=False,
        distillation_only=False,
        global_batch_size=mini_batch_size,
        mini_batch_size=mini_batch_size,
        epochs=1,
        seed=42,
        dataloader_kwargs={"shuffle": False},
    )
    return data


def _scores(sample: Sample) -> Tensor:
    """The reward at the last token, as verl has it."""
    scores = torch.zeros(sample.response_length)
    scores[-1] = sample.reward
    return scores
