"""The flags of samples with a sampling mask (`Sample.sampling_mask`). Needs no torch."""

import argparse

from megatron_pg.declarations.choices import SAMPLING_MASK_ENTROPIES, SAMPLING_MASK_MISSING
from megatron_pg.flags.errors import Violations
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.values import choice


def add_sampling_mask_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags."""
    group.add_argument(
        "--pg-sampling-mask-missing",
        choices=SAMPLING_MASK_MISSING,
        default="error",
        help="If a trained token is not in its sampling mask: error (default) stops the step; mask leaves the token "
        "out before anything is counted.",
    )
    group.add_argument(
        "--pg-sampling-mask-entropy",
        choices=SAMPLING_MASK_ENTROPIES,
        default="full",
        help="Entropy of a token with a sampling mask: full (default), over the whole vocabulary; kept, over the "
        "sampling mask.",
    )


def sampling_mask_violations(facts: Facts) -> Violations:
    """Rules E25 and E40 for them."""
    args = facts.args
    yield from choice("--pg-sampling-mask-missing", args.pg_sampling_mask_missing, SAMPLING_MASK_MISSING)
    yield from choice("--pg-sampling-mask-entropy", args.pg_sampling_mask_entropy, SAMPLING_MASK_ENTROPIES)
    if args.pg_sampling_mask_entropy == "kept" and not _reads_entropy(facts):
        yield (
            "E40 --pg-sampling-mask-entropy kept has no effect without an entropy: --pg-entropy-coef, a --pg-term of "
            "the kind entropy or --pg-metrics with_entropy; remove it or give one"
        )


def _reads_entropy(facts: Facts) -> bool:
    if facts.args.pg_entropy_coef != 0 or facts.args.pg_metrics == "with_entropy" or facts.wrong_terms:
        return True
    return any(term.kind == "entropy" and term.weight for term in facts.given_terms)
