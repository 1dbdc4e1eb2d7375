"""Errors and warnings of the rules."""

from collections.abc import Iterator

from megatron_pg.rollouts.printable import printable

Violations = Iterator[tuple[str, str]]  # (rule, message)


class ArgumentError(ValueError):
    """The arguments contradict each other or cannot work. `violations` holds (id, message) pairs."""

    def __init__(self, violations: list[tuple[str, str]]):
        self.violations = [(rule, printable(message, limit=None)) for rule, message in violations]
        lines = "\n".join(f"  [{rule}] {message}" for rule, message in self.violations)
        super().__init__(f"megatron_pg found {len(violations)} problem(s) in the arguments:\n{lines}")

    def __reduce__(self):
        return type(self), (self.violations,)  # for pickling between processes


class ArgumentNotice(UserWarning):
    """An argument was reconciled with another one (R1, R2)."""


class ArgumentWarning(UserWarning):
    """The arguments work, with a consequence that the user should know (W1 to W11)."""
