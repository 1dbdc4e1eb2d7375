"""The flags of samples that say what could be sampled (`Sample.support`). Needs no torch."""

import argparse

from megatron_pg.declarations.choices import ENTROPY_SUPPORTS, SUPPORT_MISSING
from megatron_pg.flags.errors import Violations
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.values import choice


def add_support_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags."""
    group.add_argument(
        "--pg-support-missing",
        choices=SUPPORT_MISSING,
        default="error",
        help="A trained token that its sample's support does not hold: error (the default) stops the step, mask leaves the token out "
        "before anything is counted.",
    )
    group.add_argument(
        "--pg-entropy-support",
        choices=ENTROPY_SUPPORTS,
        default="full",
        help="What the entropy of a token with a support is over: full (the default), the whole vocabulary, or kept, its support.",
    )


def support_violations(facts: Facts) -> Violations:
    """Rules E25 and E40 over them."""
    args = facts.args
    yield from choice("--pg-support-missing", args.pg_support_missing, SUPPORT_MISSING)
    yield from choice("--pg-entropy-support", args.pg_entropy_support, ENTROPY_SUPPORTS)
    if args.pg_entropy_support == "kept" and not _reads_entropy(facts):
        yield (
            "E40",
            "--pg-entropy-support kept has no effect without an entropy: --pg-entropy-coef, a --pg-term of the kind entropy or --pg-metrics "
            "with_entropy; remove it or give one",
        )


def _reads_entropy(facts: Facts) -> bool:
    if facts.args.pg_entropy_coef != 0 or facts.args.pg_metrics == "with_entropy" or facts.wrong_terms:
        return True
    return any(term.kind == "entropy" and term.weight for term in facts.given_terms)
