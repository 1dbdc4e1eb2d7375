"""From a host's options to the loss settings: defaults, rules, inherited flags and the banner."""

import argparse
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_pg.args import ArgumentError, ArgumentNotice, add_arguments, default_arguments, validate_args
from megatron_pg.declarations.aggregations import is_by_turn
from megatron_pg.declarations.declaration import Number, attribute_of, did_you_mean, flag_of
from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.flags.banner import banner_of, describe
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
_PER_TOKEN = "calculate_per_token_loss"  # a host cancels Megatron's division for every aggregation
_NO_EFFECT = {  # our arguments that a host cannot use: why
    "pg_role": "has no effect here, where the host decides which of its models is a critic. Remove it.",
    "pg_entropy_target": "has a state that the host does not save. Remove it.",
    "docs_per_step": "sets the size of steps, which the host sets here. Remove it.",
    "pg_logit_softcap": "caps logits in the loss alone, and not those of the host's old log-probabilities. Use a model "
    "that caps its logits.",
    "pg_dry_run": "ends Megatron's pretrain() before it builds the model, which the host builds. Remove it.",
}

Rows = dict[str, str]  # of the banner: text by name


@dataclass(frozen=True, slots=True)
class Inherited:
    """A value that one of our arguments, or an option in its text, takes from a flag of the host."""

    host_flag: str  # as the host's user writes it
    ours: str  # the argument; of an option, "argument.option"
    value: Any
    is_default: bool = False  # of the host: a value of ours that is given replaces it

    @property
    def flag(self) -> str:
        """Our flag, before its value."""
        argument, _, option = self.ours.partition(".")
        return flag_of(argument) + (f" …,{option}=" if option else " ")


class Unused(str):
    """An option of the host without effect on this loss, for the banner."""


Answer = Inherited | Unused | str  # to a flag of the host; a text: why this loss does not support it


def place_of(number: Number) -> str:
    """Where `Inherited` finds a number of the objective."""
    return f"pg_objective.{number.name}" if number.flag is None else number.attribute


def numbers_of(objective: Any) -> set[Number]:
    """The numbers that an objective reads, from its name or the text of our flag."""
    declared = OBJECTIVES.get(str(Selection.of("pg_objective", objective).name))
    return set(declared.numbers) if declared else set()


def refused(given: Mapping[str, Any], reasons: Mapping[str, str], usual: Mapping[str, Any] = {}) -> Iterator[str]:
    """A message for each argument that is neither off nor as usual: its flag, its value and the reason."""
    for name, reason in reasons.items():
        if (value := given.get(name)) not in (None, False, usual.get(name)):
            yield f"{flag_of(name)}{'' if value is True else f' {value}'} {reason}"


def cut_groups(given: Mapping[str, Any], size_name: str, size: int, group_name: str, group: int) -> Iterator[str]:
    """A message if steps of `size` samples do not hold whole prompt groups, which prompt_mean needs."""
    if given.get("loss_aggregation") == "prompt_mean" and size % group:
        sizes = f"{size_name}{size} and {group_name}{group}"
        yield f"prompt_mean with {sizes} cuts the samples of a prompt into several steps. Use a multiple."


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
    return default_arguments() | {"pg_metrics_file": None}


def refuse(*messages: str, cause: Exception | None = None) -> None:
    """Raise ArgumentError if there are messages about flags that contradict each other or are not supported."""
    if messages:
        raise ArgumentError([("E70", message) for message in messages]) from cause


class CheckedArguments(NamedTuple):
    """Arguments that passed every rule."""

    args: argparse.Namespace
    rows: Rows  # of the banner, about the host


def check(
    host: str,
    given: Mapping[str, Any],  # our arguments by attribute; a missing one has its default
    *,
    megatron: Mapping[str, Any],  # Megatron's arguments or configuration, as far as the host has them
    answers: Iterable[Answer] = (),  # to the host's flags
    carried: Collection[str] = ("old_logprobs", "ref_logprobs"),  # fields of samples that its batches can contain
    names_terms: bool = False,  # whether a sample can be of a loss term other than the objective's
    role: str = "policy",  # of the model that the host trains in this process, as in --pg-role
) -> CheckedArguments:
    """Fill in the defaults and the host's values, and check every rule. Needs no GPU and no process group.

    Raises:
        ArgumentError: with every violation at once.
    """
    known, answers = defaults(), [*answers]
    flags = [answer for answer in answers if isinstance(answer, Inherited)]
    ours, rows, messages = _merged(host, given, known, flags)
    unused = [answer for answer in answers if isinstance(answer, Unused)]
    rows |= {"without effect": "; ".join(unused)} if unused else {}
    messages += [answer for answer in answers if isinstance(answer, str) and answer not in unused]
    messages += refused(ours, _NO_EFFECT, known)
    messages += _not_carried(host, _reads(argparse.Namespace(**ours)), carried)
    ours["pg_role"] = role
    violations = [("E70", message) for message in messages]
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
            inherits = [flag for flag in flags if flag.ours not in _flat(given)]
            violations += [(rule, _by_host_flags(message, inherits)) for rule, message in error.violations]
        else:
            violations += [("E70", message) for message in _of_terms(host, args, carried, names_terms)]
    if violations:
        raise ArgumentError(violations)
    if per_token and not facts.get(_PER_TOKEN):
        rows["per-token flag"] = (
            f"--calculate-per-token-loss only sets how {host} and Megatron divide, not the aggregation"
        )
    args.calculate_per_token_loss = per_token or vars(args).get(_PER_TOKEN, False)
    return CheckedArguments(args, rows)


def rows_of(host: str, checked: CheckedArguments, scaling: str, settings: LossSettings | None = None) -> Rows:
    """The rows of the banner.

    `scaling` is what the host multiplies and divides the returned loss by; `settings` what has been chosen, if known.
    """
    args = checked.args if settings is None else settings.in_force(checked.args)
    of_loss = {name: text for name, text in describe(args) if name not in ("Megatron", "layout")}  # a host has its own
    return of_loss | {host: scaling} | checked.rows


def print_banner(rows: Rows) -> None:
    """Print the rows to the host's log."""
    print(banner_of([*rows.items()]), flush=True)  # noqa: T201


def _merged(
    host: str, given: Mapping[str, Any], known: Mapping[str, Any], inherited: Iterable[Inherited]
) -> tuple[dict[str, Any], Rows, list[str]]:
    """Our arguments (given, inherited or default, in this order), the banner's row, and messages."""
    messages, shown = [], []
    for name in [name for name in given if name not in known]:
        if (line := replacement(name, given[name])) is not None:
            messages.append(f"{name} is not an argument since 0.3.0. Write {line}.")
        else:
            messages.append(f"{name} is not an argument of megatron_pg.{did_you_mean(name, known) or ' Remove it.'}")
    flat, ours = _flat(given), {name: given.get(name, usual) for name, usual in known.items()}
    for flag in inherited:
        own, argument = flat.get(flag.ours), flag.ours.partition(".")[0]
        if own is not None and flag.is_default:
            continue
        if own not in (None, flag.value):
            theirs, mine = f"{flag.host_flag} of {host}, {flag.value},", f"{flag_of(argument)} {ours[argument]}"
            messages.append(f"{theirs} and {mine} contradict each other. Remove one of the two.")
        flat[flag.ours] = flag.value
        options = {name.partition(".")[2]: value for name, value in flat.items() if name.startswith(f"{argument}.")}
        name = flat.get(argument, known[argument])
        ours[argument] = joined(name, options) if options else name
        shown.append(f"{flag.host_flag} is {flag.flag}{flag.value}")
    return ours, {"inherited": "; ".join(shown)} if shown else {}, messages


def _flat(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are given, with the options of a text as "argument.option"."""
    flat = dict(given)
    for argument in ("pg_objective", "pg_correction"):
        selected = Selection.of(argument, given.get(argument))
        if selected.given:
            options = {**selected.given, **selected.numbers}
            flat |= {argument: selected.name, **{f"{argument}.{name}": value for name, value in options.items()}}
    return flat


def _by_host_flags(message: str, inherits: Iterable[Inherited]) -> str:
    """The message with the host's flags for ours that inherit from them."""
    names = {f.ours: f.host_flag.partition(" ")[0].rstrip(",") for f in inherits}

    def shown(match: re.Match) -> str:
        flag, option, value = match.groups()
        if (place := f"{attribute_of(flag)}.{option}") in names:
            return f"{names[place]} {value}"
        return names.get(attribute_of(flag), flag) + match[0].removeprefix(flag)

    return re.sub(r"(--[\w-]+)(?: \w+,(\w+)=(\S+))?", shown, message)


def _not_carried(host: str, reads: Iterable[tuple[str, str]], carried: Collection[str]) -> Iterator[str]:
    """Messages about flags that read a field of samples which the host's batches do not contain."""
    for flag, field in reads:
        if field not in carried:
            yield f"{flag} reads {field}, which the batches of {host} do not contain. Remove it."


def _reads(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Flags that read a further field of samples, and the field."""
    fields = {
        "loss_aggregation": is_by_turn(args.loss_aggregation) and "turns",
        "pg_sequence_level": args.pg_sequence_level == "turn" and "turns",
        "pg_weight_denominator": args.pg_weight_denominator == "weights" and "token_weights",
        "pg_sampling_mask_missing": args.pg_sampling_mask_missing != "error" and "sampling_mask",
        "pg_sampling_mask_entropy": args.pg_sampling_mask_entropy != "full" and "sampling_mask",
        "pg_correction": Facts(args).selected_correction.name == "top_entropy" and "old_entropies",
    }
    return [(f"{flag_of(name)} {vars(args)[name]}", field) for name, field in fields.items() if field]


def _of_terms(host: str, args: argparse.Namespace, carried: Collection[str], names_terms: bool) -> Iterator[str]:
    """Messages about loss terms that would have no tokens, or none of what they read."""
    further = Facts(args).further
    for term in further:
        if term.on is None and not names_terms:
            yield (
                f"{term.flag} has no tokens, because the batches of {host} name no loss terms. Take those of the "
                f"objective with on={POLICY}."
            )
    yield from _not_carried(host, ((term.flag, field) for term in further for field in term.reads), carried)
