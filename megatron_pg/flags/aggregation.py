"""The rules of the aggregation, and of the functions that users bring. Needs no torch."""

import argparse
from typing import Any

from megatron_pg.declarations.aggregations import AGGREGATIONS, DEFAULT, STEP_MEANS, elsewhere
from megatron_pg.declarations.choices import OBJECTIVE_PARAMETERS, REDUCER_PARAMETERS
from megatron_pg.flags.errors import Violations
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.import_path import (
    ImportFailedError,
    ImportPathError,
    load_function,
    source_of,
    split_import_path,
)
from megatron_pg.flags.values import choice, is_finite


def reconcile(args: argparse.Namespace) -> list[str]:
    """Make `token_mean` and the per-token flag, two names of one aggregation, agree (R1, R2); return what changed.

    An aggregation that was not given (None) becomes the default, which the per-token flag decides.
    """
    per_token = vars(args).get("calculate_per_token_loss", False)
    if args.loss_aggregation is None:
        args.loss_aggregation = STEP_MEANS[per_token]
        given = f"R2 --calculate-per-token-loss makes --loss-aggregation {STEP_MEANS[True]}, not {DEFAULT}."
        return [given] if per_token else []
    if AGGREGATIONS[args.loss_aggregation].is_per_token and not per_token:
        args.calculate_per_token_loss = True
        return [f"R1 --loss-aggregation {args.loss_aggregation} switches --calculate-per-token-loss on."]
    return []


def aggregation_violations(facts: Facts) -> Violations:
    """Rules E2 to E11, and E13 to E15 of the user's functions."""
    yield from _mode_rules(facts)
    yield from _divisor_rules(facts)
    if facts.per_token is True and facts.aggregation and not facts.aggregation.is_per_token:
        yield (
            f"E11 --calculate-per-token-loss is the older spelling of --loss-aggregation {STEP_MEANS[True]} and "
            f"contradicts {facts.mode}. Remove one of the two."
        )
    yield from _path("--custom-pg-loss-reducer-function-path", facts.reducer_path, REDUCER_PARAMETERS)
    path = None if facts.custom_objective is None else facts.custom_objective.name
    yield from _path("--pg-custom-objective-path", path, OBJECTIVE_PARAMETERS)


def _mode_rules(facts: Facts) -> Violations:
    if not isinstance(facts.mode, str):
        yield f"E2 --loss-aggregation is {facts.mode!r}. It must be a string."
    elif facts.aggregation is None:
        yield from choice("--loss-aggregation", facts.mode, AGGREGATIONS, "E3", elsewhere())
    if not isinstance(facts.per_token, bool):
        yield f"E4 calculate_per_token_loss is {facts.per_token!r}. It must be true or false."


def _divisor_rules(facts: Facts) -> Violations:
    divisor, needs_one = facts.divisor, facts.aggregation is not None and facts.aggregation.takes_divisor
    if divisor is None:
        if needs_one and facts.reducer_path is None:
            yield (
                f"E5 --loss-aggregation {facts.mode} needs a divisor, which has no default. Give "
                "--loss-aggregation-divisor L > 0. In Dr. GRPO, L is the maximum number of response tokens of a "
                "rollout, all its turns together."
            )
        return
    if isinstance(divisor, bool) or not isinstance(divisor, (int, float)):
        rule = "E6" if isinstance(divisor, bool) else "E7"
        fix = "Write it without quotes." if isinstance(divisor, str) else "Give a number of tokens."
        yield f"{rule} --loss-aggregation-divisor is {divisor!r}, which is not a number. {fix}"
    elif not is_usable_divisor(divisor):
        yield (
            f"E8 --loss-aggregation-divisor is {divisor}. It must be finite and > 0, and 1/L a normal float32. Give a "
            "number of tokens."
        )
    if facts.reducer_path is not None:
        yield (
            f"E10 --loss-aggregation-divisor {divisor} has no effect with --custom-pg-loss-reducer-function-path, "
            "whose reducer has its own denominator. Remove one of the two."
        )
    elif facts.aggregation is not None and not needs_one:
        with_divisor = next(name for name, each in AGGREGATIONS.items() if each.takes_divisor)
        yield (
            f"E9 --loss-aggregation-divisor {divisor} has no effect with --loss-aggregation {facts.mode}. Remove it, "
            f"or choose {with_divisor}."
        )


def is_usable_divisor(divisor: float) -> bool:
    """Whether L is finite and positive and 1/L is a normal float32, so that no weight is 0 or inf."""
    return is_finite(divisor) and divisor > 0 and 2.0**-126 <= 1.0 / divisor <= (2 - 2.0**-23) * 2.0**127


def _path(flag: str, path: Any, parameters: tuple[str, ...]) -> Violations:
    if path is None:
        return
    try:
        split_import_path(path)
    except ImportPathError as error:
        yield f"E13 {flag} {error}"
        return
    try:
        load_function(path, parameters)
    except ImportPathError as error:
        rule = "E14" if isinstance(error, ImportFailedError) else "E15"
        yield f"{rule} {flag} {path!r} {error}"


def aggregation_warnings(facts: Facts) -> list[str]:
    """W1 and W2: what a custom reducer computes, and which flag it takes precedence over."""
    if facts.reducer_path is None:
        return []
    messages = []
    if facts.is_mode_given:
        messages.append(
            f"W1 --custom-pg-loss-reducer-function-path takes precedence, and --loss-aggregation {facts.mode} does not "
            "shape pg_loss. Remove one of the two."
        )
    unit, source = "1/T" if facts.is_per_token else "1/N_r", _path_with_source(facts.reducer_path, REDUCER_PARAMETERS)
    return [*messages, f"W2 pg_loss = ({unit})·Σ reducer(ℓ), reducer {source}"]


def objective_source_warnings(facts: Facts) -> list[str]:
    """W9: which file a custom objective comes from."""
    if facts.custom_objective is None:
        return []
    return [f"W9 ℓ is the objective {_path_with_source(str(facts.custom_objective.name), OBJECTIVE_PARAMETERS)}"]


def _path_with_source(path: str, parameters: tuple[str, ...]) -> str:
    file, digest = source_of(load_function(path, parameters))
    return f"{path} ({file}, sha256 {digest[:12]})"
