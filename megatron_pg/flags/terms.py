"""The flag of loss terms, `--pg-term NAME:kind[,option=value]…`, and its rules. Needs no torch."""

import argparse
import math
from collections.abc import Sequence

from megatron_pg.declarations.choices import DENOMINATORS
from megatron_pg.declarations.corrections import CORRECTIONS
from megatron_pg.declarations.declaration import ABOVE_ZERO
from megatron_pg.declarations.loss_terms import AS_POLICY, KINDS, TAIL_FLOOR, LossTerm
from megatron_pg.flags.errors import Violations
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.term_text import KINDS_OF_FLAG
from megatron_pg.flags.values import number
from megatron_pg.rollouts.fields import POLICY


def add_term_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flag."""
    group.add_argument(
        "--pg-term",
        action="append",
        metavar="NAME:KIND[,OPTION=VALUE]...",
        help=f"A further loss of the step, over its own tokens, with its own denominators: kinds {', '.join(KINDS_OF_FLAG)}; options "
        f"weight (default 1), aggregation and divisor (default: as --loss-aggregation), on (the loss term whose tokens it takes, "
        f"for instance {POLICY}, those of the objective), estimator (of a KL divergence), beta, alpha (of a teacher's divergence) "
        f"and temperature (of a teacher whose likeliest tokens are read, default 1). {POLICY}:{POLICY},weight=0 drops the objective. "
        "May be given several times.",
    )
    group.add_argument(
        "--pg-teacher-tail-floor",
        type=float,
        metavar="P",
        help="Least probability that a teacher gives to all tokens together that it does not name, for the kinds topk_*: a teacher "
        f"whose named tokens sum to 1 would be infinitely far. Default {TAIL_FLOOR:g}; a metric counts where it acts.",
    )
    group.add_argument(
        "--pg-teacher-head",
        metavar="PATH[:NAME]",
        help="The teacher's output layer, for the kinds full_*, which are over the whole vocabulary: a matrix [V, H] of a safetensors file, "
        "called weight unless NAME says otherwise. Each tensor-parallel rank reads its rows.",
    )


def term_violations(facts: Facts) -> Violations:
    """Rules E71 of one loss term, E72 of several, E73 of what they cannot go with."""
    texts, floor = facts.args.pg_term, facts.args.pg_teacher_tail_floor
    if texts is None:
        yield from () if floor is None else _floor_rules(floor, ())
        yield from _hidden_rules(facts, ())
        return
    if not isinstance(texts, (list, tuple)) or not texts:
        yield "E71", f"--pg-term must be a list of texts, one for each loss term, got {texts!r}"
        return
    for text, error in facts.wrong_terms:
        yield "E71", f"--pg-term {text} {error}"
    if not facts.wrong_terms:
        terms = facts.given_terms
        yield from () if floor is None else _floor_rules(floor, terms)
        yield from _hidden_rules(facts, terms)
        yield from (("E72", message) for message in _contradictions(terms))
        yield from _together(facts, terms)


def _floor_rules(floor: object, terms: Sequence[LossTerm]) -> Violations:
    yield from number("--pg-teacher-tail-floor", floor, ABOVE_ZERO, math.nextafter(1.0, 0.0), "between 0 and 1")
    if not any(term.reads_topk and KINDS[term.kind].has_tail for term in terms):
        yield (
            "E73",
            f"--pg-teacher-tail-floor {floor} has no effect without a --pg-term of a kind topk_* that has a tail; remove it",
        )


def _hidden_rules(facts: Facts, terms: Sequence[LossTerm]) -> Violations:
    """A teacher over the whole vocabulary: its head, and the student's in whose chunks its logits are made."""
    head, readers = facts.args.pg_teacher_head, [term for term in terms if term.reads_hidden]
    if head is not None and not (isinstance(head, str) and head.strip(":")):
        yield "E73", f"--pg-teacher-head must be PATH or PATH:NAME, got {head!r}"
    elif head is not None and not readers:
        yield "E73", f"--pg-teacher-head {head} has no effect without a --pg-term of a kind full_*; remove it"
    readers = [term for term in readers if term.weight]
    for term in readers:
        if head is None:
            yield (
                "E73",
                f"{term.flag} is over the whole vocabulary of a teacher, whose logits are made of its hidden states; add --pg-teacher-head "
                "PATH, its output layer",
            )
        if facts.args.pg_fused_head is None:
            yield (
                "E73",
                f"{term.flag} makes the teacher's logits beside the model's, chunk by chunk, and without the fused head all of both would be "
                "stored; add --pg-fused-head forward, or recompute",
            )
        if (term.kind, term.mixture) != (readers[0].kind, readers[0].mixture):
            yield (
                "E73",
                f"{term.flag} and {readers[0].flag} are two divergences from one teacher's hidden states, and its logits are read for one; "
                "give both the same kind and beta",
            )
        for other in (each for each in terms if each.reads_topk and each.weight):
            yield (
                "E73",
                f"{term.flag} has the whole vocabulary of the teacher and {other.flag} its likeliest tokens, and a forward reads one of them; "
                "leave one out",
            )


def _contradictions(terms: list[LossTerm]) -> list[str]:
    found, own = [], {POLICY} | {term.name for term in terms if term.on is None}
    names = [term.name for term in terms]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            found.append(
                f"--pg-term {name} is given {names.count(name)} times, so one would be ignored; name them apart"
            )
    for term in terms:
        if term.on in names and term.on not in own:
            found.append(
                f"{term.flag},on={term.on}: {term.on} has no tokens of its own; name the loss term whose tokens it takes"
            )
        elif term.on is not None and term.on not in own:
            found.append(
                f"{term.flag},on={term.on}: there is no such loss term; choose one of {', '.join(sorted(own))}"
            )
    return found


def _together(facts: Facts, terms: list[LossTerm]) -> Violations:
    """What the rest of the loss would mean nothing with."""
    for term in terms:
        theirs = 1.0 if term.temperature is None else term.temperature
        if term.reads_topk and theirs != facts.args.pg_temperature:
            yield (
                "E73",
                f"{term.flag} has a teacher at temperature {theirs:g}, and --pg-temperature is {facts.args.pg_temperature}: the likeliest "
                "tokens of one cannot be had from another; record them at this temperature, and say so by temperature=…",
            )
    if facts.has_objective:
        return
    for term in terms:
        if term.aggregation == AS_POLICY:
            yield (
                "E73",
                f"{term.flag},aggregation={AS_POLICY} takes the objective's weights, and --pg-term {POLICY}:{POLICY},weight=0 drops the "
                "objective; name an aggregation",
            )
    if not any(term.weight for term in terms):
        yield "E73", f"--pg-term {POLICY}:{POLICY},weight=0 leaves no loss; add another loss term, or remove it"
    of_objective = (
        ("--pg-correction", facts.args.pg_correction, {*CORRECTIONS} - {"none"}),
        ("--pg-denominator", facts.args.pg_denominator, {*DENOMINATORS} - {"scheduled"}),
    )
    for flag, value, choices in of_objective:
        if isinstance(value, str) and value in choices:  # of any other value rule E25 says so
            yield (
                "E73",
                f"{flag} {value} has no effect without the objective, which --pg-term {POLICY}:{POLICY},weight=0 drops; remove one of "
                "the two",
            )
    if facts.args.pg_kl_coef or facts.args.pg_entropy_coef:
        yield (
            "E73",
            f"--pg-kl-coef and --pg-entropy-coef are terms of the objective, which --pg-term {POLICY}:{POLICY},weight=0 drops; write "
            f"--pg-term NAME:kl,on={POLICY} or NAME:entropy,on={POLICY}",
        )
