"""The loss flags of slime and miles, which have the same names: what of them is ours now, and what is refused."""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_pg.declarations.objectives import CLIP_EPS_HIGH, CLIP_EPS_LOW, OBJECTIVES
from megatron_pg.hosts.startup import TakenOver, defaults

_CLIPPED = [name for name, each in OBJECTIVES.items() if {CLIP_EPS_LOW, CLIP_EPS_HIGH} <= each.numbers.keys()]
_EPS_CLIP = 0.2  # their default, which a user has not given
_TIS = {"tis_clip_low": ("pg_correction_low", 0.0), "tis_clip": ("pg_correction_high", 2.0)}  # ours, and their default
_ESTIMATORS = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}  # low_var_kl is k3 with a cap of 10
# Flags whose effect lies in the loss that ours replaces, with what stands for them here.
_REPLACED = {
    "custom_tis_function_path": "leave it out, and choose a --pg-correction (docs/objectives.md)",
    "use_opsm": "give --pg-correction opsm_old or opsm_rollout with its --pg-correction-high",
    "eps_clip_c": "give --pg-objective dual_clip --pg-dual-clip",
    "get_mismatch_metrics": "leave it out; --pg-metrics has them where samples have rollout log-probabilities",
    "recompute_loss_function": "leave it out; --pg-fused-head keeps no logits",
    "custom_loss_function_path": "leave it out, or leave out this loss",
    "use_critic": "leave it out; the loss has no critic",
    "allgather_cp": "leave it out; context parallelism cuts in zigzag here",
}
OURS = ("pg_", "loss_aggregation", "docs_per_step")  # what our arguments' names begin with


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Ours among the host's arguments, unknown names included."""
    known, found = defaults(), vars(args)
    return {name: value for name, value in found.items() if name in known or name.startswith(OURS)}


def taken_over(args: argparse.Namespace) -> list[TakenOver]:
    """Flags of the host that say what ours say, with their values."""
    objective = vars(args).get("pg_objective", "grpo")
    found = [TakenOver("--rollout-temperature", "pg_temperature", args.rollout_temperature)]
    if objective in _CLIPPED:
        bounds = {"eps_clip": CLIP_EPS_LOW, "eps_clip_high": CLIP_EPS_HIGH}
        for name, number in bounds.items():
            value = getattr(args, name)
            found.append(TakenOver(f"--{name.replace('_', '-')}", number.attribute, value, value == _EPS_CLIP))
    if args.use_tis:  # weights of the tokens: exp(old - rollout), clamped
        found.append(TakenOver("--use-tis", "pg_correction", "tis"))
        for name, (ours, default) in _TIS.items():
            value = getattr(args, name)
            found.append(TakenOver(f"--{name.replace('_', '-')}", ours, value, value == default))
    if args.use_kl_loss and args.kl_loss_coef:
        found.append(TakenOver("--kl-loss-coef", "pg_kl_coef", args.kl_loss_coef))
        estimator = _ESTIMATORS[args.kl_loss_type]
        if vars(args).get("use_unbiased_kl"):
            estimator += "_weighted"
        found.append(TakenOver(f"--kl-loss-type {args.kl_loss_type}", "pg_kl_estimator", estimator))
    if args.entropy_coef:
        found.append(TakenOver("--entropy-coef", "pg_entropy_coef", args.entropy_coef))
    return found


def refused(args: argparse.Namespace, more: Mapping[str, str] = {}) -> Iterator[str]:
    """Messages about flags of the host that cannot go with this loss; `more` are of one host alone."""
    found, ours = vars(args), given(args)
    for name, way_on in (_REPLACED | dict(more)).items():
        if found.get(name) not in (None, False):
            yield f"--{name.replace('_', '-')} {_shown(found[name])}is not done by this loss: {way_on}"
    if args.loss_type != "policy_loss":
        yield f"--loss-type {args.loss_type} is another loss; leave it out, or leave out this one"
    objective = ours.get("pg_objective", "grpo")
    if args.advantage_estimator in ("gspo", "cispo") and objective != args.advantage_estimator:
        yield (
            f"--advantage-estimator {args.advantage_estimator} makes the host's loss {args.advantage_estimator}, and ours is {objective}; give "
            f"--pg-objective {args.advantage_estimator}, or --advantage-estimator grpo, whose advantages are the same"
        )
    if objective not in _CLIPPED and (args.eps_clip, args.eps_clip_high) != (_EPS_CLIP, _EPS_CLIP):
        yield f"--eps-clip {args.eps_clip} --eps-clip-high {args.eps_clip_high} have no effect with --pg-objective {objective}; remove them"
    if args.use_kl_loss and vars(args).get("use_unbiased_kl") and args.kl_loss_type == "k2":
        yield "--use-unbiased-kl with --kl-loss-type k2 has no estimator here; use k1 or k3"
    if ours.get("pg_kl_coef") and not args.use_kl_loss:
        yield (
            f"--pg-kl-coef {ours['pg_kl_coef']:g} needs the reference's log-probabilities, which the host makes under --use-kl-loss only; "
            "add that flag"
        )
    if vars(args).get("use_opd") and args.opd_kl_coef and _distils(ours):
        yield (
            f"--opd-kl-coef {args.opd_kl_coef:g} puts the teacher into the advantages, and --pg-term …:opd into the loss, so it would count "
            "twice; give --opd-kl-coef 0"
        )
    has_head = ours.get("pg_fused_head") is not None or ours.get("fp32_lm_head")
    if has_head and args.enable_mtp_training:
        yield "--enable-mtp-training calls the output layer for its own losses, which the float32 head would take for the policy's; remove one"
    group = args.n_samples_per_prompt
    if ours.get("loss_aggregation") == "prompt_mean" and args.global_batch_size % group:
        yield (
            f"--loss-aggregation prompt_mean with --global-batch-size {args.global_batch_size} and --n-samples-per-prompt {group}: a step would "
            "hold part of a prompt's samples; use a multiple"
        )


def _distils(ours: Mapping[str, Any]) -> bool:
    """Whether a loss term is of the kind `opd`."""
    return any(str(text).partition(":")[2].partition(",")[0] == "opd" for text in ours.get("pg_term") or ())


def _shown(value: object) -> str:
    return "" if value is True else f"{value} "
