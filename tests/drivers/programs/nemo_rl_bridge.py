"""A stand-in of Megatron-Bridge: configurations that keep what they are given, and the toy in the place of its models.

DDP, optimizer, schedule and the reduction of gradients are megatron-core's own.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import toy


class Config(SimpleNamespace):
    """Any configuration; what was not given is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def validate(self) -> None:
        pass

    finalize = __post_init__ = validate


class Provider(Config):
    def __init__(self) -> None:
        super().__init__(
            vocab_size=toy.VOCABULARY,
            make_vocab_size_divisible_by=1,
            gated_linear_unit=True,
            cuda_graph_impl="none",
            seq_length=toy.LENGTH,
        )


class Container(Config):
    def __init__(self, **given: Any) -> None:
        empty = {name: Config() for name in ("tokenizer", "rerun_state_machine", "dist")}
        super().__init__(**({"rng": Config(data_parallel_random_init=False)} | empty | given))


class State(Config):
    def __init__(self) -> None:
        super().__init__(start_time=time.time(), straggler_timer=None, train_state=Config())

    def initialize_async_checkpoint_worker(self) -> None:
        pass


class AutoBridge:
    @classmethod
    def from_hf_config(cls, config: Any) -> "AutoBridge":
        return cls()

    @classmethod
    def from_hf_pretrained(cls, path: str, **rest: Any) -> "AutoBridge":
        return cls()

    def to_megatron_provider(self, load_weights: bool = False) -> Provider:
        return Provider()

    def get_conversion_tasks(self, *rest: Any, **more: Any) -> list:
        return []

    def export_hf_weights(self, chunks: Sequence[Any], **rest: Any) -> Any:
        yield from toy.whole(chunks).items()


def of_megatron(find: Callable[[], type]) -> Callable[..., Any]:
    """A dataclass of megatron-core, without the options that the installed release does not have."""

    def make(**given: Any) -> Any:
        made = find()
        known = {field.name for field in dataclasses.fields(made)}
        return made(**{name: value for name, value in given.items() if name in known})

    return make


def ddp_config() -> type:
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig


def optimizer_config() -> type:
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig


def initialize_megatron(cfg: Any, **rest: Any) -> None:
    from megatron.core import parallel_state, tensor_parallel

    sizes = cfg.model.tensor_model_parallel_size, cfg.model.pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(*sizes, context_parallel_size=cfg.model.context_parallel_size)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def get_model(
    provider: Any,
    ddp: Any,
    wrap_with_ddp: bool = True,
    pre_wrap_hook: Sequence[Callable] = (),
    mixed_precision_wrapper: Any = None,
    **rest: Any,
) -> list:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer import TransformerConfig

    names = ("params_dtype", "bf16", "tensor_model_parallel_size", "context_parallel_size", "calculate_per_token_loss")
    config = TransformerConfig(
        num_layers=1,
        hidden_size=toy.WIDTH,
        num_attention_heads=2,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        **{name: getattr(provider, name) for name in names},
    )
    model = toy.build(
        config,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    for hook in pre_wrap_hook:
        hook([model])
    if provider.bf16:
        model = mixed_precision_wrapper(config, model)
    return [DistributedDataParallel(config, ddp, model) if wrap_with_ddp else model]


def setup_optimizer(
    optimizer_config: Any,
    scheduler_config: Any,
    model: Sequence[Any],
    use_gloo_process_groups: bool = True,
    **rest: Any,
) -> tuple:
    from megatron.core import optimizer as optimizers
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optimizer = optimizers.get_megatron_optimizer(
        optimizer_config, model, use_gloo_process_groups=use_gloo_process_groups
    )
    optimizer.grad_norms_by_group = {}
    rate = optimizer_config.lr
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=rate,
        max_lr=rate,
        min_lr=rate,
        lr_warmup_steps=0,
        lr_decay_steps=1000,
        lr_decay_style="constant",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=1000,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def update_model_config_funcs(model: Sequence[Any], model_config: Any, ddp_config: Any, optimizer: Any, **rest: Any):
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import get_model_config

    config = get_model_config(model[0])
    config.finalize_model_grads_func, config.no_sync_func = finalize_model_grads, model[0].no_sync
    if optimizer is not None:
        config.grad_scale_func = optimizer.scale_loss


def process_groups(model: Any) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


def nothing(*rest: Any, **more: Any) -> None:
    pass


def itself(value: Any, mp_group: Any) -> Any:
    return value


TRAINING = "megatron.bridge.training."
CONFIGS = (
    *("CheckpointConfig", "DistributedInitConfig", "LoggerConfig"),
    *("SchedulerConfig", "TokenizerConfig", "TrainingConfig"),
)
CONTENTS = {
    "megatron.bridge": {"AutoBridge": AutoBridge},
    "megatron.bridge.models.model_provider": {"ModelProviderMixin": Config, "get_model": get_model},
    f"{TRAINING}checkpointing": {
        "checkpoint_exists": lambda path: path is not None,
        "init_checkpointing_context": lambda config: {},
        **dict.fromkeys(("load_checkpoint", "maybe_finalize_async_save", "save_checkpoint"), nothing),
    },
    f"{TRAINING}config": {
        "ConfigContainer": Container,
        "DistributedDataParallelConfig": of_megatron(ddp_config),
        "OptimizerConfig": of_megatron(optimizer_config),
        **dict.fromkeys(CONFIGS, Config),
    },
    f"{TRAINING}initialize": {"initialize_megatron": initialize_megatron, "set_jit_fusion_options": nothing},
    f"{TRAINING}optim": {"setup_optimizer": setup_optimizer},
    f"{TRAINING}setup": {"_update_model_config_funcs": update_model_config_funcs},
    f"{TRAINING}state": {"GlobalState": State},
    f"{TRAINING}tokenizers.tokenizer": {"build_tokenizer": nothing},
    f"{TRAINING}utils.pg_utils": {"get_pg_collection": process_groups},
    f"{TRAINING}utils.train_utils": {
        "logical_and_across_model_parallel_group": itself,
        "reduce_max_stat_across_model_parallel_group": itself,
    },
    f"{TRAINING}utils": {"flop_utils": SimpleNamespace(num_floating_point_operations=lambda config, batch_size: 0.0)},
    "megatron.bridge.utils.cuda_graph": {"set_cuda_graph_modules": nothing},
    "megatron.bridge.utils.common_utils": {"get_rank_safe": lambda: int(os.environ.get("RANK", "0"))},
    "megatron.bridge.utils.vocab_utils": {"calculate_padded_vocab_size": lambda size, *rest: size},
}
