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
from typing import NoReturn

from megatron_pg.cli.shell_tokens import ASSIGNMENT, HOLE, NAME, Lexer, Part, Token
from megatron_pg.cli.shell_tree import (
    Block,
    Case,
    Chain,
    For,
    Function,
    If,
    InFile,
    Loop,
    Node,
    Not,
    Pipe,
    Redirected,
    Simple,
    Subshell,
    literal,
    parse,
    written,
)
from megatron_pg.cli.shell_values import State, Unknown, Value, Word, hole, lines_of, merged, text_of
from megatron_pg.cli.shell_words import Words, without_redirections
from megatron_pg.cli.terminal import InputError, read_text, show_path

_SETTING = {"read": "REPLY", "mapfile": "MAPFILE", "readarray": "MAPFILE", "getopts": "OPTARG"}  # and what by default
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}
_PREFIXES = {"exec", "command", "nohup", "env", "builtin"}
_WRITING = {"tee", "cp", "mv", "sed", "ln", "install", "wget", "curl"}
_STOPPING = {"nocasematch", "expand_aliases", "posix"}  # of `shopt -s` and `set -o`
_VANISHING = {"nullglob", "failglob", "dotglob", "nocaseglob"}
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
        self._is_tested = False  # within a test, where `set -e` does not count
        self._input = ""  # what the script itself gives the command to read
        self._readonly: set[str] = set()
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
        self._call(InFile(str(path), label, block), show_path(path))

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
                self._note_files(tokens, tokens)
                return self._run_simple(tokens)
            case tuple():
                return self._run_block(node)
            case Not(command):
                status = self._run_tested(command)
                return None if status is None else not status
            case Pipe(commands):
                for i, command in enumerate(commands):
                    with self._reading(self._words.text_in(written(commands[:i]))):
                        self._run_apart(command)
                return None
            case Redirected(tokens, body):
                self._note_files(tokens, body)
                with self._reading("\n".join(map(self._raw, tokens))):
                    return self._run(body)
            case InFile(path, label, body):
                outside = self._words.file, self._label
                self._words.file, self._label = path, label
                status = self._run(body)
                self._words.file, self._label = outside
                return status
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
                self._state.functions[name] = InFile(self._words.file, self._label, body)
                return True

    def _run_block(self, nodes: Block) -> bool | None:
        status = None
        for node in nodes:
            status = self._run(node)
            if status is False and isinstance(node, Simple) and self._state.exits and not self._is_tested:
                self._state.ended = self._where(node.tokens[0])
        return status

    def _run_tested(self, node: Node) -> bool | None:
        outside, self._is_tested = self._is_tested, True
        status = self._run(node)
        self._is_tested = outside
        return status

    @contextmanager
    def _reading(self, text: str) -> Iterator[None]:
        outside = self._input
        self._input = lines_of(outside, text)
        yield
        self._input = outside

    def _note_files(self, tokens: Sequence[Token], command: Node | Sequence[Token]) -> None:
        """Which files the script writes, and what it may put there."""
        for redirection, target in itertools.pairwise(tokens):
            if redirection.kind == "operator" and ">" in redirection.text and target.kind == "word":
                word = self._words.expand_one(target, self._where(target))
                if not word.holes and not word.text.startswith("/dev/"):
                    path = self._path(word.text)
                    text = lines_of(self._input, self._words.text_in(written(command)))
                    self._words.files[path] = lines_of(self._words.files.get(path, ""), text)

    def _path(self, text: str) -> str:
        return os.path.normpath(os.path.join(self._state.folder or "", text))

    def _stop(self, where: str, what: str) -> NoReturn:
        raise InputError(
            f"{show_path(self._words.path)}: {where}: {what}, which is not followed here. Give the flags themselves, or put "
            "`python -m megatron_pg explain` in the place of the training command."
        )

    def _run_apart(self, node: Node) -> bool | None:
        """In a shell of its own: what it assigns is lost."""
        state, assigned = self._state.copy(), dict(self._words.assigned)
        status = self._run(node)
        self._state, self._words.assigned = state, assigned
        return status

    def _run_chain(self, left: Node, operator: str, right: Node) -> bool | None:
        status = self._run_tested(left)
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
        status = self._run_tested(node.test) if node.test else None
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
            self._words.forget(name, where, "changes in the `for` loop", text_of(items))
            self._run(loop.body)

        self._repeat(once)

    def _run_loop(self, loop: Loop) -> None:
        for _ in range(_ROUNDS):
            recorded = len(self.commands)
            status = self._run_apart(Not(Not(loop.test)))
            del self.commands[recorded:]
            if status == (loop.word == "until") or self._state.ended:
                return
            if status is None or loop.word == "for" or _breaks(loop.body):
                break
            self._run_tested(loop.test)
            self._run(loop.body)
        self._repeat(lambda: (self._run_tested(loop.test), self._run(loop.body)))

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
            self._words.forget(name, unknown.where, "is assigned inside a loop", text)

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
        is_last = is_program = False
        while words and literal(words[0]) in _PREFIXES:
            is_program = True
            is_last |= literal(words[0]) == "exec" and len(words) > 1
            words = words[1:]
            if words and literal(words[0]) in ("-v", "-V"):  # `command -v`
                return None
        if words and literal(words[0]) in _DECLARING:
            return self._declare(words[0], words[1:])
        assignments = list(itertools.takewhile(_is_assignment, words))
        if len(assignments) == len(words):
            for token in assignments:
                self._assign(token)
            commands = [part for token in assignments for part in _parts(token) if part.kind == "command"]
            return None if commands else True
        where = self._where(words[0])
        rest = [word for token in words[len(assignments) :] for word in self._words.expand(token, self._where(token))]
        if self._state.ended or not rest:  # `${NAME:?}`, or nothing is left to run
            return None
        if rest[0].text in self._state.functions and not is_program:
            return self._run_function(rest[0].text, rest[1:], assignments)
        with self._assigned_before(assignments if rest[0].text in ("source", ".", "eval") else []):
            status = self._run_command(rest, self._where(words[len(assignments)]), tokens)
        self._state.ended = where if is_last else self._state.ended
        return status

    @contextmanager
    def _assigned_before(self, assignments: list[Token]) -> Iterator[None]:
        """`NAME=value source file`: what is assigned holds within."""
        before = {name: self._state.values.get(name) for name in map(_assigned_name, assignments)}
        for token in assignments:
            self._assign(token)
        yield
        for name, value in before.items():
            self._words.set(name, value, self._where(assignments[0]))
            if value is None:
                self._state.values.pop(name, None)

    def _run_command(self, words: list[Word], where: str, whole: tuple[Token, ...]) -> bool | None:
        name, rest = words[0].text, words[1:]
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
                self._source(rest, where)
            case "cd" | "pushd" | "popd":
                target = [word for word in rest if word.text != "--"]
                known = name == "cd" and len(target) == 1 and target[0].unknown is None and self._state.folder
                self._state.folder = os.path.join(self._state.folder, target[0].text) if known else None
            case "eval":
                return self._eval(words, where, whole[0].line)
            case "shift":
                return self._shift(rest, where)
            case "set":
                self._set(rest, where)
            case "shopt":
                self._shopt({word.text for word in rest}, where)
            case "let":
                self._words.arithmetic_sets(" ".join(word.text for word in rest), where)
            case "printf" if rest and rest[0].text == "-v" and len(rest) > 1:
                self._forget(rest[1], where, "is set by `printf`", text_of(rest))
            case "unset":
                self._unset(rest, where)
            case _ if name in _SETTING:
                given = text_of(self._state.arguments) if name == "getopts" else self._input
                text = lines_of(given, *map(self._raw, whole))
                for word in [*rest, Word(_SETTING[name], where)]:
                    self._forget(word, where, f"is set by `{name}`", text)
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
            if isinstance(value, Word) and not value.where:  # two branches, one of which made it local
                where = self._words.assigned[each].where if each in self._words.assigned else name
                self._words.forget(each, where, "is local only where a branch is taken")
            elif value is not None:
                state.values[each] = value
        (state.arguments, state.locals), self._words.knows_arguments = outside, knows_arguments

    def _lose_variables(self, why: Unknown) -> None:
        self._state.lost = why
        self._state.values.clear()

    def _lose_all(self, why: Unknown) -> None:
        """After commands that are not known: variables, arguments, and the functions that their text may define."""
        state = self._state
        self._lose_variables(why)
        state.arguments = [hole(replace(why, text=lines_of(why.text, text_of(state.arguments))))]
        for name, body in state.functions.items():
            if re.search(rf"\b{re.escape(name)}\s*\(\s*\)|\bfunction\s+{re.escape(name)}\b", why.text):
                state.functions[name] = If((), (body,), ())

    def _eval(self, words: list[Word], where: str, line: int) -> bool | None:
        if any(word.holes or word.maybe for word in words):
            self._lose_all(Unknown(where, "`eval` may have set it", text_of(words)))
            self.commands.append(Command(where, tuple(words), self._is_certain))
            return None
        shown = f"{show_path(self._words.path)}: {where}: `eval` of "
        return self._run(parse(Lexer(" ".join(word.text for word in words[1:]), shown, line).tokens(), shown))

    def _set(self, rest: list[Word], where: str) -> None:
        while rest and rest[0].text[:1] in ("-", "+") and rest[0].text != "--":
            option, *rest = rest
            name = rest.pop(0).text if option.text.endswith("o") and rest else ""
            if name in _STOPPING and option.text[0] == "-":
                self._stop(where, f"`set -o {name}` changes what commands mean")
            if "e" in option.text or name == "errexit":
                self._state.exits = option.text[0] == "-"
        is_marked = bool(rest) and rest[0].text == "--"
        if rest:
            self._state.arguments = rest[is_marked:]

    def _shopt(self, options: set[str], where: str) -> None:
        if "-s" not in options:
            return
        if changing := sorted(options & _STOPPING):
            self._stop(where, f"`shopt -s {changing[0]}` changes what commands mean")
        self._words.knows_globs &= not options & _VANISHING

    def _unset(self, words: list[Word], where: str) -> None:
        for word in words:
            if word.text == "-f":
                for each in words:
                    self._state.functions.pop(each.text, None)
                return
            if re.fullmatch(NAME, word.text) and not word.maybe:
                self._words.set(word.text, None, where)
            else:
                self._forget(word, where, "has an element unset", word.text)

    def _forget(self, word: Word, where: str, why: str, text: str = "") -> None:
        """Forget the variable that a word names; where the name is not known, all of them."""
        match = re.match(rf"({NAME})(\[.*)?$", word.text, re.DOTALL)
        if match:
            self._words.forget(match.group(1), where, why, text)
        elif word.text.startswith(HOLE):
            self._lose_variables(Unknown(where, f"a variable {why}", text))

    def _shift(self, rest: list[Word], where: str) -> bool | None:
        count = int(rest[0].text) if rest and rest[0].text.isdecimal() else None if rest else 1
        arguments = self._state.arguments
        unsure = [word.many or bool(word.maybe) for word in arguments]
        if count is None or any(unsure[:count]) or (count > len(arguments) and any(unsure)):
            self._state.arguments = [hole(Unknown(where, "`shift` changes the arguments", text_of(arguments)))]
            return None
        if count <= len(arguments):
            self._state.arguments = arguments[count:]
        return count <= len(arguments)

    def _source(self, words: list[Word], where: str) -> None:
        word, *arguments = words
        is_known = word.unknown is None and (self._state.folder is not None or os.path.isabs(word.text))
        path = Path(self._state.folder or "", word.text)
        if is_known and self._is_written(word.text):
            self._stop(where, f"`source` reads {show_path(word.text)}, which the script itself writes")
        if is_known and path.is_file():
            outside = self._state.arguments
            self._state.arguments = arguments or outside
            self.run_file(path, show_path(path))
            self._state.arguments = outside if arguments else self._state.arguments
            return
        shown = "a file whose name is not known" if word.unknown else show_path(word.text)
        why = f"`source` reads {shown}, which is not to be had here and may set it"
        if word.unknown and not word.many and word.text == HOLE and word.unknown.text:  # `source <(…)`
            self._lose_all(Unknown(where, why, word.unknown.text))
        self._state.tainted = Unknown(where, why)
        self.caveats.append(f"{where}: {shown} is not read; what it changes is not seen")

    def _is_written(self, name: str) -> bool:
        path = self._path(name)
        writing = (command.words for command in self.commands if command.words[0].text in _WRITING)
        return path in self._words.files or any(self._path(word.text) == path for words in writing for word in words)

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
        if len(tokens) > 1 and literal(tokens[0]) == "!":
            found = self._compare(tokens[1:])
            return None if found is None else not found
        words = [self._words.expand_one(token, self._where(token)) for token in tokens]
        if len(words) == 3 and words[1].text in ("=", "==", "!="):
            found = _matches(words[0], words[2], tokens[2])
            return None if found is None else found == (words[1].text != "!=")
        return _test(words)

    def _run_arithmetic(self, token: Token) -> bool | None:
        text, where = token.parts[0].value, self._where(token)
        word = self._words.arithmetic(text, where)
        return None if word.unknown else word.text != "0"

    # --- assignments ---

    def _declare(self, word: Token, tokens: list[Token]) -> bool:
        kind, where = literal(word), self._where(word)
        is_local = kind == "local" or (kind in ("declare", "typeset") and self._words.knows_arguments)
        options = {letter for token in tokens if literal(token)[:1] == "-" for letter in literal(token)[1:]}
        if "n" in options and kind != "export":
            self._stop(where, f"`{kind} -n` makes a second name of a variable")
        found = [each for token in tokens for each in self._assigned(token)]  # all of them before one is set
        for name, value, is_added in found:
            self._put(name, value, where, is_added=is_added, is_local=is_local and "g" not in options)
            if options - set("axrgfp"):  # `-i`, `-A`
                self._words.forget(name, where, "is declared with an attribute that changes it")
            if (kind == "readonly" or "r" in options) and not is_local:
                self._readonly.add(name)
        return True

    def _assign(self, token: Token, *, is_local: bool = False) -> None:
        for name, value, is_added in self._assigned(token):
            self._put(name, value, self._where(token), is_added=is_added, is_local=is_local)

    def _assigned(self, token: Token) -> list[tuple[str, Value | None, bool]]:
        """What a word assigns: names, each with its value, None where only the name stands, and whether that is added."""
        where, name = self._where(token), _assigned_name(token)
        if token.kind == "array":
            if any(re.match(r"\[[^]]*\]\+?=", item.parts[0].value) for item in token.items if item.parts):
                unknown = Unknown(where, f"{token.text} is an array with indices", self._raw(token))
                return [(token.text, [hole(unknown)], token.append)]
            items = [word for item in token.items for word in self._words.expand(item, self._where(item))]
            return [(token.text, items, token.append)]
        match = ASSIGNMENT.match(token.parts[0].value) if name else None
        if match:
            head = replace(token.parts[0], value=token.parts[0].value[match.end() :])
            value = self._words.expand_one(replace(token, parts=(head, *token.parts[1:])), where)
            return [(name, value, bool(match.group(2)))]
        if name and token.parts[0].value != name:
            old = self._state.values.get(name)
            index = re.match(rf"{NAME}\[(\d+)\]=", token.parts[0].value)
            is_known = isinstance(old, list) and not any(word.many or word.maybe for word in old)
            if index and is_known and int(index.group(1)) < len(old):
                head = replace(token.parts[0], value=token.parts[0].value[index.end() :])
                word = self._words.expand_one(replace(token, parts=(head, *token.parts[1:])), where)
                at = int(index.group(1))
                return [(name, [*old[:at], replace(word, many=False), *old[at + 1 :]], False)]
            old = self._words.texts.get(name, "")
            unknown = Unknown(where, f"{name} has an element assigned", lines_of(self._raw(token), old))
            return [(name, [hole(unknown)], False)]
        return [each for word in self._words.expand(token, where) for each in self._named(word, where)]

    def _named(self, word: Word, where: str) -> list[tuple[str, Value | None, bool]]:
        """What an argument of `export` and its like assigns."""
        match = ASSIGNMENT.match(word.text)
        if match:
            return [(match.group(1), replace(word, text=word.text[match.end() :], many=False), bool(match.group(2)))]
        if word.holes:
            self._lose_variables(Unknown(where, "a declaration may have set it", text_of(word)))
        return [(word.text, None, False)] if re.fullmatch(NAME, word.text) else []

    def _put(self, name: str, value: Value | None, where: str, *, is_added: bool, is_local: bool) -> None:
        is_new = is_local and name not in self._state.locals
        if is_new:
            self._state.locals[name] = self._state.values.get(name)
        if name in self._readonly and value is not None:
            self._words.forget(name, where, "is readonly, so bash does not assign it", text_of(value))
        elif value is None:
            if is_new:
                self._words.set(name, None, where)
        elif is_added:
            self._words.append(name, value, where)
        elif is_new:
            self._words.set(name, value, where)
        else:
            self._words.assign(name, value, where)

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
