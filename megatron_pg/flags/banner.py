"""The startup banner: the meaning of the arguments in words and formulas. Needs no torch."""

import argparse
import shlex
from collections.abc import Iterator, Sequence

from megatron_pg.declarations.aggregations import AGGREGATIONS, STEP_MEANS
from megatron_pg.declarations.choices import DENOMINATORS, ROLES
from megatron_pg.declarations.corrections import CORRECTIONS
from megatron_pg.declarations.installation import installed_version
from megatron_pg.declarations.loss_terms import AS_POLICY, KINDS, SHORTHANDS, LossTerm
from megatron_pg.declarations.objectives import CRITIC, DEFAULT, OBJECTIVES
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.head import head_text, is_float32
from megatron_pg.rollouts.fields import POLICY
from megatron_pg.rollouts.printable import printable

COMMAND_LINE = "megatron_pg command line: "  # explain and validate find the job's words after it
Rows = Iterator[tuple[str, str]]
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
        ("Megatron", _contract(facts)),
        ("layout", _layout(args)),
        *_head_rows(facts),
        ("kernel", f"{args.pg_kernel or 'triton on CUDA, torch elsewhere'}  (--pg-kernel)"),
        ("metrics", f"{args.pg_metrics}, means per sample for every aggregation  (--pg-metrics)"),
        ("versions", ", ".join(f"{name} {installed_version(name) or 'absent'}" for name in _PACKAGES)),
    ]
    of_policies = ("temperature", "kernel") if facts.is_critic else ()
    return [row for row in rows if row[0] not in of_policies]


def banner(args: argparse.Namespace) -> str:
    """The rows of `describe` as text for the log."""
    return banner_of(describe(args))


def command_line(argv: Sequence[str]) -> str:
    """One line of a dry run: the words of the command line, quoted as a shell reads them."""
    return COMMAND_LINE + printable(shlex.join(argv), limit=None)


def banner_of(rows: list[tuple[str, str]], title: str = "megatron_pg: effective policy-gradient objective") -> str:
    """Rows as text for the log."""
    width = max(len(name) for name, _ in rows)
    return "\n".join([f"── {title} ──", *(f"  {name:<{width}}  {text}" for name, text in rows)])


def _objective_rows(facts: Facts) -> Rows:
    numbers = facts.objective_numbers if facts.has_objective else {}
    if not facts.has_objective:
        yield "objective", f"none  (--pg-term {POLICY}:{POLICY},weight=0)"
    elif facts.custom_objective is not None:
        yield "objective", f"ℓ = a custom function  ({facts.custom_objective})"
        if numbers:
            yield "parameters", ", ".join(f"{name} {value:g}" for name, value in numbers.items())
    elif facts.is_critic:
        yield "objective", f"{CRITIC.formula}  (--pg-role critic)"
        yield from CRITIC.bound_rows(numbers)
    else:
        declared, given = OBJECTIVES[str(facts.selected_objective.name)], facts.args.pg_objective
        yield "objective", declared.formula + ("" if given == DEFAULT else f"  (--pg-objective {given})")
        yield from declared.bound_rows(numbers)


def _aggregation_rows(facts: Facts) -> Rows:
    args, name = facts.args, ROLES[facts.args.pg_role]
    if not facts.has_objective:
        return
    if (path := args.custom_pg_loss_reducer_function_path) is not None:
        unit = "1/T" if facts.per_token else "1/N_r"
        yield name, f"({unit}) Σ reducer(ℓ)  (--custom-pg-loss-reducer-function-path {path})"
        return
    flag, divisor = f"--loss-aggregation {args.loss_aggregation}", args.loss_aggregation_divisor
    if divisor is not None:
        flag += f" --loss-aggregation-divisor {divisor:.12g}"
    counted, tokens, _ = DENOMINATORS[args.pg_denominator]
    declared = AGGREGATIONS[args.loss_aggregation]
    yield name, f"{declared.formula}  ({flag})"
    yield "weight", f"1/δ, δ = {declared.denominator.format(counted=counted, tokens=tokens, divisor=divisor)}"


def _term_rows(facts: Facts) -> Rows:
    """What is in the loss in addition to the objective; empty by default."""
    args = facts.args
    if args.pg_correction != "none":
        letters = {"low": "lo", "high": "hi", "fraction": "f", "coef": "β"}
        shown = ", ".join(f"{letters[name]} = {value:g}" for name, value in facts.correction_numbers.items())
        formula = CORRECTIONS[str(facts.selected_correction.name)].formula.format(**facts.correction_words)
        yield "correction", f"{formula}, {shown}  (--pg-correction {args.pg_correction})"
    if args.pg_denominator != "scheduled" or args.pg_correction != "none":
        yield "denominator", f"{DENOMINATORS[args.pg_denominator][2]}  (--pg-denominator {args.pg_denominator})"
    if args.pg_weight_denominator != "tokens":
        yield "M, T, n", "sums of the tokens' weights  (--pg-weight-denominator weights)"
    if args.pg_sequence_level != "sample":
        yield "sequence", "each turn of a response  (--pg-sequence-level turn)"
    if args.pg_kl_coef:
        by = f"by {args.pg_kl_estimator}  (--pg-kl-coef, --pg-kl-estimator)"
        yield "KL", f"+ {args.pg_kl_coef:g} Σ u·KL(π‖π_ref) {by}"
    if (target := args.pg_entropy_target) is not None:
        first = f"η is {args.pg_entropy_coef:g} in the first step"
        yield "entropy", f"- η Σ u·H, exact; {first}  (--pg-entropy-coef, --pg-entropy-target {target})"
    elif args.pg_entropy_coef:
        yield "entropy", f"- {args.pg_entropy_coef:g} Σ u·H, exact  (--pg-entropy-coef)"
    if args.pg_kl_coef or facts.has_entropy_term:
        yield "u", f"{_auxiliary_weights(facts)}  (--pg-aux-aggregation {args.pg_aux_aggregation})"
    yield from (_term_row(term) for term in facts.further if term.name not in SHORTHANDS)
    if args.pg_sampling_mask_entropy != "full":
        yield "entropies", "over the sampling mask, for tokens that have one  (--pg-sampling-mask-entropy kept)"
    if args.pg_sampling_mask_missing != "error":
        yield "sampling mask", "trained tokens outside it are masked  (--pg-sampling-mask-missing mask)"
    if depths := vars(args).get("mtp_num_layers"):
        yield "MTP", _prediction_text(args, depths)
    if args.pg_grad_divisor != 1:
        divisor = f"{args.pg_grad_divisor:.12g}"
        same = f"with Adam, --clip-grad and --adam-eps times {divisor} instead are the same"
        yield "gradient", f"divided by {divisor}, unlike the loss; {same}  (--pg-grad-divisor)"


def _prediction_text(args: argparse.Namespace, depths: int) -> str:
    factor = f"{vars(args).get('mtp_loss_scaling_factor') or 0.1:g}"
    is_own = args.pg_mtp_aggregation == "token_mean"
    weights = "1/n_d, n_d its tokens of the step" if is_own else "those of pg_loss, of its tokens"
    loss = "ce_d" if args.pg_mtp_target == "token" else "KL(π‖π_d)"
    flags = f"--mtp-num-layers, --pg-mtp-aggregation {args.pg_mtp_aggregation}, --pg-mtp-target {args.pg_mtp_target}"
    return f"+ {factor}/{depths} Σ_d Σ v·{loss}, v = {weights}  ({flags})"


def _term_row(term: LossTerm) -> tuple[str, str]:
    """A loss term as a summand, and what its denominators count."""
    by, weights = f" by {term.estimator}" if term.estimator else "", "with v = the weights of pg_loss"
    if term.aggregation and term.aggregation != AS_POLICY:
        denominator = AGGREGATIONS[term.aggregation].denominator
        counted = denominator.format(counted="", tokens="trained", divisor=term.divisor)
        weights = f"counted alone: v = 1/δ, δ = {counted}"
    summand = f"+ {term.weight:g} Σ v·({_loss(term)}){by} over the tokens of {term.tokens}"
    return term.name, f"{summand}, {weights}  ({term.flag})"


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


def _auxiliary_weights(facts: Facts) -> str:
    """The weights of the KL and entropy terms, which no correction changes."""
    if facts.args.pg_aux_aggregation == "policy":
        return "the weights of pg_loss"
    counted = {
        "scheduled": "",
        "live": ", over rollouts with a trained token",
        "varied": ", over groups whose rewards differ",
        "kept": ", over what is trained, rejected or not",
    }
    return f"{STEP_MEANS[facts.per_token]} over the step{counted[facts.args.pg_denominator]}"


def _head_rows(facts: Facts) -> Rows:
    args = facts.args
    is_exact = is_float32(vars(args).get("params_dtype"))
    backward = f"backward {'float32' if is_exact else args.fp32_lm_head_backward or 'bf16'}"
    if args.pg_fused_head is not None:
        yield "head", f"fused, logits never stored, {backward}  (--pg-fused-head {head_text(facts)})"
    elif args.fp32_lm_head:
        yield "head", f"float32 logits, stored whole, {backward}  (--fp32-lm-head)"
    if (head := facts.teacher_head) is not None:
        yield "teacher", f"logits of its hidden states, by {head}  (--pg-term …,head=)"
    if args.pg_vocab_size is not None:
        yield "vocabulary", f"columns from {args.pg_vocab_size} on are padding  (--pg-vocab-size)"


def _documents_rows(args: argparse.Namespace) -> Rows:
    if args.docs_per_step:
        policy, end = args.docs_per_step_policy or "exact", args.docs_per_step_end or "partial"
        amount = f"{'' if policy == 'exact' else 'at least '}{args.docs_per_step} documents"
        last = "the last step may have fewer" if end == "partial" else "too few documents for a last step are dropped"
        yield "step", f"{amount}, {last}  (--docs-per-step, -policy {policy}, -end {end})"


def _contract(facts: Facts) -> str:
    if facts.per_token:
        counted = "n its positions, Q = Σn" if vars(facts.args).get("num_experts") else "n = 1, Q = Σn = K·D·C"
        return f"returns (Q·Σwℓ, n, report), {counted}; finalize divides by Q  (--calculate-per-token-loss)"
    return "returns (K·D·Σwℓ, report); the schedule multiplies by C and divides by K, DDP divides by D·C"


def _layout(args: argparse.Namespace) -> str:
    kinds = {"D": "data", "C": "context", "TP": "tensor_model", "PP": "pipeline_model"}
    sizes = {name: vars(args).get(f"{kind}_parallel_size") for name, kind in kinds.items()}
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size is not None) or "not known yet"
