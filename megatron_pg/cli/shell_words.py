"""The expansion of words: what a parameter, a quote, an arithmetic expression becomes among a command's arguments."""

import ast
import glob
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron_pg.cli.shell_tokens import HOLE, NAME, Lexer, Part, Token, evaluate
from megatron_pg.cli.shell_tree import Chain, Simple, parse, written
from megatron_pg.cli.shell_values import State, Unknown, Value, Word, hole, joined, lines_of, text_of
from megatron_pg.cli.terminal import InputError

_LONGEST = 1_000_000  # characters of a variable


class Words:
    """Expands words in a state, which their reader changes between them.

    Args:
        path: the script, which `$0` names.
        arguments: what it is called with.
        overrides: variables whose value is given, whatever the script assigns.
    """

    def __init__(self, path: Path, arguments: list[Word], overrides: Mapping[str, str]):
        self.state = State(arguments)
        self.environment: set[str] = set()  # variables that were taken from the environment
        self.assigned: dict[str, Unknown] = {}  # every variable that was set: where, and what the script has put there
        self.knows_arguments = False  # in a function, and in a test: `$1` that is not given is empty
        self._path, self._overrides = path, overrides

    def set(self, name: str, value: Value, where: str) -> None:
        """Assign a variable."""
        text = text_of(value)
        if len(text) > _LONGEST:
            raise InputError(f"{where}: {name} grows beyond {_LONGEST} characters. Give the flags themselves.")
        before = self.assigned.get(name)
        self.assigned[name] = Unknown(where, "", lines_of(before.text, text) if before else text)
        if name not in self._overrides:
            self.state.values[name] = value

    def append(self, name: str, value: Value, where: str) -> None:
        """`name+=value`."""
        old = self._lookup(name, where)
        if isinstance(old, list) or isinstance(value, list):
            lists = [each if isinstance(each, list) else [each] for each in (old, value) if each is not None]
            value = [word for each in lists for word in each]
        elif old is not None:
            value = Word(old.text + value.text, where, old.holes + value.holes, old.many or value.many)
        self.set(name, value, where)

    def text_in(self, text: str, seen: frozenset[str] = frozenset()) -> str:
        """What the script may have put into the result of an expression: its text, its variables' values, its functions."""
        names = set(re.findall(rf"\$\{{?[!#]?({NAME}|[@*\d])", text))
        values = [
            self._positional("@", "") if name in "@*" or name.isdigit() else self._lookup(name, "") for name in names
        ]
        called = {
            name
            for name in self.state.functions.keys() - seen
            if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)
        }
        bodies = [self.text_in(written(self.state.functions[name]), seen | called) for name in sorted(called)]
        return lines_of(text, text_of(*values), *bodies)

    # --- values of parameters ---

    def _lookup(self, name: str, where: str) -> Value | None:
        """The value of a parameter, or None where bash would find it unset."""
        if name in self._overrides:
            return Word(self._overrides[name], where)
        if name.isdigit() or name in ("@", "*"):
            return self._positional(name, where)
        if name in self.state.values:
            return self.state.values[name]
        if name in os.environ:
            self.environment.add(name)
            return Word(os.environ[name], where)
        if name == "BASH_SOURCE":
            return Word(str(self._path), where)
        if self.state.tainted is not None:
            return hole(
                replace(self.state.tainted, where=where, reason=f"{name} is not set here, and {self.state.tainted}")
            )
        return None

    def _positional(self, name: str, where: str) -> Value | None:
        if name in "@*":
            return list(self.state.arguments)
        if name == "0":
            return Word(str(self._path), where)
        return self._select(self.state.arguments, int(name) - 1)

    def _parameter(self, text: str, where: str) -> Value:
        match = re.fullmatch(rf"({NAME}|\d+|[@*])(?:\[([@*]|\d+)\])?(?:(:?[-=+?])(.*))?", text, re.DOTALL)
        if match is None:
            return self._other_parameter(text, where)
        name, index, operator, rest = match.groups()
        is_list = index in ("@", "*") or name in ("@", "*")
        if is_list and name in self._overrides:
            return [Word(text, where) for text in shlex.split(self._overrides[name])]
        found = self._lookup(name, where)
        if is_list:
            found = [found] if isinstance(found, Word) else found
        elif isinstance(found, list):
            found = self._select(found, int(index or 0))
        if operator is None:
            return self._unset(name, where, is_list) if found is None else found
        if operator[-1] != "?" and (unsure := _unsure_whether_empty(found)):
            found = hole(replace(unsure, text=lines_of(text_of(found), self.text_in(rest)), is_open=True))
            if operator[-1] == "=":
                self.set(name, found, where)
            return found
        empty = found is None or (operator[0] == ":" and _is_empty(found))
        if operator[-1] == "+":
            return Word("", where) if empty else self._expand_text(rest, where)
        if not empty or operator[-1] == "?":
            return found or self._unset(name, where, is_list)
        value = self._expand_text(rest, where)
        if operator[-1] == "=":
            self.set(name, value, where)
        return value

    def _other_parameter(self, text: str, where: str) -> Word:
        length = re.fullmatch(rf"#(?:({NAME})\[[@*]\]|[@*])?", text)
        if length:
            found = self._lookup(length.group(1) or "@", where)
            if isinstance(found, list) and not any(word.many or word.maybe for word in found):
                return Word(str(len(found)), where)
            return hole(Unknown(where, f"${{{text}}} is a length that is not known", is_open=False), many=False)
        what = f"${text}" if text[0] == "'" else f"${{{text}}}"
        return hole(Unknown(where, f"{what} is a form that is not read here", self.text_in(f"${{{text}}}")))

    def _select(self, found: list[Word], position: int) -> Word | None:
        if unsure := next((word for word in found[: position + 1] if word.many or word.maybe), None):
            unknown = unsure.unknown or unsure.maybe
            return hole(replace(unknown, text=text_of(found)))
        return found[position] if position < len(found) else None

    def _unset(self, name: str, where: str, is_list: bool) -> Value:
        if name.isdigit() and self.knows_arguments:
            return Word("", where)
        shown = (
            f"${name}, an argument of the script, is not given"
            if name.isdigit()
            else f"{name} is set neither in the script nor in the environment"
        )
        word = hole(Unknown(where, shown))
        return [word] if is_list else word

    def _expand_text(self, text: str, where: str) -> Word:
        """The word behind `:-` and its like."""
        tokens = list(Lexer(text if re.search("[\"']", text) else f'"{text}"', "").tokens())
        if len(tokens) > 1:
            why = f"{text!r} is a default of several words, some in quotes, which is not read here"
            return hole(Unknown(where, why, self.text_in(text)))
        piece = self.expand_one(tokens[0], where) if tokens else Word("", where)
        quoted = re.search("[\"']", text) and all(part.quoted for part in tokens[0].parts)
        return replace(piece, whole=bool(quoted))

    def _command(self, text: str, where: str) -> Word:
        """The output of the commands that name a script's folder; of others, nothing is known."""
        try:
            block = parse(Lexer(text, "").tokens(), "")
        except InputError:
            block = ()
        match block:
            case (Simple() as only,):
                words = self.arguments_of(only, where)
                if len(words) == 2 and words[0].text == "dirname" and not words[1].unknown:
                    return Word(os.path.dirname(words[1].text) or ".", where)
            case (Chain(Simple() as first, "&&", Simple() as second),) if self.state.folder is not None:
                words, then = self.arguments_of(first, where), self.arguments_of(second, where)
                moves = len(words) == 2 and words[0].text == "cd" and not words[1].unknown
                if moves and [word.text for word in then] in (["pwd"], ["pwd", "-P"]):
                    return Word(os.path.abspath(os.path.join(self.state.folder, words[1].text)), where)
        shown = " ".join(text.split())
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return hole(Unknown(where, f"$({shown}) is the output of a command", self.text_in(text)))

    def arguments_of(self, command: Simple, where: str = "") -> list[Word]:
        """The words of a command, `--` left out."""
        words = [word for token in without_redirections(command.tokens) for word in self.expand(token, where)]
        return [word for word in words if word.text != "--"]

    def arithmetic(self, text: str, where: str) -> Word:
        """An integer; also where it is not known, it is nothing else."""
        plain = re.sub(rf"\$\{{({NAME}|\d+)\}}|\$({NAME}|\d+)", lambda m: f" {m.group(1) or m.group(2)} ", text)
        unknown: list[Unknown] = []

        def value_of(name: str) -> int:
            found = self._lookup(name, where)
            word = found if isinstance(found, Word) else Word("0" if found is None else HOLE, where)
            if word.unknown or not re.fullmatch(r"\s*-?(0|[1-9]\d*)?\s*", word.text):
                unknown.append(word.unknown or Unknown(where, f"{name} is no decimal integer"))
                return 1
            return int(word.text or 0)

        try:
            result = evaluate(ast.parse(plain.strip(), mode="eval").body, value_of)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            unknown.append(Unknown(where, f"$(({text.strip()})) is arithmetic that is not read here"))
            result = 0
        if unknown:
            return hole(replace(unknown[0], text="", is_open=False), many=False)
        return Word(str(result), where)

    # --- expansion of words ---

    def expand_one(self, token: Token, where: str) -> Word:
        """The value of an assignment: no splitting, arrays joined with blanks."""
        word = Word("", where)
        for part in token.parts:
            value = self._value(part, where)
            piece = joined(value, where) if isinstance(value, list) else value
            word = replace(
                word, text=word.text + piece.text, holes=word.holes + piece.holes, many=word.many or piece.many
            )
        return word

    def expand(self, token: Token, where: str) -> list[Word]:
        """The arguments that a word of a command becomes."""
        fields = _Fields(where)
        for part in token.parts:
            value = self._value(part, where)
            if part.quoted:
                is_star = part.kind == "parameter" and part.value.rstrip("]").endswith("*")
                fields.add_quoted(joined(value, where) if is_star and isinstance(value, list) else value)
            else:
                fields.add(
                    value, partial(self._left_by_the_shell, part=part, where=where, is_alone=len(token.parts) == 1)
                )
        return fields.finish()

    def _left_by_the_shell(self, word: Word, *, part: Part, where: str, is_alone: bool) -> Word:
        """A word outside quotes, or what is not known of it: file names, braces, and splitting at an own IFS."""
        text, is_literal = word.text, part.kind == "text"
        if is_literal and re.search(r"\{[^}]*(,|\.\.)", text):
            return hole(Unknown(where, f"{text!r} has braces, which the shell expands", text))
        if not is_literal and "IFS" in self.state.values and re.search(r"\W", text):
            return hole(Unknown(where, "the script sets IFS, which decides how words are split", text))
        folder = self.state.folder
        if re.search(r"[*?\[]", text) and (not is_alone or folder is None or glob.glob(text, root_dir=folder)):
            # names that match `[0]*` begin with 0: none is a flag
            start = "[" if re.match(r"\[[^-\]]+\]", text) else ""
            unknown = Unknown(where, f"{text!r} may be a pattern of file names", text)
            return replace(hole(unknown, many=not start), text=start + HOLE)
        return word

    def _value(self, part: Part, where: str) -> Value:
        if part.kind == "text":
            return Word(part.value, where)
        return {"parameter": self._parameter, "command": self._command, "arithmetic": self.arithmetic}[part.kind](
            part.value, where
        )


class _Fields:
    """The arguments that one word becomes, while its parts are added."""

    def __init__(self, where: str):
        self._where = where
        self._done: list[Word] = []
        self._open: Word | None = None

    def add_quoted(self, value: Value) -> None:
        """A part in quotes: one word, or the elements of an array."""
        for word in self._each(value):
            self._append(replace(word, many=word.many and isinstance(value, list)))

    def add(self, value: Value, look: Callable[[Word], Word]) -> None:
        """A part outside quotes, which is split at blanks; `look` is what the shell does to each piece."""
        for word in self._each(value):
            if word.whole:
                self._append(word)
            else:
                self._split(word, look)

    def _each(self, value: Value) -> Iterator[Word]:
        """The elements of an array, each an argument of its own that stands where it was written; or the one word."""
        if isinstance(value, Word):
            yield replace(value, where=self._where)
            return
        for i, word in enumerate(value):
            if i:
                self._close()
            yield word

    def _split(self, word: Word, look: Callable[[Word], Word]) -> None:
        holes = iter(word.holes)
        for i, text in enumerate(re.split(r"[ \t\n]+", word.text)):
            if i:
                self._close()
            if HOLE in text:
                mine = tuple(next(holes) for _ in range(text.count(HOLE)))
                self._append(replace(word, text=text, holes=mine, many=any(each.is_open or each.text for each in mine)))
            elif text:
                self._append(look(replace(word, text=text, holes=(), many=False)))

    def _append(self, word: Word) -> None:
        old = self._open or Word("", word.where)
        self._open = Word(
            old.text + word.text,
            old.where,
            old.holes + word.holes,
            old.many or word.many,
            maybe=old.maybe or word.maybe,
        )

    def _close(self) -> None:
        if self._open is not None:
            self._done.append(self._open)
        self._open = None

    def finish(self) -> list[Word]:
        """All of them."""
        self._close()
        return self._done


def without_redirections(tokens: tuple[Token, ...]) -> list[Token]:
    """The words of a command."""
    kept, skip = [], False
    for token in tokens:
        if token.kind == "operator":
            skip = token.text != "<<"
        elif skip:
            skip = False
        elif token.kind != "here":
            kept.append(token)
    return kept


def _unsure_whether_empty(found: Value | None) -> Unknown | None:
    words = found if isinstance(found, list) else [found] if found else []
    if any(word.text.strip(HOLE) and not word.maybe for word in words):
        return None
    return next((word.unknown or word.maybe for word in words if word.holes or word.maybe), None)


def _is_empty(found: Value) -> bool:
    words = found if isinstance(found, list) else [found]
    return len(words) < 2 and all(word.text == "" and word.unknown is None for word in words)
