"""The grammar of bash: words and operators become a tree of commands."""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_pg.cli.shell_tokens import Part, Token
from megatron_pg.cli.terminal import InputError

_CLOSING = {"then", "elif", "else", "fi", "do", "done", "}", "esac"}


@dataclass(frozen=True, slots=True)
class Simple:
    """Assignments and a command, with its redirections and here documents."""

    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """`! command`."""

    command: "Node"


@dataclass(frozen=True, slots=True)
class Pipe:
    """`a | b`; each part runs in a shell of its own."""

    commands: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """`a && b` or `a || b`."""

    left: "Node"
    operator: str
    right: "Node"


@dataclass(frozen=True, slots=True)
class Subshell:
    """`( … )`, or a command in the background: what it assigns is lost."""

    body: "Block"


@dataclass(frozen=True, slots=True)
class If:
    """One test and its two ways; an `elif` is an If in `otherwise`."""

    test: "Block"
    then: "Block"
    otherwise: "Block"


@dataclass(frozen=True, slots=True)
class For:
    """`for name in items`; the positional arguments where `items` is None."""

    name: Token
    items: tuple[Token, ...] | None
    body: "Block"


@dataclass(frozen=True, slots=True)
class Loop:
    """`while`, `until`, or the `for` of arithmetic, whose head is the test."""

    word: str
    test: "Block"
    body: "Block"


@dataclass(frozen=True, slots=True)
class Case:
    """`case word in`: the patterns of each arm, and what it runs."""

    word: Token
    arms: tuple[tuple[tuple[Token, ...], "Block"], ...]
    falls_through: bool  # an arm ends with `;&` or `;;&`


@dataclass(frozen=True, slots=True)
class Redirected:
    """A compound command with the redirections behind it, its here documents among them."""

    tokens: tuple[Token, ...]
    body: "Node"


@dataclass(frozen=True, slots=True)
class InFile:
    """What a file defines: its path and the name that messages give it go with it."""

    path: str
    label: str
    body: "Node"


@dataclass(frozen=True, slots=True)
class Function:
    """The definition of a function."""

    name: str
    body: "Node"


Block = tuple["Node", ...]  # commands one after the other, `{ … }` too
Node = Simple | Not | Pipe | Chain | Subshell | If | For | Loop | Case | Redirected | InFile | Function | Block


def literal(token: Token) -> str:
    """The word as it is written, where it is plain text without quotes; else nothing."""
    plain = len(token.parts) == 1 and token.parts[0].kind == "text" and not token.parts[0].quoted
    return token.parts[0].value if plain and token.kind == "word" else ""


def written(node: object) -> str:
    """All words of a command, without quotes, one a line."""
    if isinstance(node, Token):
        return "".join(part.written for part in node.parts) + "".join(f"\n{written(item)}" for item in node.items)
    parts = node if isinstance(node, tuple) else [getattr(node, name) for name in getattr(node, "__slots__", ())]
    return "\n".join(map(written, parts))


def is_redirection(token: Token) -> bool:
    """Whether it is an operator that a file or a here document follows, or the text of a here document."""
    if token.kind == "here":
        return True
    return token.kind == "operator" and (token.text.lstrip("0123456789")[0] in "<>" or token.text[:2] == "&>")


def parse(tokens: Iterable[Token], label: str) -> Block:
    """The commands of a script.

    Raises:
        InputError: a command is not finished, or ends what has not begun.
    """
    return _Parser(list(tokens), label).parse()


class _Parser:
    def __init__(self, tokens: list[Token], label: str):
        self._tokens, self._label, self._at = tokens, label, 0

    def parse(self) -> Block:
        block = self._block()
        if self._at < len(self._tokens):
            raise self._unexpected()
        return block

    def _word(self) -> str:
        """The operator or the plain word that comes next; nothing at the end of the script or before any other word."""
        if self._at == len(self._tokens):
            return ""
        token = self._tokens[self._at]
        return token.text if token.kind == "operator" else literal(token)

    def _take(self) -> Token:
        if self._at == len(self._tokens):
            raise self._unexpected()
        self._at += 1
        return self._tokens[self._at - 1]

    def _expect(self, word: str) -> None:
        if self._word() != word:
            raise self._unexpected()
        self._at += 1

    def _unexpected(self) -> InputError:
        token = self._tokens[min(self._at, len(self._tokens) - 1)]
        what = repr(self._word()) if self._at < len(self._tokens) else "its end"
        return InputError(
            f"{self._label}line {token.line}: bash would not expect {what} here, so the script cannot be read. Is the file cut short?"
        )

    def _skip(self, *words: str) -> None:
        while self._word() in words and self._word():
            self._at += 1

    def _block(self, *ends: str) -> Block:
        """Commands up to one of the words that may end them, which is left."""
        nodes: list[Node] = []
        while True:
            self._skip("\n", ";")
            if self._at == len(self._tokens) or self._word() in ends:
                return tuple(nodes)
            node = self._chain()
            nodes.append(Subshell((node,)) if self._word() == "&" else node)
            self._skip("&")

    def _chain(self) -> Node:
        left = self._pipe()
        while (operator := self._word()) in ("&&", "||"):
            self._at += 1
            self._skip("\n")
            left = Chain(left, operator, self._pipe())
        return left

    def _pipe(self) -> Node:
        negated = False
        while (word := self._word()) in ("!", "time"):
            negated ^= word == "!"
            self._at += 1
        commands = [self._command()]
        while self._word() in ("|", "|&"):
            self._at += 1
            self._skip("\n")
            commands.append(self._command())
        node = commands[0] if len(commands) == 1 else Pipe(tuple(commands))
        return Not(node) if negated else node

    def _command(self) -> Node:
        readers = {
            **{"if": self._if, "for": self._for, "select": self._for, "while": self._loop, "until": self._loop},
            **{"case": self._case, "{": self._group, "(": self._subshell, "function": self._function},
        }
        reader = readers.get(self._word())
        if reader is None:
            return self._simple()
        self._at += 1
        node = reader()
        tokens = self._redirections()
        return Redirected(tuple(tokens), node) if tokens else node

    def _redirections(self) -> list[Token]:
        """What follows a command, or stands in it: `< file`, `> >(command)`, and the text of a here document."""
        tokens: list[Token] = []
        while self._at < len(self._tokens) and is_redirection(self._tokens[self._at]):
            token = self._take()
            if self._word() == "(":  # `<(command)` is the name of a file
                self._at += 1
                part = Part("process", written(self._subshell()), True)
                tokens.append(Token("word", token.line, (part,)))
                continue
            tokens.append(token)
            if token.kind == "operator" and token.text != "<<":
                tokens += self._redirections()[:1] if self._word()[:1] in ("<", ">") else [self._take()]
        return tokens

    def _simple(self) -> Node:
        tokens: list[Token] = []
        if self._word() in _CLOSING:
            raise self._unexpected()
        is_test = self._word() == "[["
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            if is_test:
                is_test = literal(self._take()) != "]]"
                tokens.append(token)
            elif is_redirection(token):
                tokens += self._redirections()
            elif token.kind != "operator":
                tokens.append(self._take())
            elif token.text == "(" and len(tokens) == 1 and literal(tokens[0]):
                return self._defined(tokens[0])
            elif token.text == "(":
                raise self._unexpected()
            else:
                break
        if not tokens:
            raise self._unexpected()
        return Simple(tuple(tokens))

    def _function(self) -> Node:
        return self._defined(self._take())

    def _defined(self, name: Token) -> Node:
        if self._word() == "(":
            self._at += 1
            self._expect(")")
        self._skip("\n")
        return Function(literal(name), self._command())

    def _group(self) -> Node:
        body = self._block("}")
        self._expect("}")
        return body

    def _subshell(self) -> Node:
        body = self._block(")")
        self._expect(")")
        return Subshell(body)

    def _if(self) -> Node:
        test = self._block("then")
        self._expect("then")
        then = self._block("elif", "else", "fi")
        word = self._word()
        self._take()
        if word == "elif":
            return If(test, then, (self._if(),))
        otherwise = self._block("fi") if word == "else" else ()
        if word == "else":
            self._expect("fi")
        return If(test, then, otherwise)

    def _for(self) -> Node:
        name, items = self._take(), None
        if self._word() == "in":
            self._at += 1
            items = []
            while self._word() not in (";", "\n"):
                items.append(self._take())
            items = tuple(items)
        self._skip("\n", ";")
        body = self._body()
        if name.kind == "arithmetic":
            return Loop("for", (Simple((name,)),), body)
        return For(name, items, body)

    def _loop(self) -> Node:
        word = literal(self._tokens[self._at - 1])
        test = self._block("do")
        return Loop(word, test, self._body())

    def _body(self) -> Block:
        if self._word() == "{":  # `for ((…)) { …; }`
            self._at += 1
            return self._group()
        self._expect("do")
        body = self._block("done")
        self._expect("done")
        return body

    def _case(self) -> Node:
        word, arms, falls_through = self._take(), [], False
        self._skip("\n")
        self._expect("in")
        while True:
            self._skip("\n", ";;", ";&", ";;&")
            if self._word() == "esac":
                self._at += 1
                return Case(word, tuple(arms), falls_through)
            self._skip("(")
            patterns = []
            while self._word() != ")":
                patterns.append(self._take())
            self._at += 1
            body = self._block(";;", ";&", ";;&", "esac")
            falls_through |= self._word() in (";&", ";;&")
            arms.append((tuple(token for token in patterns if token.kind != "operator"), body))
