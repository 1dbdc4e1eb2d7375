"""What the arguments mean, in words and formulas: the startup banner. Needs no torch."""

import argparse

from megatron_pg.flags.head import is_float32
from megatron_pg.flags.loss_terms import CORRECTIONS, OBJECTIVES, correction_numbers, objective_numbers

_FORMULA = {
    "sample_mean": "(1/N_r) Σ_rollouts (Σ m·ℓ)/M_rollout",
    "prompt_mean": "(1/P) Σ_prompts (Σ m·ℓ)/M_group",
    "token_mean": "(Σ m·ℓ)/T",
    "constant": "(Σ m·ℓ)/(N_r·L)",
}
_DENOMINATOR = {
    "sample_mean": "N_r · M_rollout: rollouts of the step{counted} · {tokens} tokens of the token's rollout",
    "prompt_mean": "P · M_group: prompts of the step{counted} · {tokens} tokens of the token's prompt group",
    "token_mean": "T: {tokens} tokens of the step",
    "constant": "N_r · L: rollouts of the step{counted} · {divisor:.12g}",
}
# --pg-denominator: which units count, and which of their tokens
COUNTED_UNITS = {"scheduled": "", "live": " with a trained token", "kept": " with a kept token"}
COUNTED_TOKENS = {"scheduled": "trained", "live": "trained", "kept": "kept"}
_COUNTED = {
    "scheduled": "counts all rollouts and trained tokens, rejected ones too",
    "live": "counts units with a trained token",
    "kept": "counts units and tokens that the correction does not reject",
}


def describe(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Rows (name, text) of the effective objective, from arguments that `validate_args` has accepted."""
    return [
        *_objective_rows(args),
        *_aggregation_rows(args),
        *_term_rows(args),
        ("temperature", f"softmax(z / {args.pg_temperature:g}), in float32  (--pg-temperature)"),
        (
            "counted over",
            "all micro-batches and data-parallel ranks of one optimizer step; context-parallel copies once",
        ),
        *_documents_rows(args),
        ("Megatron", _contract(args)),
        ("layout", _layout(args)),
        *_head_rows(args),
        ("kernel", f"{args.pg_kernel or 'triton on CUDA, torch elsewhere'}  (--pg-kernel)"),
        ("metrics", f"{args.pg_metrics}, means over documents whatever the aggregation  (--pg-metrics)"),
    ]


def banner(args: argparse.Namespace) -> str:
    """The rows of `describe` as text for the log."""
    rows = describe(args)
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {text}" for name, text in rows]
    return "\n".join(["── megatron_pg: effective policy-gradient objective ──", *lines])


def _objective_rows(args: argparse.Namespace) -> list[tuple[str, str]]:
    numbers = objective_numbers(args)
    if args.pg_custom_objective_path is not None:
        shown = ", ".join(f"{name} {value:g}" for name, value in numbers.items())
        return [
            ("objective", f"ℓ = your own  (--pg-custom-objective-path {args.pg_custom_objective_path})"),
            *([("parameters", shown)] if shown else []),
        ]
    flag = "" if args.pg_objective == "grpo" else f"  (--pg-objective {args.pg_objective})"
    return [("objective", OBJECTIVES[args.pg_objective].formula + flag), *_bound_rows(args.pg_objective, numbers)]


def _bound_rows(objective: str, numbers: dict[str, float]) -> list[tuple[str, str]]:
    """What the objective's numbers come to."""
    rows = []
    if objective == "cispo":
        low, cap = 1 - numbers["clip_eps_low"], numbers["cispo_cap"]
        rows.append(("clip", f"weight in [{low:g}, {cap:g}]  (--pg-clip-eps-low, --pg-cispo-cap, which is absolute)"))
    elif "clip_eps_high" in numbers:
        variable = {"gspo": "R", "gspo_token": "s"}.get(objective, "r")
        interval = f"[{1 - numbers['clip_eps_low']:g}, {1 + numbers['clip_eps_high']:g}]"
        rows.append(("clip", f"{variable} in {interval}  (--pg-clip-eps-low/-high)"))
    if "dual_clip" in numbers:
        rows.append(("dual clip", f"c = {numbers['dual_clip']:g}  (--pg-dual-clip)"))
    if "delta" in numbers:
        rows.append(("cap", f"δ = {numbers['delta']:g}  (--pg-delta)"))
    if objective == "sapo":
        rows.append(
            (
                "tau",
                f"{numbers['sapo_tau_pos']:g} where A > 0, else {numbers['sapo_tau_neg']:g}  (--pg-sapo-tau-pos/-neg)",
            )
        )
    if "dppo_delta_high" in numbers:
        unit = "probability" if objective == "dppo_tv" else "nats"
        rows.append(
            (
                "trust region",
                f"{numbers['dppo_delta_high']:g} where A > 0, {numbers['dppo_delta_low']:g} where A < 0, {unit}  "
                "(--pg-dppo-delta-high/-low)",
            )
        )
    return rows


def _term_rows(args: argparse.Namespace) -> list[tuple[str, str]]:
    """What is in the loss beside the objective; nothing of it by default."""
    rows = []
    if args.pg_correction != "none":
        bounds = {"correction_low": "lo", "correction_high": "hi"}
        shown = ", ".join(f"{bounds[name]} = {value:g}" for name, value in correction_numbers(args).items())
        text = f"{CORRECTIONS[args.pg_correction].formula}, {shown}  (--pg-correction {args.pg_correction})"
        rows.append(("correction", text))
    if args.pg_denominator != "scheduled" or args.pg_correction != "none":
        rows.append(("denominator", f"{_COUNTED[args.pg_denominator]}  (--pg-denominator {args.pg_denominator})"))
    if args.pg_kl_coef:
        text = f"+ {args.pg_kl_coef:g} Σ u·KL(π‖π_ref) by {args.pg_kl_estimator}  (--pg-kl-coef, --pg-kl-estimator)"
        rows.append(("KL", text))
    if args.pg_entropy_coef:
        rows.append(("entropy", f"- {args.pg_entropy_coef:g} Σ u·H, exact  (--pg-entropy-coef)"))
    if args.pg_kl_coef or args.pg_entropy_coef:
        rows.append(("u", f"{_auxiliary_weights(args)}  (--pg-aux-aggregation {args.pg_aux_aggregation})"))
    if args.pg_grad_divisor != 1:
        divisor = args.pg_grad_divisor
        rows.append(
            (
                "gradient",
                f"divided by {divisor:.12g}, the loss is not; with Adam the same without it: --clip-grad and --adam-eps times "
                f"{divisor:.12g}  (--pg-grad-divisor)",
            )
        )
    return rows


def _auxiliary_weights(args: argparse.Namespace) -> str:
    """The weights of the KL and entropy terms, which no correction touches."""
    is_policy = args.pg_aux_aggregation == "policy"
    if is_policy and args.pg_denominator != "kept":
        return "the weights of pg_loss"
    step_mean = "token_mean" if vars(args).get("calculate_per_token_loss", False) else "sample_mean"
    counted = {
        "scheduled": "",
        "live": ", over rollouts with a trained token",
        "kept": ", over what is trained, rejected or not",
    }
    return f"{args.loss_aggregation if is_policy else step_mean} over the step{counted[args.pg_denominator]}"


def _aggregation_rows(args: argparse.Namespace) -> list[tuple[str, str]]:
    if args.custom_pg_loss_reducer_function_path is not None:
        unit = "1/T" if vars(args).get("calculate_per_token_loss", False) else "1/N_r"
        path = args.custom_pg_loss_reducer_function_path
        return [("pg_loss", f"({unit}) Σ reducer(ℓ)  (--custom-pg-loss-reducer-function-path {path})")]
    mode = args.loss_aggregation
    flag = f"--loss-aggregation {mode}"
    if mode == "constant":
        flag += f" --loss-aggregation-divisor {args.loss_aggregation_divisor:.12g}"
    denominator = _DENOMINATOR[mode].format(
        counted=COUNTED_UNITS[args.pg_denominator],
        tokens=COUNTED_TOKENS[args.pg_denominator],
        divisor=args.loss_aggregation_divisor or 0,
    )
    return [("pg_loss", f"{_FORMULA[mode]}  ({flag})"), ("weight", f"1/δ, δ = {denominator}")]


def _head_rows(args: argparse.Namespace) -> list[tuple[str, str]]:
    rounding = "float32" if is_float32(vars(args).get("params_dtype")) else args.fp32_lm_head_backward or "bf16"
    backward = f"backward {rounding}"
    rows = []
    if args.pg_fused_head is not None:
        rows.append(("head", f"fused, logits never stored, {backward}  (--pg-fused-head {args.pg_fused_head})"))
    elif args.fp32_lm_head:
        rows.append(("head", f"float32 logits, stored whole, {backward}  (--fp32-lm-head)"))
    if args.pg_vocab_size is not None:
        rows.append(("vocabulary", f"columns from {args.pg_vocab_size} on are padding  (--pg-vocab-size)"))
    return rows


def _documents_rows(args: argparse.Namespace) -> list[tuple[str, str]]:
    if not args.docs_per_step:
        return []
    policy, end = args.docs_per_step_policy or "exact", args.docs_per_step_end or "partial"
    amount = f"{args.docs_per_step} documents" if policy == "exact" else f"at least {args.docs_per_step} documents"
    last = "the last step may have fewer" if end == "partial" else "too few for a last step are left"
    return [("step", f"{amount}, {last}  (--docs-per-step, -policy {policy}, -end {end})")]


def _contract(args: argparse.Namespace) -> str:
    if vars(args).get("calculate_per_token_loss", False):
        return "returns (Q·Σwℓ, n, report); finalize divides by Q = Σn  (--calculate-per-token-loss)"
    return "returns (K·D·Σwℓ, report); the schedule multiplies by C and divides by K, DDP divides by D·C"


def _layout(args: argparse.Namespace) -> str:
    found = vars(args)
    sizes = {
        "D": found.get("data_parallel_size"),
        "C": found.get("context_parallel_size"),
        "TP": found.get("tensor_model_parallel_size"),
        "PP": found.get("pipeline_model_parallel_size"),
    }
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size is not None) or "not known yet"
