"""The text of one loss term, `NAME:kind[,option=value]…`. Needs no torch."""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_pg.declarations.aggregations import AGGREGATIONS
from megatron_pg.declarations.choices import SOFTCAPS
from megatron_pg.declarations.corrections import KL_ESTIMATORS, OTHER_ESTIMATORS
from megatron_pg.declarations.declaration import did_you_mean, one_of
from megatron_pg.declarations.loss_terms import AS_POLICY, KINDS, SHORTHANDS, LossTerm
from megatron_pg.flags.option_text import number_of, split
from megatron_pg.rollouts.fields import POLICY, is_term

KINDS_OF_FLAG = tuple(name for name, kind in KINDS.items() if not kind.is_of_a_correction)
_MIXTURES = tuple(dict.fromkeys(kind.mixture.option for kind in KINDS.values() if kind.mixture))
_NUMBERS = ("weight", "divisor", "temperature", "tail_floor", "softcap", *_MIXTURES)
_OPTIONS = (*_NUMBERS, "aggregation", "on", "estimator", "head")


@functools.cache
def parse(text: str) -> LossTerm:
    """A loss term from its flag's value; every text is parsed once in a process.

    Raises:
        ValueError: the text is not a loss term; the message follows the flag and the text.
    """
    name, _, rest = text.partition(":")
    kind, texts = split(rest)
    if not is_term(name) or not kind:
        raise ValueError("does not begin with NAME:kind. Write it in that form, where NAME has only a-z, 0-9 and _.")
    known = (POLICY,) if name == POLICY else KINDS_OF_FLAG
    if kind not in known:
        raise ValueError(f"has kind {kind!r}, which is not one of {one_of(kind, known)}")
    if unknown := [option for option in texts if option not in _OPTIONS]:
        options = ", ".join(f"{option}=…" for option in _OPTIONS)
        hint = did_you_mean(unknown[0], _OPTIONS)
        raise ValueError(f"has {unknown[0]}={texts[unknown[0]]}, which is not one of {options}.{hint}")
    given: dict[str, Any] = {o: number_of(o, value) if o in _NUMBERS else value for o, value in texts.items()}
    mixtures = {option: given.pop(option) for option in _MIXTURES if option in given}
    term = LossTerm(name=name, kind=kind, **given, mixture=next(iter(mixtures.values()), None))
    if problem := next(_problems(term, mixtures), None):
        raise ValueError(problem)
    return term


def _problems(term: LossTerm, mixtures: Mapping[str, float]) -> Iterator[str]:
    if not (math.isfinite(term.weight) and term.weight >= 0):
        yield f"has weight={term.weight:g}. It must be finite and >= 0."
    if term.name in SHORTHANDS:
        yield f"has a name that belongs to {SHORTHANDS[term.name]}. Choose another."
    if term.name != POLICY:
        yield from _of_aggregation(term)
        yield from _of_estimator(term)
        yield from _of_topk(term, mixtures)
        yield from _of_teacher(term)
    elif term != LossTerm(name=POLICY, kind=POLICY, weight=0.0):
        yield (
            f"is not {POLICY}:{POLICY},weight=0, which drops the objective. Write that, or remove it. The weights of "
            "other terms are relative to the objective, and its aggregation is --loss-aggregation."
        )


def _of_aggregation(term: LossTerm) -> Iterator[str]:
    choices = (*AGGREGATIONS, AS_POLICY)
    if term.aggregation not in (None, *choices):
        yield f"has aggregation={term.aggregation}, which is not one of {one_of(str(term.aggregation), choices)}"
    if term.aggregation == AS_POLICY and term.on != POLICY:
        yield f"has aggregation={AS_POLICY}, the weights of the objective's tokens. Add on={POLICY}."
    takes_divisor = term.aggregation in AGGREGATIONS and AGGREGATIONS[term.aggregation].takes_divisor
    if term.divisor is not None and not takes_divisor:
        yield (
            f"has divisor={term.divisor:g}, which has no effect without aggregation=constant. Remove it, or add that "
            "option."
        )
    if takes_divisor and not (term.divisor is not None and 0 < term.divisor < math.inf):
        yield "has aggregation=constant, which needs a divisor. Give divisor=L in tokens, finite and > 0."


def _of_estimator(term: LossTerm) -> Iterator[str]:
    kind = KINDS[term.kind]
    if term.estimator is None:
        if kind.against is not None and kind.estimator is None:
            yield (
                "has no estimator, and there is no default. Give estimator=…: k3_weighted has the right value and "
                "gradient."
            )
    elif kind.against is None:
        why = "is not a KL divergence"
        if kind.reads_topk or kind.whole_form:
            why = f"needs none: it is exact over {'its categories' if kind.reads_topk else 'the vocabulary'}"
        yield f"has estimator={term.estimator}, and {term.kind} {why}. Remove it."
    elif term.estimator not in KL_ESTIMATORS:
        names = one_of(term.estimator, KL_ESTIMATORS, OTHER_ESTIMATORS)
        yield f"has estimator={term.estimator}, which is not one of {names}"


def _of_topk(term: LossTerm, mixtures: Mapping[str, float]) -> Iterator[str]:
    kind = KINDS[term.kind]
    own = kind.mixture.option if kind.mixture else None
    if strays := [option for option in mixtures if option != own]:
        fix = f"Give {own} instead" if own else "Remove it"
        yield f"has {strays[0]}={mixtures[strays[0]]:g}, which {term.kind} does not read. {fix}."
    if term.mixture is not None and not 0 < term.mixture < 1:
        yield f"has {own}={term.mixture:g}. It must be between 0 and 1."
    if (value := term.temperature) is not None and not kind.reads_topk:
        yield f"has temperature={value:g}, which only a top-k teacher has, and {term.kind} has none. Remove it."


def _of_teacher(term: LossTerm) -> Iterator[str]:
    kind, (low, high) = KINDS[term.kind], SOFTCAPS
    if (floor := term.tail_floor) is not None and not (kind.reads_topk and kind.has_tail):
        yield f"has tail_floor={floor:g}, and {term.kind} has no top-k tail. Remove it."
    if floor is not None and not 0 < floor < 1:
        yield f"has tail_floor={floor:g}. It must be between 0 and 1."
    if term.head is not None and not term.reads_hidden:
        yield f"has head={term.head}, and {term.kind} reads no hidden states of a teacher. Remove it."
    if (cap := term.softcap) is not None and not (term.reads_hidden and (cap == 0 or low <= cap <= high)):
        yield (
            f"has softcap={cap:g}. Only the logits of a full_* teacher have one, between {low:g} and {high:g}, or 0 "
            "for none."
        )
    if term.head is not None and not term.head.strip(":"):
        yield f"has head={term.head}. It must be PATH or PATH:NAME."
