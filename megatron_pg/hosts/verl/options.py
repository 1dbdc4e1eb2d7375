"""What verl's configuration sets for our loss: options, what our loss inherits, and what it refuses.

Without our options the loss is the one that verl's actor configuration describes. An option replaces what verl has by
default; two that were both set and differ are refused.
"""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from megatron_pg.declarations import objectives
from megatron_pg.declarations.choices import AT_ONCE, AUTO
from megatron_pg.declarations.declaration import Number
from megatron_pg.hosts.startup import Answer, CheckedArguments, Inherited, check, numbers_of, place_of, refused

TRAINED = "_megatron_pg_trained"  # attribute of a McoreEngineConfig: the actor's or critic's that it is part of
RESPONSE_LENGTH = "_megatron_pg_response_length"  # attribute of an actor: verl's rollout.response_length
KEY = "megatron_pg"  # in override_mcore_model_config, of which verl itself reads other keys only
_USUAL = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}  # verl's defaults
_USUAL_VALUE_CLIP, _USUAL_MEAN, _USUAL_ESTIMATOR = 0.5, "token-mean", "low_var_kl"
_CLIP = {"clip_ratio_low": objectives.CLIP_EPS_LOW, "clip_ratio_high": objectives.CLIP_EPS_HIGH}
_CAP = {"clip_ratio_c": objectives.CAP}
_DPPO = {"clip_ratio_low": objectives.DELTA_LOW, "clip_ratio_high": objectives.DELTA_HIGH, **_CAP}
Mode = tuple[str, Mapping[str, Number]]  # our objective, and its numbers by fields of the actor
MODES: dict[str, Mode] = {  # of verl's policy losses
    "vanilla": ("dual_clip", _CLIP | _CAP),
    "gspo": ("gspo_token", _CLIP),
    "cispo": ("cispo", {**_CLIP, "clip_ratio_high": objectives.WEIGHT_CAP}),
    "dppo_tv": ("dppo_tv", _DPPO),
    "dppo_kl": ("dppo_kl", _DPPO),
    "sapo": ("sapo", {"tau_pos": objectives.TAU_POS, "tau_neg": objectives.TAU_NEG}),
    "gpg": ("reinforce", {}),
    "dro": ("dro", {"policy_loss.dro_beta": objectives.BETA}),
}
_SEQUENCE_MEAN = "seq-mean-token-mean"  # of gspo and sapo where a release of verl ignores loss_agg_mode
_SUM, _SUM_NORM = "seq-mean-token-sum", "seq-mean-token-sum-norm"
_AGGREGATIONS = {
    **{_USUAL_MEAN: "token_mean", _SEQUENCE_MEAN: "sample_mean"},
    **{_SUM: "constant", _SUM_NORM: "constant"},
}
_DIVISOR = "loss_aggregation_divisor"
_ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_REFUSED = ("dynamic_context_parallel", "use_megatron_fsdp")  # of the engine
_TEMPERATURE = {"pg_temperature": "is a second temperature in addition to verl's rollout.temperature. Remove it."}


def checked(engine: Any, model: Any, trained: Any) -> CheckedArguments:
    """Our arguments of an engine (McoreEngineConfig), with what they inherit from verl's.

    `trained` is the McoreActorConfig or McoreCriticConfig that has this engine; None: the engine makes
    log-probabilities only.
    """
    given = dict(engine.override_mcore_model_config.get(KEY) or {})
    if given.get("pg_fused_head") == AUTO:
        given["pg_fused_head"] = "recompute"  # verl computes its loss after the head
    role = "critic" if hasattr(trained, "cliprange_value") else "policy"
    answers = [*_of_engine(engine, model, given, role)]
    if role == "critic":
        clip, own = trained.cliprange_value, objectives.VALUE_CLIP.attribute
        answers.append(Inherited("critic.cliprange_value", own, float(clip), clip == _USUAL_VALUE_CLIP))
        answers += _of_mean("critic", trained, given)
    elif trained is not None:
        answers += [*_of_objective(trained, given), *_of_mean("actor", trained, given), *_of_terms(trained)]
    megatron = {name: value for name, value in vars(engine).items() if name not in _REFUSED}
    facts = megatron | dict(engine.override_transformer_config)
    return check("verl", given, megatron=facts, answers=answers, role=role)


def _of_objective(actor: Any, given: Mapping[str, Any]) -> Iterator[Answer]:
    """Of the objective, and of the numbers that it reads; a custom objective has the clip bounds."""
    mode, ours = actor.policy_loss.loss_mode, str(given.get("pg_objective", ""))
    source, has_custom = f"actor.policy_loss.loss_mode={mode}", "pg_custom_objective_path" in given
    # verl's own setting selects the objective where no option does, and always if it is not verl's default
    is_theirs = mode != "vanilla" or not (ours or has_custom)
    objective, numbers = MODES.get(mode, MODES["vanilla"])
    if mode not in MODES:
        yield f"{source} has no objective of megatron_pg. Use {', '.join(MODES)}, or vanilla with pg_objective."
    elif is_theirs:
        yield Inherited(source, "pg_objective", objective)
    if mode == "dro" and actor.policy_loss.dro_beta is None and f",{objectives.BETA.name}=" not in ours:
        yield f"actor.policy_loss.dro_beta is null, and {source} needs it. Set it to a positive number."
    if mode != "vanilla" and has_custom:
        yield f"{source} has no effect with pg_custom_objective_path. Remove one of them."
    reads = set(numbers.values()) if is_theirs else numbers_of(ours)
    reads = set(_CLIP.values()) if has_custom else reads
    for name in {**numbers, **_USUAL}:
        value, number = attrgetter(name)(actor), numbers.get(name)
        value = actor.clip_ratio if value is None and name in _CLIP else value  # as verl reads it
        is_default = value == _USUAL.get(name)
        if number in reads and value is not None and (is_theirs or not is_default):
            absolute = float(value) + (number == objectives.WEIGHT_CAP)
            yield Inherited(f"actor.{name}", place_of(number), absolute, is_default)
        elif number not in reads and not is_default and not is_theirs:  # verl's own do not read all of them
            yield f"actor.{name}={value} has no effect with pg_objective {ours}. Remove it."
    if mode in ("gspo", "sapo") and actor.loss_agg_mode != _SEQUENCE_MEAN and "loss_aggregation" not in given:
        yield (
            f"actor.loss_agg_mode={actor.loss_agg_mode} has no effect on {source} in some releases of verl. Set it to "
            f"{_SEQUENCE_MEAN}, or set loss_aggregation."
        )


def _of_terms(actor: Any) -> Iterator[Answer]:
    """Of KL and entropy."""
    has_kl, kind = actor.use_kl_loss and actor.kl_loss_coef, actor.kl_loss_type
    if actor.use_kl_loss:
        yield Inherited("actor.kl_loss_coef", "pg_kl_coef", float(actor.kl_loss_coef))
    if has_kl and kind in _ESTIMATORS:
        source, is_default = f"actor.kl_loss_type={kind}", kind == _USUAL_ESTIMATOR
        yield Inherited(source, "pg_kl_estimator", _ESTIMATORS[kind], is_default)
    elif has_kl:
        yield f"actor.kl_loss_type={kind} has no estimator in megatron_pg. Use one of {', '.join(_ESTIMATORS)}."
    if actor.entropy_coeff:
        yield Inherited("actor.entropy_coeff", "pg_entropy_coef", actor.entropy_coeff)
    if actor.calculate_entropy:
        yield Inherited("actor.calculate_entropy", "pg_metrics", "with_entropy", is_default=True)
    if actor.entropy_coeff or has_kl:
        source = "actor.loss_agg_mode, for KL and entropy,"
        yield Inherited(source, "pg_aux_aggregation", "policy", is_default=True)
    yield from _not_run("actor", actor, "calculate_sum_pi_squared", "use_prefix_grouper")


def _of_mean(section: str, config: Any, given: Mapping[str, Any]) -> Iterator[Answer]:
    """Of the denominators of an actor or a critic."""
    scale, mean, length = config.loss_scale_factor, config.loss_agg_mode, vars(config).get(RESPONSE_LENGTH)
    source = f"{section}.loss_agg_mode={mean}"
    if given.get("loss_aggregation") == "prompt_mean" and config.ppo_epochs > 1:
        epochs = f"{section}.ppo_epochs={config.ppo_epochs}"
        yield f"loss_aggregation prompt_mean with {epochs} cannot tell whether prompt groups are whole. Use 1."
    if scale is not None and mean != _SUM_NORM:
        yield f"{section}.loss_scale_factor={scale} has no effect with loss_agg_mode={mean}. Remove it."
    if mean == _SUM_NORM and scale is length is None and not {"loss_aggregation", _DIVISOR} & given.keys():
        yield (
            f"{section}.loss_scale_factor is null, so verl divides each micro-batch by the length of its longest "
            "response. Set it to a constant, such as ${data.max_response_length}."
        )
    elif mean not in _AGGREGATIONS:
        yield f"{source} is not a mean over the step. Use one of {', '.join(_AGGREGATIONS)}."
    elif not ("custom_pg_loss_reducer_function_path" in given and mean == _USUAL_MEAN):
        yield Inherited(source, "loss_aggregation", _AGGREGATIONS[mean], mean == _USUAL_MEAN)
    if mean == _SUM:
        yield Inherited(source, _DIVISOR, 1.0)
    elif mean == _SUM_NORM and scale is not None:
        yield Inherited(f"{section}.loss_scale_factor", _DIVISOR, float(scale))
    elif mean == _SUM_NORM and length is not None:
        null = f"rollout.response_length ({section}.loss_scale_factor is null)"
        yield Inherited(null, _DIVISOR, float(length), is_default=True)


def _not_run(section: str, config: Any, *names: str) -> Iterator[str]:
    """Messages about options of verl with which this loss was not run."""
    for name in names:
        if getattr(config, name, False):
            yield f"{section}.{name}=True was not run with megatron_pg. Set it to False."


def _of_engine(engine: Any, model: Any, given: Mapping[str, Any], role: str) -> Iterator[Answer]:
    if engine.use_fused_kernels and role == "policy":  # verl has none for critics
        yield Inherited("model.use_fused_kernels", "pg_fused_head", "recompute")
    yield from _not_run("megatron", engine, *_REFUSED)
    yield from _not_run("model.mtp", model.mtp, "enable")
    yield from refused(given, _TEMPERATURE, {"pg_temperature": 1.0})
    heads = [name for name in ("pg_fused_head", "fp32_lm_head") if given.get(name)]
    if heads and not engine.use_fused_kernels:
        yield f"{heads[0]} needs model.use_fused_kernels=True, which includes it. Set that, and remove {heads[0]}."
    if (mode := given.get("pg_fused_head")) in AT_ONCE:
        yield f"pg_fused_head {mode} needs the loss inside the head, and verl computes its loss later. Use recompute."
