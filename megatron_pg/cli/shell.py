"""The part of bash that launch scripts are written in, read without running anything.

Variables, arrays, quotes, continuations, comments, `${NAME:-default}`, arithmetic, `source`, and the script's own
folder are followed. What depends on a command, a branch or a loop is not guessed: such a value is an `Unknown` that
knows its line, and it matters only where a flag could hide in it.
"""

import ast
import glob
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_pg.cli.shell_tokens import ASSIGNMENT, HOLE, NAME, Lexer, Part, Token, evaluate
from megatron_pg.cli.terminal import InputError, read_text, show_path

_SCRIPT_FOLDER = re.compile(
    r"""(cd\s+(?:--\s+)?"?\$\()?\s*dirname\s+(?:--\s+)?"?(?:\$0|\$\{(?:BASH_SOURCE(?:\[0\])?(?::-\$0)?|0)\})"?"""
    r"""(?:\)((?:/\.\.)*)"?(?:\s*&?>\s*/dev/null(?:\s+2>&1)?)?\s*&&\s*pwd(?:\s+-P)?)?\s*"""
)
_OPENING = {"if", "for", "while", "until", "case", "select", "{"}
_CLOSING = {"fi", "done", "esac", "}"}
_SKIPPED = {"then", "else", "elif", "do", "!", "time", "function", "exec", "command", "nohup", "env"}
_KEYWORDS = _OPENING | _CLOSING | _SKIPPED
_SETTING = {"read", "mapfile", "readarray", "unset", "getopts"}
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that reading alone cannot give."""

    where: str  # "line 12"
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Word:
    """One argument of a command. `text` has a HOLE for every unknown piece; `many`: it may be no or several arguments."""

    text: str
    where: str
    unknown: Unknown | None = None
    many: bool = False
    whole: bool = False  # was quoted where it was written: not split
    maybe: Unknown | None = None  # known, but there only where a branch is taken


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command that the script would run, expanded."""

    where: str
    words: tuple[Word, ...]
    is_certain: bool = True  # False inside a branch, a loop or a function
    read: frozenset[str] = frozenset()  # the variables in it
    stale: Unknown | None = None  # a function read it before one of its variables got its value


def read_commands(path: str | Path, *, arguments: Sequence[str], overrides: Mapping[str, str]) -> "Reading":
    """The simple commands of a bash script, in order, expanded as far as reading alone can.

    Args:
        path: the script.
        arguments: what the script is called with, `$1` and so on.
        overrides: variables whose value is given, whatever the script assigns.

    Raises:
        InputError: the script cannot be read or ends inside a quote.
    """
    reading = Reading(Path(path), tuple(arguments), dict(overrides))
    reading.run_file(Path(path), "")
    return reading


@dataclass
class Reading:
    """The state of a script while it is read."""

    path: Path
    arguments: tuple[str, ...]
    overrides: dict[str, str]
    commands: list[Command] = field(default_factory=list)
    environment: set[str] = field(default_factory=set)  # variables that were taken from the environment
    caveats: list[str] = field(default_factory=list)
    _values: dict[str, Word | list[Word]] = field(default_factory=dict)
    _tainted: Unknown | None = None  # what may have set any variable that is not set here
    _blocks: list[str] = field(default_factory=list)  # what is open: "if", "for", "{", "function", "(", ...
    _functions: dict[str, set[str]] = field(default_factory=dict)  # the variables that each function sets
    _function: str = ""  # the one whose body is read
    _read: set[str] = field(default_factory=set)  # the variables of the command that is read
    _folder: str | None = "."  # where `cd` has led; None where that is not known
    _files: int = 0

    def run_file(self, path: Path, label: str) -> None:
        """Read one file; `label` is how messages name it, empty for the script itself."""
        self._files += 1
        if self._files > 50:
            raise InputError(f"{show_path(path)}: is one of more than 50 sourced files. Is one sourcing itself?")
        command: list[Token] = []
        conditional = False
        for token in Lexer(read_text(path), f"{label or show_path(path)} ").tokens():
            if token.kind != "operator" or token.text.lstrip("0123456789")[0] in "<>" or token.text[:2] == "&>":
                command.append(token)
                continue
            self._run(command, label, conditional)
            self._bracket(token.text, command)
            conditional, command = token.text in ("&&", "||", "|", "|&"), []
        self._run(command, label, conditional)

    def _bracket(self, operator: str, before: list[Token]) -> None:
        if operator == "(":
            names_function = len(before) == 1 and _literal(before[0]) not in {*_KEYWORDS, ""}
            self._blocks.append("function" if names_function else "(")
            self._function = _literal(before[0]) if names_function else self._function
        elif operator == ")" and "(" in self._blocks[-1:]:
            self._blocks.pop()
        elif operator == ")" and self._blocks[-1:] == ["function"]:
            self._blocks[-1] = "function name"  # waits for its `{`

    def _run(self, tokens: list[Token], label: str, conditional: bool) -> None:
        tokens = _without_redirections(tokens)
        while tokens and (word := _literal(tokens[0])) in _KEYWORDS:
            self._keyword(word, conditional, _literal(tokens[1]) if len(tokens) > 1 else "")
            if word in ("for", "select") and len(tokens) > 1:
                self._assign_unknown(_literal(tokens[1]), tokens[1], label, f"changes in the `{word}` loop")
            if word in ("for", "select", "case"):
                return
            tokens = tokens[2 if word == "function" else 1 :]
        declares = bool(tokens) and _literal(tokens[0]) in _DECLARING
        assignments = tokens[1:] if declares else _leading_assignments(tokens)
        if declares or len(assignments) == len(tokens):
            changes = any(
                _literal(t)[:1] == "-" and set(_literal(t)[1:]) - set("axrg") for t in assignments
            )  # `-i`, `-A`
            for token in assignments:
                self._assign(token, label, conditional or (declares and changes))
            return
        self._run_simple(tokens[len(assignments) :], label)

    def _keyword(self, word: str, conditional: bool, following: str) -> None:
        if word == "function":
            self._blocks.append("function name")
            self._function = following
        elif word == "{" and self._blocks[-1:] == ["function name"]:
            self._blocks[-1] = "function"
        elif word in _OPENING:
            self._blocks.append("if" if conditional else word)
        elif word in _CLOSING and self._blocks:
            self._blocks.pop()

    @property
    def _is_certain(self) -> bool:
        """Whether what is read now runs exactly once."""
        return all(block == "{" for block in self._blocks)

    def _run_simple(self, tokens: list[Token], label: str) -> None:
        where, self._read = _where(label, tokens[0]), set()
        words = [word for token in tokens for word in self._expand(token, label)]
        name = words[0].text if words else ""
        if self._blocks[-2:] == ["(", "("] or name == "let":  # arithmetic
            self._forget(re.findall(NAME, " ".join(word.text for word in words)), where, "is changed by arithmetic")
        elif name in ("source", ".") and len(words) > 1:
            self._source(words[1], where)
        elif name in ("cd", "pushd", "popd"):
            known = name == "cd" and len(words) == 2 and words[1].unknown is None and self._folder and self._is_certain
            self._folder = os.path.join(self._folder, words[1].text) if known else None
        elif name in self._functions:
            self._forget(sorted(self._functions[name]), where, f"is set by the function {name}")
        elif name == "eval":
            self._tainted = Unknown(where, "`eval` may have set it")
            self._values.clear()
        elif name == "shift" or (name == "set" and words[1:2] and words[1].text == "--"):
            unknown = Unknown(where, f"`{name}` changes the script's arguments")
            self._values["@"] = [Word(HOLE, where, unknown, many=True)]
        elif name in _SETTING or (name == "printf" and words[1:2] and words[1].text == "-v"):
            self._forget([word.text for word in words[1:]], where, f"is set by `{name}`")
        elif words:
            read = frozenset(self._read) if "function" in self._blocks else frozenset()
            self.commands.append(Command(where, tuple(words), self._is_certain, read))

    def _forget(self, names: Sequence[str], where: str, why: str) -> None:
        for name in names:
            self._set(name, Word(HOLE, where, Unknown(where, f"{name} {why}"), many=True))

    def _source(self, word: Word, where: str) -> None:
        is_known = word.unknown is None and (self._folder is not None or os.path.isabs(word.text))
        path = Path(self._folder or "", word.text)
        if is_known and path.is_file():
            self.run_file(path, show_path(path))
            return
        shown = "a file whose name is not known" if word.unknown else show_path(word.text)
        self._tainted = Unknown(where, f"`source` reads {shown}, which is not to be had here and may set it")
        self.caveats.append(f"{where}: {shown} is not read; what it changes is not seen")

    def _assign(self, token: Token, label: str, conditional: bool) -> None:
        where = _where(label, token)
        if token.kind == "array":
            name, append = token.text, token.append
            value: Word | list[Word] = [word for item in token.items for word in self._expand(item, label)]
        else:
            match = ASSIGNMENT.match(token.parts[0].value) if token.parts else None
            if match is None:  # `export NAME`, `local -a`
                return
            name, append = match.group(1), bool(match.group(2))
            head = replace(token.parts[0], value=token.parts[0].value[match.end() :])
            value = self._expand_one(replace(token, parts=(head, *token.parts[1:])), where)
        is_certain = self._is_certain and not conditional
        old = self._lookup(name, where) if append and token.kind == "array" else None
        if not is_certain and isinstance(old, list) and not any(word.unknown for word in value):
            self._set(
                name, [*old, *(replace(word, maybe=Unknown(where, "only where a branch is taken")) for word in value)]
            )
            if "function" in self._blocks:
                self._functions.setdefault(self._function, set()).add(name)
        elif not is_certain:
            self._assign_unknown(name, token, label, "is assigned inside a branch, a loop or a function")
        else:
            self._set(name, self._joined(name, value) if append else value)

    def _assign_unknown(self, name: str, token: Token, label: str, why: str) -> None:
        if "function" in self._blocks:
            self._functions.setdefault(self._function, set()).add(name)
        self._forget([name], _where(label, token), why)

    def _joined(self, name: str, value: Word | list[Word]) -> Word | list[Word]:
        old = self._values.get(name)
        if old is None:
            return value
        if isinstance(old, list) or isinstance(value, list):
            return [*(old if isinstance(old, list) else [old]), *(value if isinstance(value, list) else [value])]
        return Word(old.text + value.text, value.where, old.unknown or value.unknown, many=old.many or value.many)

    def _set(self, name: str, value: Word | list[Word]) -> None:
        if name in self.overrides:
            return
        self._values[name] = value
        for i, command in enumerate(self.commands):
            if name in command.read and "function" not in self._blocks:
                why = f"a function reads {name}, which changes after the function is defined"
                self.commands[i] = replace(command, stale=Unknown(command.where, why))

    # --- values of parameters ---

    def _lookup(self, name: str, where: str) -> Word | list[Word] | None:
        """The value of a parameter, or None where bash would find it unset."""
        self._read.add(name)
        if name in self.overrides:
            return Word(self.overrides[name], where)
        if name.isdigit() or name in ("@", "*"):
            return self._positional(name, where)
        if name in self._values:
            return self._values[name]
        if name in os.environ:
            self.environment.add(name)
            return Word(os.environ[name], where)
        if name == "BASH_SOURCE":
            return Word(str(self.path), where)
        if self._tainted is not None:
            return Word(HOLE, where, Unknown(where, f"{name} is not set here, and {self._tainted}"), many=True)
        return None

    def _positional(self, name: str, where: str) -> Word | list[Word] | None:
        if "function" in self._blocks and name != "0":
            unknown = Word(HOLE, where, Unknown(where, f"${name} is an argument of a function"), many=True)
            return [unknown] if name in "@*" else unknown
        if "@" in self._values:
            return self._values["@"] if name in "@*" else self._values["@"][0]
        if name in ("@", "*"):
            return [Word(text, where) for text in self.arguments]
        everything = (str(self.path), *self.arguments)
        return Word(everything[int(name)], where) if int(name) < len(everything) else None

    def _parameter(self, text: str, where: str) -> Word | list[Word]:
        match = re.fullmatch(rf"({NAME}|\d+|[@*])(?:\[([@*]|\d+)\])?(?:(:?[-=+?])(.*))?", text, re.DOTALL)
        if match is None:
            return self._other_parameter(text, where)
        name, index, operator, rest = match.groups()
        is_list = index in ("@", "*") or name in ("@", "*")
        if is_list and name in self.overrides:
            return [Word(text, where) for text in shlex.split(self.overrides[name])]
        found = self._select(self._lookup(name, where), index, is_list)
        if operator is None:
            return self._unset(name, where, is_list) if found is None else found
        if isinstance(found, list) and (unsure := next((word.maybe for word in found if word.maybe), None)):
            return [Word(HOLE, where, unsure, many=True)]
        empty = found is None or (operator[0] == ":" and _is_empty(found))
        if operator[-1] == "+":
            return Word("", where) if empty else self._expand_text(rest, where)
        if not empty or operator[-1] == "?":
            return found or self._unset(name, where, is_list)
        value = self._expand_text(rest, where)
        if operator[-1] == "=":
            unknown = Word(
                HOLE, where, Unknown(where, f"{name} is assigned inside a branch, a loop or a function"), many=True
            )
            self._set(name, value if self._is_certain else unknown)
        return value

    def _other_parameter(self, text: str, where: str) -> Word:
        length = re.fullmatch(rf"#({NAME})\[[@*]\]", text)
        found = self._lookup(length.group(1), where) if length else None
        if isinstance(found, list) and not any(word.many or word.maybe for word in found):
            return Word(str(len(found)), where)
        return Word(HOLE, where, Unknown(where, f"${{{text}}} is a form that is not read here"), many=True)

    def _select(self, found: Word | list[Word] | None, index: str | None, is_list: bool) -> Word | list[Word] | None:
        if is_list:
            return [found] if isinstance(found, Word) else found
        if isinstance(found, list):
            position = int(index or 0)
            if unsure := next((word for word in found[: position + 1] if word.many or word.maybe), None):
                return Word(HOLE, unsure.where, unsure.unknown or unsure.maybe, many=True)
            return found[position] if position < len(found) else None
        return found

    def _unset(self, name: str, where: str, is_list: bool) -> Word | list[Word]:
        shown = (
            f"${name}, an argument of the script, is not given"
            if name.isdigit()
            else f"{name} is set neither in the script nor in the environment"
        )
        unknown = Unknown(where, shown)
        word = Word(HOLE, where, unknown, many=True)
        return [word] if is_list else word

    def _expand_text(self, text: str, where: str) -> Word:
        """The word behind `:-` and its like."""
        tokens = list(Lexer(text if re.search("[\"']", text) else f'"{text}"', "").tokens())
        if len(tokens) > 1:
            why = f"{text!r} is a default of several words, some in quotes, which is not read here"
            return Word(HOLE, where, Unknown(where, why), many=True)
        piece = self._expand_one(tokens[0], where) if tokens else Word("", where)
        quoted = re.search("[\"']", text) and all(part.quoted for part in tokens[0].parts)
        return replace(piece, whole=bool(quoted))

    def _command(self, text: str, where: str) -> Word:
        match = _SCRIPT_FOLDER.fullmatch(text)
        if match is None or (match.group(1) is None) != (match.group(2) is None):
            shown = " ".join(text.split())
            shown = shown if len(shown) <= 60 else shown[:57] + "..."
            return Word(HOLE, where, Unknown(where, f"$({shown}) is the output of a command"))
        folder = os.path.dirname(str(self.path)) or "."
        if match.group(1) is None:
            return Word(folder, where)
        return Word(os.path.abspath(folder + match.group(2)), where)

    def _arithmetic(self, text: str, where: str) -> Word:
        plain = re.sub(rf"\$\{{({NAME}|\d+)\}}|\$({NAME}|\d+)", lambda m: f" {m.group(1) or m.group(2)} ", text)
        unknown: list[Unknown] = []

        def value_of(name: str) -> int:
            found = self._lookup(name, where)
            word = found if isinstance(found, Word) else Word("0" if found is None else HOLE, where)
            if word.unknown or not re.fullmatch(r"\s*-?\d*\s*", word.text):
                unknown.append(word.unknown or Unknown(where, f"{name} is no integer"))
                return 1
            return int(word.text or 0)

        try:
            result = evaluate(ast.parse(plain.strip(), mode="eval").body, value_of)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            unknown.append(Unknown(where, f"$(({text.strip()})) is arithmetic that is not read here"))
            result = 0
        return Word(HOLE, where, unknown[0]) if unknown else Word(str(result), where)

    # --- expansion of words ---

    def _expand_one(self, token: Token, where: str) -> Word:
        """The value of an assignment: no splitting, arrays joined with blanks."""
        text, unknown, many = "", None, False
        for part in token.parts:
            value = self._value(part, where)
            words = value if isinstance(value, list) else [value]
            text += " ".join(word.text for word in words)
            unknown = unknown or next(
                (word.unknown or word.maybe for word in words if word.unknown or word.maybe), None
            )
            many = many or any(word.many or word.maybe for word in words)
        return Word(HOLE if unknown and not text.count(HOLE) else text, where, unknown, many)

    def _expand(self, token: Token, label: str) -> list[Word]:
        """The arguments that a word of a command becomes."""
        where = _where(label, token)
        fields = _Fields(where)
        for part in token.parts:
            value = self._value(part, where)
            joined = part.kind == "parameter" and part.value.rstrip("]").endswith("*")
            if not part.quoted:
                words = value if isinstance(value, list) else [value]
                words = [self._left_by_the_shell(word, part, where, len(token.parts) == 1) for word in words]
                value = words if isinstance(value, list) else words[0]
            fields.add(value, quoted=part.quoted or part.kind == "text", joined=joined)
        return fields.finish()

    def _left_by_the_shell(self, word: Word, part: Part, where: str, is_alone: bool) -> Word:
        """A word outside quotes, or what is not known of it: file names, braces, and splitting at an own IFS."""
        if word.unknown or word.whole:
            return word
        is_literal = part.kind == "text"
        if is_literal and re.search(r"\{[^}]*(,|\.\.)", word.text):
            return Word(HOLE, where, Unknown(where, f"{word.text!r} has braces, which the shell expands"), many=True)
        if not is_literal and "IFS" in self._values and re.search(r"\W", word.text):
            return Word(
                HOLE, where, Unknown(where, "the script sets IFS, which decides how words are split"), many=True
            )
        patterns = [text for text in word.text.split() if re.search(r"[*?\[]", text)]
        if patterns and (
            not is_alone or self._folder is None or any(glob.glob(text, root_dir=self._folder) for text in patterns)
        ):
            # names that match `[0]*` begin with 0: none is a flag
            start = "[" if re.match(r"\[[^-\]]+\]", word.text) and len(patterns) == len(word.text.split()) == 1 else ""
            why = f"{patterns[0]!r} may be a pattern of file names"
            return Word(start + HOLE, where, Unknown(where, why), many=not start)
        return word

    def _value(self, part: Part, where: str) -> Word | list[Word]:
        if part.kind == "text":
            return Word(part.value, where)
        return {"parameter": self._parameter, "command": self._command, "arithmetic": self._arithmetic}[part.kind](
            part.value, where
        )


class _Fields:
    """The arguments that one word becomes, while its parts are added."""

    def __init__(self, where: str):
        self._where = where
        self._done: list[Word] = []
        self._open: Word | None = None

    def add(self, value: Word | list[Word], *, quoted: bool, joined: bool) -> None:
        if isinstance(value, list) and quoted and joined:
            unknown = next((word.unknown or word.maybe for word in value if word.unknown or word.maybe), None)
            value = Word(HOLE if unknown else " ".join(word.text for word in value), self._where, unknown)
        for i, word in enumerate(value if isinstance(value, list) else [value]):
            if i:
                self._close()
            if quoted:
                self._append(replace(word, many=word.many and isinstance(value, list)))
            elif word.unknown or word.whole:
                self._append(replace(word, many=word.unknown is not None))
            else:
                self._split(word)

    def _split(self, word: Word) -> None:
        for i, text in enumerate(re.split(r"[ \t\n]+", word.text)):
            if i:
                self._close()
            if text:
                self._append(replace(word, text=text))

    def _append(self, word: Word) -> None:
        old = self._open or Word("", self._where)
        self._open = Word(
            old.text + word.text,
            self._where,
            old.unknown or word.unknown,
            old.many or word.many,
            maybe=old.maybe or word.maybe,
        )

    def _close(self) -> None:
        if self._open is not None:
            self._done.append(self._open)
        self._open = None

    def finish(self) -> list[Word]:
        self._close()
        return self._done


def _literal(token: Token) -> str:
    """The word as it is written, where it is plain text without quotes; else nothing."""
    plain = len(token.parts) == 1 and token.parts[0].kind == "text" and not token.parts[0].quoted
    return token.parts[0].value if plain else ""


def _where(label: str, token: Token) -> str:
    return f"{label} line {token.line}".strip()


def _without_redirections(tokens: list[Token]) -> list[Token]:
    kept, skip = [], False
    for token in tokens:
        if token.kind == "operator":
            skip = token.text != "<<"
        elif skip:
            skip = False
        else:
            kept.append(token)
    return kept


def _leading_assignments(tokens: list[Token]) -> list[Token]:
    found = []
    for token in tokens:
        plain = token.parts and token.parts[0].kind == "text" and not token.parts[0].quoted
        if token.kind != "array" and not (plain and ASSIGNMENT.match(token.parts[0].value)):
            break
        found.append(token)
    return found


def _is_empty(found: Word | list[Word]) -> bool:
    words = found if isinstance(found, list) else [found]
    return len(words) < 2 and all(word.text == "" and word.unknown is None for word in words)
