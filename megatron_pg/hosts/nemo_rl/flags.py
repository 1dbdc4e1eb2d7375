"""NeMo-RL's loss options, `loss_fn` of its configuration: what of them is ours now, and what is refused.

Its YAML files give every option a value, so none of them can be told from a default: all that this loss has too is taken
over, and an option of ours that says something else is an error.
"""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from megatron_pg.declarations.objectives import DEFAULT, OBJECTIVES
from megatron_pg.hosts.startup import TakenOver

OURS = "megatron_pg"  # the key below `loss_fn` that holds our options
_NOT_TRUNCATED = 1e9  # above e^20, at which log-ratios are clamped
# Their options by what is done with them; one that a newer release has is in neither.
_TAKEN = (
    *("disable_ppo_ratio", "token_level_loss", "sequence_level_importance_ratios", "use_cispo"),
    *("ratio_clip_min", "ratio_clip_max", "ratio_clip_c", "reference_policy_kl_penalty", "reference_policy_kl_type"),
    *("kl_input_clamp_value", "kl_output_clamp_value", "use_kl_in_reward", "use_on_policy_kl_approximation"),
    *("use_importance_sampling_correction", "truncated_importance_sampling_type"),
    *("truncated_importance_sampling_ratio", "truncated_importance_sampling_ratio_min"),
)
_REFUSED = {
    "force_on_policy_ratio": "it leaves out prev_logprobs, which the metrics read. Set it to false and loss_fn.disable_ppo_ratio to true: "
    "the gradient is the same.",
    "positive_example_nll_weight": "its denominator counts one micro-batch. Set it to 0.",
}
_OBJECTIVES = {  # the option that chooses it: ours
    "sequence_level_importance_ratios": "gspo",
    "use_cispo": "cispo",
    "disable_ppo_ratio": "reinforce",
    "ratio_clip_c": "dual_clip",
}
_CORRECTIONS = {  # type, and whether ratios are of sequences: ours
    (None, False): "tis",
    ("tis", False): "tis",
    ("icepop", False): "icepop",
    ("seq-mask-tis", False): "seq_mask_tis",
    (None, True): "seq_tis",
    ("tis", True): "seq_tis",
    ("icepop", True): "mis",
}
_POLICY = (  # places in the configuration of the policy that must be off, and why
    ("megatron_cfg.use_fused_linear_logprobs", "it hands over log-probabilities, and this loss reads logits"),
    ("sequence_packing.fuse_loss", "it takes a loss of log-probabilities only"),
    ("draft.enabled", "its loss reads the logits over which this loss writes their gradient"),
)


options_of = attrgetter("loss_fn")  # of their whole configuration


def missing(theirs: Mapping[str, Any]) -> list[str]:
    """Options that this adapter knows and the configuration lacks."""
    return sorted({*_TAKEN, *_REFUSED} - theirs.keys())


def given(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Our options among theirs."""
    return dict(theirs.get(OURS) or {})


def taken_over(theirs: Mapping[str, Any]) -> Iterator[TakenOver]:
    """Options of theirs that say what ours say, with their values."""
    ours = given(theirs)
    if "loss_aggregation" not in ours and "custom_pg_loss_reducer_function_path" not in ours:
        mode = "token_mean" if theirs["token_level_loss"] else "sample_mean"
        yield TakenOver("loss_fn.token_level_loss", "loss_aggregation", mode)
    yield from _objective(theirs, ours)
    coefficient = 0.0 if theirs["use_kl_in_reward"] else theirs["reference_policy_kl_penalty"]
    yield TakenOver("loss_fn.reference_policy_kl_penalty", "pg_kl_coef", coefficient)
    if coefficient and "pg_kl_estimator" not in ours and not _has_no_estimator(theirs):
        # NeMo-RL weighs k3 by π/sg(π): value k3 and gradient x, which is k2's
        yield TakenOver("loss_fn.reference_policy_kl_type k3, by its gradient,", "pg_kl_estimator", "k2")
    if theirs["use_importance_sampling_correction"]:
        yield from _correction(theirs)


def _objective(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[TakenOver]:
    chosen = next((option for option in _OBJECTIVES if theirs[option]), None)
    if chosen:
        yield TakenOver(f"loss_fn.{chosen}", "pg_objective", _OBJECTIVES[chosen])
    reads = _reads(_OBJECTIVES.get(chosen), ours)
    for option, name, value in (
        ("ratio_clip_min", "pg_clip_eps_low", theirs["ratio_clip_min"]),
        ("ratio_clip_max", "pg_clip_eps_high", theirs["ratio_clip_max"]),
        ("ratio_clip_max + 1", "pg_cispo_cap", 1 + theirs["ratio_clip_max"]),
        ("ratio_clip_c", "pg_dual_clip", theirs["ratio_clip_c"]),
    ):
        if name in reads and value is not None:
            yield TakenOver(f"loss_fn.{option}", name, value)


def _reads(chosen: str | None, ours: Mapping[str, Any]) -> set[str]:
    """Arguments that the objective in force reads; what a user's own reads is the user's to give."""
    if ours.get("pg_custom_objective_path"):
        return set()
    declared = OBJECTIVES.get(chosen or ours.get("pg_objective", DEFAULT))
    return {number.attribute for number in declared.numbers} if declared else set()


def _correction(theirs: Mapping[str, Any]) -> Iterator[TakenOver]:
    kind = theirs["truncated_importance_sampling_type"]
    name = _CORRECTIONS.get((kind, theirs["sequence_level_importance_ratios"]))
    if name is None:
        return
    low, high = (theirs[f"truncated_importance_sampling_ratio{end}"] for end in ("_min", ""))
    option = "loss_fn.use_importance_sampling_correction"
    yield TakenOver(option if kind is None else f"{option} with {kind}", "pg_correction", name)
    bound = "loss_fn.truncated_importance_sampling_ratio"
    yield TakenOver(f"{bound}_min", "pg_correction_low", 0.0 if low is None else low)
    yield TakenOver(bound, "pg_correction_high", _NOT_TRUNCATED if kind is None else high)


def _has_no_estimator(theirs: Mapping[str, Any]) -> bool:
    return theirs["reference_policy_kl_type"] != "k3" or theirs["use_on_policy_kl_approximation"]


def not_read(theirs: Mapping[str, Any]) -> str:
    """Options of theirs without effect on this loss, for the banner."""
    ours = given(theirs)
    found = ["kl_input_clamp_value, kl_output_clamp_value: the penalty is not clamped"]
    if "pg_kl_estimator" in ours:
        found.append("reference_policy_kl_type")
    if not {"pg_clip_eps_low", "pg_clip_eps_high"} & {flag.attribute for flag in taken_over(theirs)}:
        found.append("ratio_clip_min, ratio_clip_max: the objective has no such bounds")
    if "loss_aggregation" in ours or "custom_pg_loss_reducer_function_path" in ours:
        found.append("token_level_loss: the aggregation is given")
    return "; ".join(found)


def refused(theirs: Mapping[str, Any], usual: Mapping[str, Any] = {}) -> Iterator[str]:
    """Messages about options that cannot go with this loss; `usual` are the defaults of the installed release."""
    ours = given(theirs)
    for option in sorted(theirs.keys() - {*_TAKEN, *_REFUSED, OURS}):
        if option not in usual:
            yield f"loss_fn.{option}={theirs[option]!r} is not an option of NeMo-RL's loss or of this adapter. Remove it."
        elif theirs[option] != usual[option]:
            yield (
                f"loss_fn.{option}={theirs[option]!r} is an option of NeMo-RL's loss that megatron_pg does not compute. Set it to its "
                f"default {usual[option]!r}."
            )
    for option, why in _REFUSED.items():
        if theirs[option]:
            yield f"loss_fn.{option}={theirs[option]!r} is not done by this loss: {why}"
    chosen = [option for option in _OBJECTIVES if theirs[option]]
    if len(chosen) > 1:
        yield f"loss_fn.{' and loss_fn.'.join(chosen)} together have no objective here; keep one"
    kind, of_sequences = theirs["truncated_importance_sampling_type"], theirs["sequence_level_importance_ratios"]
    if theirs["use_importance_sampling_correction"] and (kind, of_sequences) not in _CORRECTIONS:
        yield f"loss_fn.truncated_importance_sampling_type={kind!r} has no correction here; give megatron_pg.pg_correction instead"
    if kind is not None and not theirs["use_importance_sampling_correction"]:
        yield f"loss_fn.truncated_importance_sampling_type={kind!r} has no effect without use_importance_sampling_correction; set both"
    in_loss = theirs["reference_policy_kl_penalty"] and not theirs["use_kl_in_reward"]
    if in_loss and "pg_kl_estimator" not in ours and _has_no_estimator(theirs):
        yield (
            f"loss_fn.reference_policy_kl_type={theirs['reference_policy_kl_type']!r} (use_on_policy_kl_approximation="
            f"{theirs['use_on_policy_kl_approximation']}) has a gradient that no estimator here has. Set loss_fn.megatron_pg.pg_kl_estimator, "
            "for example to k3_weighted, which weighs by π/π_old."
        )
    yield from _refused_of_ours(ours)


def _refused_of_ours(ours: Mapping[str, Any]) -> Iterator[str]:
    for name in ("fp32_lm_head", "pg_fused_head"):
        if ours.get(name):
            yield (
                f"--{name.replace('_', '-')} makes the logits itself, and NeMo-RL calls a loss when its model has made them; remove it"
            )
    if ours.get("pg_temperature", 1.0) != 1.0:
        yield (
            f"--pg-temperature {ours['pg_temperature']}: NeMo-RL has divided the logits by policy.generation.temperature; remove it"
        )
    if ours.get("pg_metrics_file"):
        yield f"--pg-metrics-file {ours['pg_metrics_file']}: the metrics go to NeMo-RL's logger as pg/…; remove it"
    if ours.get("pg_no_mismatch_advice"):
        yield "--pg-no-mismatch-advice has no effect, because no advice is given in NeMo-RL; remove it"


def refused_of_policy(config: Any) -> Iterator[str]:
    """Messages about the rest of NeMo-RL's configuration, which only the driver sees."""
    policy = config.policy
    if not (policy.get("megatron_cfg") or {}).get("enabled"):
        yield "policy.megatron_cfg.enabled is not true, and this loss is for NeMo-RL's Megatron worker; enable it"
    for place, why in _POLICY:
        section, _, name = place.partition(".")
        if (policy.get(section) or {}).get(name):
            yield f"policy.{place}=true: {why}; set it to false"
    generation = policy.get("generation") or {}
    if generation.get("top_k") not in (None, -1) or generation.get("top_p", 1.0) != 1.0:
        yield (
            f"policy.generation.top_k={generation.get('top_k')}, top_p={generation.get('top_p')} cut off logits before log-probabilities are "
            "taken, and this loss reads whole ones; use null and 1.0"
        )
    size, group = policy["train_global_batch_size"], config.grpo.num_generations_per_prompt
    if given(options_of(config).model_dump()).get("loss_aggregation") == "prompt_mean" and size % group:
        yield (
            f"--loss-aggregation prompt_mean with policy.train_global_batch_size={size} and grpo.num_generations_per_prompt={group}: a step "
            "would hold part of a prompt's samples; use a multiple"
        )
    if (getattr(config, "data_plane", None) or {}).get("enabled"):
        yield "data_plane.enabled=true takes rows past Policy.train, where this loss plans the step; set it to false"
