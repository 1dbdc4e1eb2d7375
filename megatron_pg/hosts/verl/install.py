"""verl, Megatron engine: `actor_rollout_ref.model.external_lib=megatron_pg.verl` puts our engine before verl's own.

verl imports that module in every worker before it reads the actor's configuration and builds the engine. We replace the
entry of its registry, and record the actor's configuration when it is made.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from megatron_pg.hosts.patching import attribute, check_signatures, wrap
from megatron_pg.hosts.startup import refuse
from megatron_pg.hosts.verl.options import ACTOR, RESPONSE_LENGTH

VERSION = "verl 0.9.1"  # that this was run with
_ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead"
_SIGNATURES = (
    f"{_ENGINE}.__init__(self, model_config, engine_config, optimizer_config, checkpoint_config)",
    f"{_ENGINE}.forward_backward_batch(self, data, loss_function, forward_only)",
    f"{_ENGINE}.forward_step(self, batch_iter, model, logits_processor_func, postprocess_micro_batch_func)",
    f"{_ENGINE}.postprocess_micro_batch_func(self, output, data, forward_only, loss_function, local_cp_size)",
    f"{_ENGINE}._lm_head_logits_processor(self, logits, label, temperature, calculate_sum_pi_squared, "
    "calculate_entropy, distillation_use_topk, distillation_only, logits_processor_func, batch, data_format)",
    f"{_ENGINE}._routed_num_tokens(self, data)",
    f"{_ENGINE}.optimizer_step(self)",
    f"{_ENGINE}.load_checkpoint(self, local_path)",
    "verl.utils.kernel.linear_cross_entropy:LinearCrossEntropy.forward(ctx, hidden, weight, labels, temperature, "
    "reduction, dist_process_group)",
    "verl.workers.utils.losses:ppo_loss(config, model_output, data, dp_group)",
    "verl.workers.engine.base:EngineRegistry.register(model_type, backend, device, vendor)",
    "verl.workers.engine_workers:omega_conf_to_dataclass(config)",
)


def install() -> None:
    """Register our engine for language models under Megatron in this process, if verl's release is supported."""
    installed = getattr(import_module("verl"), "__version__", "an unknown version")
    check_signatures(f"{VERSION} (here is {installed})", _SIGNATURES)
    from megatron_pg.hosts.verl.engine import PolicyGradientEngine

    verl_engine, registry = attribute(_ENGINE), attribute("verl.workers.engine.base:EngineRegistry")
    engines = registry._engines["language_model"]["megatron"]
    our_engine = type(verl_engine.__name__, (PolicyGradientEngine, verl_engine), {})
    engines |= {device: our_engine for device, engine in engines.items() if engine is verl_engine}
    wrap(attribute("verl.workers.config:McoreActorConfig"), "__post_init__", _finish_and_note)
    wrap(import_module("verl.workers.engine_workers"), "omega_conf_to_dataclass", _convert_and_check)


def _finish_and_note(finish: Callable[[Any], None], actor: Any) -> None:
    """`__post_init__` of an actor's configuration, which then stores the whole in the part that its engine receives."""
    finish(actor)
    vars(actor.engine)[ACTOR] = actor


def _convert_and_check(convert: Callable[..., Any], config: Any, *rest: Any, **more: Any) -> Any:
    """The function that makes the configurations of verl's worker, before a model is built, with further checks."""
    target = config.get("_target_") if hasattr(config, "get") else None
    if str(target).endswith(".DistillationConfig") and config.get("enabled"):
        refuse("distillation.enabled=True trains with another loss than megatron_pg's. Set it to False.")
    made = convert(config, *rest, **more)
    if isinstance(made, attribute("verl.workers.config:ActorConfig")):
        if made.strategy != "megatron":
            refuse(
                f"actor.strategy={made.strategy} does not use megatron_pg's loss, which is for verl's Megatron engine. "
                "Set it to megatron (--config-name=ppo_megatron_trainer), or remove "
                "actor_rollout_ref.model.external_lib."
            )
        length = attribute("omegaconf:OmegaConf").select(config._get_parent(), "rollout.response_length")
        vars(made).update({} if length is None else {RESPONSE_LENGTH: length})
    return made
