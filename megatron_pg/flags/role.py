"""The flags of the trained model's role, policy or critic, and their rules. Needs no torch."""

import argparse
from collections.abc import Mapping

from megatron_pg.declarations.choices import ROLES
from megatron_pg.declarations.objectives import VALUE_CLIP
from megatron_pg.flags.errors import Violations
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.values import choice, number

# A critic reads these arguments in addition to those of its role; all others are about log-probabilities.
_OF_BOTH = (
    *("loss_aggregation", "loss_aggregation_divisor", "custom_pg_loss_reducer_function_path"),
    *("pg_denominator", "pg_grad_divisor", "pg_metrics", "pg_dry_run"),
    *("docs_per_step", "docs_per_step_policy", "docs_per_step_end", "docs_per_step_drop_position"),
)


def add_role_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags."""
    role = (
        "What the model is. policy (default): it gives logits. critic: it has a value head, of "
        "megatron_pg.add_value_head, and learns the samples' returns by PPO's value loss."
    )
    group.add_argument("--pg-role", choices=ROLES, default="policy", help=role)
    clip = (
        "Hold a critic's value to EPS around the sample's old value in the value loss; EPS > 0. Default: not clipped."
    )
    group.add_argument(str(VALUE_CLIP.flag), type=float, metavar="EPS", help=clip)


def role_violations(facts: Facts, defaults: Mapping[str, object]) -> Violations:
    """Rules E24, E25 and E45; `defaults` are those of all arguments."""
    args, clip = facts.args, facts.args.pg_value_clip
    yield from choice("--pg-role", args.pg_role, ROLES)
    if clip is not None:
        yield from number(str(VALUE_CLIP.flag), clip, VALUE_CLIP.low, VALUE_CLIP.high, VALUE_CLIP.requirement)
    if not facts.is_critic:
        if clip is not None:
            yield f"E45 {VALUE_CLIP.flag} {clip} has no effect without --pg-role critic; remove it, or add that role"
        return
    for name, default in defaults.items():
        value = vars(args)[name]
        if name not in (*_OF_BOTH, "pg_role", VALUE_CLIP.attribute) and value != default:
            shown = "" if value is True else f" {value}"
            yield f"E45 --{name.replace('_', '-')}{shown} has no meaning with --pg-role critic; remove it"
    if args.pg_metrics == "with_entropy":
        yield "E45 --pg-metrics with_entropy has no meaning with --pg-role critic, which has no entropy; use basic"
