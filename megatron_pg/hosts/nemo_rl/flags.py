"""NeMo-RL's loss options, `loss_fn` of its configuration: what our loss inherits and what it refuses.

NeMo-RL's YAML files give every option a value, so a default looks like a choice. Every option that both losses have is
inherited, and a different value in our options is an error.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_pg.declarations.declaration import flag_of
from megatron_pg.declarations.objectives import CAP, CLIP_EPS_HIGH, CLIP_EPS_LOW, DEFAULT, WEIGHT_CAP
from megatron_pg.flags.option_text import Selection
from megatron_pg.hosts.startup import Answer, Inherited, Unused, cut_groups, numbers_of, place_of, refused

OURS = "megatron_pg"  # the key below `loss_fn` that holds our options
_NOT_TRUNCATED = 1e9  # above e^20, at which log-ratios are clamped
_TIS = "truncated_importance_sampling"
ON_POLICY = "force_on_policy_ratio"  # the loss computes the old log-probabilities itself
KNOWN = {  # their options; a newer release may have others
    *("disable_ppo_ratio", "token_level_loss", "sequence_level_importance_ratios", "use_cispo"),
    *("ratio_clip_min", "ratio_clip_max", "ratio_clip_c", "reference_policy_kl_penalty", "reference_policy_kl_type"),
    *("kl_input_clamp_value", "kl_output_clamp_value", "use_kl_in_reward", "use_on_policy_kl_approximation"),
    *("use_importance_sampling_correction", f"{_TIS}_type", f"{_TIS}_ratio", f"{_TIS}_ratio_min"),
    *(ON_POLICY, "positive_example_nll_weight"),
}
_OBJECTIVES = {  # the option that selects it: ours
    "sequence_level_importance_ratios": "gspo",
    "use_cispo": "cispo",
    "disable_ppo_ratio": "reinforce",
    "ratio_clip_c": "dual_clip",
}
_NUMBERS = (  # their option, our number, and what is added
    ("ratio_clip_min", CLIP_EPS_LOW, 0),
    ("ratio_clip_max", CLIP_EPS_HIGH, 0),
    ("ratio_clip_max", WEIGHT_CAP, 1),
    ("ratio_clip_c", CAP, 0),
)
_AGGREGATION = {"loss_aggregation", "custom_pg_loss_reducer_function_path"}  # our arguments that set it
_CORRECTIONS = {  # type, and whether importance weights are sequence-level: ours
    (None, False): "tis",
    ("tis", False): "tis",
    ("icepop", False): "icepop",
    ("seq-mask-tis", False): "seq_mask_tis",
    (None, True): "seq_tis",
    ("tis", True): "seq_tis",
    ("icepop", True): "mis",
}
# Settings of the policy under which NeMo-RL passes log-probabilities to the loss, or reads the logits after it.
_LOGPROBS = ("megatron_cfg.use_fused_linear_logprobs", "sequence_packing.fuse_loss", "draft.enabled")
_OF_LOGITS = {"pg_entropy_coef": 0.0, "pg_metrics": "basic", "pg_vocab_size": None, "pg_kernel": "auto"}  # and defaults
_MAKES_LOGITS = "computes the logits itself, and NeMo-RL calls a loss after its model has computed them. Remove it."
_NO_EFFECT = {  # our arguments without effect: why
    "fp32_lm_head": _MAKES_LOGITS,
    "pg_fused_head": _MAKES_LOGITS,
    "pg_temperature": "is that of the logits, which NeMo-RL has divided by policy.generation.temperature. Remove it.",
    "pg_metrics_file": "has no effect, because the metrics go to NeMo-RL's logger as pg/…. Remove it.",
    "pg_no_mismatch_advice": "has no effect, because NeMo-RL's runs give no advice. Remove it.",
}


def given(loss_fn: Mapping[str, Any]) -> dict[str, Any]:
    """Our options in `loss_fn`."""
    return dict(loss_fn.get(OURS) or {})


def answers(loss_fn: Mapping[str, Any], usual: Mapping[str, Any] = {}) -> Iterator[Answer]:
    """What our arguments inherit from their options, and messages about those that this loss does not support.

    `usual` are the defaults of the installed release.
    """
    ours = given(loss_fn)
    for option in sorted(loss_fn.keys() - {*KNOWN, OURS}):
        known = f"loss_fn.{option}={loss_fn[option]!r} is"
        if option not in usual:
            yield f"{known} not an option of NeMo-RL's loss or of this adapter. Remove it."
        elif loss_fn[option] != usual[option]:
            yield f"{known} an option that megatron_pg does not compute. Set it to its default {usual[option]!r}."
    if weight := loss_fn["positive_example_nll_weight"]:
        yield f"loss_fn.positive_example_nll_weight={weight} has a denominator of one micro-batch. Set it to 0."
    if _AGGREGATION & ours.keys():
        yield Unused("token_level_loss: the aggregation is given")
    else:
        mode = "token_mean" if loss_fn["token_level_loss"] else "sample_mean"
        yield Inherited("loss_fn.token_level_loss", "loss_aggregation", mode)
    yield from _of_objective(loss_fn, ours)
    yield from _of_penalty(loss_fn, ours)
    yield from _of_correction(loss_fn, ours)
    yield from refused(ours, _NO_EFFECT, {"pg_temperature": 1.0})


def _of_objective(loss_fn: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[Answer]:
    objective, selected = ours.get("pg_objective", DEFAULT), [option for option in _OBJECTIVES if loss_fn[option]]
    if selected:
        objective = _OBJECTIVES[selected[0]]
        yield Inherited(f"loss_fn.{selected[0]}", "pg_objective", objective)
    if len(selected) > 1:
        yield f"loss_fn.{' and loss_fn.'.join(selected)} together have no objective here. Keep one."
    reads = set() if ours.get("pg_custom_objective_path") else numbers_of(objective)
    for option, number, plus in _NUMBERS:
        if number in reads and loss_fn[option] is not None:
            yield Inherited(f"loss_fn.{option}{' + 1' * plus}", place_of(number), plus + loss_fn[option])
    if not {CLIP_EPS_LOW, CLIP_EPS_HIGH} & reads:
        yield Unused("ratio_clip_min, ratio_clip_max: the objective has no such bounds")


def _of_penalty(loss_fn: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[Answer]:
    coefficient = _kl_coefficient(loss_fn)
    yield Inherited("loss_fn.reference_policy_kl_penalty", "pg_kl_coef", coefficient)
    yield Unused("kl_input_clamp_value, kl_output_clamp_value: the penalty is not clamped")
    if "pg_kl_estimator" in ours:
        yield Unused("reference_policy_kl_type: the estimator is given")
    if not coefficient or "pg_kl_estimator" in ours:
        return
    # NeMo-RL weighs k3 by π/sg(π): value k3 and gradient x, which is k2's
    yield Inherited("loss_fn.reference_policy_kl_type k3, by its gradient,", "pg_kl_estimator", "k2")
    estimator, is_weighted = loss_fn["reference_policy_kl_type"], loss_fn["use_on_policy_kl_approximation"]
    if is_weighted or estimator != "k3":
        yield (
            f"loss_fn.reference_policy_kl_type={estimator!r} (use_on_policy_kl_approximation={is_weighted}) has a "
            "gradient that no estimator here has. Set loss_fn.megatron_pg.pg_kl_estimator, for example to k3_weighted, "
            "which weighs by π/π_old."
        )


def _of_correction(loss_fn: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[Answer]:
    kind, option = loss_fn[f"{_TIS}_type"], "use_importance_sampling_correction"
    name = _CORRECTIONS.get((kind, loss_fn["sequence_level_importance_ratios"])) if loss_fn[option] else None
    if name is not None:
        yield Inherited(f"loss_fn.{option}" + ("" if kind is None else f" with {kind}"), "pg_correction", name)
        low, high = loss_fn[f"{_TIS}_ratio_min"], _NOT_TRUNCATED if kind is None else loss_fn[f"{_TIS}_ratio"]
        yield Inherited(f"loss_fn.{_TIS}_ratio_min", "pg_correction.low", 0.0 if low is None else low)
        yield Inherited(f"loss_fn.{_TIS}_ratio", "pg_correction.high", high)
    elif loss_fn[option]:
        yield f"loss_fn.{_TIS}_type={kind!r} has no correction here. Give megatron_pg.pg_correction instead."
    elif kind is not None:
        yield f"loss_fn.{_TIS}_type={kind!r} has no effect without {option}. Set both."
    if loss_fn[ON_POLICY]:
        yield from _of_logits(ours, [f"loss_fn.{ON_POLICY}"])
        correction = name or Selection.of("pg_correction", ours.get("pg_correction", "none")).name
        if correction not in ("none", "tis"):
            reads = f"that --pg-correction {correction} reads. Set it to false."
            yield f"loss_fn.{ON_POLICY}=True leaves out the old log-probabilities {reads}"


def _kl_coefficient(loss_fn: Mapping[str, Any]) -> float:
    return 0.0 if loss_fn["use_kl_in_reward"] else loss_fn["reference_policy_kl_penalty"]


def refused_of_policy(config: Any) -> Iterator[str]:
    """Messages about the rest of NeMo-RL's configuration, which only the driver reads."""
    policy, loss_fn = config.policy, config.loss_fn.model_dump()
    if not (policy.get("megatron_cfg") or {}).get("enabled"):
        yield "policy.megatron_cfg.enabled is not true, and this loss is for NeMo-RL's Megatron worker. Enable it."
    yield from _of_logits(given(loss_fn), passes_logprobs(policy))
    if (cut := _cuts_off(policy)) and _kl_coefficient(loss_fn):
        fix = "Set loss_fn.reference_policy_kl_penalty to 0, or policy.generation.top_k to null and top_p to 1.0."
        yield f"{cut} cuts off logits, but not those of NeMo-RL's KL term. {fix}"
    grpo = config.grpo if isinstance(config.grpo, Mapping) else vars(config.grpo)  # in v0.7.0 a dict
    sizes = policy["train_global_batch_size"], "grpo.num_generations_per_prompt=", grpo["num_generations_per_prompt"]
    yield from cut_groups(given(loss_fn), "policy.train_global_batch_size=", *sizes)
    if (getattr(config, "data_plane", None) or {}).get("enabled"):
        yield "data_plane.enabled=true sends rows past Policy.train, where this loss plans the step. Set it to false."


def passes_logprobs(policy: Mapping[str, Any]) -> list[str]:
    """Settings of the policy for which the loss takes NeMo-RL's log-probabilities instead of logits."""
    places = [place.partition(".")[::2] for place in _LOGPROBS]
    found = [f"policy.{section}.{name}" for section, name in places if (policy.get(section) or {}).get(name)]
    return [*found, cut] if (cut := _cuts_off(policy)) else found


def _cuts_off(policy: Mapping[str, Any]) -> str | None:
    """Sampling options with which NeMo-RL leaves out tokens in training, too."""
    generation = policy.get("generation") or {}
    top_k, top_p = generation.get("top_k"), generation.get("top_p", 1.0)
    return None if top_k in (None, -1) and top_p == 1.0 else f"policy.generation.top_k={top_k}, top_p={top_p}"


def _of_logits(ours: Mapping[str, Any], sources: Sequence[str]) -> Iterator[str]:
    """Messages about our options that read logits, where there are none."""
    reads = [(name, ours[name]) for name, usual in _OF_LOGITS.items() if ours.get(name, usual) != usual]
    reads += [("pg_term", term) for term in ours.get("pg_term") or () if ":entropy" in term]
    for name, value in reads if sources else ():
        yield (
            f"{flag_of(name)} {value} reads logits, and NeMo-RL passes log-probabilities for {', '.join(sources)}. "
            f"Remove {name}, or set {', '.join(sources)} to its default."
        )
