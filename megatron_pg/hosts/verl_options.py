"""What verl's configuration says about our loss: options, its own flags that are ours now, and what is refused.

What the options leave out is verl's: without any, the loss is the one that its actor's configuration describes. An option takes
the place of what verl has by default; two that were both set and differ are refused.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_pg.declarations.choices import AT_ONCE
from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.hosts.startup import Checked, TakenOver, check

KEY = "megatron_pg"  # in override_mcore_model_config, of which verl itself reads other keys only
_USUAL = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}  # verl's defaults
_NUMBERS = {"clip_ratio_low": "pg_clip_eps_low", "clip_ratio_high": "pg_clip_eps_high", "clip_ratio_c": "pg_dual_clip"}
_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sample_mean",
    "seq-mean-token-sum": "constant",
    "seq-mean-token-sum-norm": "constant",
}
_ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_NOT_RUN = "was not run with megatron_pg; switch it off"


def checked(engine: Any, model: Any, actor: Any | None) -> Checked:
    """Our arguments of an engine, and verl's that are ours now.

    Args:
        engine: its McoreEngineConfig.
        model: the model's configuration.
        actor: the McoreActorConfig that has this engine; None: the engine makes log-probabilities only.

    Raises:
        ArgumentError: with every violation at once.
    """
    given = dict(engine.override_mcore_model_config.get(KEY) or {})
    taken, refused = list(_of_the_head(engine)), list(_refused(engine, model, given))
    if actor is not None:
        taken += _of_the_loss(actor, given)
        refused += _refused_of_the_loss(actor, given)
    facts = {name: value for name, value in vars(engine).items() if name != "dynamic_context_parallel"}
    return check(
        "verl", given, megatron=facts | dict(engine.override_transformer_config), taken_over=taken, refused=refused
    )


def _of_the_head(engine: Any) -> Iterator[TakenOver]:
    if engine.use_fused_kernels:
        yield TakenOver("model.use_fused_kernels", "pg_fused_head", "recompute")


def _of_the_loss(actor: Any, given: Mapping[str, Any]) -> Iterator[TakenOver]:
    """The actor's flags that were set, and of the others those that no option replaces."""
    is_theirs = _has_their_objective(given)
    if is_theirs:
        yield TakenOver("actor.policy_loss.loss_mode vanilla", "pg_objective", "dual_clip")
    for theirs, ours in _NUMBERS.items():
        value = getattr(actor, theirs)
        if (value != _USUAL[theirs] or (is_theirs and ours not in given)) and ours in _read_by(given):
            yield TakenOver(f"actor.{theirs}", ours, value)
    mode = _AGGREGATIONS.get(actor.loss_agg_mode)
    own = "loss_aggregation" in given or "custom_pg_loss_reducer_function_path" in given
    if mode is not None and (not own or actor.loss_agg_mode != "token-mean"):
        yield TakenOver(f"actor.loss_agg_mode {actor.loss_agg_mode}", "loss_aggregation", mode)
        if actor.loss_agg_mode == "seq-mean-token-sum":
            yield TakenOver("its divisor", "loss_aggregation_divisor", 1.0)
        elif mode == "constant" and actor.loss_scale_factor is not None:
            yield TakenOver("actor.loss_scale_factor", "loss_aggregation_divisor", float(actor.loss_scale_factor))
    if actor.use_kl_loss and actor.kl_loss_type in _ESTIMATORS:
        yield TakenOver("actor.kl_loss_coef", "pg_kl_coef", actor.kl_loss_coef)
        yield TakenOver(f"actor.kl_loss_type {actor.kl_loss_type}", "pg_kl_estimator", _ESTIMATORS[actor.kl_loss_type])
    if actor.entropy_coeff:
        yield TakenOver("actor.entropy_coeff", "pg_entropy_coef", actor.entropy_coeff)
    if actor.calculate_entropy and "pg_metrics" not in given:
        yield TakenOver("actor.calculate_entropy", "pg_metrics", "with_entropy")
    if (actor.use_kl_loss or actor.entropy_coeff) and "pg_aux_aggregation" not in given:
        yield TakenOver("actor.loss_agg_mode of KL and entropy", "pg_aux_aggregation", "policy")


def _has_their_objective(given: Mapping[str, Any]) -> bool:
    return "pg_objective" not in given and "pg_custom_objective_path" not in given


def _read_by(given: Mapping[str, Any]) -> set[str]:
    """Our arguments that the objective reads; a user's own reads all."""
    if "pg_custom_objective_path" in given:
        return set(_NUMBERS.values())
    declared = OBJECTIVES.get("dual_clip" if _has_their_objective(given) else given["pg_objective"])
    return {number.attribute for number in declared.numbers} if declared else set()


def _refused(engine: Any, model: Any, given: Mapping[str, Any]) -> Iterator[str]:
    for name in ("dynamic_context_parallel", "vanilla_mbridge", "use_megatron_fsdp"):
        if getattr(engine, name):
            yield f"megatron.{name} {_NOT_RUN}"
    if not engine.use_remove_padding:
        yield "model.use_remove_padding=False was not run with megatron_pg; set it to True"
    if model.mtp.enable:
        yield f"model.mtp.enable {_NOT_RUN}"
    if given.get("pg_temperature", 1.0) != 1.0:
        yield f"pg_temperature {given['pg_temperature']} would be a second temperature beside rollout.temperature of verl, which is used; remove it"
    asked = [name for name in ("pg_fused_head", "fp32_lm_head") if given.get(name)]
    if asked and not engine.use_fused_kernels:
        yield (
            f"{asked[0]} needs model.use_fused_kernels=True, because verl makes logits itself without it; set that, and leave {asked[0]} "
            "out"
        )
    if given.get("pg_fused_head") in AT_ONCE:
        yield f"pg_fused_head {given['pg_fused_head']} needs the loss where the head is, and verl's comes later; use recompute"


def _refused_of_the_loss(actor: Any, given: Mapping[str, Any]) -> Iterator[str]:
    mode = actor.policy_loss.loss_mode
    if mode != "vanilla":
        yield f"actor.policy_loss.loss_mode={mode} would have no effect beside our loss; leave it vanilla and set pg_objective"
    if actor.loss_agg_mode not in _AGGREGATIONS:
        yield f"actor.loss_agg_mode={actor.loss_agg_mode} is no mean over the step; use one of {', '.join(_AGGREGATIONS)}"
    if actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield f"actor.loss_scale_factor={actor.loss_scale_factor} has no effect with loss_agg_mode={actor.loss_agg_mode}; remove it"
    for theirs, ours in _NUMBERS.items():
        if (value := getattr(actor, theirs)) != _USUAL[theirs] and ours not in _read_by(given):
            yield f"actor.{theirs}={value} has no effect with pg_objective {given.get('pg_objective')}; remove it"
    if actor.use_kl_loss and actor.kl_loss_type not in _ESTIMATORS:
        yield f"actor.kl_loss_type={actor.kl_loss_type} has no estimator of ours; use {', '.join(_ESTIMATORS)}, or set pg_kl_estimator"
    for name in ("calculate_sum_pi_squared", "use_prefix_grouper"):
        if getattr(actor, name):
            yield f"actor.{name} {_NOT_RUN}"
    if given.get("loss_aggregation") == "prompt_mean" and actor.ppo_epochs > 1:
        yield f"loss_aggregation prompt_mean with actor.ppo_epochs={actor.ppo_epochs} cannot tell whether prompt groups are whole; use 1"
