"""The command line: `add_arguments`, and `validate_args`, which checks every rule of `flags`.

`add_arguments` is an `extra_args_provider` of Megatron. `validate_args` runs after the *last* merge of command
line, YAML and recipe, and before Megatron builds its model config, because that config freezes the per-token
flag into DDP. It reports every violation at once; only `reconcile` changes an argument.
"""

import argparse
import hashlib
import json
import math
import os
import warnings

from megatron_pg.declarations.declaration import flag_of
from megatron_pg.flags.aggregation import (
    aggregation_violations,
    aggregation_warnings,
    objective_source_warnings,
    reconcile,
)
from megatron_pg.flags.compatibility import compatibility_violations, compatibility_warnings
from megatron_pg.flags.documents import documents_violations
from megatron_pg.flags.errors import ArgumentError, ArgumentNotice, ArgumentWarning, Violations, numbered
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.head import head_violations, head_warnings
from megatron_pg.flags.megatron import RULE_ARGUMENTS
from megatron_pg.flags.objective import objective_violations, objective_warnings, role_violations, weight_violations
from megatron_pg.flags.spelling import add_hints, add_moved_arguments
from megatron_pg.flags.table import DEFAULTS, add_flags, switch_rules, word_rules
from megatron_pg.flags.terms import sampling_mask_violations, term_violations
from megatron_pg.flags.values import number

__all__ = [
    "ArgumentError",
    "ArgumentNotice",
    "ArgumentWarning",
    "add_arguments",
    "checkpoint_changes",
    "default_arguments",
    "disagreement",
    "own_arguments",
    "rank_snapshot",
    "reconcile",
    "snapshot",
    "validate_args",
]

# Arguments of this package that change no loss or gradient, or only the samples of a step.
_NOT_OF_THE_LOSS = (
    *("pg_metrics", "pg_no_mismatch_advice", "pg_kernel", "pg_dry_run"),
    *("docs_per_step_end", "docs_per_step_drop_position"),
)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add megatron_pg's flags to Megatron's parser and return it (an `extra_args_provider`).

    The group of the common flags is the first one.
    """
    add_flags(parser)
    add_moved_arguments(parser)
    add_hints(parser, [flag_of(name) for name in DEFAULTS])
    return parser


def default_arguments() -> dict[str, object]:
    """The attributes that `add_arguments` defines, with their defaults."""
    return dict(DEFAULTS)


def own_arguments() -> tuple[str, ...]:
    """Names of the attributes that `add_arguments` defines."""
    return tuple(DEFAULTS)


def validate_args(args: argparse.Namespace) -> argparse.Namespace:
    """Check every rule, reconcile `token_mean` with the per-token flag, and return `args`.

    Call it after Megatron's own validation and after the last merge; it may be called again.

    Raises:
        ArgumentError: with every violation of the decision table at once.
    """
    attributes = vars(args)
    if missing := [name for name in own_arguments() if name not in attributes]:
        message = (
            f"the arguments lack {', '.join(missing)} of megatron_pg: --yaml-cfg replaces the parsed namespace. Set "
            "what is missing in the YAML file."
        )
        raise ArgumentError([("E1", message)])
    facts = Facts(args)
    validated_before = "megatron_pg_validated" in attributes
    if violations := (_late_changes(args) if validated_before else []) or _violations(facts):
        raise ArgumentError(violations)
    if validated_before:
        return args
    _say(ArgumentNotice, reconcile(args))
    of_functions = aggregation_warnings, compatibility_warnings, objective_source_warnings
    sources = *of_functions, objective_warnings, head_warnings
    _say(ArgumentWarning, [message for warnings_of in sources for message in warnings_of(facts)])
    args.megatron_pg_validated = json.dumps(snapshot(args))  # primitive: Megatron stores it in checkpoints
    return args


def disagreement(per_rank: list[dict[str, str | None]]) -> str | None:
    """The first name on which the ranks' texts differ, as the message of rule E23; None when they agree."""
    for name in sorted(set().union(*per_rank)):
        first, *others = [values.get(name) for values in per_rank]
        for rank, value in enumerate(others, start=1):
            if value != first:
                return f"ranks disagree on {name}: rank 0 has {first}, rank {rank} has {value}. Give all the same."
    return None


def _violations(facts: Facts) -> list[tuple[str, str]]:
    of_policies = objective_violations, term_violations, sampling_mask_violations, head_violations
    rules = (
        *(aggregation_violations, _common_rules, role_violations),
        *(() if facts.is_critic else of_policies),  # a critic's rule refuses their flags
        *(weight_violations, documents_violations, compatibility_violations),
    )
    return numbered(violation for rule in rules for violation in rule(facts))


def _common_rules(facts: Facts) -> Violations:
    args = facts.args
    yield from number(
        "--pg-temperature", args.pg_temperature, 2.0**-126, math.inf, "finite and > 0 as a normal float32"
    )
    yield from word_rules(args, "--pg-metrics", "--pg-kernel")
    yield from switch_rules(args, "--pg-dry-run", "--pg-no-mismatch-advice")


def snapshot(args: argparse.Namespace) -> dict[str, object]:
    """The arguments that decide the loss, by name: what is compared between calls and between ranks."""
    names = (*own_arguments(), "calculate_per_token_loss")
    return {name: vars(args).get(name, False) for name in names}


def rank_snapshot(args: argparse.Namespace) -> dict[str, str]:
    """Every argument that a rule reads, by name, as text, before validation: what must agree between the ranks."""
    names = (*own_arguments(), *RULE_ARGUMENTS)
    return {name: _as_text(vars(args)[name]) for name in names if name in vars(args)}


def checkpoint_changes(saved: argparse.Namespace, args: argparse.Namespace) -> list[str]:
    """Changes of the loss since a checkpoint, as "--flag: old, now new"; both arguments must be validated."""
    if "megatron_pg_validated" not in vars(saved):
        return []  # trained without this loss
    then, now = json.loads(saved.megatron_pg_validated), json.loads(json.dumps(snapshot(args)))
    names = [n for n in now if n in then and n not in _NOT_OF_THE_LOSS and then[n] != now[n]]
    return [f"{flag_of(name)}: {then[name]}, now {now[name]}" for name in names]


def _as_text(value: object) -> str:
    """The value as text; a long value is cut and gets a hash, because the message between ranks has a fixed size."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:40]}… ({hashlib.sha256(text.encode()).hexdigest()[:16]})"


def _late_changes(args: argparse.Namespace) -> list[tuple[str, str]]:
    before, now = json.loads(args.megatron_pg_validated), snapshot(args)
    changed = [n for n in now if now[n] != before.get(n) or isinstance(now[n], bool) != isinstance(before.get(n), bool)]
    advice = "Call validate_args after the last merge."
    return [("E22", f"{n} was {before.get(n)!r} when validated and is {now[n]!r} now. {advice}") for n in changed]


def _say(category: type[Warning], messages: list[str]) -> None:
    if os.environ.get("RANK", "0") == "0":
        for rule, message in numbered(messages):
            warnings.warn(f"[{rule}] {message}", category, stacklevel=3)
