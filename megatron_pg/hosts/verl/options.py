"""What verl's configuration says about our loss: options, what our loss inherits, and what it refuses.

Without our options the loss is the one that verl's actor configuration describes. An option replaces what verl has by
default; two that were both set and differ are refused.
"""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from megatron_pg.declarations import objectives
from megatron_pg.declarations.choices import AT_ONCE, AUTO
from megatron_pg.declarations.declaration import Number
from megatron_pg.hosts.startup import Answer, CheckedArguments, Inherited, check, numbers_of

TRAINED = "_megatron_pg_trained"  # attribute of a McoreEngineConfig: the actor's or critic's that it is part of
RESPONSE_LENGTH = "_megatron_pg_response_length"  # attribute of an actor: verl's rollout.response_length
KEY = "megatron_pg"  # in override_mcore_model_config, of which verl itself reads other keys only
_USUAL_VALUE_CLIP = 0.5  # verl's default
_USUAL = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}  # verl's defaults
_CLIP = {"clip_ratio_low": objectives.CLIP_EPS_LOW, "clip_ratio_high": objectives.CLIP_EPS_HIGH}
_CAP = {"clip_ratio_c": objectives.CAP}
_DPPO = {"clip_ratio_low": objectives.DELTA_LOW, "clip_ratio_high": objectives.DELTA_HIGH, **_CAP}
MODES: dict[
    str, tuple[str, Mapping[str, Number]]
] = {  # verl's policy losses: ours, and its numbers by fields of the actor
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
_SUM_NORM = "seq-mean-token-sum-norm"
_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sample_mean",
    "seq-mean-token-sum": "constant",
    _SUM_NORM: "constant",
}
_ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_REFUSED = ("dynamic_context_parallel", "use_megatron_fsdp")  # of the engine


def checked(engine: Any, model: Any, trained: Any | None) -> CheckedArguments:
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
        answers += _of_critic(trained, given)
    elif trained is not None:
        answers += _Loss(trained, given).answers()
    megatron = {name: value for name, value in vars(engine).items() if name not in _REFUSED}
    facts = megatron | dict(engine.override_transformer_config)
    return check("verl", given, megatron=facts, answers=answers, role=role)


def _of_critic(critic: Any, given: Mapping[str, Any]) -> Iterator[Answer]:
    clip = critic.cliprange_value
    yield Inherited("critic.cliprange_value", objectives.VALUE_CLIP.attribute, float(clip), clip == _USUAL_VALUE_CLIP)
    yield from _of_mean("critic", critic, given)


class _Loss:
    """An actor's configuration together with our options."""

    def __init__(self, actor: Any, given: Mapping[str, Any]):
        self.actor, self.given = actor, given
        self.mode = actor.policy_loss.loss_mode
        # verl's own setting selects the objective where no option does, and always if it is not verl's default
        self.is_theirs = self.mode != "vanilla" or not {"pg_objective", "pg_custom_objective_path"} & given.keys()

    def answers(self) -> Iterator[Answer]:
        """What our loss inherits, flags that were set and those that no option replaces, and what it refuses."""
        actor, given = self.actor, self.given
        yield from self._of_objective()
        yield from self._of_numbers()
        yield from _of_mean("actor", actor, given)
        if self.mode in ("gspo", "sapo") and actor.loss_agg_mode != _SEQUENCE_MEAN and "loss_aggregation" not in given:
            yield (
                f"actor.loss_agg_mode={actor.loss_agg_mode} has no effect on actor.policy_loss.loss_mode={self.mode} "
                f"in some releases of verl. Set it to {_SEQUENCE_MEAN}, or set loss_aggregation."
            )
        if actor.use_kl_loss:
            yield Inherited("actor.kl_loss_coef", "pg_kl_coef", float(actor.kl_loss_coef))
        has_kl = actor.use_kl_loss and actor.kl_loss_coef
        if has_kl and actor.kl_loss_type in _ESTIMATORS:
            estimator = _ESTIMATORS[actor.kl_loss_type]
            yield Inherited(f"actor.kl_loss_type {actor.kl_loss_type}", "pg_kl_estimator", estimator)
        elif has_kl:
            known = ", ".join(_ESTIMATORS)
            yield f"actor.kl_loss_type={actor.kl_loss_type} has no estimator in megatron_pg; use {known}"
        if actor.entropy_coeff:
            yield Inherited("actor.entropy_coeff", "pg_entropy_coef", actor.entropy_coeff)
        if actor.calculate_entropy and "pg_metrics" not in given:
            yield Inherited("actor.calculate_entropy", "pg_metrics", "with_entropy")
        if (actor.entropy_coeff or has_kl) and "pg_aux_aggregation" not in given:
            yield Inherited("actor.loss_agg_mode, for KL and entropy,", "pg_aux_aggregation", "policy")
        yield from _not_run("actor", actor, "calculate_sum_pi_squared", "use_prefix_grouper")

    def _of_objective(self) -> Iterator[Answer]:
        mode, ours = f"actor.policy_loss.loss_mode={self.mode}", str(self.given.get("pg_objective", ""))
        if self.is_theirs and self.mode in MODES:
            yield Inherited(f"actor.policy_loss.loss_mode {self.mode}", "pg_objective", MODES[self.mode][0])
        elif self.mode not in MODES:
            yield f"{mode} has no objective of megatron_pg. Use {', '.join(MODES)}, or vanilla with pg_objective."
        if self.mode == "dro" and self.actor.policy_loss.dro_beta is None and f",{objectives.BETA.name}=" not in ours:
            yield f"actor.policy_loss.dro_beta is null, and {mode} needs it. Set it to a positive number."
        if self.mode != "vanilla" and "pg_custom_objective_path" in self.given:
            yield f"{mode} has no effect with pg_custom_objective_path. Remove one of them."

    def _of_numbers(self) -> Iterator[Answer]:
        """Numbers that the objective in force reads; a custom objective has the clip bounds."""
        _, numbers = MODES.get(self.mode, MODES["vanilla"])
        if "pg_custom_objective_path" in self.given:
            reads = set(_CLIP.values())
        else:
            reads = set(numbers.values()) if self.is_theirs else numbers_of(self.given["pg_objective"])
        for name in {**numbers, **_USUAL}:
            value, number = attrgetter(name)(self.actor), numbers.get(name)
            value = self.actor.clip_ratio if value is None and name in _CLIP else value  # as verl reads it
            is_default = value == _USUAL.get(name)
            if number in reads and value is not None and (self.is_theirs or not is_default):
                absolute = float(value) + (number == objectives.WEIGHT_CAP)
                yield Inherited.number(f"actor.{name}", number, absolute, is_default=is_default)
            elif number not in reads and not is_default and not self.is_theirs:  # verl's own do not read all of them
                ours = self.given.get("pg_objective", "")
                yield f"actor.{name}={value} has no effect with pg_objective {ours}; remove it"


def _of_mean(section: str, config: Any, given: Mapping[str, Any]) -> Iterator[Answer]:
    """Of the denominators of an actor or a critic."""
    scale, divisor, mean = config.loss_scale_factor, "loss_aggregation_divisor", config.loss_agg_mode
    length = vars(config).get(RESPONSE_LENGTH)
    is_known = scale is not None or length is not None or {"loss_aggregation", divisor} & given.keys()
    has_ours = {"loss_aggregation", "custom_pg_loss_reducer_function_path"} & given.keys()
    if mean not in _AGGREGATIONS:
        yield f"{section}.loss_agg_mode={mean} is not a mean over the step; use one of {', '.join(_AGGREGATIONS)}"
    if scale is not None and mean != _SUM_NORM:
        yield f"{section}.loss_scale_factor={scale} has no effect with loss_agg_mode={mean}; remove it"
    if mean == _SUM_NORM and not is_known:
        yield (
            f"{section}.loss_scale_factor is null, so verl divides each micro-batch by the length of its longest "
            "response. Set it to a constant, such as ${data.max_response_length}."
        )
    elif mean in _AGGREGATIONS and not (has_ours and mean == "token-mean"):
        source = f"{section}.loss_agg_mode {mean}"
        yield Inherited(source, "loss_aggregation", _AGGREGATIONS[mean])
        if mean == "seq-mean-token-sum":
            yield Inherited(source, divisor, 1.0)
        elif mean == _SUM_NORM and scale is not None:
            yield Inherited(f"{section}.loss_scale_factor", divisor, float(scale))
        elif mean == _SUM_NORM and length is not None and divisor not in given:
            yield Inherited(f"rollout.response_length ({section}.loss_scale_factor is null)", divisor, float(length))
    if given.get("loss_aggregation") == "prompt_mean" and config.ppo_epochs > 1:
        epochs = f"{section}.ppo_epochs={config.ppo_epochs}"
        yield f"loss_aggregation prompt_mean with {epochs} cannot tell whether prompt groups are whole. Use 1."


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
    if (value := given.get("pg_temperature", 1.0)) != 1.0:
        yield f"pg_temperature {value} is a second temperature in addition to verl's rollout.temperature. Remove it."
    heads = [name for name in ("pg_fused_head", "fp32_lm_head") if given.get(name)]
    if heads and not engine.use_fused_kernels:
        yield f"{heads[0]} needs model.use_fused_kernels=True, which includes it. Set that, and remove {heads[0]}."
    if (mode := given.get("pg_fused_head")) in AT_ONCE:
        yield f"pg_fused_head {mode} needs the loss inside the head, and verl computes its loss later; use recompute"
