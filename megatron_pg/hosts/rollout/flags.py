"""The loss flags of slime and miles, which have the same names: what our loss inherits and what it refuses."""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_pg.declarations.declaration import flag_of
from megatron_pg.declarations.objectives import CAP, CLIP_EPS_HIGH, CLIP_EPS_LOW, DEFAULT, VALUE_CLIP
from megatron_pg.flags.option_text import Selection
from megatron_pg.hosts.startup import Answer, Inherited, cut_groups, defaults, numbers_of, place_of, refused
from megatron_pg.rollouts.fields import POLICY

_CLIPS = {"eps_clip": CLIP_EPS_LOW, "eps_clip_high": CLIP_EPS_HIGH}
_EPS_CLIP = 0.2  # their default of both
_VALUE_CLIP = 0.2  # their default
_TIS = {"tis_clip_low": ("low", 0.0), "tis_clip": ("high", 2.0)}  # the option of tis, and their default
_ESTIMATORS = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}  # low_var_kl is k3 with a cap of 10
_TOP_P = {"rollout_top_p": 1.0}  # their default
UNSUPPORTED = {  # flags whose effect lies in the loss that ours replaces, and the replacement
    "custom_tis_function_path": "is not supported. Remove it, and choose a --pg-correction (docs/corrections.md).",
    "use_opsm": "is not supported. Give --pg-correction opsm_old,high=… or opsm,high=… instead.",
    "get_mismatch_metrics": "is not supported. Use --pg-metrics, which has them where samples have rollout "
    "log-probabilities.",
    "recompute_loss_function": "is not supported. Remove it: --pg-fused-head stores no logits.",
    "custom_loss_function_path": "is not supported. Remove it, or remove this loss.",
}
SFT = "sft"  # our name of the term that --loss-type sft_loss trains
_OF_CRITICS = (  # of our arguments
    *("loss_aggregation", "loss_aggregation_divisor", "custom_pg_loss_reducer_function_path"),
    *("pg_grad_divisor", "pg_metrics", "pg_metrics_file", VALUE_CLIP.attribute),
)
_OURS = ("pg_", "loss_aggregation", "docs_per_step")  # prefixes of our arguments


def given(args: argparse.Namespace, role: str) -> dict[str, Any]:
    """Our arguments for the model of this role that are set among the host's; for a policy, unknown names included.

    The command line of a policy and its critic is one. Arguments about log-probabilities are the policy's.
    """
    known = defaults()
    found = {name: value for name, value in vars(args).items() if value != known.get(name)}
    if role == "policy":
        of_critic = {VALUE_CLIP.attribute} if vars(args).get("use_critic") else set()
        return {n: v for n, v in found.items() if n not in of_critic and (n in known or n.startswith(_OURS))}
    found = {name: found[name] for name in _OF_CRITICS if name in found}
    return found | ({"pg_metrics": "basic"} if found.get("pg_metrics") == "with_entropy" else {})


def trains_sft(args: argparse.Namespace) -> bool:
    """Whether every sample is a demonstration."""
    return args.loss_type == "sft_loss"


def answers(args: argparse.Namespace, role: str, unsupported: Mapping[str, str]) -> Iterator[Answer]:
    """What our loss inherits from the host's flags, and messages about those that it does not support."""
    options = vars(args)
    yield from refused(options, unsupported, _TOP_P)
    if args.loss_type != "policy_loss" and not (trains_sft(args) and role == "policy"):
        yield f"--loss-type {args.loss_type} is another loss. Remove it, or remove this one."
    if options.get("allgather_cp") and options.get("context_parallel_size", 1) > 1:
        yield (
            f"--allgather-cp with --context-parallel-size {args.context_parallel_size} splits samples into contiguous "
            "parts, and this loss reads zigzag parts. Remove --allgather-cp, or use --context-parallel-size 1."
        )
    size, group = args.global_batch_size, args.n_samples_per_prompt
    yield from cut_groups(options, "--global-batch-size ", size, "--n-samples-per-prompt ", group)
    if role == "critic":
        yield Inherited("--value-clip", VALUE_CLIP.attribute, args.value_clip, args.value_clip == _VALUE_CLIP)
        return
    yield Inherited("--rollout-temperature", "pg_temperature", args.rollout_temperature)
    yield from _of_objective(args)
    if args.use_tis:  # weights of the tokens: exp(old - rollout), clamped
        yield Inherited("--use-tis", "pg_correction", "tis")
        for name, (option, default) in _TIS.items():
            value = options[name]
            yield Inherited(flag_of(name), f"pg_correction.{option}", value, value == default)
    yield from _of_terms(args)
    if (options.get("pg_fused_head") is not None or options.get("fp32_lm_head")) and args.enable_mtp_training:
        yield "--enable-mtp-training calls the output layer for other losses than the float32 head's. Remove one."


def _of_objective(args: argparse.Namespace) -> Iterator[Answer]:
    selected = {"--advantage-estimator gspo": "gspo"} if args.advantage_estimator == "gspo" else {}
    selected |= {} if args.eps_clip_c is None else {"--eps-clip-c": "dual_clip"}
    for flag, theirs in selected.items():
        yield Inherited(flag, "pg_objective", theirs)
    if [*selected] == ["--eps-clip-c"]:
        yield Inherited("--eps-clip-c", place_of(CAP), args.eps_clip_c)
    ours = Selection.of("--pg-objective", vars(args).get("pg_objective", DEFAULT)).name
    objective = next(iter(selected.values()), str(ours))  # of two that contradict each other, the host's
    if args.advantage_estimator == "cispo" and objective != "cispo":
        cap = 1 + args.eps_clip_high
        yield f"--advantage-estimator cispo selects the host's loss. Give grpo, and --pg-objective cispo,cap={cap:g}."
    if len(selected) > 1:
        yield f"{' and '.join(selected)} together have no objective here. Remove one of the two."
    if set(_CLIPS.values()) <= numbers_of(objective):
        for name, number in _CLIPS.items():
            value = getattr(args, name)
            yield Inherited(flag_of(name), place_of(number), value, value == _EPS_CLIP)
    elif (args.eps_clip, args.eps_clip_high) != (_EPS_CLIP, _EPS_CLIP):
        clips = f"--eps-clip {args.eps_clip} --eps-clip-high {args.eps_clip_high}"
        yield f"{clips} have no effect with --pg-objective {objective}. Remove them."


def _of_terms(args: argparse.Namespace) -> Iterator[Answer]:
    """Of KL, entropy, supervised tokens and a teacher."""
    options = vars(args)
    if args.use_kl_loss and args.kl_loss_coef:
        estimator = _ESTIMATORS[args.kl_loss_type] + ("_weighted" if options.get("use_unbiased_kl") else "")
        yield Inherited("--kl-loss-coef", "pg_kl_coef", args.kl_loss_coef)
        yield Inherited(f"--kl-loss-type {args.kl_loss_type}", "pg_kl_estimator", estimator)
    if args.use_kl_loss and options.get("use_unbiased_kl") and args.kl_loss_type == "k2":
        yield "--use-unbiased-kl with --kl-loss-type k2 has no estimator here. Use k1 or k3."
    if options.get("pg_kl_coef") and not args.use_kl_loss:
        yield f"--pg-kl-coef {args.pg_kl_coef:g} needs the reference's log-probabilities. Add --use-kl-loss."
    if trains_sft(args):
        yield Inherited("--loss-type sft_loss", "pg_term", [f"{POLICY}:{POLICY},weight=0", f"{SFT}:ce"])
    if args.entropy_coef:
        yield Inherited("--entropy-coef", "pg_entropy_coef", args.entropy_coef)
    kinds = {str(text).partition(":")[2].partition(",")[0] for text in options.get("pg_term") or ()}
    if options.get("use_opd") and args.opd_kl_coef and "opd" in kinds:
        twice = "puts the teacher into the advantages, and --pg-term …:opd into the loss. Give --opd-kl-coef 0."
        yield f"--opd-kl-coef {args.opd_kl_coef:g} {twice}"
