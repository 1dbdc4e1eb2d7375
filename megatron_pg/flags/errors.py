"""Errors and warnings of the rules."""

from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, metadata

from megatron_pg.rollouts.printable import printable

Violations = Iterator[str]  # the rule's number and the message, "E2 --flag …"


def numbered(violations: Iterable[str]) -> list[tuple[str, str]]:
    """Violations as (rule, message) pairs."""
    return [(text.partition(" ")[0], text.partition(" ")[2]) for text in violations]


def page_of(rule: str) -> str | None:
    """Where the documentation of the installed version explains a rule; None if the project has no home page."""
    try:
        urls = metadata("megatron-pg").get_all("Project-URL") or []
    except PackageNotFoundError:
        return None
    pages = [url.partition(", ")[2] for url in urls if url.startswith("Documentation, ")]
    return f"{pages[0].rpartition('/')[0]}/messages.md#{rule.lower()}" if pages else None


class ArgumentError(ValueError):
    """Arguments break one or more rules. `violations` holds (rule, message) pairs."""

    def __init__(self, violations: list[tuple[str, str]]):
        self.violations = [(rule, printable(message, limit=None)) for rule, message in violations]
        lines = "\n".join(f"  [{rule}] {message}" for rule, message in self.violations)
        link = page_of(self.violations[0][0])
        footer = "" if link is None else f"\nCauses and fixes: {link}"
        super().__init__(f"megatron_pg found {len(violations)} problem(s) in the arguments:\n{lines}{footer}")

    def __reduce__(self):
        return type(self), (self.violations,)  # for pickling between processes


class ArgumentNotice(UserWarning):
    """An argument was changed to agree with another one (R1, R2)."""


class ArgumentWarning(UserWarning):
    """The arguments work, with a consequence that the user should know (W1 to W14)."""
