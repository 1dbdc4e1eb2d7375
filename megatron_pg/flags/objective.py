"""The rules of role and objective: its numbers, correction, KL, entropy, gradient divisor. Needs no torch.

Every objective and correction has its own numbers, the options of its text, with the defaults of its paper. A number
that the selected one does not read is an error, and so is a missing number without a default.
"""

import math

from megatron_pg.declarations import corrections, objectives
from megatron_pg.declarations.adaptive_entropy import NUMBERS
from megatron_pg.declarations.aggregations import AGGREGATIONS, is_by_turn
from megatron_pg.declarations.choices import DENOMINATORS
from megatron_pg.declarations.corrections import CORRECTIONS, KL_ESTIMATORS, OTHER_ESTIMATORS
from megatron_pg.declarations.declaration import ABOVE_ZERO, Number, flag_of
from megatron_pg.declarations.objectives import CLIP_EPS_HIGH, CLIP_EPS_LOW, OBJECTIVES, VALUE_CLIP
from megatron_pg.flags.errors import Violations
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.table import DEFAULTS, word_rules
from megatron_pg.flags.values import are_numbers, choice, number

# A critic reads these arguments in addition to those of its role; all others are about log-probabilities.
_OF_BOTH = (
    *("loss_aggregation", "loss_aggregation_divisor", "custom_pg_loss_reducer_function_path"),
    *("pg_denominator", "pg_weight_denominator", "pg_grad_divisor", "pg_metrics", "pg_dry_run"),
    *("docs_per_step", "docs_per_step_policy", "docs_per_step_end", "docs_per_step_drop_position"),
)


def objective_violations(facts: Facts) -> Violations:
    """Rules E24, E25 and E40 to E44 for the flags of the objective."""
    args = facts.args
    yield from _selection_rules(facts)
    yield from word_rules(args, "--pg-sequence-level", "--pg-aux-aggregation")
    if args.pg_kl_estimator is not None:
        yield from choice("--pg-kl-estimator", args.pg_kl_estimator, KL_ESTIMATORS, elsewhere=OTHER_ESTIMATORS)
    for declared in (CLIP_EPS_LOW, CLIP_EPS_HIGH):
        if (value := vars(args)[declared.attribute]) is not None:
            yield from number(str(declared.flag), value, declared.low, declared.high, declared.requirement)
    yield from number("--pg-kl-coef", args.pg_kl_coef, 0.0, math.inf, "finite and >= 0")
    yield from number("--pg-entropy-coef", args.pg_entropy_coef, 0.0, math.inf, "finite and >= 0")
    yield from _objective_rules(facts)
    yield from _correction_rules(facts)
    yield from _auxiliary_rules(facts)
    yield from word_rules(args, "--pg-mtp-aggregation", "--pg-mtp-target")
    yield from _prediction_rules(facts)


def weight_violations(facts: Facts) -> Violations:
    """Rules E24, E25 and E43 for what every role weighs tokens and gradients by."""
    yield from word_rules(facts.args, "--pg-denominator", "--pg-weight-denominator")
    yield from number("--pg-grad-divisor", facts.args.pg_grad_divisor, ABOVE_ZERO, math.inf, "finite and > 0")
    yield from _denominator_rules(facts)
    yield from _unit_rules(facts)


def _selection_rules(facts: Facts) -> Violations:
    """Rules of the texts that select objective and correction, and of the options in them."""
    selected, correction = facts.selected_objective, facts.selected_correction
    yield from choice("--pg-objective", selected.name, OBJECTIVES, elsewhere=objectives.ELSEWHERE)
    yield from choice("--pg-correction", correction.name, CORRECTIONS, elsewhere=corrections.ELSEWHERE)
    if facts.objective is not None:
        yield from selected.violations(facts.objective.numbers, {})
    if facts.correction is not None:
        yield from correction.violations(facts.correction.numbers, facts.correction.words)
    if (custom := facts.custom_objective) is not None:
        reads = {Number(name=name, requirement="a finite number"): None for name in custom.given}
        yield from custom.violations(reads, {})


def _objective_rules(facts: Facts) -> Violations:
    args, chosen = facts.args, str(facts.selected_objective)
    if facts.custom_objective is not None and args.pg_objective != objectives.DEFAULT:
        yield (
            f"E44 --pg-custom-objective-path replaces --pg-objective, which is {args.pg_objective}. Remove one of the "
            "two."
        )
    if facts.objective is None:
        return
    for declared in (CLIP_EPS_LOW, CLIP_EPS_HIGH):
        if (value := vars(args)[declared.attribute]) is not None and declared not in facts.objective.numbers:
            is_cap = declared is CLIP_EPS_HIGH and CLIP_EPS_LOW in facts.objective.numbers and are_numbers(value)
            instead = f", or write it as cap={1 + value:g}" if is_cap else ""  # of cispo
            yield f"E40 {declared.flag} {value} has no effect with {chosen}. Remove it{instead}."


def _correction_rules(facts: Facts) -> Violations:
    declared, selected = facts.correction, facts.selected_correction
    if declared is None:
        return
    numbers = selected.resolved(declared.numbers, {})
    low, high = numbers.get("low", math.nan), numbers.get("high", math.nan)
    if selected.name == "rejection" and "low" in selected.given and selected.given.get("estimator") in ("k2", "k3"):
        estimator = selected.given["estimator"]
        yield (
            f"E40 {selected},low={low:g} has no effect with estimator={estimator}, which is never negative. Remove it."
        )
    if are_numbers(low, high) and not low < high:
        yield f"E42 {selected},low={low:g} is not below high={high:g}. Give bounds with low < high."
    if declared.bounds and are_numbers(low) and low < 0:
        yield f"E42 {selected},low={low:g} bounds {declared.bounds}, which is never negative. Use 0."
    if declared.bounds and are_numbers(high) and low != high and high <= 0:
        yield f"E42 {selected},high={high:g} bounds {declared.bounds}. Give a bound > 0."


def _auxiliary_rules(facts: Facts) -> Violations:
    args, has_kl = facts.args, facts.args.pg_kl_coef != 0
    if has_kl and args.pg_kl_estimator is None:
        yield (
            f"E41 --pg-kl-coef {args.pg_kl_coef} needs --pg-kl-estimator, which has no default. Choose one: "
            "k3_weighted has the right value and gradient, and the GRPO paper uses k3."
        )
    if not has_kl and args.pg_kl_estimator is not None:
        yield (
            f"E40 --pg-kl-estimator {args.pg_kl_estimator} has no effect without --pg-kl-coef. Remove it, or give a "
            "coefficient > 0."
        )
    if not has_kl and not facts.has_entropy_term and args.pg_aux_aggregation == "policy":
        yield (
            "E40 --pg-aux-aggregation policy has no effect without --pg-kl-coef or --pg-entropy-coef. Remove it, or "
            "give one of them."
        )
    if (selected := facts.selected_target) is not None:
        yield from number("--pg-entropy-target", selected.amount, ABOVE_ZERO, math.inf, "finite and > 0")
        yield from selected.violations(NUMBERS, {})
        first, most = args.pg_entropy_coef, selected.numbers.get("max", math.inf)
        if are_numbers(first) and first > most:
            yield (
                f"E42 --pg-entropy-coef {first:g} is above max={most:g} of --pg-entropy-target. Lower it, or raise max."
            )


def _prediction_rules(facts: Facts) -> Violations:
    given = {"aggregation": facts.args.pg_mtp_aggregation, "target": facts.args.pg_mtp_target}
    for name in [name for name, value in given.items() if value == "policy" and not facts.megatron("mtp_num_layers")]:
        yield (
            f"E40 --pg-mtp-{name} policy has no effect without --mtp-num-layers. Remove it, or give the number of "
            "layers."
        )
    if given["aggregation"] == "policy" and facts.reducer_path is not None:
        yield (
            "E43 --pg-mtp-aggregation policy needs weights that --custom-pg-loss-reducer-function-path does not "
            "compute for multi-token prediction. Use token_mean."
        )


def _denominator_rules(facts: Facts) -> Violations:
    args, chosen = facts.args, f"--pg-denominator {facts.args.pg_denominator}"
    if args.pg_denominator not in DENOMINATORS or args.pg_denominator == "scheduled":
        return
    if facts.reducer_path is not None:
        yield (
            f"E43 {chosen} has no effect with --custom-pg-loss-reducer-function-path, whose reducer has its own "
            "denominator. Remove one of the two."
        )
    if args.pg_denominator == "live" and facts.is_per_token:
        yield f"E43 {chosen} has no effect with {facts.mode}, which does not count rollouts. Remove it."
    rejects = facts.correction.rejects if facts.correction else None
    if args.pg_denominator != "kept" or rejects == "data":
        return
    if rejects == "model":
        if not vars(args).get("open_steps"):
            yield (
                f"E43 {chosen} cannot be combined with {facts.selected_correction}, whose rejections are known only "
                "after the forward. Use live, or open steps in your own training loop (args.open_steps = True)."
            )
    else:
        yield f"E43 {chosen} has no effect with {facts.selected_correction}, which rejects no token. Use live."


def role_violations(facts: Facts) -> Violations:
    """Rules E24, E25 and E45."""
    args, clip = facts.args, facts.args.pg_value_clip
    yield from word_rules(args, "--pg-role")
    if clip is not None:
        yield from number(str(VALUE_CLIP.flag), clip, VALUE_CLIP.low, VALUE_CLIP.high, VALUE_CLIP.requirement)
    if not facts.is_critic:
        if clip is not None:
            critic = "train a critic (--pg-role critic)"
            yield f"E45 {VALUE_CLIP.flag} {clip} has no effect on a policy. Remove it, or {critic}."
        return
    for name, default in DEFAULTS.items():
        value = vars(args)[name]
        if name not in (*_OF_BOTH, "pg_role", VALUE_CLIP.attribute) and value != default:
            shown = "" if value is True else f" {value}"
            yield f"E45 {flag_of(name)}{shown} has no meaning with --pg-role critic. Remove it."
    if args.pg_metrics == "with_entropy":
        yield "E45 --pg-metrics with_entropy has no meaning with --pg-role critic, which has no entropy. Use basic."


def _unit_rules(facts: Facts) -> Violations:
    """E43 for weights and turns that nothing reads."""
    args = facts.args
    if args.pg_weight_denominator == "weights" and not facts.wrong_terms and isinstance(facts.per_token, bool):
        own = [facts.mode] if facts.has_objective and facts.reducer_path is None else []
        used = [AGGREGATIONS[name] for name in (*own, *(t.aggregation for t in facts.further)) if name in AGGREGATIONS]
        if all(declared.takes_divisor for declared in used):
            owner = "a custom reducer" if facts.reducer_path is not None else facts.mode
            yield f"E43 --pg-weight-denominator weights has no effect with {owner}, which sums no tokens. Remove it."
    if args.pg_denominator == "live" and is_by_turn(facts.mode):
        yield f"E43 --pg-denominator live has no effect with {facts.mode}, which counts only trained turns. Remove it."
    is_read = facts.custom_objective is not None or (facts.objective is not None and facts.objective.reads_sequences)
    if args.pg_sequence_level == "turn" and not (facts.has_objective and (is_read or facts.corrects_sequences)):
        yield from unread_turns(facts)


def unread_turns(facts: Facts) -> Violations:
    """Rule E43 for turns that nothing reads. A custom objective is tried at startup to determine what it reads."""
    objective = facts.custom_objective or facts.selected_objective
    yield (
        f"E43 --pg-sequence-level turn has no effect with {objective} and {facts.selected_correction}, which read "
        "single tokens. Remove it."
    )


def objective_warnings(facts: Facts) -> list[str]:
    """W3, W7, W8 and W12, for arguments without violations."""
    args, name, messages = facts.args, facts.selected_objective.name, []
    if declared := facts.objective:
        published = declared.published_with
        if published is not None and facts.mode != published:
            messages.append(
                f"W3 --pg-objective {name} is published with equal sequence weights ({published}), and {facts.mode} "
                f"has other weights. Use {published}, or accept the difference."
            )
        if advice := declared.advice(facts.objective_numbers):
            messages.append(f"W8 --pg-objective {name} {advice}")
    selection = facts.correction.selection if facts.correction else None
    if declared and selection and selection.published_with not in (None, name):
        messages.append(
            f"W12 {facts.selected_correction} is published with --pg-objective {selection.published_with}, which clips "
            f"no token, so the loss with {name} differs from the paper. Use {selection.published_with}, or accept the "
            "difference."
        )
    if args.pg_kl_coef and (flaw := KL_ESTIMATORS[args.pg_kl_estimator].flaw):
        messages.append(f"W7 --pg-kl-estimator {args.pg_kl_estimator} {flaw}")
    return messages
