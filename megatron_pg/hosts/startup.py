"""From a host's options to the loss settings: defaults, rules, inherited flags and the banner."""

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
from megatron_pg.declarations.aggregations import is_by_turn
from megatron_pg.declarations.declaration import Number, did_you_mean
from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.flags.banner import banner_of, describe, in_force
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.megatron import RULE_ARGUMENTS
from megatron_pg.flags.option_text import Selection, joined
from megatron_pg.flags.spelling import replacement
from megatron_pg.plan.settings import LossSettings
from megatron_pg.rollouts.fields import POLICY

# Arguments of Megatron's own training loop. A host has its own batches, steps and evaluations, and its model adds the
# losses of multi-token prediction itself.
_LOOP_ARGUMENTS = {
    *("dataloader_type", "eval_interval", "eval_iters", "iterations_to_skip", "perform_rl_step", "rampup_batch_size"),
    *("decrease_batch_size_if_needed", "sft", "train_samples", "mtp_num_layers", "mtp_loss_scaling_factor"),
}
_CARRIED = ("old_logprobs", "ref_logprobs")  # fields that the batches of every host can contain
_WITH_OPTIONS = ("pg_objective", "pg_correction")  # arguments of the form NAME[,option=value]…
_PER_TOKEN = "calculate_per_token_loss"  # a host cancels Megatron's division for every aggregation
_ROWS_OF_MEGATRON = {"Megatron", "layout"}  # of the banner: a host has its own loss scaling and layout


@dataclass(frozen=True, slots=True)
class Inherited:
    """A value that one of our arguments, or an option in it, takes from a flag of the host."""

    host_flag: str  # as the host's user writes it
    attribute: str  # ours
    value: Any
    is_default: bool = False  # the host's user has not set it
    option: str | None = None  # of our argument's text; None: the whole argument, or the name that the text begins with

    @classmethod
    def number(cls, host_flag: str, number: Number, value: Any, *, is_default: bool = False) -> "Inherited":
        """A number of the objective."""
        if number.flag is not None:
            return cls(host_flag, number.attribute, value, is_default)
        return cls(host_flag, "pg_objective", value, is_default, number.name)

    @property
    def ours(self) -> str:
        """Our flag, with the option."""
        return flag_of(self.attribute) + (f" …,{self.option}=" if self.option else "")

    def of(self, text: Any) -> Any:
        """The value in our argument that this one replaces; None for an option that is not given."""
        if self.option is not None:
            selected = Selection.of(self.ours, text)
            return selected.numbers.get(self.option, selected.given.get(self.option))
        return Selection.of(self.ours, text).name if self.attribute in _WITH_OPTIONS else text

    def put_into(self, text: Any) -> Any:
        """Our argument with this value."""
        if self.option is None:
            return text if self.of(text) == self.value else self.value
        selected = Selection.of(self.ours, text)
        return joined(str(selected.name), {**selected.given, self.option: self.value})

    @property
    def name(self) -> str:
        """The name of the flag alone."""
        return self.host_flag.partition(" ")[0].rstrip(",")


def numbers_of(objective: Any) -> set[Number]:
    """The numbers that an objective reads, from its name or the text of our flag."""
    declared = OBJECTIVES.get(str(Selection.of("pg_objective", objective).name))
    return set(declared.numbers) if declared else set()


def flag_of(name: str) -> str:
    """The flag of an argument."""
    return "--" + name.replace("_", "-")


def add_host_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags, and the path of a run's metrics."""
    add_arguments(parser)
    metrics_file = (
        "metrics.jsonl of the run, one line per optimizer step; a resumed run continues it. Default: no file."
    )
    parser.add_argument("--pg-metrics-file", metavar="PATH", help=metrics_file)
    return parser


def defaults() -> dict[str, Any]:
    """The default values of our arguments."""
    return vars(add_host_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args([]))


class CheckedArguments(NamedTuple):
    """Arguments that passed every rule."""

    args: argparse.Namespace
    rows: list[tuple[str, str]]  # of the banner, about the host


def check(
    host: str,
    given: Mapping[str, Any],
    *,
    megatron: Mapping[str, Any],
    inherited: Iterable[Inherited] = (),
    refused: Iterable[str] = (),
    carried: Collection[str] = _CARRIED,
    names_terms: bool = False,
) -> CheckedArguments:
    """Fill in the defaults and the host's values, and check every rule. Needs no GPU and no process group.

    Args:
        host: its name.
        given: our arguments by attribute; a missing one has its default.
        megatron: Megatron's arguments or configuration, as far as the host has them.
        inherited: values that our arguments take from the host's flags where ours are not given.
        refused: messages about flags of the host that this loss does not support.
        carried: fields of the samples that its batches can contain.
        names_terms: whether a sample can be of a loss term other than the objective's.

    Raises:
        ArgumentError: with every violation at once.
    """
    known, flags = defaults(), [*inherited]
    ours, rows, violations = _merged(host, given, known, flags)
    args = argparse.Namespace(**ours)
    violations += [("E70", message) for message in (*refused, *_refused_of_ours(args, carried))]
    facts = {name: megatron[name] for name in RULE_ARGUMENTS if name in megatron and name not in _LOOP_ARGUMENTS}
    per_token = bool(facts.pop(_PER_TOKEN, False))
    if ours["loss_aggregation"] is None:
        facts[_PER_TOKEN] = per_token
    args = argparse.Namespace(**facts | ours)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ArgumentNotice)  # about Megatron's per-token flag, which stays the host's
        try:
            validate_args(args)
        except ArgumentError as error:
            inherits = [f for f in flags if f.of(given.get(f.attribute)) in (None, f.of(known[f.attribute]))]
            violations += [(rule, _by_host_flags(message, inherits)) for rule, message in error.violations]
        else:
            violations += [("E70", message) for message in _refused_terms(host, args, carried, names_terms)]
    if violations:
        raise ArgumentError(violations)
    if per_token and not facts.get(_PER_TOKEN):
        text = f"--calculate-per-token-loss only sets how {host} and Megatron divide, not the aggregation"
        rows = [*rows, ("per-token flag", text)]
    args.calculate_per_token_loss = per_token or vars(args).get(_PER_TOKEN, False)
    return CheckedArguments(args, rows)


def start(host: str, checked: CheckedArguments, *, scaling: str, says: bool) -> tuple[LossSettings, dict[str, str]]:
    """The settings in force and the rows of the banner, which this process prints if `says` is true.

    `scaling` says what the host multiplies and divides the returned loss by.
    """
    args = checked.args
    settings = LossSettings.from_args(args)
    rows = [row for row in describe(in_force(args, settings.kernel)) if row[0] not in _ROWS_OF_MEGATRON]
    rows += [(host, scaling), *checked.rows]
    if says:
        print(banner_of(rows), flush=True)  # noqa: T201
    return settings, dict(rows)


def _merged(
    host: str, given: Mapping[str, Any], known: Mapping[str, Any], inherited: Iterable[Inherited]
) -> tuple[dict[str, Any], list[tuple[str, str]], list[tuple[str, str]]]:
    """Our arguments (given, inherited or default, in this order), the banner's row, and violations."""
    ours, rows = dict(known), []
    violations = [("E70", _unknown_message(name, value, known)) for name, value in given.items() if name not in known]
    ours |= {name: value for name, value in given.items() if name in known}
    for flag in inherited:
        text = ours[flag.attribute]
        value, usual = flag.of(text), flag.of(known[flag.attribute])
        if value != usual and flag.is_default:
            continue
        if value not in (usual, flag.value):
            theirs, own = f"{flag.host_flag} of {host}, {flag.value},", f"{flag_of(flag.attribute)} {text}"
            violations.append(("E70", f"{theirs} and {own} contradict each other; remove one"))
        ours[flag.attribute] = flag.put_into(text)
        rows.append(f"{flag.host_flag} is {flag.ours}{'' if flag.option else ' '}{flag.value}")
    return ours, [("inherited", "; ".join(rows))] if rows else [], violations


def _unknown_message(name: str, value: Any, known: Mapping[str, Any]) -> str:
    if (line := replacement(name, value)) is not None:
        return f"{name} is not an argument since 0.3.0. Write {line}."
    return f"{name} is not an argument of megatron_pg{did_you_mean(name, known, {})}"


def _by_host_flags(message: str, inherits: Iterable[Inherited]) -> str:
    """The message with the host's flags for ours that inherit from them."""
    names = {(flag_of(flag.attribute), flag.option): flag.name for flag in inherits}

    def shown(match: re.Match) -> str:
        flag, option, value = match.groups()
        if (flag, option) in names and option is not None:
            return f"{names[flag, option]} {value}"
        return names.get((flag, None), flag) + match[0].removeprefix(flag)

    return re.sub(r"(--[\w-]+)(?: \w+,(\w+)=(\S+))?", shown, message)


def _refused_of_ours(args: argparse.Namespace, carried: Collection[str]) -> Iterator[str]:
    """Messages about arguments that belong to Megatron's own loop, or read what the host's batches do not contain."""
    if args.pg_role == "critic":
        yield "--pg-role critic has no effect here, where this loss replaces that of the host's actor; remove it"
    if args.docs_per_step:
        yield f"--docs-per-step {args.docs_per_step} sets the size of steps, which the host sets here; remove it"
    reads_masks = args.pg_sampling_mask_missing != "error" or args.pg_sampling_mask_entropy != "full"
    if "sampling_mask" not in carried and reads_masks:
        flags = "--pg-sampling-mask-missing and --pg-sampling-mask-entropy"
        yield f"{flags} are of samples with a sampling mask, which the host's batches do not have; remove them"
    if args.pg_logit_softcap is not None:
        capped = f"--pg-logit-softcap {args.pg_logit_softcap} caps logits in the loss alone"
        yield f"{capped}, and not those of the host's old log-probabilities; use a model that caps its logits"
    if args.pg_dry_run:
        yield "--pg-dry-run ends Megatron's pretrain() before it builds the model, which the host builds; remove it"
    of_samples = (
        ("turns", is_by_turn(args.loss_aggregation), f"--loss-aggregation {args.loss_aggregation}"),
        ("turns", args.pg_sequence_level == "turn", "--pg-sequence-level turn"),
        ("token_weights", args.pg_weight_denominator == "weights", "--pg-weight-denominator weights"),
    )
    for name, is_read, flag in of_samples:
        if is_read and name not in carried:
            yield f"{flag} reads {name} of samples, which the host's batches do not contain; remove it"
    if "old_entropies" not in carried and Facts(args).selected_correction.name == "top_entropy":
        reads = "reads old_entropies, which the host's batches do not contain"
        yield f"--pg-correction top_entropy {reads}; choose another correction"


def _refused_terms(host: str, args: argparse.Namespace, carried: Collection[str], names_terms: bool) -> Iterator[str]:
    """Loss terms that would have no tokens, or none of what they read."""
    for term in Facts(args).further:
        if term.on is None and not names_terms:
            yield (
                f"{term.flag}: the batches of {host} name no loss terms, so it has no tokens; take those of the "
                f"objective with on={POLICY}"
            )
        for name in term.reads:
            if name not in carried:
                yield f"{term.flag} reads {name}, which the batches of {host} do not contain; remove it"


def run(main: Callable[[Sequence[str]], None]) -> None:
    """Run a launcher's command; an argument error is printed without a traceback."""
    try:
        main(sys.argv[1:])
    except ArgumentError as error:
        sys.exit(str(error))


def attribute(path: str) -> Any:
    """The current value of `module:name` or `module:Class.name` of a host; another plugin may have replaced it."""
    module, _, name = path.partition(":")
    return functools.reduce(getattr, name.split("."), import_module(module))


def check_signature(version: str, path: str, parameters: Sequence[str]) -> str:
    """Refuse a host whose function has other parameters than the adapter expects.

    Args:
        version: the host and the version that the adapter was run with.
        path: the function, `module:name`; several with `|` between them: the first that exists in this release.
        parameters: the names of its first parameters.

    Returns:
        The path of the function that exists.

    Raises:
        ArgumentError: they differ, or no such function exists.
    """
    names, cause = None, None
    for each in path.split("|"):
        try:
            names = [*inspect.signature(attribute(each)).parameters]
        except (ImportError, AttributeError) as error:
            found, cause = f"does not exist ({error}), and the loss needs it", error
        else:
            if names[: len(parameters)] == [*parameters]:
                return each
            found, cause = f"takes ({', '.join(names)}), not ({', '.join(parameters)})", None
            break
    fix = f"use that version{'' if names else ' and put its checkout on PYTHONPATH'}"
    message = f"{each} {found} as in {version}; {fix}, or use a megatron_pg that supports yours"
    raise ArgumentError([("E70", message)]) from cause
