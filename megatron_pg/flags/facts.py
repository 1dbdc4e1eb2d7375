"""What the rules read, under the names of the decision table."""

import argparse
from functools import cached_property, partial
from typing import Any

from megatron_pg.declarations import objectives
from megatron_pg.declarations.aggregations import AGGREGATIONS, STEP_MEANS, AggregationDeclaration
from megatron_pg.declarations.corrections import CORRECTION_COEF, CORRECTIONS, PENALTY, CorrectionDeclaration
from megatron_pg.declarations.declaration import resolved
from megatron_pg.declarations.objectives import OBJECTIVES, ObjectiveDeclaration
from megatron_pg.declarations.streams import AS_POLICY, TAIL_FLOOR, Stream
from megatron_pg.flags.megatron import RULE_ARGUMENTS
from megatron_pg.flags.stream_text import parse
from megatron_pg.rollouts.fields import POLICY


class Facts:
    """The arguments, and what follows from them; they may break any rule."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.divisor = args.loss_aggregation_divisor
        self.reducer_path = args.custom_pg_loss_reducer_function_path
        self.objective_path = args.pg_custom_objective_path
        self.per_token = vars(args).get("calculate_per_token_loss", False)
        self.is_mode_given = args.loss_aggregation is not None
        self.mode = args.loss_aggregation if self.is_mode_given else STEP_MEANS[self.per_token is True]  # R2

    def megatron(self, name: str, default: object = None) -> Any:
        """Megatron's argument, or `default` where this release does not have it."""
        if name not in RULE_ARGUMENTS:
            raise KeyError(name)
        return vars(self.args).get(name, default)

    @property
    def aggregation(self) -> AggregationDeclaration | None:
        """What the mode is; None where it is unknown."""
        return AGGREGATIONS.get(self.mode) if isinstance(self.mode, str) else None

    @property
    def is_per_token(self) -> bool:
        """Whether the aggregation in force is what the per-token flag asks for."""
        return self.aggregation is not None and self.aggregation.is_per_token

    @property
    def objective(self) -> ObjectiveDeclaration | None:
        """The objective; None where it is the user's own, or unknown."""
        name = self.args.pg_objective
        return OBJECTIVES.get(name) if self.objective_path is None and isinstance(name, str) else None

    @property
    def correction(self) -> CorrectionDeclaration | None:
        """The correction; None where it is unknown."""
        name = self.args.pg_correction
        return CORRECTIONS.get(name) if isinstance(name, str) else None

    @cached_property
    def _parsed(self) -> list[tuple[object, Stream | ValueError]]:
        texts = self.args.pg_stream
        return [(text, _parsed_or_error(text)) for text in texts] if isinstance(texts, (list, tuple)) else []

    @property
    def wrong_streams(self) -> list[tuple[object, ValueError]]:
        """The texts of `--pg-stream` that are no streams, and why (rule E71)."""
        return [(text, stream) for text, stream in self._parsed if isinstance(stream, ValueError)]

    @property
    def given_streams(self) -> list[Stream]:
        """The streams of `--pg-stream` as they were given; the wrong texts are left out."""
        return [stream for _, stream in self._parsed if isinstance(stream, Stream)]

    @property
    def has_policy(self) -> bool:
        """Whether the objective is in the loss."""
        return all(stream.name != POLICY for stream in self.given_streams)

    @property
    def own_tokens(self) -> frozenset[str]:
        """The streams that a sample's tokens can be of, those of weight 0 too."""
        return frozenset({POLICY, *(stream.name for stream in self.given_streams if stream.on is None)})

    @property
    def objective_numbers(self) -> dict[str, float]:
        """The objective's numbers by name, given ones before defaults. A custom objective gets all that were set."""
        if self.objective_path is None:
            return resolved(OBJECTIVES[self.args.pg_objective].numbers, vars(self.args))
        given = {each.name: vars(self.args)[each.attribute] for each in objectives.numbers()}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def correction_numbers(self) -> dict[str, float]:
        """The correction's numbers by name, given ones before defaults."""
        return resolved(CORRECTIONS[self.args.pg_correction].numbers, vars(self.args))

    @property
    def streams(self) -> tuple[Stream, ...]:
        """All further losses with a weight > 0, whole, from arguments without violations; the shorthands first."""
        args, step_mean = self.args, STEP_MEANS[self.per_token]
        term = partial(Stream, on=POLICY, aggregation=AS_POLICY if args.pg_aux_aggregation == "policy" else step_mean)
        of_policy = (self.mode, self.divisor) if self.reducer_path is None else (step_mean, None)
        floor = TAIL_FLOOR if args.pg_teacher_tail_floor is None else args.pg_teacher_tail_floor
        streams = [
            term(name="kl", kind="kl", weight=args.pg_kl_coef, estimator=args.pg_kl_estimator),
            term(name="entropy", kind="entropy", weight=args.pg_entropy_coef),
            *([self._penalty()] if args.pg_correction == PENALTY else []),
            *(stream.resolved(*of_policy, floor) for stream in self.given_streams if stream.name != POLICY),
        ]
        return tuple(stream for stream in streams if stream.weight)

    def _penalty(self) -> Stream:
        """The further loss of the tokens that the correction chooses, with the objective's weights."""
        weight = self.correction_numbers[CORRECTION_COEF.name]
        return Stream(name=PENALTY, kind=PENALTY, weight=weight, on=POLICY, aggregation=AS_POLICY, estimator="abs")


def _parsed_or_error(text: object) -> Stream | ValueError:
    try:
        return parse(text if isinstance(text, str) else repr(text))
    except ValueError as error:
        return error
