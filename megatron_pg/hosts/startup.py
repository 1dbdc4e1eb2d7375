"""From a host's options to the loss settings: defaults, rules, inherited flags and the banner."""

import argparse
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
_WITH_OPTIONS = ("pg_objective", "pg_correction")  # arguments of the form NAME[,option=value]…
_PER_TOKEN = "calculate_per_token_loss"  # a host cancels Megatron's division for every aggregation

Rows = list[tuple[str, str]]  # of the banner: name and text


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
        selected = Selection.of(self.ours, text)
        if self.option is not None:
            return selected.numbers.get(self.option, selected.given.get(self.option))
        return selected.name if self.attribute in _WITH_OPTIONS else text

    def put_into(self, text: Any) -> Any:
        """Our argument with this value."""
        if self.option is None:
            return text if self.of(text) == self.value else self.value
        selected = Selection.of(self.ours, text)
        return joined(str(selected.name), {**selected.given, self.option: self.value})


Answer = Inherited | str  # to a flag of the host; a text says why this loss does not support it


def numbers_of(objective: Any) -> set[Number]:
    """The numbers that an objective reads, from its name or the text of our flag."""
    declared = OBJECTIVES.get(str(Selection.of("pg_objective", objective).name))
    return set(declared.numbers) if declared else set()


def flag_of(name: str) -> str:
    """The flag of an argument."""
    return "--" + name.replace("_", "-")


def cut_groups(given: Mapping[str, Any], size_name: str, size: int, group_name: str, group: int) -> Iterator[str]:
    """A message if steps of `size` samples do not hold whole prompt groups, which prompt_mean needs."""
    if given.get("loss_aggregation") == "prompt_mean" and size % group:
        sizes = f"{size_name}{size} and {group_name}{group}"
        yield f"prompt_mean with {sizes}: a step would hold part of a prompt's samples; use a multiple"


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
    messages += [answer for answer in answers if isinstance(answer, str)]
    messages += _refused_of_ours(argparse.Namespace(**ours), carried)
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
            inherits = [f for f in flags if f.of(given.get(f.attribute)) in (None, f.of(known[f.attribute]))]
            violations += [(rule, _by_host_flags(message, inherits)) for rule, message in error.violations]
        else:
            violations += [("E70", message) for message in _refused_terms(host, args, carried, names_terms)]
    if violations:
        raise ArgumentError(violations)
    if per_token and not facts.get(_PER_TOKEN):
        text = f"--calculate-per-token-loss only sets how {host} and Megatron divide, not the aggregation"
        rows.append(("per-token flag", text))
    args.calculate_per_token_loss = per_token or vars(args).get(_PER_TOKEN, False)
    return CheckedArguments(args, rows)


def start(host: str, checked: CheckedArguments, *, scaling: str, says: bool) -> tuple[LossSettings, dict[str, str]]:
    """The settings in force and the rows of the banner, which this process prints if `says` is true."""
    settings = LossSettings.from_args(checked.args)
    args = in_force(checked.args, settings.kernel, settings.head_choice)
    rows = rows_of(host, CheckedArguments(args, checked.rows), scaling)
    if says:
        print_banner(rows)
    return settings, dict(rows)


def rows_of(host: str, checked: CheckedArguments, scaling: str) -> Rows:
    """The rows of the banner; `scaling` says what the host multiplies and divides the returned loss by."""
    of_loss = [row for row in describe(checked.args) if row[0] not in ("Megatron", "layout")]  # a host has its own
    return [*of_loss, (host, scaling), *checked.rows]


def print_banner(rows: Iterable[tuple[str, str]]) -> None:
    """Print the rows to the host's log."""
    print(banner_of([*rows]), flush=True)  # noqa: T201


def _merged(
    host: str, given: Mapping[str, Any], known: Mapping[str, Any], inherited: Iterable[Inherited]
) -> tuple[dict[str, Any], Rows, list[str]]:
    """Our arguments (given, inherited or default, in this order), the banner's row, and messages."""
    messages, shown = [], []
    for name in [name for name in given if name not in known]:
        if (line := replacement(name, given[name])) is not None:
            messages.append(f"{name} is not an argument since 0.3.0. Write {line}.")
        else:
            messages.append(f"{name} is not an argument of megatron_pg{did_you_mean(name, known, {})}")
    ours = {name: given.get(name, usual) for name, usual in known.items()}
    for flag in inherited:
        text = ours[flag.attribute]
        value, usual = flag.of(text), flag.of(known[flag.attribute])
        if value != usual and flag.is_default:
            continue
        if value not in (usual, flag.value):
            theirs, own = f"{flag.host_flag} of {host}, {flag.value},", f"{flag_of(flag.attribute)} {text}"
            messages.append(f"{theirs} and {own} contradict each other; remove one")
        ours[flag.attribute] = flag.put_into(text)
        shown.append(f"{flag.host_flag} is {flag.ours}{'' if flag.option else ' '}{flag.value}")
    return ours, [("inherited", "; ".join(shown))] if shown else [], messages


def _by_host_flags(message: str, inherits: Iterable[Inherited]) -> str:
    """The message with the host's flags for ours that inherit from them."""
    names = {(flag_of(f.attribute), f.option): f.host_flag.partition(" ")[0].rstrip(",") for f in inherits}

    def shown(match: re.Match) -> str:
        flag, option, value = match.groups()
        if (flag, option) in names and option is not None:
            return f"{names[flag, option]} {value}"
        return names.get((flag, None), flag) + match[0].removeprefix(flag)

    return re.sub(r"(--[\w-]+)(?: \w+,(\w+)=(\S+))?", shown, message)


def _refused_of_ours(args: argparse.Namespace, carried: Collection[str]) -> Iterator[str]:
    """Messages about arguments that belong to Megatron's own loop, or read what the host's batches do not contain."""
    if args.pg_role == "critic":
        yield "--pg-role critic has no effect here, where the host decides which of its models is a critic; remove it"
    if args.pg_entropy_target is not None:
        yield f"--pg-entropy-target {args.pg_entropy_target} has a state that the host does not save; remove it"
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
    reads = {
        f"--loss-aggregation {args.loss_aggregation}": is_by_turn(args.loss_aggregation) and "turns",
        "--pg-sequence-level turn": args.pg_sequence_level == "turn" and "turns",
        "--pg-weight-denominator weights": args.pg_weight_denominator == "weights" and "token_weights",
    }
    for flag, name in reads.items():
        if name and name not in carried:
            yield f"{flag} reads {name} of samples, which the host's batches do not contain; remove it"
    if "old_entropies" not in carried and Facts(args).selected_correction.name == "top_entropy":
        batches = "which the host's batches do not contain; choose another correction"
        yield f"--pg-correction top_entropy reads old_entropies, {batches}"


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
