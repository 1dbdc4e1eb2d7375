"""The rules of `--docs-per-step`. Needs no torch."""

from megatron_pg.flags.errors import Violations
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.table import switch_rules, word_rules


def documents_violations(facts: Facts) -> Violations:
    """Rules E25, E60 and E61; E62 needs the checkpoint."""
    args, documents = facts.args, facts.args.docs_per_step
    is_count = isinstance(documents, int) and not isinstance(documents, bool) and 0 <= documents < 2**62
    if not is_count:
        yield f"E60 --docs-per-step is {documents!r}. It must be a whole number of documents below 2^62, or 0 for off."
    for flag, value in {
        "--docs-per-step-policy": args.docs_per_step_policy,
        "--docs-per-step-end": args.docs_per_step_end,
    }.items():
        unknown = list(word_rules(args, flag))
        yield from unknown
        if value is not None and not unknown and is_count and documents == 0:
            yield f"E61 {flag} {value} has no effect without --docs-per-step. Remove it."
    yield from switch_rules(args, "--docs-per-step-drop-position")
    if args.docs_per_step_drop_position is True and documents:
        yield (
            "E61 --docs-per-step-drop-position has no effect with --docs-per-step, which resumes at the position. "
            "Remove it."
        )
