"""Shared by the tables: numbers that flags set, and functions that are imported on demand."""

import difflib
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

ABOVE_ZERO, ABOVE_ONE = math.nextafter(0.0, 1.0), math.nextafter(1.0, 2.0)

Numbers = Mapping[str, float]  # by the name of the number


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number of an objective or correction, set by the flag `--pg-` and its name."""

    name: str
    low: float
    high: float
    requirement: str  # for messages: must be …
    help: str
    metavar: str = "X"

    @property
    def flag(self) -> str:
        """The flag that sets it."""
        return "--pg-" + self.name.replace("_", "-")

    @property
    def attribute(self) -> str:
        """The argument that the flag sets."""
        return f"pg_{self.name}"


Reads = Mapping[Number, float | None]  # numbers that are read, each with its default or None


def resolved(reads: Reads, given: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that are read, by name: values of `given` (arguments by attribute), or else defaults."""
    return {n.name: default if given[n.attribute] is None else given[n.attribute] for n, default in reads.items()}


@functools.cache
def load(path: str) -> Callable:
    """The function at `package.module:function`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def did_you_mean(word: str, names: Iterable[str], elsewhere: Mapping[str, str]) -> str:
    """A hint for an unknown name: a similar name, or ours for another framework's name. Empty without a match."""
    key = word.lower().replace("-", "_")
    close = difflib.get_close_matches(key, [*names, *elsewhere], n=1)
    guess = key if key in elsewhere else (close[0] if close else None)
    return f"; did you mean {elsewhere.get(guess, guess)}?" if guess else ""
