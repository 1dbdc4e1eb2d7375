"""Bash scripts, read without running anything: the commands that they would run, with their arguments.

Assignments, functions, `source`, tests and branches are followed as bash would follow them. Of a branch whose test is
not known both ways are followed, and what they agree on is known behind it. What a command prints, or a loop makes, is
not guessed: such a value is an `Unknown` that knows its line and what the script itself may have put there.
"""

import fnmatch
import itertools
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_pg.cli.shell_tokens import ASSIGNMENT, NAME, Lexer, Part, Token
from megatron_pg.cli.shell_tree import (
    Block,
    Case,
    Chain,
    For,
    Function,
    If,
    Loop,
    Node,
    Not,
    Pipe,
    Simple,
    Subshell,
    literal,
    parse,
)
from megatron_pg.cli.shell_values import State, Unknown, Value, Word, hole, lines_of, merged, text_of
from megatron_pg.cli.shell_words import Words, without_redirections
from megatron_pg.cli.terminal import InputError, read_text, show_path

_SETTING = {"read", "mapfile", "readarray", "unset", "getopts"}
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}
_PREFIXES = {"exec", "command", "nohup", "env", "builtin"}
_STEPS = 10_000  # simple commands that are followed, loops and functions counted as often as they run
_ROUNDS = 100  # of a loop whose test is known
_DEPTH = 30  # functions and sourced files in each other


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command that the script would run, expanded."""

    where: str
    words: tuple[Word, ...]
    is_certain: bool = True  # False where a branch or a loop decides whether, or how often, it runs


def read_commands(path: str | Path, *, arguments: Sequence[str], overrides: Mapping[str, str]) -> "Reading":
    """The simple commands of a bash script, in order, expanded as far as reading alone can.

    Args:
        path: the script.
        arguments: what the script is called with, `$1` and so on.
        overrides: variables whose value is given, whatever the script assigns.

    Raises:
        InputError: the script cannot be read, ends inside a quote or a command, or is nested or repeated without end.
    """
    reading = Reading(Path(path), arguments, overrides)
    try:
        reading.run_file(Path(path), "")
    except RecursionError:
        raise InputError(
            f"{show_path(path)}: its commands are nested too deeply to be read. Give the flags themselves."
        ) from None
    return reading


class Reading:
    """The state of a script while it is read."""

    def __init__(self, path: Path, arguments: Sequence[str], overrides: Mapping[str, str]):
        self.commands: list[Command] = []
        self.caveats: list[str] = []
        self._words = Words(path, [Word(text, "the command line") for text in arguments], overrides)
        self._label = ""  # how messages name the file that is read; empty for the script itself
        self._is_certain = True
        self._returned: list[State] = []  # where the function or file that is read has returned
        self._steps, self._depth = 0, 0

    @property
    def environment(self) -> set[str]:
        """The variables that were taken from the environment."""
        return self._words.environment

    @property
    def ended(self) -> str | None:
        """Where the script ends itself, if it does."""
        return self._state.ended

    @property
    def _state(self) -> State:
        return self._words.state

    @_state.setter
    def _state(self, state: State) -> None:
        self._words.state = state

    def run_file(self, path: Path, label: str) -> None:
        """Read one file; `label` is how messages name it, empty for the script itself."""
        shown = f"{label or show_path(path)} "
        block = parse(Lexer(read_text(path), shown).tokens(), shown)
        outside, self._label = self._label, label
        self._call(block, show_path(path))
        self._label = outside

    def _call(self, body: Node, name: str) -> None:
        """Run what `return` leaves: a function or a file."""
        self._depth += 1
        if self._depth > _DEPTH:
            raise InputError(
                f"{name}: {_DEPTH} functions or sourced files are open in each other. Does one call itself?"
            )
        outside, self._returned = self._returned, []
        self._run(body)
        for state in self._returned:
            self._state = merged(self._state, state)
        self._returned = outside
        self._depth -= 1

    # --- commands; each method returns whether the command succeeds, None where that is not known ---

    def _run(self, node: Node) -> bool | None:
        if self._state.ended:
            return None
        match node:
            case Simple(tokens):
                return self._run_simple(tokens)
            case tuple():
                return [None, *map(self._run, node)][-1]
            case Not(command):
                status = self._run(command)
                return None if status is None else not status
            case Pipe(commands):
                for command in commands:
                    self._run_apart(command)
                return None
            case Subshell(body):
                return self._run_apart(body)
            case Chain(left, operator, right):
                return self._run_chain(left, operator, right)
            case If():
                return self._run_if(node)
            case For():
                return self._run_for(node)
            case Loop():
                return self._run_loop(node)
            case Case():
                return self._run_case(node)
            case Function(name, body):
                self._state.functions[name] = body
                return True

    def _run_apart(self, node: Node) -> bool | None:
        """In a shell of its own: what it assigns is lost."""
        state, assigned = self._state.copy(), dict(self._words.assigned)
        status = self._run(node)
        self._state, self._words.assigned = state, assigned
        return status

    def _run_chain(self, left: Node, operator: str, right: Node) -> bool | None:
        status = self._run(left)
        goes_on = operator == "&&"
        if status is None:
            self._fork(lambda: self._run(right if goes_on else ()), lambda: self._run(() if goes_on else right))
            return None
        return self._run(right) if status == goes_on else status

    def _fork(self, one: Callable[[], object], other: Callable[[], object]) -> None:
        """Follow two ways from the same state, and keep what they agree on."""
        before = self._state.copy()
        with self._uncertain():
            one()
            taken, self._state = self._state, before
            other()
        self._state = merged(taken, self._state)

    @contextmanager
    def _uncertain(self) -> Iterator[None]:
        outside, self._is_certain = self._is_certain, False
        yield
        self._is_certain = outside

    def _run_if(self, node: If) -> bool | None:
        status = self._run(node.test) if node.test else None
        if status is None:
            self._fork(lambda: self._run(node.then), lambda: self._run(node.otherwise))
            return None
        return self._run(node.then if status else node.otherwise)

    def _run_case(self, node: Case) -> None:
        if node.falls_through:
            self._repeat(lambda: [self._fork(lambda body=body: self._run(body), bool) for _, body in node.arms])
        else:
            self._run_arms(self._words.expand_one(node.word, self._where(node.word)), node.arms)

    def _run_arms(self, word: Word, arms: Sequence[tuple[tuple[Token, ...], Block]]) -> None:
        for i, (patterns, body) in enumerate(arms):
            found = [_matches(word, self._words.expand_one(each, self._where(each)), each) for each in patterns]
            if None in found and True not in found:
                self._fork(lambda body=body: self._run(body), lambda i=i: self._run_arms(word, arms[i + 1 :]))
                return
            if True in found:
                self._run(body)
                return

    # --- loops ---

    def _run_for(self, loop: For) -> None:
        where, name = self._where(loop.name), literal(loop.name)
        tokens = loop.items or ()
        items = [word for token in tokens for word in self._words.expand(token, self._where(token))]
        if loop.items is None:
            items = self._state.arguments
        if not _breaks(loop.body) and not any(word.unknown or word.maybe for word in items):
            for word in items:
                self._words.set(name, word, where)
                self._run(loop.body)
            return

        def once() -> None:
            self._forget(name, where, "changes in the `for` loop", text_of(items))
            self._run(loop.body)

        self._repeat(once)

    def _run_loop(self, loop: Loop) -> None:
        for _ in range(_ROUNDS):
            recorded = len(self.commands)
            status = self._run_apart(loop.test)
            del self.commands[recorded:]
            if status == (loop.word == "until") or self._state.ended:
                return
            if status is None or loop.word == "for" or _breaks(loop.body):
                break
            self._run(loop.test)
            self._run(loop.body)
        self._repeat(lambda: (self._run(loop.test), self._run(loop.body)))

    def _repeat(self, once: Callable[[], object]) -> None:
        """What runs no or several times: nothing that it assigns is known, within it and behind it."""
        start, outside, recorded = self._state.copy(), self._words.assigned, len(self.commands)
        changing: dict[str, Unknown] = {}
        for is_first in itertools.chain([True], itertools.repeat(False)):
            before = self._state.copy()
            self._words.assigned = {}
            del self.commands[recorded:]
            with self._uncertain():
                once()
            is_settled = self._words.assigned.keys() <= changing.keys()
            changing |= self._words.assigned
            self._state = merged(before, self._state)
            self._words.assigned = outside
            self._let_go(changing, start)
            if is_settled and not is_first:  # the second time has seen what the first one changed
                break

    def _let_go(self, changing: Mapping[str, Unknown], start: State) -> None:
        for name, unknown in changing.items():
            text = lines_of(text_of(start.values.get(name)), unknown.text)
            self._forget(name, unknown.where, "is assigned inside a loop", text)

    # --- simple commands ---

    def _run_simple(self, tokens: tuple[Token, ...]) -> bool | None:
        self._steps += 1
        if self._steps > _STEPS:
            raise InputError(
                f"more than {_STEPS} commands are run in its loops and functions. Give the flags themselves."
            )
        if tokens and literal(tokens[0]) in ("[[", "[", "test"):
            with self._testing():
                return self._run_test(tokens)
        words = without_redirections(tokens)
        if words and words[0].kind == "arithmetic":
            return self._run_arithmetic(words[0])
        is_last = False
        while words and literal(words[0]) in _PREFIXES:
            is_last |= literal(words[0]) == "exec" and len(words) > 1
            words = words[1:]
        if words and literal(words[0]) in _DECLARING:
            return self._declare(words[0], words[1:])
        assignments = list(itertools.takewhile(_is_assignment, words))
        if len(assignments) == len(words):
            for token in assignments:
                self._assign(token)
            commands = [part for token in assignments for part in _parts(token) if part.kind == "command"]
            return None if commands else True
        status = self._run_command(words[len(assignments) :], assignments, tokens)
        self._state.ended = self._where(words[0]) if is_last else self._state.ended
        return status

    def _run_command(self, tokens: list[Token], assignments: list[Token], whole: tuple[Token, ...]) -> bool | None:
        where = self._where(tokens[0])
        words = [word for token in tokens for word in self._words.expand(token, self._where(token))]
        name, rest = (words[0].text, words[1:]) if words else ("", [])
        if name in self._state.functions:
            return self._run_function(name, rest, assignments)
        match name:
            case "true" | ":":
                return True
            case "false":
                return False
            case "exit":
                self._state.ended = where
            case "return":
                self._returned.append(self._state.copy())
                self._state.ended = where
            case "source" | "." if rest:
                self._source(rest[0], where)
            case "cd" | "pushd" | "popd":
                target = [word for word in rest if word.text != "--"]
                known = name == "cd" and len(target) == 1 and target[0].unknown is None and self._state.folder
                self._state.folder = os.path.join(self._state.folder, target[0].text) if known else None
            case "eval":
                self._lose_all(Unknown(where, "`eval` may have set it", text_of(words)))
            case "shift":
                self._shift(rest, where)
            case "set" if any(word.text == "--" for word in rest):
                self._state.arguments = rest[[word.text for word in rest].index("--") + 1 :]
            case "let":
                self._run_let(" ".join(word.text for word in rest), where)
            case "printf" if rest and rest[0].text == "-v" and len(rest) > 1:
                self._forget(rest[1].text, where, "is set by `printf`", text_of(rest))
            case _ if name in _SETTING:
                text = "\n".join(map(self._raw, whole))
                for word in rest:
                    self._forget(word.text, where, f"is set by `{name}`", text)
            case _:
                self.commands.append(Command(where, tuple(words), self._is_certain))
                return True if name in ("echo", "printf") else None
        return None

    def _run_function(self, name: str, arguments: list[Word], assignments: list[Token]) -> None:
        state, knows_arguments = self._state, self._words.knows_arguments
        outside, state.arguments, state.locals, self._words.knows_arguments = (
            (state.arguments, state.locals),
            arguments,
            {},
            True,
        )
        for token in assignments:  # `NAME=value function`
            self._assign(token, is_local=True)
        self._call(state.functions[name], name)
        state = self._state
        for each, value in state.locals.items():
            state.values.pop(each, None)
            if value is not None:
                state.values[each] = value
        (state.arguments, state.locals), self._words.knows_arguments = outside, knows_arguments

    def _lose_all(self, why: Unknown) -> None:
        self._state.tainted = why
        self._state.values.clear()

    def _shift(self, rest: list[Word], where: str) -> None:
        count = int(rest[0].text) if rest and rest[0].text.isdecimal() else None if rest else 1
        arguments = self._state.arguments
        if count is None or any(word.many or word.maybe for word in arguments[:count]):
            self._state.arguments = [hole(Unknown(where, "`shift` changes the arguments", text_of(arguments)))]
        else:
            self._state.arguments = arguments[count:]

    def _source(self, word: Word, where: str) -> None:
        is_known = word.unknown is None and (self._state.folder is not None or os.path.isabs(word.text))
        path = Path(self._state.folder or "", word.text)
        if is_known and path.is_file():
            self.run_file(path, show_path(path))
            return
        shown = "a file whose name is not known" if word.unknown else show_path(word.text)
        self._state.tainted = Unknown(where, f"`source` reads {shown}, which is not to be had here and may set it")
        self.caveats.append(f"{where}: {shown} is not read; what it changes is not seen")

    # --- tests ---

    @contextmanager
    def _testing(self) -> Iterator[None]:
        """Where an argument that is not given is empty, as it is for bash."""
        outside, self._words.knows_arguments = self._words.knows_arguments, True
        yield
        self._words.knows_arguments = outside

    def _run_test(self, tokens: Sequence[Token]) -> bool | None:
        """`[ … ]`, `test …` and `[[ … ]]`; of the operators of the last, `&&` or `||` alone."""
        if literal(tokens[0]) != "[[":
            words = [
                word for token in without_redirections(tokens) for word in self._words.expand(token, self._where(token))
            ]
            return _test(words[1:-1] if words[0].text == "[" else words[1:])
        tokens = tokens[1:-1]
        operators = {token.text for token in tokens if token.kind == "operator"}
        if len(operators) > 1 or operators - {"&&", "||"}:
            return None
        parts = [
            list(part) for is_word, part in itertools.groupby(tokens, lambda token: token.kind != "operator") if is_word
        ]
        found = [self._compare(part) for part in parts]
        decisive = operators == {"||"}
        return decisive if decisive in found else None if None in found else not decisive

    def _compare(self, tokens: list[Token]) -> bool | None:
        words = [self._words.expand_one(token, self._where(token)) for token in tokens]
        if len(words) == 3 and words[1].text in ("=", "==", "!="):
            found = _matches(words[0], words[2], tokens[2])
            return None if found is None else found == (words[1].text != "!=")
        return _test(words)

    def _run_arithmetic(self, token: Token) -> bool | None:
        text, where = token.parts[0].value, self._where(token)
        if self._run_let(text, where):
            return None
        word = self._words.arithmetic(text, where)
        return None if word.unknown else word.text != "0"

    def _run_let(self, text: str, where: str) -> bool:
        """Whether arithmetic assigns; what it assigns is an integer."""
        pattern = rf"({NAME})\s*(?:\[[^]]*\]\s*)?(?:[-+*/%&|^]?=(?!=)|<<=|>>=|\+\+|--)|(?:\+\+|--)\s*({NAME})"
        names = [a or b for a, b in re.findall(pattern, text)]
        for name in names:
            self._forget(name, where, "is changed by arithmetic", is_open=False)
        return bool(names)

    # --- assignments ---

    def _declare(self, word: Token, tokens: list[Token]) -> bool:
        is_local = literal(word) == "local" or (literal(word) in ("declare", "typeset") and self._words.knows_arguments)
        options = {letter for token in tokens if literal(token)[:1] == "-" for letter in literal(token)[1:]}
        for token in tokens:
            self._assign(token, is_local=is_local and "g" not in options)
            if options - set("axrgf") and (name := _assigned_name(token)):  # `-i`, `-A`, `-n`
                self._forget(
                    name, self._where(token), "is declared with an attribute that changes it", self._raw(token)
                )
        if "n" in options:
            self._lose_all(Unknown(self._where(word), "a reference to its name may have set it"))
        return True

    def _assign(self, token: Token, *, is_local: bool = False) -> None:
        where, name = self._where(token), _assigned_name(token)
        if name is None:
            if token.parts and token.parts[0].kind != "text":  # `export $(…)`
                self._state.tainted = Unknown(where, "a declaration may have set it", self._raw(token))
            return
        if is_local:
            self._state.locals.setdefault(name, self._state.values.get(name))
        if token.kind == "array":
            value: Value = [word for item in token.items for word in self._words.expand(item, self._where(item))]
            (self._words.append if token.append else self._words.set)(name, value, where)
            return
        match = ASSIGNMENT.match(token.parts[0].value)
        if match is None and not is_local:  # `export NAME`, or an element of an array
            if token.parts[0].value != name:
                self._forget(name, where, "has an element assigned", self._raw(token))
            return
        head = replace(token.parts[0], value=token.parts[0].value[match.end() if match else len(name) :])
        value = self._words.expand_one(replace(token, parts=(head, *token.parts[1:])), where)
        (self._words.append if match and match.group(2) else self._words.set)(name, value, where)

    def _forget(self, name: str, where: str, why: str, text: str = "", *, is_open: bool = True) -> None:
        self._words.set(name, hole(Unknown(where, f"{name} {why}", text, is_open), many=is_open), where)

    def _raw(self, token: Token) -> str:
        return self._words.text_in("".join(part.written for part in _parts(token)))

    def _where(self, token: Token) -> str:
        return f"{self._label} line {token.line}".strip()


def _parts(token: Token) -> list[Part]:
    return [*token.parts, *(part for item in token.items for part in item.parts)]


def _assigned_name(token: Token) -> str | None:
    """The variable that a word names or assigns."""
    if token.kind == "array":
        return token.text
    is_plain = bool(token.parts) and token.parts[0].kind == "text" and not token.parts[0].quoted
    match = re.match(rf"({NAME})(?:\[|\+?=|$)", token.parts[0].value) if is_plain else None
    return match.group(1) if match else None


def _is_assignment(token: Token) -> bool:
    text = "".join(part.value for part in token.parts)
    return _assigned_name(token) is not None and (
        token.kind == "array" or re.match(rf"{NAME}(\[.*\])?\+?=", text) is not None
    )


def _breaks(node: object) -> bool:
    """Whether a loop's body may leave it."""
    if isinstance(node, Simple):
        return bool(node.tokens) and literal(node.tokens[0]) in ("break", "continue")
    if isinstance(node, tuple):
        return any(map(_breaks, node))
    return isinstance(node, Not | Pipe | Chain | Subshell | If | For | Loop | Case) and any(
        _breaks(getattr(node, name)) for name in node.__slots__
    )


def _matches(word: Word, pattern: Word, token: Token) -> bool | None:
    """Whether a word matches a pattern of `case` or `[[`."""
    if pattern.text == "*" and not token.parts[0].quoted:
        return True
    if word.holes or pattern.holes:
        return None
    if all(part.quoted for part in token.parts) or not re.search(r"[*?\[\\(]", pattern.text):
        return word.text == pattern.text
    is_plain = all(part.kind == "text" and not part.quoted for part in token.parts) and not re.search(
        r"[\[\\(]", pattern.text
    )
    return fnmatch.fnmatchcase(word.text, pattern.text) if is_plain else None


def _test(words: list[Word]) -> bool | None:
    """`[ … ]` of texts and integers; files are not looked for."""
    if any(word.holes or word.maybe for word in words):
        return None
    match [word.text for word in words]:
        case ["!", *_]:
            status = _test(words[1:])
            return None if status is None else not status
        case ["-z", text]:
            return text == ""
        case ["-n", text] | [text]:
            return text != ""
        case [one, "=" | "==", other]:
            return one == other
        case [one, "!=", other]:
            return one != other
        case [one, ("-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge") as name, other]:
            if all(re.fullmatch(r"-?(0|[1-9]\d{0,17})", text) for text in (one, other)):
                return getattr(operator, name[1:])(int(one), int(other))
    return None
