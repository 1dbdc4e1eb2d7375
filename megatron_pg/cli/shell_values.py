"""What a script's variables hold: words, unknown ones among them, and what is left of two branches."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_pg.cli.shell_tokens import HOLE
from megatron_pg.cli.shell_tree import If, Node


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that reading alone cannot give."""

    where: str  # "line 12"
    reason: str
    text: str = ""  # what the script itself may have put there
    is_open: bool = True  # False: it is an integer or one of the values in `text`, nothing from outside

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Word:
    """One argument of a command. `text` has a HOLE for every unknown piece; `many`: it may be no or several arguments."""

    text: str
    where: str = field(compare=False)
    holes: tuple[Unknown, ...] = ()
    many: bool = False
    whole: bool = False  # was quoted where it was written: not split
    maybe: Unknown | None = None  # known, but there only where a branch is taken

    @property
    def unknown(self) -> Unknown | None:
        """Why it is not known, where it is not."""
        return self.holes[0] if self.holes else None


Value = Word | list[Word]


def hole(unknown: Unknown, *, many: bool = True) -> Word:
    """A word of which nothing is known."""
    return Word(HOLE, unknown.where, (unknown,), many)


def text_of(*values: Value | None) -> str:
    """All that the script may have put into values, each line once."""
    words = [word for value in values if value for word in (value if isinstance(value, list) else [value])]
    texts = (text for word in words for text in (word.text, *(each.text for each in word.holes)))
    return lines_of(*(text.replace(HOLE, "") for text in texts))


def lines_of(*texts: str) -> str:
    """Every line of the texts, once."""
    return "\n".join(dict.fromkeys(line for text in texts for line in text.split("\n")))


def joined(words: Sequence[Word], where: str) -> Word:
    """Words as one, with blanks between them."""
    if unsure := next((word.maybe for word in words if word.maybe), None):
        return hole(replace(unsure, text=text_of(list(words))))
    holes = tuple(each for word in words for each in word.holes)
    return Word(" ".join(word.text for word in words), where, holes, any(word.many for word in words))


@dataclass
class State:
    """What one command leaves to the next."""

    arguments: list[Word]
    values: dict[str, Value | None] = field(default_factory=dict)
    functions: dict[str, Node] = field(default_factory=dict)
    locals: dict[str, Value | None] = field(default_factory=dict)  # what the variables of a function hide
    tainted: Unknown | None = None  # what may have set any variable that is not set here
    lost: Unknown | None = None  # the same, of the environment's too
    exits: bool = False  # `set -e`
    folder: str | None = "."  # where `cd` has led; None where that is not known
    ended: str | None = None  # where the script, or what was called, came to its end

    def copy(self) -> "State":
        """A state that changes on its own."""
        return replace(self, values=dict(self.values), functions=dict(self.functions), locals=dict(self.locals))


def merged(one: State, other: State) -> State:
    """What is known behind two ways of which one was taken."""
    if one.ended or other.ended:
        return one if other.ended else other
    state = one.copy()
    for name in [name for name in {**one.values, **other.values} if one.values.get(name) != other.values.get(name)]:
        state.values[name] = _either(name, *(_present(name, each) for each in (one, other)))
    for name in [
        name for name in {**one.functions, **other.functions} if one.functions.get(name) != other.functions.get(name)
    ]:
        state.functions[name] = If((), *((each.functions.get(name, ()),) for each in (one, other)))
    state.locals = {**other.locals, **one.locals}
    for name in one.locals.keys() ^ other.locals.keys():
        state.locals[name] = hole(Unknown("", f"{name} is local only where a branch is taken"))
    state.tainted, state.lost = one.tainted or other.tainted, one.lost or other.lost
    state.exits = one.exits and other.exits
    state.folder = one.folder if one.folder == other.folder else None
    if one.arguments != other.arguments:
        where = next((word.where for word in [*one.arguments, *other.arguments]), "")
        text = text_of(one.arguments, other.arguments)
        state.arguments = [hole(Unknown(where, "a branch or a loop changes the arguments", text))]
    return state


def _present(name: str, state: State) -> Value | None:
    if name in state.values:
        return state.values[name]
    if state.lost:
        return hole(state.lost)
    if name in os.environ:
        return Word(os.environ[name], "the environment")
    return hole(state.tainted) if state.tainted else None


def _either(name: str, one: Value | None, other: Value | None) -> Value:
    if one == other:
        return one
    if all(isinstance(value, list | None) for value in (one, other)):
        return _either_list(one or [], other or [])
    words = [
        word for value in (one, other) for word in (value if isinstance(value, list) else [value] if value else [])
    ]
    is_open = any(each.is_open for word in words for each in word.holes)
    return hole(Unknown(words[0].where, f"{name} is assigned inside a branch", text_of(one, other), is_open))


def _either_list(one: list[Word], other: list[Word]) -> list[Word]:
    """The options that both have, in order, and between them those that may be there."""
    ours, theirs = _options(one), _options(other)
    start = _common(ours, theirs)
    end = _common(ours[start:][::-1], theirs[start:][::-1])
    middle = [word for each in (ours, theirs) for option in each[start : len(each) - end] for word in option]
    return [
        *(word for option in ours[:start] for word in option),
        *(replace(word, maybe=Unknown(word.where, "only where a branch is taken")) for word in middle),
        *(word for option in ours[len(ours) - end :] for word in option),
    ]


def _common(one: list, other: list) -> int:
    """How many elements both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _options(words: list[Word]) -> list[list[Word]]:
    """Each flag with its values."""
    options: list[list[Word]] = []
    for word in words:
        if not options or word.text[:1] in ("-", HOLE):
            options.append([])
        options[-1].append(word)
    return options
