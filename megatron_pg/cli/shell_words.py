"""The expansion of words: what a parameter, a quote, an arithmetic expression becomes among a command's arguments."""

import ast
import glob
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, MutableSet
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron_pg.cli.shell_tokens import HOLE, NAME, Lexer, Part, Token, evaluate
from megatron_pg.cli.shell_tree import Chain, Simple, literal, parse, written
from megatron_pg.cli.shell_values import State, Unknown, Value, Word, hole, joined, lines_of, text_of
from megatron_pg.cli.terminal import InputError

_LONGEST = 1_000_000  # characters of a variable
_ASSIGNED = rf"({NAME})\s*(?:\[[^]]*\]\s*)?(?:[-+*/%&|^]?=(?!=)|<<=|>>=|\+\+|--)|(?:\+\+|--)\s*({NAME})"
_BY_BASH = {  # variables that bash itself sets
    *("BASHPID", "BASH_COMMAND", "BASH_SUBSHELL", "EPOCHREALTIME", "EPOCHSECONDS", "EUID", "FUNCNAME", "GROUPS"),
    *("HOSTNAME", "LINENO", "OLDPWD", "PIPESTATUS", "PPID", "RANDOM", "SECONDS", "SHLVL", "SRANDOM", "UID"),
}


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
        self.texts: dict[str, str] = {}  # of every variable, all that was put there, whatever has become of it
        self.files: dict[str, str] = {}  # of every file that the script writes, what it may have put there
        self.file = str(path)  # the one that is read
        self.knows_globs = True  # a pattern of file names that no file has stays as it is
        self.knows_arguments = False  # in a function, and in a test: `$1` that is not given is empty
        self.path, self._overrides = path, overrides

    def set(self, name: str, value: Value, where: str) -> None:
        """Assign a variable."""
        text = text_of(value)
        if len(text) > _LONGEST:
            raise InputError(f"{where}: {name} grows beyond {_LONGEST} characters. Give the flags themselves.")
        before = self.assigned.get(name)
        self.assigned[name] = Unknown(where, "", lines_of(before.text, text) if before else text)
        self.texts[name] = lines_of(self.texts.get(name, ""), text)
        if name not in self._overrides:
            self.state.values[name] = value

    def forget(self, name: str, where: str, why: str, text: str = "", *, is_open: bool = True) -> None:
        """From here on the variable is not known, unless as an integer; all that the script has put there may be there."""
        text = lines_of(text, self.texts.get(name, "")) if is_open else ""
        self.set(name, hole(Unknown(where, f"{name} {why}", text, is_open), many=is_open), where)

    def all_text(self) -> str:
        """All that the script has put anywhere."""
        return lines_of(*self.texts.values(), text_of(self.state.arguments))

    def assign(self, name: str, value: Value | None, where: str) -> None:
        """`name=value`; that of an array without an index is its first element."""
        old = self.state.values.get(name)
        if isinstance(old, list) and isinstance(value, Word) and len(old) > 1:
            self.forget(name, where, "is an array whose first element is assigned", text_of(value))
        else:
            self.set(name, [value] if isinstance(old, list) and isinstance(value, Word) else value, where)

    def append(self, name: str, value: Value, where: str) -> None:
        """`name+=value`."""
        old = self._lookup(name, where)
        if isinstance(old, list) and isinstance(value, Word):
            self.forget(name, where, "is an array to whose first element something is added", text_of(value))
            return
        if isinstance(value, list):
            lists = [each if isinstance(each, list) else [each] for each in (old, value) if each is not None]
            value = [word for each in lists for word in each]
        elif old is not None:
            value = Word(old.text + value.text, where, old.holes + value.holes, old.many or value.many)
        self.set(name, value, where)

    def text_in(self, text: str, seen: MutableSet[str] | None = None) -> str:
        """What the script may have put into the result of an expression: text, values, functions, files."""
        seen = set() if seen is None else seen
        names = set(re.findall(rf"\$\{{?[!#]?({NAME}|[@*\d])", text))
        values = [
            self._positional("@", "") if name in "@*" or name.isdigit() else self._lookup(name, "") for name in names
        ]
        called = {
            name
            for name in self.state.functions.keys() - seen
            if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)
        }
        seen |= called
        bodies = [self.text_in(written(self.state.functions[name]), seen) for name in sorted(called)]
        files = [put for path, put in self.files.items() if os.path.basename(path) in text]
        return lines_of(text, text_of(*values), *bodies, *files)

    # --- values of parameters ---

    def _lookup(self, name: str, where: str) -> Value | None:
        """The value of a parameter, or None where bash would find it unset."""
        if name in self._overrides:
            return Word(self._overrides[name], where)
        if name.isdigit() or name in ("@", "*"):
            return self._positional(name, where)
        if name in self.state.values:
            return self.state.values[name]
        if name == "BASH_SOURCE":
            return Word(self.file, where)
        if name == "PWD" and self.state.folder is not None:
            return Word(os.path.normpath(os.path.join(_here(), self.state.folder)), where)
        if name in _BY_BASH or name == "PWD":
            return hole(Unknown(where, f"{name} is set by bash itself"))
        if name in os.environ and self.state.lost is None:
            self.environment.add(name)
            return Word(os.environ[name], where)
        if why := self.state.lost or self.state.tainted:
            text = lines_of(why.text, self.texts.get(name, ""))
            return hole(replace(why, where=where, reason=f"{name} is not set here, and {why}", text=text))
        return None

    def _positional(self, name: str, where: str) -> Value | None:
        if name in "@*":
            return list(self.state.arguments)
        if name == "0":
            return Word(str(self.path), where)
        return self._select(self.state.arguments, int(name) - 1)

    def _parameter(self, text: str, where: str, *, quoted: bool = False) -> Value:
        match = re.fullmatch(rf"({NAME}|\d+|[@*])(?:\[([@*]|\d+)\])?(?:(:?[-=+?])(.*))?", text, re.DOTALL)
        if match is None:
            return self._other_parameter(text, where)
        name, index, operator, rest = match.groups()
        if quoted and rest and "'" in rest and operator[-1] != "?":
            why = f"${{{text}}} has single quotes inside double ones, which bash keeps"
            return hole(Unknown(where, why, self.text_in(f"${{{text}}}")), many=False)
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
            return ([] if is_list else Word("", where)) if empty or found == [] else self._expand_text(rest, where)
        if operator == ":?" and found is not None and empty:
            self.state.ended = where
        if not empty or operator[-1] == "?":
            return self._unset(name, where, is_list) if found is None else found
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
        written = self.text_in(f"${{{text}}}")
        if text[0] == "!" and not text.endswith(("[@]", "[*]")):  # the variable whose name another one holds
            written = lines_of(written, self.all_text())
        return hole(Unknown(where, f"{what} is a form that is not read here", written))

    def _select(self, found: list[Word], position: int) -> Word | None:
        if unsure := next((word for word in found[: position + 1] if word.many or word.maybe), None):
            unknown = unsure.unknown or unsure.maybe
            return hole(replace(unknown, text=text_of(found)))
        return found[position] if position < len(found) else None

    def _unset(self, name: str, where: str, is_list: bool) -> Value:
        if name in self.state.values or (name.isdigit() and self.knows_arguments):
            return [] if is_list else Word("", where)
        shown = (
            f"${name}, an argument of the script, is not given"
            if name.isdigit()
            else f"{name} is set neither in the script nor in the environment"
        )
        word = hole(Unknown(where, shown))
        return [word] if is_list else word

    def _expand_text(self, text: str, where: str) -> Value:
        """The word behind `:-` and its like."""
        alone = re.fullmatch(rf'"\$(?:\{{({NAME}\[@\]|@)\}}|(@))"', text)
        if alone:
            found = self._parameter(alone.group(1) or alone.group(2), where)
            return [replace(word, whole=True) for word in (found if isinstance(found, list) else [found])]
        tokens = list(Lexer(text if re.search("[\"']", text) else f'"{text}"', "").tokens())
        if len(tokens) > 1 or text.startswith("#") or re.search(r"\$\{?[@*]|\[[@*]\]", text):
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
        unknown: list[Unknown] = []
        if self.arithmetic_sets(text, where):
            unknown.append(Unknown(where, f"$(({text.strip()})) assigns, which is not read here"))

        def value_of(name: str) -> int:
            found = self._lookup(name, where)
            word = found if isinstance(found, Word) else Word("0" if found is None else HOLE, where)
            if word.unknown or not re.fullmatch(r"\s*-?(0|[1-9]\d*)?\s*", word.text):
                unknown.append(word.unknown or Unknown(where, f"{name} is no decimal integer"))
                return 1
            return int(word.text or 0)

        parameter = rf"\$\{{({NAME}|\d+)\}}|\$({NAME}|\d+)"
        plain = re.sub(parameter, lambda match: f" ({value_of(match.group(1) or match.group(2))}) ", text)
        try:
            if re.search(r"[^\w\s()+\-*/%<>=!]|\b0\w|\b\d+[A-Za-z_]", plain, re.ASCII):
                raise ValueError
            result = evaluate(ast.parse(plain.strip(), mode="eval").body, value_of)
            if abs(result) >= 2**63:
                raise ValueError
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            unknown.append(Unknown(where, f"$(({text.strip()})) is arithmetic that is not read here"))
            result = 0
        if unknown:
            return hole(replace(unknown[0], text="", is_open=False), many=False)
        return Word(str(result), where)

    def arithmetic_sets(self, text: str, where: str) -> bool:
        """Whether arithmetic assigns; what it assigns is an integer."""
        names = [one or other for one, other in re.findall(_ASSIGNED, text)]
        for name in names:
            self.forget(name, where, "is changed by arithmetic", is_open=False)
        return bool(names)

    # --- expansion of words ---

    def expand_one(self, token: Token, where: str) -> Word:
        """The value of an assignment: no splitting, arrays joined with blanks."""
        word = Word("", where)
        for part in token.parts:
            value = self._value(part, where)
            piece = self._joined(value, where) if isinstance(value, list) else value
            word = replace(
                word, text=word.text + piece.text, holes=word.holes + piece.holes, many=word.many or piece.many
            )
        return word

    def expand(self, token: Token, where: str) -> list[Word]:
        """The arguments that a word of a command becomes."""
        if _has_braces(token):
            text = "".join(part.written for part in token.parts)
            return [hole(Unknown(where, f"{text!r} has braces, which the shell expands", self.text_in(text)))]
        fields = _Fields(where)
        for part in token.parts:
            value = self._value(part, where)
            if part.quoted:
                is_star = part.kind == "parameter" and part.value.rstrip("]").endswith("*")
                fields.add_quoted(self._joined(value, where) if is_star and isinstance(value, list) else value)
            else:
                fields.add(
                    value if part.kind == "text" else self._split_at_ifs(value, where),
                    partial(self._left_by_the_shell, part=part, where=where, is_alone=len(token.parts) == 1),
                )
        return fields.finish()

    def _own_ifs(self) -> str | None:
        """The characters at which words are split, where the script sets them; HOLE where they are not known."""
        found = self.state.values.get("IFS")
        own = found.text if isinstance(found, Word) else HOLE if found else None
        return None if own == " \t\n" else own

    def _joined(self, words: list[Word], where: str) -> Word:
        if self._own_ifs() is None or len(words) == 1:
            return joined(words, where)
        return hole(Unknown(where, "the script sets IFS, which joins the elements", text_of(words)), many=False)

    def _split_at_ifs(self, value: Value, where: str) -> Value:
        own = self._own_ifs()
        if own is None:
            return value
        if isinstance(value, list):
            return [self._split_at_ifs(word, where) for word in value]
        if value.whole or not ((HOLE in own and value.text) or set(value.text) & {*own, *" \t\n"}):
            return value
        return hole(Unknown(where, "the script sets IFS, which decides how words are split", text_of(value)))

    def _left_by_the_shell(self, word: Word, *, part: Part, where: str, is_alone: bool) -> Word:
        """A word outside quotes, or what is not known of it: file names."""
        text, folder = word.text, self.state.folder
        if re.search(r"[*?\[]|[@+!]\(", text) and (
            not (is_alone and self.knows_globs) or folder is None or glob.glob(text, root_dir=folder)
        ):
            # names that match `[0]*` begin with 0: none is a flag
            start = "[" if re.match(r"\[[^-\]]+\]", text) else ""
            unknown = Unknown(where, f"{text!r} may be a pattern of file names", text)
            return replace(hole(unknown, many=not start), text=start + HOLE)
        return word

    def _value(self, part: Part, where: str) -> Value:
        if part.kind == "text":
            return Word(part.value, where)
        if part.kind == "parameter":
            return self._parameter(part.value, where, quoted=part.quoted)
        if part.kind == "process":
            return hole(Unknown(where, "`<(…)` is the name of a file", self.text_in(part.value)), many=False)
        return (self._command if part.kind == "command" else self.arithmetic)(part.value, where)


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


def _here() -> str:
    """The folder of the process, as bash names it."""
    named = os.environ.get("PWD", "")
    return named if os.path.isabs(named) and os.path.realpath(named) == os.path.realpath(".") else os.getcwd()


def _has_braces(token: Token) -> bool:
    """Whether the shell makes several words of it, before all else."""
    plain = (part.value if part.kind == "text" and not part.quoted else "_" for part in token.parts)
    return re.search(r"\{.*(,|\.\.).*\}", "".join(plain), re.DOTALL) is not None


def without_redirections(tokens: tuple[Token, ...]) -> list[Token]:
    """The words of a command."""
    kept, skip = [], False
    for token in tokens:
        if token.kind == "operator":
            skip = token.text != "<<"
            if kept and re.fullmatch(rf"\{{{NAME}\}}", literal(kept[-1])):  # `{FD}>file`
                kept.pop()
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
