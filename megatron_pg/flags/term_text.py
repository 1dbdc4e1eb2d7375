"""The text of one loss term, `NAME:kind[,option=value]…`. Needs no torch."""

import functools
import math
from collections.abc import Mapping
from typing import Any

from megatron_pg.declarations.aggregations import AGGREGATIONS
from megatron_pg.declarations.choices import SOFTCAPS
from megatron_pg.declarations.corrections import KL_ESTIMATORS, OTHER_ESTIMATORS
from megatron_pg.declarations.declaration import did_you_mean
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
        raise ValueError("does not begin with NAME:kind, where NAME has only a-z, 0-9 and _")
    known = (POLICY,) if name == POLICY else KINDS_OF_FLAG
    if kind not in known:
        raise ValueError(f"has the kind {kind!r}, and {name} can be {', '.join(known)}{did_you_mean(kind, known, {})}")
    if unknown := [option for option in texts if option not in _OPTIONS]:
        hint = did_you_mean(unknown[0], _OPTIONS, {})
        options = ", ".join(f"{option}=…" for option in _OPTIONS)
        raise ValueError(f"has {unknown[0]}={texts[unknown[0]]}, which is not one of {options}{hint}")
    given: dict[str, Any] = {o: number_of(o, value) if o in _NUMBERS else value for o, value in texts.items()}
    mixtures = {option: given.pop(option) for option in _MIXTURES if option in given}
    term = LossTerm(name=name, kind=kind, **given, mixture=next(iter(mixtures.values()), None))
    if not (math.isfinite(term.weight) and term.weight >= 0):
        raise ValueError(f"has weight={term.weight:g}, which is not finite and >= 0")
    if name in SHORTHANDS:
        raise ValueError(f"has a name that belongs to {SHORTHANDS[name]}; choose another")
    if name == POLICY:
        _check_policy(term)
    else:
        _check_aggregation(term)
        _check_estimator(term)
        _check_topk(term, mixtures)
        _check_teacher(term)
    return term


def _check_policy(term: LossTerm) -> None:
    if term != LossTerm(name=POLICY, kind=POLICY, weight=0.0):
        raise ValueError(
            "can only be weight=0, which drops the objective: other weights are relative to the objective, and its "
            "aggregation is --loss-aggregation"
        )


def _check_aggregation(term: LossTerm) -> None:
    choices = (*AGGREGATIONS, AS_POLICY)
    if term.aggregation not in (None, *choices):
        hint = did_you_mean(term.aggregation or "", choices, {})
        raise ValueError(f"has aggregation={term.aggregation}, which is not one of {', '.join(choices)}{hint}")
    if term.aggregation == AS_POLICY and term.on != POLICY:
        raise ValueError(f"has aggregation={AS_POLICY}, the weights of the objective's tokens; add on={POLICY}")
    takes_divisor = term.aggregation in AGGREGATIONS and AGGREGATIONS[term.aggregation].takes_divisor
    if term.divisor is not None and not takes_divisor:
        raise ValueError(f"has divisor={term.divisor:g}, which has no effect without aggregation=constant")
    if takes_divisor and not (term.divisor is not None and 0 < term.divisor < math.inf):
        raise ValueError("has aggregation=constant, which needs divisor=L in tokens, finite and > 0")


def _check_estimator(term: LossTerm) -> None:
    kind = KINDS[term.kind]
    if term.estimator is None:
        if kind.against is not None and kind.estimator is None:
            raise ValueError("needs estimator=…; there is no default (k3_weighted has the right value and gradient)")
    elif kind.against is None:
        why = "is not a KL divergence"
        if kind.reads_topk or kind.whole_form:
            why = f"needs none: it is exact over {'its categories' if kind.reads_topk else 'the vocabulary'}"
        raise ValueError(f"has estimator={term.estimator}, and {term.kind} {why}; remove it")
    elif term.estimator not in KL_ESTIMATORS:
        hint = did_you_mean(term.estimator, KL_ESTIMATORS, OTHER_ESTIMATORS)
        raise ValueError(f"has estimator={term.estimator}, which is not one of {', '.join(KL_ESTIMATORS)}{hint}")


def _check_topk(term: LossTerm, mixtures: Mapping[str, float]) -> None:
    kind = KINDS[term.kind]
    of_kind = kind.mixture.option if kind.mixture else None
    if strays := [option for option in mixtures if option != of_kind]:
        instead = f"; it has {of_kind}" if of_kind else ""
        raise ValueError(f"has {strays[0]}={mixtures[strays[0]]:g}, which {term.kind} does not read{instead}")
    if term.mixture is not None and not 0 < term.mixture < 1:
        raise ValueError(f"has {of_kind}={term.mixture:g}, which is not between 0 and 1")
    if term.temperature is not None and not kind.reads_topk:
        raise ValueError(
            f"has temperature={term.temperature:g}, which only a top-k teacher has, and {term.kind} has none; remove it"
        )


def _check_teacher(term: LossTerm) -> None:
    kind = KINDS[term.kind]
    has_tail = kind.reads_topk and kind.has_tail
    if term.tail_floor is not None and not has_tail:
        raise ValueError(f"has tail_floor={term.tail_floor:g}, and {term.kind} has no top-k tail; remove it")
    if term.tail_floor is not None and not 0 < term.tail_floor < 1:
        raise ValueError(f"has tail_floor={term.tail_floor:g}, which is not between 0 and 1")
    if term.head is not None and not term.reads_hidden:
        raise ValueError(f"has head={term.head}, and {term.kind} reads no hidden states of a teacher; remove it")
    low, high = SOFTCAPS
    if term.softcap is not None and not (term.reads_hidden and (term.softcap == 0 or low <= term.softcap <= high)):
        raise ValueError(
            f"has softcap={term.softcap:g}, which a full_* teacher's logits have: between {low:g} and {high:g}, or 0 "
            "for none"
        )
    if term.head is not None and not term.head.strip(":"):
        raise ValueError(f"has head={term.head}, which is not PATH or PATH:NAME")
