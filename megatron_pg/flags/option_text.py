"""The text of a flag with options, `NAME[,option=value]…`. Needs no torch."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from megatron_pg.declarations.declaration import Number, Reads, resolved
from megatron_pg.flags.errors import Violations
from megatron_pg.flags.values import choice

_NUMBER = re.compile(r"[+-]?((\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|inf|nan)", re.ASCII | re.IGNORECASE)


def split(text: str) -> tuple[str, dict[str, str]]:
    """Head and options, in the order in which they are given.

    Raises:
        ValueError: a part is not an option, or is given twice; the message follows the flag and the text.
    """
    head, *parts = text.split(",")
    given: dict[str, str] = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if not option or not equals:
            raise ValueError(f"has {part!r}, which is not option=value. Write it in that form.")
        if option in given:
            raise ValueError(f"has {option} twice. Remove one of them.")
        given[option] = value
    return head, given


def joined(head: str, options: Mapping[str, object]) -> str:
    """The text of head and options; `split` reads it."""
    return ",".join([head, *(f"{option}={value}" for option, value in options.items())])


def number_of(option: str, text: str) -> float:
    """A number in plain decimals: Python's float() also accepts 1_0 and digits of other scripts.

    Raises:
        ValueError: the text is not one; the message follows the flag and the text.
    """
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"has {option}={text}, which is not a number. Write a number.")
    value = float(text)
    if value == 0 and any(digit in text.lower().partition("e")[0] for digit in "123456789"):
        raise ValueError(f"has {option}={text}, which is 0 in float64. The smallest number is 5e-324.")
    return value


class Selection(NamedTuple):
    """The name that a flag selects, and the options that are given with it; they may violate any rule."""

    flag: str
    name: object  # a text, unless a configuration file gives something else
    given: Mapping[str, str]
    error: str | None = None  # what is wrong in the text; the options are then empty

    @classmethod
    def of(cls, flag: str, text: object) -> "Selection":
        """From the flag's value."""
        if not isinstance(text, str):
            return cls(flag, text, {})
        try:
            return cls(flag, *split(text))
        except ValueError as error:
            return cls(flag, text.partition(",")[0], {}, f"{flag} {text} {error}")

    def __str__(self) -> str:
        return f"{self.flag} {self.name}"

    @property
    def amount(self) -> object:
        """The name as a number where it is one, for a flag whose text begins with a number."""
        return float(self.name) if isinstance(self.name, str) and _NUMBER.fullmatch(self.name) else self.name

    @property
    def numbers(self) -> dict[str, float]:
        """The options that are numbers."""
        return {option: float(text) for option, text in self.given.items() if _NUMBER.fullmatch(text)}

    def resolved(self, reads: Reads, flags: Mapping[str, float | None]) -> dict[str, float]:
        """The numbers of a declaration by name: options and values of flags, or else defaults."""
        return resolved(reads, {**flags, **self.numbers})

    def violations(self, reads: Reads, words: Mapping[str, tuple[str, ...]]) -> Violations:
        """Rules E24, E25, E40 and E41 of the options, for a declared name with these numbers and words."""
        if self.error is not None:
            yield f"E25 {self.error}"
            return
        known = {number.name: number for number in reads if number.flag is None}
        for option, text in self.given.items():
            if option in words:
                yield from choice(f"{self},{option}", text, words[option])
            elif option in known:
                yield from self._number_rule(known[option], text)
            else:
                options = ", ".join(f"{name}=…" for name in (*words, *known)) or "none"
                yield f"E40 {self},{option}={text} has no effect. Remove it. The options of {self.name}: {options}."
        yield from self._missing(reads, words)

    def _number_rule(self, number: Number, text: str) -> Violations:
        try:
            value = number_of(number.name, text)
        except ValueError as error:
            yield f"E24 {self} {error}"
            return
        if not (math.isfinite(value) and number.low <= value <= number.high):
            yield f"E24 {self},{number.name}={text} is out of range. It must be {number.requirement}."

    def _missing(self, reads: Reads, words: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
        for option, choices in words.items():
            if option not in self.given:
                yield f"E41 {self} needs {option}=…, which has no default. Choose one of {', '.join(choices)}."
        for number, default in reads.items():
            if number.flag is None and number.name not in self.given and default is None:
                yield f"E41 {self} needs {number.name}=…, which has no default. Add it."
