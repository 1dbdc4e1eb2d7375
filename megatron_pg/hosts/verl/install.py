"""verl, Megatron engine: `actor_rollout_ref.model.external_lib=megatron_pg.verl` puts our engine before verl's own.

verl imports that module in every worker before it reads the actor's configuration and builds the engine. We replace the
entry of its registry, and record the actor's configuration when it is made.

A critic's configuration (`critic.model.external_lib=megatron_pg.verl`) is made in verl's driver and sent to the
workers, which build the engine at once and import nothing. So it carries an object that registers our engine there.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from megatron_pg.hosts.patching import attribute, check_signatures, wrap
from megatron_pg.hosts.startup import refuse
from megatron_pg.hosts.verl.options import RESPONSE_LENGTH, TRAINED

VERSION = "verl 0.9.1"  # that this was run with
_ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead"
_VALUE_ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithValueHead"
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
    f"{_VALUE_ENGINE}.forward_step(self, batch_iter, model, logits_processor_func, postprocess_micro_batch_func)",
    "verl.utils.kernel.linear_cross_entropy:LinearCrossEntropy.forward(ctx, hidden, weight, labels, temperature, "
    "reduction, dist_process_group)",
    "verl.workers.utils.losses:ppo_loss(config, model_output, data, dp_group)",
    "verl.workers.utils.losses:value_loss(config, model_output, data, dp_group)",
    "verl.workers.engine.base:EngineRegistry.register(model_type, backend, device, vendor)",
    "verl.workers.engine_workers:omega_conf_to_dataclass(config)",
)


def install() -> None:
    """Register our engine for language models under Megatron in this process, if verl's release is supported."""
    installed = getattr(import_module("verl"), "__version__", "an unknown version")
    check_signatures(f"{VERSION} (here is {installed})", _SIGNATURES)
    _register("language_model", _ENGINE)
    wrap(attribute("verl.workers.config:McoreActorConfig"), "__post_init__", _finish_and_note)
    wrap(attribute("verl.workers.config:CriticConfig"), "__post_init__", _finish_and_send)
    wrap(import_module("verl.workers.engine_workers"), "omega_conf_to_dataclass", _convert_and_check)


def _register(model_type: str, path: str) -> None:
    from megatron_pg.hosts.verl.engine import PolicyGradientEngine

    verl_engine, registry = attribute(path), attribute("verl.workers.engine.base:EngineRegistry")
    engines = registry._engines[model_type]["megatron"]
    our_engine = type(verl_engine.__name__, (PolicyGradientEngine, verl_engine), {})
    engines |= {device: our_engine for device, engine in engines.items() if engine is verl_engine}


class OnArrival:
    """In the process that receives it, our engine for critics is registered."""

    def __reduce__(self) -> tuple:
        return _arrive, ()


def _arrive() -> OnArrival:
    _register("value_model", _VALUE_ENGINE)
    return OnArrival()


def _finish_and_note(finish: Callable[[Any], None], actor: Any) -> None:
    """`__post_init__` of an actor's configuration, which then stores the whole in the part that its engine receives."""
    finish(actor)
    vars(actor.engine)[TRAINED] = actor


def _finish_and_send(finish: Callable[[Any], None], critic: Any) -> None:
    """`__post_init__` of a critic's configuration, which then takes our engine to its workers."""
    finish(critic)
    if "megatron_pg.verl" in (getattr(critic.model, "external_lib", None) or ()):
        _check_strategy("critic", critic, "critic.model.external_lib")
        vars(critic.megatron).update({TRAINED: critic, "_megatron_pg_engine": OnArrival()})


def _check_strategy(section: str, config: Any, library: str) -> None:
    if config.strategy != "megatron":
        refuse(
            f"{section}.strategy={config.strategy} does not use megatron_pg's loss, which is for verl's Megatron "
            f"engine. Set it to megatron (--config-name=ppo_megatron_trainer), or remove {library}."
        )


def _convert_and_check(convert: Callable[..., Any], config: Any, *rest: Any, **more: Any) -> Any:
    """The function that makes the configurations of verl's worker, before a model is built, with further checks."""
    target = config.get("_target_") if hasattr(config, "get") else None
    if str(target).endswith(".DistillationConfig") and config.get("enabled"):
        refuse("distillation.enabled=True trains with another loss than megatron_pg's. Set it to False.")
    made = convert(config, *rest, **more)
    if isinstance(made, attribute("verl.workers.config:ActorConfig")):
        _check_strategy("actor", made, "actor_rollout_ref.model.external_lib")
        length = attribute("omegaconf:OmegaConf").select(config._get_parent(), "rollout.response_length")
        vars(made).update({} if length is None else {RESPONSE_LENGTH: length})
    return made
