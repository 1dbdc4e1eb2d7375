"""Shared by the tables: numbers that flags or their options set, and functions that are imported on demand."""

import difflib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

ABOVE_ZERO, ABOVE_ONE = math.nextafter(0.0, 1.0), math.nextafter(1.0, 2.0)

Numbers = Mapping[str, float]  # by the name of the number


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number of an objective or correction: an option of its flag, as in `--pg-objective cispo,cap=5`."""

    name: str
    low: float = -math.inf
    high: float = math.inf
    requirement: str  # for messages: It must be …
    flag: str | None = None  # that sets it; None: it is an option

    @property
    def attribute(self) -> str:
        """The argument that its flag sets; the option's name if it has no flag."""
        return self.name if self.flag is None else attribute_of(self.flag)


def positive(name: str, flag: str | None = None) -> Number:
    """A finite number above 0."""
    return Number(name=name, low=ABOVE_ZERO, requirement="finite and > 0", flag=flag)


def attribute_of(flag: str) -> str:
    """The name of the argument that a flag sets."""
    return flag.lstrip("-").replace("-", "_")


def flag_of(name: str) -> str:
    """The flag that sets an argument; also of a flag."""
    return "--" + name.lstrip("-").replace("_", "-")


Reads = Mapping[Number, float | None]  # numbers that are read, each with its default or None


def resolved(reads: Reads, given: Mapping[str, float | None]) -> dict[str, Any]:
    """The numbers that are read, by name: values of `given` (arguments and options by attribute), or else defaults."""
    values = {number: given.get(number.attribute) for number in reads}
    return {number.name: reads[number] if value is None else value for number, value in values.items()}


@functools.cache
def load(path: str) -> Callable:
    """The function at `package.module:function`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def did_you_mean(word: str, names: Iterable[str], elsewhere: Mapping[str, str] = MappingProxyType({})) -> str:
    """A question after an unknown name: a similar name, or ours for another framework's. Empty without a match."""
    key = word.lower().replace("-", "_")
    close = difflib.get_close_matches(key, [*names, *elsewhere], n=1)
    guess = key if key in elsewhere else (close[0] if close else None)
    return f" Did you mean {elsewhere.get(guess, guess)}?" if guess else ""


def one_of(word: str, names: Collection[str], elsewhere: Mapping[str, str] = MappingProxyType({})) -> str:
    """The names that an unknown one could be, a period and the question, for the end of a message."""
    return f"{', '.join(names)}.{did_you_mean(word, names, elsewhere)}"
