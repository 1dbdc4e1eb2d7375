"""The flags of `--docs-per-step` and their rules. Needs no torch."""

import argparse

from megatron_pg.declarations.choices import DOCS_ENDS, DOCS_POLICIES
from megatron_pg.flags.errors import Violations
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.values import choice


def add_documents_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags of steps with a fixed number of documents."""
    documents = (
        "An optimizer step has N documents (samples) over all data-parallel ranks, in as many micro-batches as needed. "
        "The dataset provider returns megatron_pg.Documents. Default 0: a step has --global-batch-size rows."
    )
    group.add_argument("--docs-per-step", type=int, default=0, metavar="N", help=documents)
    policy = (
        "exact (default): a step has exactly N documents; the others are in the next step. at_least: ranks fill whole "
        "micro-batches until there are N, and surplus documents stay in the step. Rollouts are never split, nor are "
        "prompt groups with prompt_mean."
    )
    group.add_argument("--docs-per-step-policy", choices=DOCS_POLICIES, help=policy)
    end = (
        "At the end of the documents: partial (default) trains the remaining ones in a smaller last step; stop drops "
        "them. Every rank then leaves the training loop, with a checkpoint if --save is given."
    )
    group.add_argument("--docs-per-step-end", choices=DOCS_ENDS, help=end)
    drop_position = (
        "Resume a checkpoint of --docs-per-step without that flag: its position in the documents is dropped, and the "
        "data start where the dataset provider starts."
    )
    group.add_argument("--docs-per-step-drop-position", action="store_true", help=drop_position)


def documents_violations(facts: Facts) -> Violations:
    """Rules E25, E60 and E61; E62 needs the checkpoint."""
    args, documents = facts.args, facts.args.docs_per_step
    is_count = isinstance(documents, int) and not isinstance(documents, bool) and 0 <= documents < 2**62
    if not is_count:
        yield f"E60 --docs-per-step must be a whole number of documents below 2^62, or 0 for off, got {documents!r}"
    for name, choices in (("policy", DOCS_POLICIES), ("end", DOCS_ENDS)):
        flag, value = f"--docs-per-step-{name}", vars(args)[f"docs_per_step_{name}"]
        violations = [] if value is None else list(choice(flag, value, choices))
        yield from violations
        if value is not None and not violations and is_count and documents == 0:
            yield f"E61 {flag} {value} has no effect without --docs-per-step; remove it"
    if not isinstance(args.docs_per_step_drop_position, bool):
        yield f"E25 --docs-per-step-drop-position must be true or false, got {args.docs_per_step_drop_position!r}"
    elif args.docs_per_step_drop_position and documents:
        yield (
            "E61 --docs-per-step-drop-position has no effect with --docs-per-step, which resumes at the position; "
            "remove it"
        )
