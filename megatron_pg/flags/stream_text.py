"""The text of one stream, `NAME:kind[,option=value]…`. Needs no torch."""

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

from megatron_pg.declarations.aggregations import AGGREGATIONS
from megatron_pg.declarations.corrections import KL_ESTIMATORS
from megatron_pg.declarations.declaration import did_you_mean
from megatron_pg.declarations.streams import AS_POLICY, KINDS, SHORTHANDS, Stream
from megatron_pg.rollouts.fields import POLICY, is_stream

KINDS_OF_FLAG = tuple(name for name, kind in KINDS.items() if not kind.is_of_a_correction)
_NUMBER = re.compile(r"[+-]?((\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|inf|nan)", re.ASCII | re.IGNORECASE)
_MIXTURES = tuple(dict.fromkeys(kind.mixture.option for kind in KINDS.values() if kind.mixture))
_NUMBERS = ("weight", "divisor", "temperature", *_MIXTURES)
_OPTIONS = ("weight", "aggregation", "divisor", "on", "estimator", "temperature", *_MIXTURES)


@functools.cache
def parse(text: str) -> Stream:
    """A stream from its flag's value; every text is parsed once in a process.

    Raises:
        ValueError: what is wrong with it by itself.
    """
    head, *parts = text.split(",")
    name, _, kind = head.partition(":")
    if not is_stream(name) or not kind:
        raise ValueError("does not begin with NAME:kind, a name of a-z, 0-9 and _ and what its loss is")
    known = (POLICY,) if name == POLICY else KINDS_OF_FLAG
    if kind not in known:
        raise ValueError(f"has the kind {kind!r}, and {name} can be {', '.join(known)}{did_you_mean(kind, known, {})}")
    given: dict[str, Any] = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if option not in _OPTIONS or not equals:
            hint = did_you_mean(option, _OPTIONS, {})
            raise ValueError(f"has {part!r}, which is none of {', '.join(f'{each}=…' for each in _OPTIONS)}{hint}")
        if option in given:
            raise ValueError(f"has {option} twice, so one of them would be ignored")
        given[option] = _number(option, value) if option in _NUMBERS else value
    mixtures = {option: given.pop(option) for option in _MIXTURES if option in given}
    stream = Stream(name=name, kind=kind, **given, mixture=next(iter(mixtures.values()), None))
    if not (math.isfinite(stream.weight) and stream.weight >= 0):
        raise ValueError(f"has weight={stream.weight:g}, which is not finite and >= 0")
    if name in SHORTHANDS:
        raise ValueError(f"has a name that belongs to {SHORTHANDS[name]}; choose another")
    if name == POLICY:
        _check_policy(stream)
    else:
        _check_aggregation(stream)
        _check_estimator(stream)
        _check_topk(stream, mixtures)
    return stream


def _number(option: str, text: str) -> float:
    """Plain decimals only: Python's float() also reads 1_0 and the digits of other scripts."""
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"has {option}={text}, which is no number")
    value = float(text)
    if value == 0 and any(digit in text.lower().partition("e")[0] for digit in "123456789"):
        raise ValueError(f"has {option}={text}, which is 0 in float64; the smallest number is 5e-324")
    return value


def _check_policy(stream: Stream) -> None:
    if stream != Stream(name=POLICY, kind=POLICY, weight=0.0):
        raise ValueError(
            "takes weight=0, no objective, and nothing else: other weights are relative to it, and its aggregation is --loss-aggregation"
        )


def _check_aggregation(stream: Stream) -> None:
    choices = (*AGGREGATIONS, AS_POLICY)
    if stream.aggregation not in (None, *choices):
        hint = did_you_mean(stream.aggregation, choices, {})
        raise ValueError(f"has aggregation={stream.aggregation}, which is none of {', '.join(choices)}{hint}")
    if stream.aggregation == AS_POLICY and stream.on != POLICY:
        raise ValueError(f"has aggregation={AS_POLICY}, the weights of the objective's tokens; add on={POLICY}")
    takes_divisor = stream.aggregation in AGGREGATIONS and AGGREGATIONS[stream.aggregation].takes_divisor
    if stream.divisor is not None and not takes_divisor:
        raise ValueError(f"has divisor={stream.divisor:g}, which has no effect without aggregation=constant")
    if takes_divisor and not (stream.divisor is not None and 0 < stream.divisor < math.inf):
        raise ValueError("has aggregation=constant, which needs divisor=L in tokens, finite and > 0")


def _check_estimator(stream: Stream) -> None:
    kind = KINDS[stream.kind]
    if stream.estimator is None:
        if kind.against is not None and kind.estimator is None:
            raise ValueError("needs estimator=…; there is no default (k3_weighted has the right value and gradient)")
    elif kind.against is None:
        why = "is no KL divergence"
        if kind.reads_topk or kind.whole_form:
            why = f"needs none: it is exact over {'its categories' if kind.reads_topk else 'the vocabulary'}"
        raise ValueError(f"has estimator={stream.estimator}, and {stream.kind} {why}; remove it")
    elif stream.estimator not in KL_ESTIMATORS:
        hint = did_you_mean(stream.estimator, KL_ESTIMATORS, {})
        raise ValueError(f"has estimator={stream.estimator}, which is none of {', '.join(KL_ESTIMATORS)}{hint}")


def _check_topk(stream: Stream, mixtures: Mapping[str, float]) -> None:
    kind = KINDS[stream.kind]
    own = kind.mixture.option if kind.mixture else None
    if strays := [option for option in mixtures if option != own]:
        instead = f"; it has {own}" if own else ""
        raise ValueError(f"has {strays[0]}={mixtures[strays[0]]:g}, which {stream.kind} does not read{instead}")
    if stream.mixture is not None and not 0 < stream.mixture < 1:
        raise ValueError(
            f"has {own}={stream.mixture:g}, which is not between 0 and 1, where one of the two would be alone"
        )
    if stream.temperature is not None and not kind.reads_topk:
        raise ValueError(
            f"has temperature={stream.temperature:g}, and {stream.kind} has no teacher of whose likeliest tokens it would be; remove it"
        )
