"""What the arguments mean, in words and formulas: the startup banner. Needs no torch."""

import argparse

_FORMULA = {
    "sample_mean": "(1/N_r) Σ_rollouts (Σ m·ℓ)/M_rollout",
    "prompt_mean": "(1/P) Σ_prompts (Σ m·ℓ)/M_group",
    "token_mean": "(Σ m·ℓ)/T",
    "constant": "(Σ m·ℓ)/(N_r·L)",
}
_DENOMINATOR = {
    "sample_mean": "N_r · M_rollout: rollouts of the step · trained tokens of the token's rollout",
    "prompt_mean": "P · M_group: prompts of the step · trained tokens of the token's prompt group",
    "token_mean": "T: trained tokens of the step",
    "constant": "N_r · L: rollouts of the step · {divisor:.12g}",
}


def describe(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Rows (name, text) of the effective objective, from arguments that `validate_args` has accepted."""
    return [
        ("objective", "ℓ = -min(r·A, clip(r)·A), r = exp(log π - log π_old)"),
        *_aggregation_rows(args),
        (
            "clip",
            f"r in [{1 - args.pg_clip_eps_low:g}, {1 + args.pg_clip_eps_high:g}]  (--pg-clip-eps-low/-high)",
        ),
        ("temperature", f"softmax(z / {args.pg_temperature:g}), in float32  (--pg-temperature)"),
        (
            "counted over",
            "all micro-batches and data-parallel ranks of one optimizer step; context-parallel copies once",
        ),
        ("Megatron", _contract(args)),
        ("layout", _layout(args)),
        ("kernel", f"{args.pg_kernel or 'triton on CUDA, torch elsewhere'}  (--pg-kernel)"),
        ("metrics", f"{args.pg_metrics}, means over documents whatever the aggregation  (--pg-metrics)"),
    ]


def banner(args: argparse.Namespace) -> str:
    """The rows of `describe` as text for the log."""
    rows = describe(args)
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {text}" for name, text in rows]
    return "\n".join(["── megatron_pg: effective policy-gradient objective ──", *lines])


def _aggregation_rows(args: argparse.Namespace) -> list[tuple[str, str]]:
    if args.custom_pg_loss_reducer_function_path is not None:
        unit = "1/T" if vars(args).get("calculate_per_token_loss", False) else "1/N_r"
        path = args.custom_pg_loss_reducer_function_path
        return [("pg_loss", f"({unit}) Σ reducer(ℓ)  (--custom-pg-loss-reducer-function-path {path})")]
    mode = args.loss_aggregation
    flag = f"--loss-aggregation {mode}"
    if mode == "constant":
        flag += f" --loss-aggregation-divisor {args.loss_aggregation_divisor:.12g}"
    return [
        ("pg_loss", f"{_FORMULA[mode]}  ({flag})"),
        ("weight", f"1/δ, δ = {_DENOMINATOR[mode].format(divisor=args.loss_aggregation_divisor or 0)}"),
    ]


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
