"""The flags of `--docs-per-step` and their rules. Needs no torch."""

import argparse

from megatron_pg.declarations.choices import DOCS_ENDS, DOCS_POLICIES
from megatron_pg.flags.errors import Violations
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.values import choice


def add_documents_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags of steps that are a number of documents."""
    group.add_argument(
        "--docs-per-step",
        type=int,
        default=0,
        metavar="N",
        help="An optimizer step is N documents (samples), over all data-parallel ranks, in as many micro-batches as they "
        "take; the dataset provider returns megatron_pg.Documents. Default 0: a step is --global-batch-size rows.",
    )
    group.add_argument(
        "--docs-per-step-policy",
        choices=DOCS_POLICIES,
        help="exact (default): a step has exactly N documents, further ones wait for the next step. at_least: ranks fill whole "
        "micro-batches until there are N, and surplus documents stay in the step. Rollouts, and with prompt_mean prompt "
        "groups, are never cut.",
    )
    group.add_argument(
        "--docs-per-step-end",
        choices=DOCS_ENDS,
        help="When all documents have ended: partial (default) trains those that are too few for a step in a last one; stop "
        "leaves them. Either way every rank then leaves the loop, with a checkpoint where --save is given.",
    )
    group.add_argument(
        "--docs-per-step-drop-position",
        action="store_true",
        help="Resume a checkpoint of --docs-per-step without it: its position in the documents is lost, and the data are what the "
        "dataset provider begins with.",
    )


def documents_violations(facts: Facts) -> Violations:
    """Rules E25, E60 and E61; E62 needs the checkpoint."""
    args, documents = facts.args, facts.args.docs_per_step
    is_count = isinstance(documents, int) and not isinstance(documents, bool) and 0 <= documents < 2**62
    if not is_count:
        yield "E60", f"--docs-per-step must be a whole number of documents below 2^62, or 0 for off, got {documents!r}"
    for name, choices in (("policy", DOCS_POLICIES), ("end", DOCS_ENDS)):
        flag, value = f"--docs-per-step-{name}", vars(args)[f"docs_per_step_{name}"]
        found = [] if value is None else list(choice(flag, value, choices))
        yield from found
        if value is not None and not found and is_count and documents == 0:
            yield "E61", f"{flag} {value} has no effect without --docs-per-step; remove it"
    if not isinstance(args.docs_per_step_drop_position, bool):
        yield "E25", f"--docs-per-step-drop-position must be true or false, got {args.docs_per_step_drop_position!r}"
    elif args.docs_per_step_drop_position and documents:
        yield (
            "E61",
            "--docs-per-step-drop-position has no effect with --docs-per-step, which goes on from the position; remove it",
        )
