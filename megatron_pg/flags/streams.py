"""The flag of streams, `--pg-stream NAME:kind[,option=value]…`. Needs no torch."""

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from megatron_pg.declarations.aggregations import AGGREGATIONS, STEP_MEANS
from megatron_pg.declarations.choices import DENOMINATORS
from megatron_pg.declarations.corrections import CORRECTION_COEF, CORRECTIONS, KL_ESTIMATORS, PENALTY
from megatron_pg.declarations.declaration import ABOVE_ZERO, did_you_mean
from megatron_pg.declarations.streams import AS_POLICY, KINDS, SHORTHANDS, TAIL_FLOOR, Stream
from megatron_pg.flags.errors import Violations
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.loss_terms import correction_numbers
from megatron_pg.flags.values import number
from megatron_pg.rollouts.fields import POLICY, is_stream

_KINDS = tuple(name for name, kind in KINDS.items() if not kind.is_of_a_correction)
_NUMBER = re.compile(r"[+-]?((\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|inf|nan)", re.ASCII | re.IGNORECASE)
_MIXTURES = tuple(dict.fromkeys(kind.mixture.option for kind in KINDS.values() if kind.mixture))
_NUMBERS = ("weight", "divisor", "temperature", *_MIXTURES)
_OPTIONS = ("weight", "aggregation", "divisor", "on", "estimator", "temperature", *_MIXTURES)


def add_stream_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flag."""
    group.add_argument(
        "--pg-stream",
        action="append",
        metavar="NAME:KIND[,OPTION=VALUE]...",
        help=f"A further loss of the step, over its own tokens, with its own denominators: kinds {', '.join(_KINDS)}; options "
        f"weight (default 1), aggregation and divisor (default: as --loss-aggregation), on (the stream whose tokens it takes, "
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


def parse(text: object) -> Stream:
    """A stream from its flag's value.

    Raises:
        ValueError: what is wrong with it by itself.
    """
    head, *parts = text.split(",") if isinstance(text, str) else [repr(text)]
    name, _, kind = head.partition(":")
    if not is_stream(name) or not kind:
        raise ValueError("does not begin with NAME:kind, a name of a-z, 0-9 and _ and what its loss is")
    known = (POLICY,) if name == POLICY else _KINDS
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


def stream_violations(facts: Facts) -> Violations:
    """Rules E71 of one stream, E72 of several, E73 of what they cannot go with."""
    texts, floor = facts.args.pg_stream, facts.args.pg_teacher_tail_floor
    if texts is None:
        yield from () if floor is None else _floor_rules(floor, ())
        yield from _hidden_rules(facts, ())
        return
    if not isinstance(texts, (list, tuple)) or not texts:
        yield "E71", f"--pg-stream must be a list of texts, one for each stream, got {texts!r}"
        return
    streams = []
    for text in texts:
        try:
            streams.append(parse(text))
        except ValueError as error:
            yield "E71", f"--pg-stream {text} {error}"
    if len(streams) == len(texts):
        yield from () if floor is None else _floor_rules(floor, streams)
        yield from _hidden_rules(facts, [stream for stream in streams if stream.name != POLICY])
        yield from (("E72", message) for message in _contradictions(streams))
        yield from _together(facts, streams)


def _floor_rules(floor: object, streams: Sequence[Stream]) -> Violations:
    yield from number("--pg-teacher-tail-floor", floor, ABOVE_ZERO, math.nextafter(1.0, 0.0), "between 0 and 1")
    if not any(KINDS[stream.kind].has_tail for stream in streams if stream.name != POLICY and stream.reads_topk):
        yield (
            "E73",
            f"--pg-teacher-tail-floor {floor} has no effect without a --pg-stream of a kind topk_* that has a tail; remove it",
        )


def _hidden_rules(facts: Facts, streams: Sequence[Stream]) -> Violations:
    """A teacher over the whole vocabulary: its head, and the student's in whose chunks its logits are made."""
    head, readers = facts.args.pg_teacher_head, [stream for stream in streams if stream.reads_hidden]
    if head is not None and not (isinstance(head, str) and head.strip(":")):
        yield "E73", f"--pg-teacher-head must be PATH or PATH:NAME, got {head!r}"
    elif head is not None and not readers:
        yield "E73", f"--pg-teacher-head {head} has no effect without a --pg-stream of a kind full_*; remove it"
    readers = [stream for stream in readers if stream.weight]
    for stream in readers:
        if head is None:
            yield (
                "E73",
                f"{stream.flag} is over the whole vocabulary of a teacher, whose logits are made of its hidden states; add --pg-teacher-head "
                "PATH, its output layer",
            )
        if facts.args.pg_fused_head is None:
            yield (
                "E73",
                f"{stream.flag} makes the teacher's logits beside the model's, chunk by chunk, and without the fused head all of both would be "
                "stored; add --pg-fused-head forward, or recompute",
            )
        if (stream.kind, stream.mixture) != (readers[0].kind, readers[0].mixture):
            yield (
                "E73",
                f"{stream.flag} and {readers[0].flag} are two divergences from one teacher's hidden states, and its logits are read for one; "
                "give both the same kind and beta",
            )
        for other in (each for each in streams if each.reads_topk and each.weight):
            yield (
                "E73",
                f"{stream.flag} has the whole vocabulary of the teacher and {other.flag} its likeliest tokens, and a forward reads one of them; "
                "leave one out",
            )


def _contradictions(streams: list[Stream]) -> list[str]:
    found, own = [], {POLICY} | {stream.name for stream in streams if stream.on is None}
    names = [stream.name for stream in streams]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            found.append(
                f"--pg-stream {name} is given {names.count(name)} times, so one would be ignored; name them apart"
            )
    for stream in streams:
        if stream.on in names and stream.on not in own:
            found.append(
                f"{stream.flag},on={stream.on}: {stream.on} has no tokens of its own; name the stream whose tokens it takes"
            )
        elif stream.on is not None and stream.on not in own:
            found.append(
                f"{stream.flag},on={stream.on}: there is no such stream; choose one of {', '.join(sorted(own))}"
            )
    return found


def _together(facts: Facts, streams: list[Stream]) -> Violations:
    """What the rest of the loss would mean nothing with."""
    for stream in streams:
        theirs = 1.0 if stream.temperature is None else stream.temperature
        if stream.name != POLICY and stream.reads_topk and theirs != facts.args.pg_temperature:
            yield (
                "E73",
                f"{stream.flag} has a teacher at temperature {theirs:g}, and --pg-temperature is {facts.args.pg_temperature}: the likeliest "
                "tokens of one cannot be had from another; record them at this temperature, and say so by temperature=…",
            )
    if all(stream.name != POLICY for stream in streams):
        return
    for stream in streams:
        if stream.aggregation == AS_POLICY:
            yield (
                "E73",
                f"{stream.flag},aggregation={AS_POLICY} takes the objective's weights, and --pg-stream {POLICY}:{POLICY},weight=0 drops the "
                "objective; name an aggregation",
            )
    if not any(stream.weight for stream in streams):
        yield "E73", f"--pg-stream {POLICY}:{POLICY},weight=0 leaves no loss; add another stream, or remove it"
    of_objective = (
        ("--pg-correction", facts.args.pg_correction, {*CORRECTIONS} - {"none"}),
        ("--pg-denominator", facts.args.pg_denominator, {*DENOMINATORS} - {"scheduled"}),
    )
    for flag, value, choices in of_objective:
        if isinstance(value, str) and value in choices:  # of any other value rule E25 says so
            yield (
                "E73",
                f"{flag} {value} has no effect without the objective, which --pg-stream {POLICY}:{POLICY},weight=0 drops; remove one of "
                "the two",
            )
    if facts.args.pg_kl_coef or facts.args.pg_entropy_coef:
        yield (
            "E73",
            f"--pg-kl-coef and --pg-entropy-coef are terms of the objective, which --pg-stream {POLICY}:{POLICY},weight=0 drops; write "
            f"--pg-stream NAME:kl,on={POLICY} or NAME:entropy,on={POLICY}",
        )


def streams_given(args: argparse.Namespace) -> list[Stream]:
    """What `--pg-stream` asks for, from arguments that `validate_args` has accepted."""
    return [parse(text) for text in args.pg_stream or ()]


def has_policy(args: argparse.Namespace) -> bool:
    """Whether the objective is in the loss."""
    return all(stream.name != POLICY for stream in streams_given(args))


def own_tokens(args: argparse.Namespace) -> frozenset[str]:
    """The streams that a sample's tokens can be of, those of weight 0 too."""
    return frozenset({POLICY, *(stream.name for stream in streams_given(args) if stream.on is None)})


def _penalty(args: argparse.Namespace) -> Stream:
    """The further loss of the tokens that the correction chooses, with the objective's weights."""
    coefficient = correction_numbers(args)[CORRECTION_COEF.name]
    return Stream(name=PENALTY, kind=PENALTY, weight=coefficient, on=POLICY, aggregation=AS_POLICY, estimator="abs")


def streams_of(args: argparse.Namespace) -> tuple[Stream, ...]:
    """All further losses with a weight > 0, whole, from arguments that `validate_args` has accepted; the shorthands first."""
    step_mean = STEP_MEANS[vars(args).get("calculate_per_token_loss", False)]
    of_terms = AS_POLICY if args.pg_aux_aggregation == "policy" else step_mean
    of_policy = args.loss_aggregation, args.loss_aggregation_divisor
    if args.custom_pg_loss_reducer_function_path is not None:
        of_policy = step_mean, None
    floor = TAIL_FLOOR if args.pg_teacher_tail_floor is None else args.pg_teacher_tail_floor
    term = partial(Stream, on=POLICY, aggregation=of_terms)
    found = [
        term(name="kl", kind="kl", weight=args.pg_kl_coef, estimator=args.pg_kl_estimator),
        term(name="entropy", kind="entropy", weight=args.pg_entropy_coef),
        *([_penalty(args)] if args.pg_correction == PENALTY else []),
        *(stream.resolved(*of_policy, floor) for stream in streams_given(args) if stream.name != POLICY),
    ]
    return tuple(stream for stream in found if stream.weight)
