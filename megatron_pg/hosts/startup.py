"""From a host's options to the loss settings: defaults, rules, what of the host's own flags is ours now, and the banner."""

import argparse
import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from megatron_pg.args import ArgumentError, ArgumentNotice, add_arguments, validate_args
from megatron_pg.declarations.declaration import did_you_mean
from megatron_pg.flags.banner import banner_of, describe, in_force
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.megatron import RULE_ARGUMENTS
from megatron_pg.plan.settings import LossSettings
from megatron_pg.rollouts.fields import POLICY

# What Megatron's own loop reads of its arguments; a host brings batches, steps and evaluations itself, and its model adds the
# losses of multi-token prediction by itself.
_OF_THE_LOOP = {
    *("dataloader_type", "eval_interval", "eval_iters", "iterations_to_skip", "perform_rl_step", "rampup_batch_size"),
    *("decrease_batch_size_if_needed", "sft", "train_samples", "mtp_num_layers", "mtp_loss_scaling_factor"),
}
_CARRIED = ("old_logprobs", "ref_logprobs")  # what the batches of every host can have
_PER_TOKEN = "calculate_per_token_loss"  # a host multiplies what Megatron divides, whatever the aggregation is
_ROWS_OF_MEGATRON = {"Megatron", "layout"}  # of the banner: a host's contract and layout are its own


@dataclass(frozen=True, slots=True)
class TakenOver:
    """A flag of the host that says what one of ours says."""

    theirs: str  # as the host's user writes it
    attribute: str  # ours
    value: Any
    is_default: bool = False  # nobody has said it

    @property
    def ours(self) -> str:
        """Our flag."""
        return "--" + self.attribute.replace("_", "-")

    @property
    def name(self) -> str:
        """The name of the flag alone."""
        return self.theirs.partition(" ")[0].rstrip(",")


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


class Checked(NamedTuple):
    """Arguments that may be used, and what of them is the host's."""

    args: argparse.Namespace
    rows: list[tuple[str, str]]  # of the banner


def check(
    host: str,
    given: Mapping[str, Any],
    *,
    megatron: Mapping[str, Any],
    taken_over: Iterable[TakenOver] = (),
    refused: Iterable[str] = (),
    carried: Collection[str] = _CARRIED,
    names_terms: bool = False,
) -> Checked:
    """Our arguments, defaults and the host's filled in, against every rule. Needs no GPU and no rank.

    Args:
        host: its name.
        given: our arguments by attribute; one that is missing has its default.
        megatron: Megatron's arguments or configuration, as far as the host has them.
        taken_over: the host's flags that stand for ours where ours are not given.
        refused: messages about flags of the host that cannot go with this loss.
        carried: fields of the samples that its batches can have, of those that our flags read.
        names_terms: whether a sample can be of a loss term other than the objective's.

    Raises:
        ArgumentError: with every violation at once.
    """
    known = defaults()
    taken = [*taken_over]
    ours, rows, violations = _merged(host, given, known, taken)
    args = argparse.Namespace(**ours)
    violations += [("E70", message) for message in (*refused, *_refused_of_ours(args, carried))]
    facts = {name: megatron[name] for name in RULE_ARGUMENTS if name in megatron and name not in _OF_THE_LOOP}
    per_token = bool(facts.pop(_PER_TOKEN, False))
    if ours["loss_aggregation"] is None:
        facts[_PER_TOKEN] = per_token
    args = argparse.Namespace(**facts | ours)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ArgumentNotice)  # about Megatron's per-token flag, which stays the host's
        try:
            validate_args(args)
        except ArgumentError as error:
            theirs = {
                flag.ours: flag.name for flag in taken if given.get(flag.attribute) in (None, known[flag.attribute])
            }
            violations += [(rule, _in_words_of_the_host(message, theirs)) for rule, message in error.violations]
        else:
            violations += [("E70", message) for message in _refused_terms(host, args, carried, names_terms)]
    if violations:
        raise ArgumentError(violations)
    if per_token and not facts.get(_PER_TOKEN):
        text = f"--calculate-per-token-loss says how {host} and Megatron divide, not the aggregation"
        rows = [*rows, ("per-token flag", text)]
    args.calculate_per_token_loss = per_token or vars(args).get(_PER_TOKEN, False)
    return Checked(args, rows)


def start(host: str, checked: Checked, *, contract: str, says: bool) -> tuple[LossSettings, dict[str, str]]:
    """The settings in force, and the rows of the banner, which this process prints if it `says`.

    `contract` is how the host treats what the loss returns.
    """
    args = checked.args
    settings = LossSettings.from_args(args)
    rows = [row for row in describe(in_force(args, settings.kernel)) if row[0] not in _ROWS_OF_MEGATRON]
    rows += [(host, contract), *checked.rows]
    if says:
        sys.stdout.write(banner_of(rows) + "\n")
        sys.stdout.flush()
    return settings, dict(rows)


def _merged(
    host: str, given: Mapping[str, Any], known: Mapping[str, Any], taken_over: Iterable[TakenOver]
) -> tuple[dict[str, Any], list[tuple[str, str]], list[tuple[str, str]]]:
    """Ours before the host's before defaults; the banner's row about the host's; violations."""
    ours, rows = dict(known), []
    violations = [
        ("E70", f"{name} is no argument of megatron_pg{did_you_mean(name, known, {})}") for name in given.keys() - known
    ]
    ours |= {name: value for name, value in given.items() if name in known}
    for flag in taken_over:
        value = ours[flag.attribute]
        if value != known[flag.attribute] and flag.is_default:
            continue
        if value not in (known[flag.attribute], flag.value):
            message = f"{flag.theirs} of {host}, {flag.value}, and {flag.ours} {value} say different things of one loss; remove one"
            violations.append(("E70", message))
        ours[flag.attribute] = flag.value
        rows.append(f"{flag.theirs} is {flag.ours} {flag.value}")
    return ours, [("taken over", "; ".join(rows))] if rows else [], violations


def _in_words_of_the_host(message: str, theirs: Mapping[str, str]) -> str:
    """A message of our rules, with the host's flags in place of ours that nobody has set; `theirs` by our flag."""
    return re.sub(r"--[\w-]+", lambda flag: theirs.get(flag[0], flag[0]), message)


def _refused_of_ours(args: argparse.Namespace, carried: Collection[str]) -> list[str]:
    """What of ours belongs to Megatron's own loop, or reads what the host's batches do not carry."""
    refused = []
    if args.docs_per_step:
        refused.append(f"--docs-per-step {args.docs_per_step} cuts steps, which the host does here; remove it")
    if "support" not in carried and (args.pg_support_missing != "error" or args.pg_entropy_support != "full"):
        refused.append(
            "--pg-support-missing and --pg-entropy-support are of samples with a support, which the host's batches do not have, so they would "
            "have no effect; remove them"
        )
    if args.pg_dry_run:
        refused.append(
            "--pg-dry-run ends Megatron's pretrain() before the model is built, which the host builds here; remove it"
        )
    if "old_entropies" not in carried and args.pg_correction == "top_entropy":
        refused.append(
            "--pg-correction top_entropy reads old_entropies, which the host's batches do not carry; choose another correction"
        )
    return refused


def _refused_terms(host: str, args: argparse.Namespace, carried: Collection[str], names_terms: bool) -> Iterator[str]:
    """Loss terms that would have no tokens, or none of what they read."""
    for term in Facts(args).terms:
        if term.on is None and not names_terms:
            yield f"{term.flag}: the batches of {host} name no loss terms, so it would have no tokens; take those of the objective, on={POLICY}"
        for name in term.reads:
            if name not in carried:
                yield f"{term.flag} reads {name}, which the batches of {host} do not carry; remove it"


def run(main: Callable[[Sequence[str]], None]) -> None:
    """A launcher's command: what is wrong with its arguments is a message without a traceback."""
    try:
        main(sys.argv[1:])
    except ArgumentError as error:
        sys.exit(str(error))


def attribute(path: str) -> Any:
    """What a host has at `module:name` (or `module:Class.name`) now: another plugin may have replaced it."""
    module, _, name = path.partition(":")
    return functools.reduce(getattr, name.split("."), import_module(module))


def check_signature(version: str, path: str, parameters: Sequence[str]) -> None:
    """Refuse a host whose function has other parameters than the adapter was written for.

    Args:
        version: the host and the version that the adapter was run with.
        path: the function, `module:name`.
        parameters: the names that it must have first.

    Raises:
        ArgumentError: they differ, or there is no such function.
    """
    try:
        found = [*inspect.signature(attribute(path)).parameters]
    except (ImportError, AttributeError) as error:
        message = f"{path} is not there ({error}), on which the loss relies as in {version}; put its checkout on PYTHONPATH, use that version, or a megatron_pg that knows yours"
        raise ArgumentError([("E70", message)]) from error
    if found[: len(parameters)] != [*parameters]:
        message = (
            f"{path} takes ({', '.join(found)}), not ({', '.join(parameters)}) as in {version}, so the loss would be called wrongly; use that "
            "version, or a megatron_pg that knows yours"
        )
        raise ArgumentError([("E70", message)])


def first_of(version: str, paths: Sequence[str], parameters: Sequence[str]) -> str:
    """The first of several `module:name` that the installed release of a host has.

    Args:
        version: as for `check_signature`.
        paths: where releases of the host have the function.
        parameters: as for `check_signature`.

    Raises:
        ArgumentError: the release has none of them, or with other parameters.
    """
    for path in paths[:-1]:
        try:
            attribute(path)
        except (ImportError, AttributeError):
            continue
        check_signature(version, path, parameters)
        return path
    check_signature(version, paths[-1], parameters)
    return paths[-1]
