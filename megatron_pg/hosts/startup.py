"""From a host's options to the loss settings: defaults, rules, what of the host's own flags is ours now, and the banner."""

import argparse
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_pg.args import ArgumentError, ArgumentNotice, add_arguments, validate_args
from megatron_pg.declarations.declaration import did_you_mean
from megatron_pg.flags.banner import banner_of, describe, in_force
from megatron_pg.flags.megatron import RULE_ARGUMENTS
from megatron_pg.step.settings import LossSettings

# What Megatron's own loop reads of its arguments; a host brings batches, steps and evaluations itself.
_OF_THE_LOOP = {
    *("dataloader_type", "eval_interval", "eval_iters", "iterations_to_skip", "perform_rl_step", "rampup_batch_size"),
    *("decrease_batch_size_if_needed", "sft", "train_samples"),
}
_ROWS_OF_MEGATRON = {"Megatron", "layout"}  # of the banner: a host's contract and layout are its own


@dataclass(frozen=True, slots=True)
class TakenOver:
    """A flag of the host that says what one of ours says."""

    theirs: str  # as the host's user writes it
    attribute: str  # ours
    value: Any


def add_host_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Our flags, and where a host's run leaves its metrics."""
    add_arguments(parser)
    parser.add_argument(
        "--pg-metrics-file",
        metavar="PATH",
        help="metrics.jsonl of the run, one line an optimizer step; a resumed run continues it. Default: none is written.",
    )
    return parser


def defaults() -> dict[str, Any]:
    """Our arguments, none of which is given."""
    return vars(add_host_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args([]))


def start(
    host: str,
    given: Mapping[str, Any],
    *,
    megatron: Mapping[str, Any],
    taken_over: Sequence[TakenOver] = (),
    refused: Sequence[str] = (),
    contract: str,
    says: bool = True,
) -> tuple[LossSettings, dict[str, str]]:
    """The settings in force, and the rows of the banner, which this process prints if it `says`.

    Args:
        host: its name.
        given: our arguments by attribute; one that is missing has its default.
        megatron: Megatron's arguments or configuration, as far as the host has them.
        taken_over: the host's flags that stand for ours where ours are not given.
        refused: messages about flags of the host that cannot go with this loss.
        contract: how the host treats what the loss returns.
        says: whether this process prints the banner.

    Raises:
        ArgumentError: with every violation at once.
    """
    args, rows = _arguments(host, given, taken_over)
    violations = [("E70", message) for message in (*refused, *_refused_of_ours(args))]
    facts = {name: megatron[name] for name in RULE_ARGUMENTS if name in megatron and name not in _OF_THE_LOOP}
    args = argparse.Namespace(**facts | vars(args))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ArgumentNotice)  # about Megatron's per-token flag, which stays the host's
        try:
            validate_args(args)
        except ArgumentError as error:
            raise ArgumentError([*violations, *error.violations]) from None
    if violations:
        raise ArgumentError(violations)
    settings = LossSettings.from_args(args)
    known = [row for row in describe(in_force(args, settings.impl)) if row[0] not in _ROWS_OF_MEGATRON]
    rows = [*known, (host, contract), *rows]
    if says:
        sys.stdout.write(banner_of(rows) + "\n")
        sys.stdout.flush()
    return settings, dict(rows)


def _arguments(
    host: str, given: Mapping[str, Any], taken_over: Sequence[TakenOver]
) -> tuple[argparse.Namespace, list[tuple[str, str]]]:
    """Ours before the host's before defaults, and the banner's row about the host's."""
    known, violations = defaults(), []
    for name in given.keys() - known.keys():
        hint = did_you_mean(name, known, {})
        violations.append(("E70", f"{name} is no argument of megatron_pg{hint}"))
    ours, rows = known | dict(given), []
    for flag in taken_over:
        flag_of_ours = "--" + flag.attribute.replace("_", "-")
        is_given = ours.get(flag.attribute) != known[flag.attribute]
        if is_given and ours[flag.attribute] != flag.value:
            violations.append(
                (
                    "E70",
                    f"{flag.theirs} of {host} and {flag_of_ours} {ours[flag.attribute]} say different things of one loss; remove one",
                )
            )
        ours[flag.attribute] = flag.value
        rows.append(f"{flag.theirs} = {flag_of_ours} {flag.value}")
    if violations:
        raise ArgumentError(violations)
    return argparse.Namespace(**ours), [("taken over", "; ".join(rows))] if rows else []


def _refused_of_ours(args: argparse.Namespace) -> list[str]:
    """What of ours belongs to Megatron's own loop."""
    refused = []
    if args.docs_per_step:
        refused.append(f"--docs-per-step {args.docs_per_step} cuts steps, which the host does here; remove it")
    if args.pg_dry_run:
        refused.append(
            "--pg-dry-run ends Megatron's pretrain() before the model is built, which the host builds here; remove it"
        )
    return refused


def check_signature(host: str, where: str, function: Callable, parameters: Sequence[str]) -> None:
    """Refuse a host whose hook has other parameters than the adapter was written for.

    Args:
        host: its name and the version that the adapter was run with.
        where: the function, as one finds it.
        function: the function.
        parameters: the names that it must have first.

    Raises:
        ArgumentError: they differ.
    """
    found = [*inspect.signature(function).parameters]
    if found[: len(parameters)] != [*parameters]:
        message = (
            f"{where} takes ({', '.join(found)}), not ({', '.join(parameters)}) as in {host}, so the loss would be called wrongly; use "
            "that version, or a megatron_pg that knows yours"
        )
        raise ArgumentError([("E70", message)])
