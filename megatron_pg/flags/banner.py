"""The startup banner: the meaning of the arguments in words and formulas. Needs no torch."""

import argparse
import shlex
from collections.abc import Sequence

from megatron_pg.declarations.aggregations import AGGREGATIONS, STEP_MEANS
from megatron_pg.declarations.choices import DENOMINATORS, ROLES
from megatron_pg.declarations.corrections import CORRECTIONS
from megatron_pg.declarations.installation import installed_version
from megatron_pg.declarations.loss_terms import AS_POLICY, KINDS, SHORTHANDS, LossTerm
from megatron_pg.declarations.objectives import CRITIC, DEFAULT, OBJECTIVES
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.head import is_float32
from megatron_pg.rollouts.fields import POLICY
from megatron_pg.rollouts.printable import printable

COMMAND_LINE = "megatron_pg command line: "  # explain and validate find the job's words after it
_PACKAGES = ("megatron-pg", "megatron-core", "torch")  # whose versions the banner shows


def describe(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Rows (name, text) of the effective objective, from arguments that `validate_args` has accepted."""
    facts, cap = Facts(args), args.pg_logit_softcap
    rows = [
        *_objective_rows(facts),
        *_aggregation_rows(facts),
        *_term_rows(facts),
        ("temperature", f"softmax(z / {args.pg_temperature:g}), in float32  (--pg-temperature)"),
        *([] if cap is None else [("softcap", f"z = {cap:g}·tanh(x / {cap:g}) of the logits x  (--pg-logit-softcap)")]),
        (
            "counted over",
            "all micro-batches and data-parallel ranks of one optimizer step; context-parallel copies once",
        ),
        *_documents_rows(args),
        ("Megatron", _contract(args)),
        ("layout", _layout(args)),
        *_head_rows(facts),
        ("kernel", f"{args.pg_kernel or 'triton on CUDA, torch elsewhere'}  (--pg-kernel)"),
        ("metrics", f"{args.pg_metrics}, means per sample for every aggregation  (--pg-metrics)"),
        ("versions", ", ".join(f"{name} {installed_version(name) or 'absent'}" for name in _PACKAGES)),
    ]
    of_policies = ("temperature", "kernel") if facts.is_critic else ()
    return [row for row in rows if row[0] not in of_policies]


def in_force(args: argparse.Namespace, impl: str) -> argparse.Namespace:
    """The arguments with the kernel in force instead of the flag's default."""
    return argparse.Namespace(**vars(args) | {"pg_kernel": impl})


def banner(args: argparse.Namespace) -> str:
    """The rows of `describe` as text for the log."""
    return banner_of(describe(args))


def command_line(argv: Sequence[str]) -> str:
    """One line of a dry run: the words of the command line, quoted as a shell reads them."""
    return COMMAND_LINE + printable(shlex.join(argv), limit=None)


def banner_of(rows: list[tuple[str, str]]) -> str:
    """Rows as text for the log."""
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {text}" for name, text in rows]
    return "\n".join(["── megatron_pg: effective policy-gradient objective ──", *lines])


def _objective_rows(facts: Facts) -> list[tuple[str, str]]:
    args = facts.args
    if not facts.has_objective:
        return [("objective", f"none  (--pg-term {POLICY}:{POLICY},weight=0)")]
    numbers = facts.objective_numbers
    if facts.custom_objective is not None:
        shown = ", ".join(f"{name} {value:g}" for name, value in numbers.items())
        return [
            ("objective", f"ℓ = a custom function  ({facts.custom_objective})"),
            *([("parameters", shown)] if shown else []),
        ]
    if facts.is_critic:
        return [("objective", f"{CRITIC.formula}  (--pg-role critic)"), *CRITIC.bound_rows(numbers)]
    declared = OBJECTIVES[str(facts.selected_objective.name)]
    flag = "" if args.pg_objective == DEFAULT else f"  (--pg-objective {args.pg_objective})"
    return [("objective", declared.formula + flag), *declared.bound_rows(numbers)]


def _term_rows(facts: Facts) -> list[tuple[str, str]]:
    """What is in the loss in addition to the objective; empty by default."""
    args, rows = facts.args, []
    if args.pg_correction != "none":
        letters = {"low": "lo", "high": "hi", "fraction": "f", "coef": "β"}
        shown = ", ".join(f"{letters[name]} = {value:g}" for name, value in facts.correction_numbers.items())
        formula = CORRECTIONS[str(facts.selected_correction.name)].formula.format(**facts.correction_words)
        text = f"{formula}, {shown}  (--pg-correction {args.pg_correction})"
        rows.append(("correction", text))
    if args.pg_denominator != "scheduled" or args.pg_correction != "none":
        text = DENOMINATORS[args.pg_denominator][2]
        rows.append(("denominator", f"{text}  (--pg-denominator {args.pg_denominator})"))
    if args.pg_weight_denominator != "tokens":
        rows.append(("M, T, n", "sums of the tokens' weights  (--pg-weight-denominator weights)"))
    if args.pg_sequence_level != "sample":
        rows.append(("sequence", "each turn of a response  (--pg-sequence-level turn)"))
    if args.pg_kl_coef:
        text = f"+ {args.pg_kl_coef:g} Σ u·KL(π‖π_ref) by {args.pg_kl_estimator}  (--pg-kl-coef, --pg-kl-estimator)"
        rows.append(("KL", text))
    if args.pg_entropy_coef:
        rows.append(("entropy", f"- {args.pg_entropy_coef:g} Σ u·H, exact  (--pg-entropy-coef)"))
    if args.pg_kl_coef or args.pg_entropy_coef:
        rows.append(("u", f"{_auxiliary_weights(args)}  (--pg-aux-aggregation {args.pg_aux_aggregation})"))
    rows += [_term_row(term) for term in facts.further if term.name not in SHORTHANDS]
    if args.pg_sampling_mask_entropy != "full":
        rows.append(
            ("entropies", "over what could be sampled, where samples say it  (--pg-sampling-mask-entropy kept)")
        )
    if args.pg_sampling_mask_missing != "error":
        rows.append(
            ("sampling mask", "trained tokens that it does not hold are masked  (--pg-sampling-mask-missing mask)")
        )
    if depths := vars(args).get("mtp_num_layers"):
        factor = f"{vars(args).get('mtp_loss_scaling_factor') or 0.1:g}"
        weights = (
            "1/n_d, n_d its tokens of the step"
            if args.pg_mtp_aggregation == "token_mean"
            else "those of pg_loss, of its tokens"
        )
        loss = "ce_d" if args.pg_mtp_target == "token" else "KL(π‖π_d)"
        flags = (
            f"--mtp-num-layers, --pg-mtp-aggregation {args.pg_mtp_aggregation}, --pg-mtp-target {args.pg_mtp_target}"
        )
        rows.append(("MTP", f"+ {factor}/{depths} Σ_d Σ v·{loss}, v = {weights}  ({flags})"))
    if args.pg_grad_divisor != 1:
        divisor = f"{args.pg_grad_divisor:.12g}"
        same = f"with Adam the same without it: --clip-grad and --adam-eps times {divisor}"
        rows.append(("gradient", f"divided by {divisor}, the loss is not; {same}  (--pg-grad-divisor)"))
    return rows


def _term_row(term: LossTerm) -> tuple[str, str]:
    """A loss term as a summand, and what its denominators count."""
    by = f" by {term.estimator}" if term.estimator else ""
    weights = "with v = the weights of pg_loss"
    if term.aggregation and term.aggregation != AS_POLICY:
        denominator = AGGREGATIONS[term.aggregation].denominator
        weights = (
            f"counted alone: v = 1/δ, δ = {denominator.format(counted='', tokens='trained', divisor=term.divisor)}"
        )
    summand = f"+ {term.weight:g} Σ v·({_loss(term)}){by} over the tokens of {term.tokens}"
    text = f"{summand}, {weights}  ({term.flag})"
    return term.name, text


def _loss(term: LossTerm) -> str:
    kind = KINDS[term.kind]
    if not (kind.reads_topk or kind.whole_form):
        return kind.formula
    letters = {"beta": "β", "alpha": "α"}
    number = f", {letters[kind.mixture.option]} = {term.mixture:g}" if kind.mixture else ""
    if kind.whole_form:
        return f"{kind.formula}{number}, over the whole vocabulary"
    tail = f" and all others as one, of probability at least {term.tail_floor:g}" if kind.has_tail else ""
    return f"{kind.formula}{number}, over the teacher's top-k tokens{tail}"


def _auxiliary_weights(args: argparse.Namespace) -> str:
    """The weights of the KL and entropy terms, which no correction changes."""
    if args.pg_aux_aggregation == "policy":
        return "the weights of pg_loss"
    step_mean = STEP_MEANS[vars(args).get("calculate_per_token_loss", False)]
    counted = {
        "scheduled": "",
        "live": ", over rollouts with a trained token",
        "varied": ", over groups whose rewards differ",
        "kept": ", over what is trained, rejected or not",
    }
    return f"{step_mean} over the step{counted[args.pg_denominator]}"


def _aggregation_rows(facts: Facts) -> list[tuple[str, str]]:
    args, name = facts.args, ROLES[facts.args.pg_role]
    if not facts.has_objective:
        return []
    if args.custom_pg_loss_reducer_function_path is not None:
        unit = "1/T" if vars(args).get("calculate_per_token_loss", False) else "1/N_r"
        path = args.custom_pg_loss_reducer_function_path
        return [(name, f"({unit}) Σ reducer(ℓ)  (--custom-pg-loss-reducer-function-path {path})")]
    mode = args.loss_aggregation
    flag = f"--loss-aggregation {mode}"
    if args.loss_aggregation_divisor is not None:
        flag += f" --loss-aggregation-divisor {args.loss_aggregation_divisor:.12g}"
    counted, tokens, _ = DENOMINATORS[args.pg_denominator]
    declared = AGGREGATIONS[mode]
    denominator = declared.denominator.format(counted=counted, tokens=tokens, divisor=args.loss_aggregation_divisor)
    return [(name, f"{declared.formula}  ({flag})"), ("weight", f"1/δ, δ = {denominator}")]


def _head_rows(facts: Facts) -> list[tuple[str, str]]:
    args = facts.args
    rounding = "float32" if is_float32(vars(args).get("params_dtype")) else args.fp32_lm_head_backward or "bf16"
    backward = f"backward {rounding}"
    rows = []
    if args.pg_fused_head is not None:
        rows.append(("head", f"fused, logits never stored, {backward}  (--pg-fused-head {args.pg_fused_head})"))
    elif args.fp32_lm_head:
        rows.append(("head", f"float32 logits, stored whole, {backward}  (--fp32-lm-head)"))
    if (head := facts.teacher_head) is not None:
        rows.append(("teacher", f"logits of its hidden states, by {head}  (--pg-term …,head=)"))
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
        counted = "n its positions, Q = Σn" if vars(args).get("num_experts") else "n = 1, Q = Σn = K·D·C"
        return f"returns (Q·Σwℓ, n, report), {counted}; finalize divides by Q  (--calculate-per-token-loss)"
    return "returns (K·D·Σwℓ, report); the schedule multiplies by C and divides by K, DDP divides by D·C"


def _layout(args: argparse.Namespace) -> str:
    kinds = {"D": "data", "C": "context", "TP": "tensor_model", "PP": "pipeline_model"}
    sizes = {name: vars(args).get(f"{kind}_parallel_size") for name, kind in kinds.items()}
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size is not None) or "not known yet"
