"""What verl's configuration says about our loss: options, its own flags that are ours now, and what is refused.

What the options leave out is verl's: without any, the loss is the one that its actor's configuration describes. An option takes
the place of what verl has by default; two that were both set and differ are refused.
"""

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from megatron_pg.declarations.choices import AT_ONCE
from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.hosts.startup import Checked, TakenOver, check

RESPONSE_LENGTH = "_megatron_pg_response_length"  # attribute of an actor: verl's rollout.response_length
KEY = "megatron_pg"  # in override_mcore_model_config, of which verl itself reads other keys only
_USUAL = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}  # verl's defaults


class Mode(NamedTuple):
    """A policy loss of verl that one of our objectives computes."""

    objective: str
    numbers: Mapping[str, str] = {}  # ours, by fields of verl's actor


_CLIP = {"clip_ratio_low": "pg_clip_eps_low", "clip_ratio_high": "pg_clip_eps_high"}
_DPPO = {"clip_ratio_low": "pg_dppo_delta_low", "clip_ratio_high": "pg_dppo_delta_high", "clip_ratio_c": "pg_dual_clip"}
_VANILLA = Mode("dual_clip", {**_CLIP, "clip_ratio_c": "pg_dual_clip"})
MODES = {
    "vanilla": _VANILLA,
    "gspo": Mode("gspo_token", _CLIP),
    "cispo": Mode("cispo", {"clip_ratio_low": "pg_clip_eps_low", "clip_ratio_high": "pg_cispo_cap"}),
    "dppo_tv": Mode("dppo_tv", _DPPO),
    "dppo_kl": Mode("dppo_kl", _DPPO),
    "sapo": Mode("sapo", {"tau_pos": "pg_sapo_tau_pos", "tau_neg": "pg_sapo_tau_neg"}),
    "gpg": Mode("reinforce"),
    "dro": Mode("dro", {"policy_loss.dro_beta": "pg_dro_beta"}),
}
_SEQUENCE_MEAN = "seq-mean-token-mean"  # of gspo and sapo in releases of verl where these do not read loss_agg_mode
_MADE: Mapping[str, Callable[[float], float]] = {"pg_cispo_cap": lambda eps: 1 + eps}  # absolute
_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sample_mean",
    "seq-mean-token-sum": "constant",
    "seq-mean-token-sum-norm": "constant",
}
_ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_REFUSED = ("dynamic_context_parallel", "vanilla_mbridge", "use_megatron_fsdp")  # of the engine
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
    facts = {name: value for name, value in vars(engine).items() if name not in _REFUSED}
    return check(
        "verl", given, megatron=facts | dict(engine.override_transformer_config), taken_over=taken, refused=refused
    )


def _of_the_head(engine: Any) -> Iterator[TakenOver]:
    if engine.use_fused_kernels:
        yield TakenOver("model.use_fused_kernels", "pg_fused_head", "recompute")


def _of_the_loss(actor: Any, given: Mapping[str, Any]) -> Iterator[TakenOver]:
    """The actor's flags that were set, and of the others those that no option replaces."""
    is_theirs, mode = _has_their_objective(actor, given), actor.policy_loss.loss_mode
    if is_theirs and mode in MODES:
        yield TakenOver(f"actor.policy_loss.loss_mode {mode}", "pg_objective", MODES[mode].objective)
    for theirs, ours in _numbers_of(actor, given).items():
        value, usual = _number(actor, theirs), _USUAL.get(theirs)
        if (
            value is not None
            and (value != usual or (is_theirs and ours not in given))
            and ours in _read_by(actor, given)
        ):
            yield TakenOver(f"actor.{theirs}", ours, _MADE.get(ours, float)(value))
    yield from _of_the_mean(actor, given)
    if actor.use_kl_loss:
        yield TakenOver("actor.kl_loss_coef", "pg_kl_coef", float(actor.kl_loss_coef))
        if actor.kl_loss_coef and actor.kl_loss_type in _ESTIMATORS:
            estimator = _ESTIMATORS[actor.kl_loss_type]
            yield TakenOver(f"actor.kl_loss_type {actor.kl_loss_type}", "pg_kl_estimator", estimator)
    if actor.entropy_coeff:
        yield TakenOver("actor.entropy_coeff", "pg_entropy_coef", actor.entropy_coeff)
    if actor.calculate_entropy and "pg_metrics" not in given:
        yield TakenOver("actor.calculate_entropy", "pg_metrics", "with_entropy")
    if _has_further_terms(actor) and "pg_aux_aggregation" not in given:
        yield TakenOver("actor.loss_agg_mode, for KL and entropy,", "pg_aux_aggregation", "policy")


def _of_the_mean(actor: Any, given: Mapping[str, Any]) -> Iterator[TakenOver]:
    """How the policy loss is averaged."""
    name, source = actor.loss_agg_mode, f"actor.loss_agg_mode {actor.loss_agg_mode}"
    mode = _AGGREGATIONS.get(name)
    own = "loss_aggregation" in given or "custom_pg_loss_reducer_function_path" in given
    if mode is None or (own and name == "token-mean") or _divisor_is_unknown(actor, given):
        return
    yield TakenOver(source, "loss_aggregation", mode)
    if name == "seq-mean-token-sum":
        yield TakenOver(source, "loss_aggregation_divisor", 1.0)
    elif mode == "constant" and actor.loss_scale_factor is not None:
        yield TakenOver("actor.loss_scale_factor", "loss_aggregation_divisor", float(actor.loss_scale_factor))
    elif mode == "constant" and RESPONSE_LENGTH in vars(actor) and "loss_aggregation_divisor" not in given:
        length = vars(actor)[RESPONSE_LENGTH]
        yield TakenOver(
            "rollout.response_length (actor.loss_scale_factor is null)", "loss_aggregation_divisor", float(length)
        )


def _has_further_terms(actor: Any) -> bool:
    return bool(actor.entropy_coeff or (actor.use_kl_loss and actor.kl_loss_coef))


def _has_their_objective(actor: Any, given: Mapping[str, Any]) -> bool:
    """Whether verl's own setting says the objective: always if it is not verl's default."""
    return actor.policy_loss.loss_mode != "vanilla" or not {"pg_objective", "pg_custom_objective_path"} & given.keys()


def _numbers_of(actor: Any, given: Mapping[str, Any]) -> Mapping[str, str]:
    """Our numbers by fields of verl's actor, for the objective in force."""
    theirs = _has_their_objective(actor, given)
    return MODES.get(actor.policy_loss.loss_mode, _VANILLA).numbers if theirs else _VANILLA.numbers


def _number(actor: Any, name: str) -> Any:
    """A field of the actor; verl reads clip_ratio where a bound is null."""
    value = attrgetter(name)(actor)
    return actor.clip_ratio if value is None and name in _CLIP else value


def _read_by(actor: Any, given: Mapping[str, Any]) -> set[str]:
    """Our arguments that the objective reads; a user's own reads all."""
    if "pg_custom_objective_path" in given:
        return set(_VANILLA.numbers.values())
    if _has_their_objective(actor, given):
        return set(_numbers_of(actor, given).values())
    declared = OBJECTIVES.get(given["pg_objective"])
    return {number.attribute for number in declared.numbers} if declared else set()


def _refused(engine: Any, model: Any, given: Mapping[str, Any]) -> Iterator[str]:
    for name in _REFUSED:
        if getattr(engine, name, False):
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
    mode, mean = actor.policy_loss.loss_mode, actor.loss_agg_mode
    if mode not in MODES:
        yield f"actor.policy_loss.loss_mode={mode} has no objective of megatron_pg. Use {', '.join(MODES)}, or vanilla with pg_objective."
    if mode == "dro" and actor.policy_loss.dro_beta is None and "pg_dro_beta" not in given:
        yield "actor.policy_loss.dro_beta is null, and actor.policy_loss.loss_mode=dro needs it. Set it to a positive number."
    if mode != "vanilla" and "pg_custom_objective_path" in given:
        yield f"actor.policy_loss.loss_mode={mode} has no effect with pg_custom_objective_path. Remove one of them."
    if mean not in _AGGREGATIONS:
        yield f"actor.loss_agg_mode={mean} is no mean over the step; use one of {', '.join(_AGGREGATIONS)}"
    elif mode in ("gspo", "sapo") and mean != _SEQUENCE_MEAN and "loss_aggregation" not in given:
        yield (
            f"actor.loss_agg_mode={mean} has no effect on actor.policy_loss.loss_mode={mode} in some releases of verl. Set it to "
            f"{_SEQUENCE_MEAN}, or set loss_aggregation."
        )
    if actor.loss_scale_factor is not None and mean != "seq-mean-token-sum-norm":
        yield f"actor.loss_scale_factor={actor.loss_scale_factor} has no effect with loss_agg_mode={mean}; remove it"
    if _divisor_is_unknown(actor, given):
        yield (
            "actor.loss_scale_factor is null, so verl divides each micro-batch by the length of its longest response. Set it to a "
            "constant, such as ${data.max_response_length}."
        )
    for theirs, usual in _USUAL.items():
        if (value := _number(actor, theirs)) != usual and not _reads(actor, given, theirs):
            name = given.get("pg_objective") or f"actor.policy_loss.loss_mode={mode}"
            yield f"actor.{theirs}={value} has no effect with {name}; remove it"
    if actor.use_kl_loss and actor.kl_loss_coef and actor.kl_loss_type not in _ESTIMATORS:
        yield f"actor.kl_loss_type={actor.kl_loss_type} has no estimator of ours; use {', '.join(_ESTIMATORS)}"
    for name in ("calculate_sum_pi_squared", "use_prefix_grouper"):
        if getattr(actor, name):
            yield f"actor.{name} {_NOT_RUN}"
    if given.get("loss_aggregation") == "prompt_mean" and actor.ppo_epochs > 1:
        yield f"loss_aggregation prompt_mean with actor.ppo_epochs={actor.ppo_epochs} cannot tell whether prompt groups are whole; use 1"


def _reads(actor: Any, given: Mapping[str, Any], name: str) -> bool:
    """Whether the objective in force reads this field of the actor."""
    return _numbers_of(actor, given).get(name) in _read_by(actor, given)


def _divisor_is_unknown(actor: Any, given: Mapping[str, Any]) -> bool:
    is_known = actor.loss_scale_factor is not None or RESPONSE_LENGTH in vars(actor)
    is_ours = {"loss_aggregation", "loss_aggregation_divisor"} & given.keys()
    return actor.loss_agg_mode == "seq-mean-token-sum-norm" and not (is_known or is_ours)
