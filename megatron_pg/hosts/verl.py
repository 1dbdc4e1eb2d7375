"""verl, Megatron engine: `actor_rollout_ref.model.external_lib=megatron_pg.verl` puts our engine before verl's own.

verl imports that module in every worker before it reads the actor's configuration and builds the engine; nothing of it is changed
but the entry of its registry, and its actor's configuration is noted when it is made.
"""

from importlib import import_module
from typing import Any

from megatron_pg.hosts.startup import attribute, check_signature

VERSION = "verl 0.9.1"  # with which this was run
_ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead"
_SIGNATURES = {
    f"{_ENGINE}.__init__": ("self", "model_config", "engine_config", "optimizer_config", "checkpoint_config"),
    f"{_ENGINE}.forward_backward_batch": ("self", "data", "loss_function", "forward_only"),
    f"{_ENGINE}.forward_step": (
        *("self", "batch_iter", "model", "logits_processor_func", "postprocess_micro_batch_func"),
    ),
    f"{_ENGINE}.postprocess_micro_batch_func": (
        *("self", "output", "data", "forward_only", "loss_function", "local_cp_size"),
    ),
    f"{_ENGINE}._lm_head_logits_processor": (
        *("self", "logits", "label", "temperature", "calculate_sum_pi_squared", "calculate_entropy"),
        *("distillation_use_topk", "distillation_only", "logits_processor_func", "batch", "data_format"),
    ),
    f"{_ENGINE}._routed_num_tokens": ("self", "data"),
    f"{_ENGINE}.optimizer_step": ("self",),
    f"{_ENGINE}.load_checkpoint": ("self", "local_path"),
    "verl.utils.kernel.linear_cross_entropy:LinearCrossEntropy.forward": (
        *("ctx", "hidden", "weight", "labels", "temperature", "reduction", "dist_process_group"),
    ),
    "verl.workers.utils.losses:ppo_loss": ("config", "model_output", "data", "dp_group"),
    "verl.workers.engine.base:EngineRegistry.register": ("model_type", "backend", "device", "vendor"),
}


def install() -> None:
    """Put our engine before verl's engine of language models under Megatron, in this process.

    Raises:
        ArgumentError: verl's functions are others than the adapter was written for.
    """
    installed = getattr(import_module("verl"), "__version__", "an unknown version")
    for path, parameters in _SIGNATURES.items():
        check_signature(f"{VERSION} (here is {installed})", path, parameters)
    from megatron_pg.hosts.verl_engine import ACTORS, PolicyGradientEngine

    theirs, registry = attribute(_ENGINE), attribute("verl.workers.engine.base:EngineRegistry")
    engines = registry._engines["language_model"]["megatron"]
    ours = type(theirs.__name__, (PolicyGradientEngine, theirs), {})
    engines |= {device: ours for device, found in engines.items() if found is theirs}
    config = attribute("verl.workers.config:McoreActorConfig")
    finish = config.__post_init__

    def remember(actor: Any) -> None:
        finish(actor)
        ACTORS[id(actor.engine)] = actor

    config.__post_init__ = remember
