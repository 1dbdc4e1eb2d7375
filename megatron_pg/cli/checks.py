"""The startup checks on a launch that is not started: `megatron_pg.args.validate_args`, with what it says collected."""

import warnings
from dataclasses import dataclass

from megatron_pg.args import ArgumentError, ArgumentNotice, ArgumentWarning, validate_args
from megatron_pg.cli.launch import Launch
from megatron_pg.cli.terminal import InputError


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the startup checks found."""

    violations: tuple[tuple[str, str], ...]  # (rule, message)
    remarks: tuple[str, ...]  # reconciliations and warnings


def check(launch: Launch) -> Verdict:
    """Run the decision table on the launch's arguments, which it reconciles; a user's functions are tried."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            args = validate_args(launch.args)
            if args.custom_pg_loss_reducer_function_path is not None:
                from megatron_pg.reducers.custom import load_custom_reducer  # imports torch

                load_custom_reducer(
                    args.custom_pg_loss_reducer_function_path,
                    calculate_per_token_loss=vars(args).get("calculate_per_token_loss", False),
                )
            if args.pg_custom_objective_path is not None:
                from megatron_pg.objectives.custom import custom_objective_of  # imports torch

                custom_objective_of(args)
        except ArgumentError as error:
            return Verdict(tuple(error.violations), ())
    ours = (each for each in caught if issubclass(each.category, (ArgumentNotice, ArgumentWarning)))
    return Verdict((), tuple(str(each.message) for each in ours))


def check_or_stop(launch: Launch) -> tuple[str, ...]:
    """The remarks on a launch that passes.

    Raises:
        InputError: with every violation, where it does not.
    """
    verdict = check(launch)
    if verdict.violations:
        raise InputError("; ".join(f"[{rule}] {message}" for rule, message in verdict.violations))
    return verdict.remarks
