"""The flags of the loss terms: objective, correction, KL, entropy, gradient divisor. Needs no torch.

Every objective and correction has its own numbers. A number that the chosen one does not read is an error, as is one
that it needs and was not given: nothing is ignored, and defaults are the papers'.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

Violations = Iterator[tuple[str, str]]
OBJECTIVE_PARAMETERS = ("tokens", "parameters")  # of a user's own objective


@dataclass(frozen=True, slots=True)
class Choice:
    """An objective or correction: its formula for the banner, and its numbers with their defaults (None: required)."""

    formula: str
    numbers: dict[str, float | None]


_CLIP = {"clip_eps_low": 0.2, "clip_eps_high": 0.2}
_GSPO = {"clip_eps_low": 3e-4, "clip_eps_high": 4e-4}
_DPPO = {"dppo_delta_low": None, "dppo_delta_high": None}
_R = "r = exp(log π - log π_old)"
_SEQUENCE_R = "R = exp(mean of log r over the sequence)"

OBJECTIVES = {
    "grpo": Choice(f"ℓ = -min(r·A, clip(r)·A), {_R}", _CLIP),
    "dual_clip": Choice(
        f"ℓ = -min(r·A, clip(r)·A), and min(that, -c·A) where A < 0, {_R}", {**_CLIP, "dual_clip": None}
    ),
    "two_sided": Choice(f"ℓ = -min(min(r, δ)·A, clip(r)·A), {_R}", {**_CLIP, "delta": None}),
    "gspo": Choice(f"ℓ = -min(R·Ā, clip(R)·Ā), {_SEQUENCE_R}, Ā = mean of A", _GSPO),
    "gspo_token": Choice(f"ℓ = -min(s·A, clip(s)·A), s = sg[R]·π/sg[π], {_SEQUENCE_R}", _GSPO),
    "cispo": Choice(f"ℓ = -sg[min(max(r, lo), cap)]·A·log π, {_R}", {"clip_eps_low": 1.0, "cispo_cap": None}),
    "sapo": Choice(f"ℓ = -(4/τ)·σ(τ(r - 1))·A, {_R}", {"sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05}),
    "dppo_tv": Choice(f"ℓ = -sg[r]·A·log π where |π - π_old| is inside the trust region, {_R}", _DPPO),
    "dppo_kl": Choice(f"ℓ = -sg[r]·A·log π where KL of the token is inside the trust region, {_R}", _DPPO),
    "reinforce": Choice("ℓ = -A·log π", {}),
    "reinforce_is": Choice(f"ℓ = -r·A, {_R}", {}),
}
SEQUENCE_LEVEL = ("gspo", "gspo_token")

_DIVERGENCES = ("k1", "k2", "k3")
_REJECTIONS = {
    f"{level}_{kind}": Choice(
        f"tokens kept where {level} {kind} of log ρ is in bounds",
        {"correction_high": None, **({"correction_low": -math.inf} if kind == "k1" else {})},
    )
    for level in ("token", "seq_sum", "seq_mean", "seq_max")
    for kind in _DIVERGENCES
}
# ρ = exp(log π_old - log π_rollout) of a token, P = Π ρ over the sequence
CORRECTIONS = {
    "none": Choice("none", {}),
    "tis": Choice("ℓ times min(max(ρ, lo), hi)", {"correction_low": 0.0, "correction_high": 2.0}),
    "seq_tis": Choice("ℓ times min(max(P, lo), hi)", {"correction_low": 0.0, "correction_high": 2.0}),
    "icepop": Choice("ℓ times ρ where lo <= ρ <= hi, else 0", {"correction_low": 0.5, "correction_high": 5.0}),
    "mis": Choice("ℓ times P where lo <= P <= hi, else 0", {"correction_low": 0.0, "correction_high": 3.0}),
    "seq_mask_tis": Choice(
        "ℓ times ρ where the sequence's geometric mean of ρ is in [lo, hi], else 0",
        {"correction_low": 0.999, "correction_high": 1.002},
    ),
    "opsm": Choice("0 where A < 0 and the sequence's mean of log π_rollout - log π > hi", {"correction_high": None}),
    "opsm_old": Choice("0 where A < 0 and the sequence's mean of log π_old - log π > hi", {"correction_high": None}),
    **_REJECTIONS,
}
REJECTS_BY_DATA = ("icepop", "mis", "seq_mask_tis", *_REJECTIONS)  # what `kept` can count before the forward
REJECTS_BY_MODEL = ("opsm", "opsm_old")

KL_ESTIMATORS = {
    "k1": "its expected gradient is 0, so it adds noise and no penalty; k1_weighted or k3_weighted has the right gradient",
    "k2": None,
    "k3": "its gradient is that of KL(π_ref‖π), not of KL(π‖π_ref); k3_weighted has the right one with the same value",
    "abs": "its gradient is not that of a KL divergence; k3_weighted has the right one",
    "k1_weighted": None,
    "k3_weighted": None,
}
DENOMINATORS = ("scheduled", "live", "kept")
AUX_AGGREGATIONS = ("default", "policy")

_ABOVE_ZERO, _ABOVE_ONE = math.nextafter(0.0, 1.0), math.nextafter(1.0, 2.0)
# name: lowest, highest, what it must be, what it is (of --help)
NUMBERS = {
    "clip_eps_low": (
        0.0,
        1.0,
        "between 0 and 1 (1 switches the bound off)",
        "Lower clip bound of the probability ratio is 1 - EPS; 0 <= EPS <= 1, 1 switches it off. Default 0.2 (gspo: 3e-4; "
        "cispo: 1).",
    ),
    "clip_eps_high": (
        0.0,
        math.inf,
        "finite and >= 0",
        "Upper clip bound of the probability ratio is 1 + EPS; EPS >= 0. Default 0.2 (DAPO clip-higher: 0.28; gspo: 4e-4).",
    ),
    "dual_clip": (_ABOVE_ONE, math.inf, "finite and > 1", "c of --pg-objective dual_clip: cap of r where A < 0."),
    "delta": (_ABOVE_ONE, math.inf, "finite and > 1", "δ of --pg-objective two_sided, > 1 + --pg-clip-eps-high."),
    "cispo_cap": (
        1.0,
        math.inf,
        "finite and >= 1 (an absolute cap of the ratio: 5 means r <= 5)",
        "Upper bound of the weight of --pg-objective cispo. Absolute: 1.28 is what others call an upper eps of 0.28.",
    ),
    "sapo_tau_pos": (_ABOVE_ZERO, math.inf, "finite and > 0", "τ of --pg-objective sapo where A > 0. Default 1."),
    "sapo_tau_neg": (_ABOVE_ZERO, math.inf, "finite and > 0", "τ of --pg-objective sapo elsewhere. Default 1.05."),
    "dppo_delta_low": (
        _ABOVE_ZERO,
        math.inf,
        "finite and > 0",
        "Trust region of --pg-objective dppo_tv (a probability) or dppo_kl (nats) where A < 0.",
    ),
    "dppo_delta_high": (_ABOVE_ZERO, math.inf, "finite and > 0", "The same where A > 0."),
}
CORRECTION_NUMBERS = {
    "correction_low": "Lower bound of --pg-correction; its meaning and default are the correction's (docs/objectives.md).",
    "correction_high": "Upper bound of --pg-correction, likewise.",
}


def flag_of(name: str) -> str:
    """The flag of a number, from its name."""
    return "--pg-" + name.replace("_", "-")


def add_objective_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the loss terms."""
    group.add_argument(
        "--pg-objective",
        choices=OBJECTIVES,
        default="grpo",
        help="Loss of one token; docs/objectives.md has the formulas. Default grpo, the clipped surrogate of PPO.",
    )
    group.add_argument(
        "--pg-custom-objective-path",
        metavar="PATH",
        help="package.module:function or package.module.function of your own objective "
        f"fn({', '.join(OBJECTIVE_PARAMETERS)}) -> Tensor. It replaces --pg-objective.",
    )
    for name, (_, _, _, text) in NUMBERS.items():
        group.add_argument(flag_of(name), type=float, metavar="EPS" if "eps" in name else "X", help=text)
    group.add_argument(
        "--pg-correction",
        choices=CORRECTIONS,
        default="none",
        help="What the mismatch of trainer and rollout engine does to the policy loss. Default none.",
    )
    for name, text in CORRECTION_NUMBERS.items():
        group.add_argument(flag_of(name), type=float, metavar="X", help=text)
    group.add_argument(
        "--pg-denominator",
        choices=DENOMINATORS,
        default="scheduled",
        help="What the denominators count: scheduled, all rollouts and trained tokens; live, only units with a trained "
        "token; kept, only units and tokens that --pg-correction does not reject.",
    )
    group.add_argument(
        "--pg-kl-coef", type=float, default=0.0, metavar="BETA", help="Adds BETA times KL(π‖π_ref). Default 0."
    )
    group.add_argument(
        "--pg-kl-estimator",
        choices=KL_ESTIMATORS,
        help="Estimator of --pg-kl-coef; required with it. k3_weighted has the right value and the right gradient.",
    )
    group.add_argument(
        "--pg-entropy-coef",
        type=float,
        default=0.0,
        metavar="ETA",
        help="Subtracts ETA times the exact entropy of softmax(z / TAU) over the vocabulary. Default 0.",
    )
    group.add_argument(
        "--pg-aux-aggregation",
        choices=AUX_AGGREGATIONS,
        default="default",
        help="Weights of the KL and entropy terms. default: sample_mean, with --calculate-per-token-loss token_mean; policy: "
        "those of the policy loss.",
    )
    group.add_argument(
        "--pg-grad-divisor",
        type=float,
        default=1.0,
        metavar="G",
        help="Divides the gradient, not the reported loss. Default 1 (docs/objectives.md: parity with DeepSpeed).",
    )


def objective_numbers(args: argparse.Namespace) -> dict[str, float]:
    """The numbers of the objective by name, given ones before defaults. A user's own objective is given all that were set."""
    given = {name: vars(args)[f"pg_{name}"] for name in NUMBERS}
    if args.pg_custom_objective_path is not None:
        return {name: value for name, value in given.items() if value is not None}
    return _resolved(OBJECTIVES[args.pg_objective], given)


def correction_numbers(args: argparse.Namespace) -> dict[str, float]:
    """The numbers of the correction by name, given ones before defaults."""
    return _resolved(CORRECTIONS[args.pg_correction], {name: vars(args)[f"pg_{name}"] for name in CORRECTION_NUMBERS})


def _resolved(choice: Choice, given: dict[str, float | None]) -> dict[str, float]:
    return {name: default if given[name] is None else given[name] for name, default in choice.numbers.items()}


def objective_violations(args: argparse.Namespace, per_token: bool) -> Violations:
    """Rules E24, E25 and E40 to E44 over the flags of the loss terms; `per_token` is whether token_mean is in force."""
    yield from _choice("--pg-objective", args.pg_objective, OBJECTIVES)
    yield from _choice("--pg-correction", args.pg_correction, CORRECTIONS)
    yield from _choice("--pg-denominator", args.pg_denominator, DENOMINATORS)
    yield from _choice("--pg-aux-aggregation", args.pg_aux_aggregation, AUX_AGGREGATIONS)
    if args.pg_kl_estimator is not None:
        yield from _choice("--pg-kl-estimator", args.pg_kl_estimator, KL_ESTIMATORS)
    for name, (low, high, requirement, _) in NUMBERS.items():
        if vars(args)[f"pg_{name}"] is not None:
            yield from number(flag_of(name), vars(args)[f"pg_{name}"], low, high, requirement)
    for name in CORRECTION_NUMBERS:
        if vars(args)[f"pg_{name}"] is not None:
            yield from number(flag_of(name), vars(args)[f"pg_{name}"], -math.inf, math.inf, "finite")
    yield from number("--pg-kl-coef", args.pg_kl_coef, 0.0, math.inf, "finite and >= 0")
    yield from number("--pg-entropy-coef", args.pg_entropy_coef, 0.0, math.inf, "finite and >= 0")
    yield from number("--pg-grad-divisor", args.pg_grad_divisor, _ABOVE_ZERO, math.inf, "finite and > 0")
    yield from _objective_rules(args)
    yield from _correction_rules(args)
    yield from _auxiliary_rules(args)
    yield from _denominator_rules(args, per_token)


def number(flag: str, value: object, low: float, high: float, requirement: str) -> Violations:
    """Rule E24: a finite number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        yield "E24", f"{flag} must be a number, got {value!r}"
    elif not (is_finite(value) and low <= value <= high):
        yield "E24", f"{flag} must be {requirement}, got {value}"


def is_finite(value: float) -> bool:
    """Whether `value` is finite as a float64; an integer in YAML may be too large for one."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _choice(flag: str, value: object, choices: object) -> Violations:
    if not (isinstance(value, str) and value in choices):
        yield "E25", f"{flag} {value!r} is not one of {', '.join(choices)}"


def _objective_rules(args: argparse.Namespace) -> Violations:
    if args.pg_custom_objective_path is not None:
        if args.pg_objective != "grpo":
            yield (
                "E44",
                f"--pg-custom-objective-path replaces --pg-objective, which is {args.pg_objective}; remove one of the two",
            )
        return
    if not isinstance(args.pg_objective, str) or args.pg_objective not in OBJECTIVES:
        return
    choice = OBJECTIVES[args.pg_objective]
    yield from _given_and_read(args, choice, f"--pg-objective {args.pg_objective}", NUMBERS)
    delta, high = args.pg_delta, _resolved(choice, {n: vars(args)[f"pg_{n}"] for n in NUMBERS}).get("clip_eps_high")
    if args.pg_objective == "two_sided" and _are_numbers(delta, high) and not delta > 1 + high:
        yield (
            "E42",
            f"--pg-delta {delta} must be > 1 + --pg-clip-eps-high = {1 + high:g}, or it would tighten the clip of A > 0 instead of "
            "capping A < 0",
        )


def _given_and_read(args: argparse.Namespace, choice: Choice, chosen: str, names: object) -> Violations:
    for name in names:
        given = vars(args)[f"pg_{name}"] is not None
        if given and name not in choice.numbers:
            yield "E40", f"{flag_of(name)} has no effect with {chosen}; remove it"
        if not given and name in choice.numbers and choice.numbers[name] is None:
            yield "E41", f"{chosen} needs {flag_of(name)}; there is no default"


def _correction_rules(args: argparse.Namespace) -> Violations:
    if not isinstance(args.pg_correction, str) or args.pg_correction not in CORRECTIONS:
        return
    choice = CORRECTIONS[args.pg_correction]
    yield from _given_and_read(args, choice, f"--pg-correction {args.pg_correction}", CORRECTION_NUMBERS)
    numbers = correction_numbers(args)
    low, high = numbers.get("correction_low"), numbers.get("correction_high")
    if _are_numbers(low, high) and not low < high:
        yield (
            "E42",
            f"--pg-correction-low {low:g} is not below --pg-correction-high {high:g}, so --pg-correction {args.pg_correction} would "
            "weigh every token the same or none",
        )
    is_ratio = args.pg_correction in ("tis", "seq_tis", "icepop", "mis", "seq_mask_tis")
    if is_ratio and _are_numbers(low) and low < 0:
        yield "E42", f"--pg-correction-low {low:g} bounds a ratio of probabilities, which is never below 0; use 0"
    if is_ratio and _are_numbers(high) and low != high and high <= 0:
        yield "E42", f"--pg-correction-high {high:g} bounds a ratio of probabilities, so every token would weigh 0"


def _are_numbers(*values: object) -> bool:
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) and not math.isnan(v) for v in values)


def _auxiliary_rules(args: argparse.Namespace) -> Violations:
    has_kl, has_entropy = args.pg_kl_coef != 0, args.pg_entropy_coef != 0
    if has_kl and args.pg_kl_estimator is None:
        yield (
            "E41",
            "--pg-kl-coef needs --pg-kl-estimator; there is no default (k3_weighted has the right value and gradient; GRPO "
            "as printed uses k3)",
        )
    if not has_kl and args.pg_kl_estimator is not None:
        yield "E40", "--pg-kl-estimator has no effect without --pg-kl-coef; remove it or give a coefficient > 0"
    if not has_kl and not has_entropy and args.pg_aux_aggregation == "policy":
        yield (
            "E40",
            "--pg-aux-aggregation policy has no effect without --pg-kl-coef or --pg-entropy-coef; remove it or give one",
        )


def _denominator_rules(args: argparse.Namespace, per_token: bool) -> Violations:
    chosen = f"--pg-denominator {args.pg_denominator}"
    if args.pg_denominator not in ("live", "kept"):
        return
    if args.custom_pg_loss_reducer_function_path is not None:
        yield (
            "E43",
            f"{chosen} has no effect with --custom-pg-loss-reducer-function-path (the reducer owns its denominator); remove one",
        )
    if args.pg_denominator == "live" and per_token:
        yield "E43", f"{chosen} has no effect with token_mean, which counts tokens and no units; remove it"
    if args.pg_denominator != "kept" or args.pg_correction in REJECTS_BY_DATA:
        return
    if args.pg_correction in REJECTS_BY_MODEL:
        yield (
            "E43",
            f"{chosen} cannot be combined with --pg-correction {args.pg_correction}, whose rejections are known only after the "
            "forward, when the denominators are fixed; use scheduled or live",
        )
    else:
        yield (
            "E43",
            f"{chosen} has no effect with --pg-correction {args.pg_correction}, which rejects no token; use live",
        )


def objective_warnings(args: argparse.Namespace, mode: str) -> list[str]:
    """W3, W7 and W8, for arguments without violations; `mode` is the aggregation in force."""
    messages = []
    if args.pg_custom_objective_path is None and args.pg_objective in SEQUENCE_LEVEL:
        if mode != "sample_mean":
            messages.append(
                f"{args.pg_objective} is published with equal sequence weights (sample_mean); {mode} weighs otherwise"
            )
        widest = max(objective_numbers(args).values())
        if widest > 0.05:
            messages.append(
                f"{args.pg_objective} clips the geometric mean of a sequence's ratios, which an eps of {widest:g} hardly ever reaches "
                "(the paper: 3e-4 and 4e-4)"
            )
    if args.pg_kl_coef and (flaw := KL_ESTIMATORS[args.pg_kl_estimator]):
        messages.append(f"--pg-kl-estimator {args.pg_kl_estimator}: {flaw}")
    return messages
