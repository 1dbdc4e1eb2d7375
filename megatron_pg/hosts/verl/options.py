"""What verl's configuration says about our loss: options, what our loss inherits, and what it refuses.

Without our options the loss is the one that verl's actor configuration describes. An option replaces what verl has by
default; two that were both set and differ are refused.
"""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from megatron_pg.declarations.choices import AT_ONCE
from megatron_pg.declarations.declaration import Number
from megatron_pg.declarations.objectives import (
    BETA,
    CAP,
    CLIP_EPS_HIGH,
    CLIP_EPS_LOW,
    DELTA_HIGH,
    DELTA_LOW,
    TAU_NEG,
    TAU_POS,
    WEIGHT_CAP,
)
from megatron_pg.flags.option_text import Selection
from megatron_pg.hosts.startup import CheckedArguments, Inherited, check, numbers_of

RESPONSE_LENGTH = "_megatron_pg_response_length"  # attribute of an actor: verl's rollout.response_length
KEY = "megatron_pg"  # in override_mcore_model_config, of which verl itself reads other keys only
_USUAL = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}  # verl's defaults


class Mode(NamedTuple):
    """A policy loss of verl that one of our objectives computes."""

    objective: str
    numbers: Mapping[str, Number] = {}  # ours, by fields of verl's actor


_CLIP = {"clip_ratio_low": CLIP_EPS_LOW, "clip_ratio_high": CLIP_EPS_HIGH}
_DPPO = {"clip_ratio_low": DELTA_LOW, "clip_ratio_high": DELTA_HIGH, "clip_ratio_c": CAP}
_VANILLA = Mode("dual_clip", {**_CLIP, "clip_ratio_c": CAP})
MODES = {
    "vanilla": _VANILLA,
    "gspo": Mode("gspo_token", _CLIP),
    "cispo": Mode("cispo", {"clip_ratio_low": CLIP_EPS_LOW, "clip_ratio_high": WEIGHT_CAP}),
    "dppo_tv": Mode("dppo_tv", _DPPO),
    "dppo_kl": Mode("dppo_kl", _DPPO),
    "sapo": Mode("sapo", {"tau_pos": TAU_POS, "tau_neg": TAU_NEG}),
    "gpg": Mode("reinforce"),
    "dro": Mode("dro", {"policy_loss.dro_beta": BETA}),
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
_NOT_RUN = "was not run with megatron_pg. Set it to False."


def checked(engine: Any, model: Any, actor: Any | None) -> CheckedArguments:
    """Our arguments of an engine, with what they inherit from verl's.

    Args:
        engine: its McoreEngineConfig.
        model: the model's configuration.
        actor: the McoreActorConfig that has this engine; None: the engine makes log-probabilities only.

    Raises:
        ArgumentError: with every violation at once.
    """
    given = dict(engine.override_mcore_model_config.get(KEY) or {})
    head, refused = "model.use_fused_kernels", [*_refused(engine, model, given)]
    inherited = [Inherited(head, "pg_fused_head", "recompute")] if engine.use_fused_kernels else []
    if actor is not None:
        loss = _Loss(actor, given)
        inherited += loss.inherited()
        refused += loss.refused()
    facts = {name: value for name, value in vars(engine).items() if name not in _REFUSED}
    return check(
        "verl", given, megatron=facts | dict(engine.override_transformer_config), inherited=inherited, refused=refused
    )


class _Loss:
    """An actor's configuration together with our options."""

    def __init__(self, actor: Any, given: Mapping[str, Any]):
        self.actor, self.given = actor, given
        self.mode, self.mean = actor.policy_loss.loss_mode, actor.loss_agg_mode
        # verl's own setting selects the objective where no option does, and always if it is not verl's default
        self.is_theirs = self.mode != "vanilla" or not {"pg_objective", "pg_custom_objective_path"} & given.keys()
        self.numbers = (MODES.get(self.mode, _VANILLA) if self.is_theirs else _VANILLA).numbers
        self.has_kl = actor.use_kl_loss and actor.kl_loss_coef
        self.length = vars(actor).get(RESPONSE_LENGTH)
        is_known = actor.loss_scale_factor is not None or self.length is not None
        is_ours = {"loss_aggregation", "loss_aggregation_divisor"} & given.keys()
        self.lacks_divisor = self.mean == _SUM_NORM and not (is_known or is_ours)

    def inherited(self) -> Iterator[Inherited]:
        """The actor's flags that were set, and of the others those that no option replaces."""
        actor, given = self.actor, self.given
        if self.is_theirs and self.mode in MODES:
            yield Inherited(f"actor.policy_loss.loss_mode {self.mode}", "pg_objective", MODES[self.mode].objective)
        for option, ours in self.numbers.items():
            value, usual = self._number(option), _USUAL.get(option)
            is_chosen = value != usual or (self.is_theirs and not self._gives(ours))
            if value is not None and is_chosen and ours in self._reads():
                yield Inherited.number(f"actor.{option}", ours, float(value) + (ours == WEIGHT_CAP))  # an absolute cap
        yield from self._mean()
        if actor.use_kl_loss:
            yield Inherited("actor.kl_loss_coef", "pg_kl_coef", float(actor.kl_loss_coef))
        if self.has_kl and actor.kl_loss_type in _ESTIMATORS:
            estimator = _ESTIMATORS[actor.kl_loss_type]
            yield Inherited(f"actor.kl_loss_type {actor.kl_loss_type}", "pg_kl_estimator", estimator)
        if actor.entropy_coeff:
            yield Inherited("actor.entropy_coeff", "pg_entropy_coef", actor.entropy_coeff)
        if actor.calculate_entropy and "pg_metrics" not in given:
            yield Inherited("actor.calculate_entropy", "pg_metrics", "with_entropy")
        if (actor.entropy_coeff or self.has_kl) and "pg_aux_aggregation" not in given:
            yield Inherited("actor.loss_agg_mode, for KL and entropy,", "pg_aux_aggregation", "policy")

    def _mean(self) -> Iterator[Inherited]:
        source, scale = f"actor.loss_agg_mode {self.mean}", self.actor.loss_scale_factor
        is_ours = {"loss_aggregation", "custom_pg_loss_reducer_function_path"} & self.given.keys()
        if self.mean not in _AGGREGATIONS or (is_ours and self.mean == "token-mean") or self.lacks_divisor:
            return
        yield Inherited(source, "loss_aggregation", _AGGREGATIONS[self.mean])
        if self.mean == "seq-mean-token-sum":
            yield Inherited(source, "loss_aggregation_divisor", 1.0)
        elif self.mean == _SUM_NORM and scale is not None:
            yield Inherited("actor.loss_scale_factor", "loss_aggregation_divisor", float(scale))
        elif self.mean == _SUM_NORM and self.length is not None and "loss_aggregation_divisor" not in self.given:
            source = "rollout.response_length (actor.loss_scale_factor is null)"
            yield Inherited(source, "loss_aggregation_divisor", float(self.length))

    def _number(self, name: str) -> Any:
        """A field of the actor; verl reads clip_ratio where a bound is null."""
        value = attrgetter(name)(self.actor)
        return self.actor.clip_ratio if value is None and name in _CLIP else value

    def _gives(self, number: Number) -> bool:
        """Whether our options give a number."""
        selected = Selection.of("pg_objective", self.given.get("pg_objective", ""))
        return number.attribute in (self.given if number.flag else selected.given)

    def _reads(self) -> set[Number]:
        """Numbers that the objective in force reads; a custom objective has the clip bounds."""
        if "pg_custom_objective_path" in self.given:
            return set(_CLIP.values())
        if self.is_theirs:
            return set(self.numbers.values())
        return numbers_of(self.given["pg_objective"])

    def refused(self) -> Iterator[str]:
        """Messages about what the actor asks for and this loss does not support."""
        actor, given, mode = self.actor, self.given, f"actor.policy_loss.loss_mode={self.mode}"
        if self.mode not in MODES:
            yield f"{mode} has no objective of megatron_pg. Use {', '.join(MODES)}, or vanilla with pg_objective."
        if self.mode == "dro" and actor.policy_loss.dro_beta is None and not self._gives(BETA):
            yield f"actor.policy_loss.dro_beta is null, and {mode} needs it. Set it to a positive number."
        if self.mode != "vanilla" and "pg_custom_objective_path" in given:
            yield f"{mode} has no effect with pg_custom_objective_path. Remove one of them."
        yield from self._refused_mean()
        for name, usual in () if self.is_theirs else _USUAL.items():  # verl's own losses do not read all of them
            if (value := self._number(name)) != usual and self.numbers.get(name) not in self._reads():
                yield f"actor.{name}={value} has no effect with pg_objective {given.get('pg_objective', '')}; remove it"
        if self.has_kl and actor.kl_loss_type not in _ESTIMATORS:
            known = ", ".join(_ESTIMATORS)
            yield f"actor.kl_loss_type={actor.kl_loss_type} has no estimator in megatron_pg; use {known}"
        for name in ("calculate_sum_pi_squared", "use_prefix_grouper"):
            if getattr(actor, name):
                yield f"actor.{name}=True {_NOT_RUN}"
        if given.get("loss_aggregation") == "prompt_mean" and actor.ppo_epochs > 1:
            epochs = f"actor.ppo_epochs={actor.ppo_epochs}"
            yield f"loss_aggregation prompt_mean with {epochs} cannot tell whether prompt groups are whole. Use 1."

    def _refused_mean(self) -> Iterator[str]:
        scale, mean = self.actor.loss_scale_factor, f"actor.loss_agg_mode={self.mean}"
        if self.mean not in _AGGREGATIONS:
            yield f"{mean} is not a mean over the step; use one of {', '.join(_AGGREGATIONS)}"
        elif self.mode in ("gspo", "sapo") and self.mean != _SEQUENCE_MEAN and "loss_aggregation" not in self.given:
            yield (
                f"{mean} has no effect on actor.policy_loss.loss_mode={self.mode} in some releases of verl. Set it to "
                f"{_SEQUENCE_MEAN}, or set loss_aggregation."
            )
        if scale is not None and self.mean != _SUM_NORM:
            yield f"actor.loss_scale_factor={scale} has no effect with loss_agg_mode={self.mean}; remove it"
        if self.lacks_divisor:
            yield (
                "actor.loss_scale_factor is null, so verl divides each micro-batch by the length of its longest "
                "response. Set it to a constant, such as ${data.max_response_length}."
            )


def _refused(engine: Any, model: Any, given: Mapping[str, Any]) -> Iterator[str]:
    for name in _REFUSED:
        if getattr(engine, name, False):
            yield f"megatron.{name}=True {_NOT_RUN}"
    if model.mtp.enable:
        yield f"model.mtp.enable=True {_NOT_RUN}"
    if (value := given.get("pg_temperature", 1.0)) != 1.0:
        yield f"pg_temperature {value} is a second temperature in addition to verl's rollout.temperature. Remove it."
    heads = [name for name in ("pg_fused_head", "fp32_lm_head") if given.get(name)]
    if heads and not engine.use_fused_kernels:
        yield f"{heads[0]} needs model.use_fused_kernels=True, which includes it. Set that, and remove {heads[0]}."
    if (mode := given.get("pg_fused_head")) in AT_ONCE:
        yield f"pg_fused_head {mode} needs the loss inside the head, and verl computes its loss later; use recompute"
