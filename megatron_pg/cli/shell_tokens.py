"""Words and operators of a bash script, with its quotes, continuations, comments, arrays and here documents."""

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megatron_pg.cli.terminal import InputError

HOLE = "\0"  # stands for an unknown piece inside a word; no argument of a process can hold it
NAME = r"[A-Za-z_][A-Za-z0-9_]*"
ASSIGNMENT = re.compile(rf"({NAME})(\+?)=")
_OPERATORS = re.compile(r"\|&|\|\||&&|;;&|;;|;&|\d*(?:<<<|<<-|<<|<>|>>|>\||[<>]&?)|&>>?|[;&|()\n]")


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a word: text, or what the shell would replace."""

    kind: str  # "text", "parameter", "arithmetic", "command" or "process" (`<(…)`, whose value is its words)
    value: str
    quoted: bool

    @property
    def written(self) -> str:
        """As the script has it, without quotes."""
        brackets = {"parameter": ("${", "}"), "arithmetic": ("$((", "))"), "command": ("$(", ")")}
        start, end = brackets.get(self.kind, ("", ""))
        return f"{start}{self.value}{end}"


@dataclass(frozen=True, slots=True)
class Token:
    """A word, the assignment of an array, or an operator."""

    kind: str  # "word", "array", "operator", "arithmetic" (`((…))`) or "here" (the text of a here document)
    line: int
    parts: tuple[Part, ...] = ()
    text: str = ""  # the operator, or the array's name
    append: bool = False
    items: tuple["Token", ...] = ()


class Lexer:
    """Splits a script into words and operators."""

    def __init__(self, text: str, label: str, line: int = 1):
        if "\r\n" in text:
            raise InputError(
                f"{label}has CRLF line ends, which bash takes into the arguments. Convert it with `sed -i 's/\\r$//'`."
            )
        self._text, self._label = text.replace(HOLE, " "), label
        self._at, self._line = 0, line
        self._here_documents: list[tuple[str, str]] = []  # the word that ends each, and what is cut from its lines

    def tokens(self) -> Iterator[Token]:
        """Every token, in order; an InputError where the script ends inside one."""
        while self._skip_blanks():
            if arithmetic := self._arithmetic():
                yield arithmetic
            elif match := _OPERATORS.match(self._text, self._at):
                if match.group() == "\n":
                    yield from self._here_texts()
                yield self._operator(match.group())
            else:
                yield self._word()

    def _skip_blanks(self) -> bool:
        while self._at < len(self._text):
            if self._text.startswith("\\\n", self._at):
                self._advance(2)
            elif self._text[self._at] in " \t":
                self._advance(1)
            elif self._text[self._at] == "#":
                end = self._text.find("\n", self._at)
                self._advance((len(self._text) if end < 0 else end) - self._at)
            else:
                return True
        return False

    def _advance(self, count: int) -> str:
        taken = self._text[self._at : self._at + count]
        self._at += count
        self._line += taken.count("\n")
        return taken

    def _operator(self, text: str) -> Token:
        token = Token("operator", self._line, text=text)
        self._advance(len(text))
        if text.lstrip("0123456789") in ("<<", "<<-"):
            self._skip_blanks()
            end = "".join(part.value for part in self._word().parts)
            self._here_documents.append((end, "\t" if text.endswith("-") else ""))
            return replace(token, text="<<")  # its word is taken
        return token

    def _arithmetic(self) -> Token | None:
        """`((…))`, or None where a subshell in a subshell begins."""
        line, at = self._line, self._at
        if not self._text.startswith("((", at):
            return None
        body = self._balanced(2, "()", 1)
        if body.endswith(")"):
            return Token("arithmetic", line, (Part("arithmetic", body[:-1], False),))
        self._at, self._line = at, line
        return None

    def _here_texts(self) -> Iterator[Token]:
        """The here documents behind this end of a line, which is left: their last line ends with it."""
        for end, cut in self._here_documents:
            line, start = self._line, self._at
            while self._at < len(self._text):
                self._advance(1)
                stop = self._text.find("\n", self._at)
                if self._advance((len(self._text) if stop < 0 else stop) - self._at).lstrip(cut) == end:
                    break
            yield Token("here", line, (Part("text", self._text[start : self._at], True),))
        self._here_documents.clear()

    def _word(self) -> Token:
        line, parts = self._line, []
        while self._at < len(self._text):
            here = self._text[self._at]
            if here in " \t\n;&|()<>":
                name = ASSIGNMENT.fullmatch(parts[0].value) if here == "(" and len(parts) == 1 else None
                if name:
                    return self._array(line, name.group(1), bool(name.group(2)))
                if here != "(" or not parts or parts[-1].quoted or parts[-1].value[-1:] not in ("@", "?", "*", "+"):
                    break
                parts.append(Part("text", f"({self._balanced(1, '()', 0)})", False))  # `@(a|b)`
                continue
            parts += self._piece(here)
        return Token("word", line, _merged(parts))

    def _array(self, line: int, name: str, append: bool) -> Token:
        self._advance(1)
        items = []
        while self._skip_blanks():
            if self._text[self._at] == "\n":
                self._advance(1)
            elif self._text[self._at] == ")":
                self._advance(1)
                return Token("array", line, text=name, append=append, items=tuple(items))
            elif _OPERATORS.match(self._text, self._at):
                raise self._unfinished(line, "an array that bash would not accept")
            else:
                items.append(self._word())
        raise self._unfinished(line, "an array that never ends")

    def _piece(self, here: str) -> list[Part]:
        if here == "\\":
            taken = self._advance(2)
            return [] if taken == "\\\n" else [Part("text", taken[1:], True)]
        if here == "'":
            return [Part("text", self._until("'", "a single quote"), True)]
        if here == '"':
            return self._double_quoted()
        if self._text.startswith('$"', self._at):
            self._advance(1)
            return self._double_quoted()
        if here in "$`":
            return [self._substitution(quoted=False)]
        return [Part("text", self._plain(r"[^ \t\n;&|()<>\\'\"$`]*"), False)]

    def _plain(self, pattern: str) -> str:
        return self._advance(re.compile(pattern).match(self._text, self._at).end() - self._at)

    def _until(self, end: str, what: str) -> str:
        stop = self._text.find(end, self._at + 1)
        if stop < 0:
            raise self._unfinished(self._line, f"{what} that never ends")
        return self._advance(stop + 1 - self._at)[1:-1]

    def _double_quoted(self) -> list[Part]:
        line, parts = self._line, []
        self._advance(1)
        while self._at < len(self._text):
            here = self._text[self._at]
            if here == '"':
                self._advance(1)
                return parts or [Part("text", "", True)]
            if here == "\\":
                taken = self._advance(2)
                keep = "" if taken == "\\\n" else taken[1:] if taken[1:] in ('"', "\\", "$", "`") else taken
                parts.append(Part("text", keep, True))
            elif here in "$`":
                parts.append(self._substitution(quoted=True))
            else:
                parts.append(Part("text", self._plain(r"[^\"\\$`]*"), True))
        raise self._unfinished(line, "a double quote that never ends")

    def _substitution(self, *, quoted: bool) -> Part:
        text, at = self._text, self._at
        if text[at] == "`":
            return Part("command", self._until("`", "a backquote"), quoted)
        if text.startswith("$((", at):
            body = self._balanced(3, "()", 1)
            if body.endswith(")"):
                return Part("arithmetic", body[:-1], quoted)
            return Part("command", f"({body}", quoted)
        if text.startswith("$(", at):
            return Part("command", self._commands(), quoted)
        if text.startswith("${", at):
            return Part("parameter", self._balanced(2, "{}", 0), quoted)
        if text.startswith("$'", at) and not quoted:
            self._advance(1)
            body = self._until("'", "a single quote")
            plain = re.sub(r"\\[nt]", lambda match: {"n": "\n", "t": "\t"}[match.group()[1]], body)
            return Part("parameter", f"$'{body}'", True) if "\\" in plain else Part("text", plain, True)
        match = re.compile(rf"\$({NAME}|[0-9@*#?$!-])").match(text, at)
        if match is None:
            return Part("text", self._advance(1), quoted)
        self._advance(match.end() - at)
        return Part("parameter", match.group(1), quoted)

    def _commands(self) -> str:
        """What lies in `$(…)`; a `)` behind the pattern of a `case` does not close it."""
        line, start, outside = self._line, self._at + 2, self._here_documents
        self._advance(2)
        self._here_documents, open_ones, begins = [], [], True
        for token in self.tokens():
            text = token.text if token.kind == "operator" else self._text_of(token)
            if text == ")" and not open_ones:
                self._here_documents = outside
                return self._text[start : self._at - 1]
            if text == "(" or (text == "case" and begins):
                open_ones.append(text)
            elif open_ones and (text, open_ones[-1]) in ((")", "("), ("esac", "case")):
                open_ones.pop()
            begins = token.kind == "operator" or text in ("then", "do", "else", "{", "!")
        raise self._unfinished(line, "a $( that never ends")

    @staticmethod
    def _text_of(token: Token) -> str:
        return "".join(part.value for part in token.parts if part.kind == "text" and not part.quoted)

    def _balanced(self, skip: int, brackets: str, extra: int) -> str:
        """What lies between brackets, nested ones and quotes included; the closing one is consumed."""
        line, start, depth = self._line, self._at + skip, 1 + extra
        self._advance(skip)
        while self._at < len(self._text):
            here = self._text[self._at]
            if here == "\\":
                self._advance(2)
                continue
            if here == "'" and brackets == "()":
                self._until("'", "a single quote")
                continue
            if here == '"':
                self._double_quoted()
                continue
            depth += (here == brackets[0]) - (here == brackets[1])
            self._advance(1)
            if depth == 0:
                return self._text[start : self._at - 1]
        raise self._unfinished(line, f"a ${brackets[0]} that never ends")

    def _unfinished(self, line: int, what: str) -> InputError:
        return InputError(f"{self._label}line {line}: {what}, so the script cannot be read. Is the file cut short?")


def _merged(parts: list[Part]) -> tuple[Part, ...]:
    """Neighbouring text of one kind of quoting as one part."""
    merged: list[Part] = []
    for part in parts:
        if merged and part.kind == "text" == merged[-1].kind and part.quoted == merged[-1].quoted:
            merged[-1] = replace(part, value=merged[-1].value + part.value)
        else:
            merged.append(part)
    return tuple(merged)


_COMPARISONS = {
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt},
    **{ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge},
}


def evaluate(node: ast.expr, value_of: Callable[[str], int]) -> int:
    """Integer arithmetic with bash's division, which rounds towards zero."""
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name):
            return value_of(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -evaluate(operand, value_of)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = evaluate(left, value_of), evaluate(right, value_of)
            quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if isinstance(op, ast.Div | ast.Mod) else 0
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.Div():
                    return quotient
                case ast.Mod():
                    return a - b * quotient
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            return int(_COMPARISONS[type(op)](evaluate(left, value_of), evaluate(right, value_of)))
    raise ValueError
