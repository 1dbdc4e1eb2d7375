"""Every error and warning message of the package, read from its source, for the page that explains them (docs/faq.md).

    python tests/helpers/faq_messages.py

brings the page's lists up to date: new messages go into the group that takes those of their room (its comment says so),
or into a new group that needs an explanation; lines that no code has any more go.

A message is what a `raise`, a rule of args.py (`yield "E… message"`), `warnings.warn` or a session's `_say` is written
with, and what a function that returns messages as `list[str]`, or one that is named so, returns. Its pattern is the
constant text with … for each value. It is the whole message: a value that is one of several constant texts (a loop over
a literal, an entry of a table, what a function that returns `str | None` may say) gives a pattern for each of them.
"""

import ast
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from megatron_pg.declarations.corrections import KL_ESTIMATORS
from megatron_pg.flags.compatibility import REFUSED

PACKAGE = Path(__file__).parents[2] / "megatron_pg"
PAGE = PACKAGE.parent / "docs" / "faq.md"
_FEWEST_LETTERS = 8  # of constant text; less is a value or a join
_MOST_ENTRIES = 5  # of a literal that gives a pattern for each

Row = dict[str, str]  # what names stand for


def collect() -> dict[str, str]:
    """Pattern -> the room that it is in, for the whole package."""
    found: dict[str, str] = {}
    modules = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    answers = {f.name: f for tree in modules.values() for f in _functions(tree) if _returns(f) == "str | None"}
    for path, tree in modules.items():
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        here = {f.name: f for f in _functions(tree)}
        for function in _functions(tree):
            module = _Module(_tables(tree.body) | _tables(function.body), answers | here)
            for pattern in _Reader(function, module).messages():
                found.setdefault(pattern, room)
    return found


def messages() -> dict[str, str]:
    """All of the package's: those of its source, and those that stand in tables."""
    found = [text.partition(" ")[2].format(flag=f"--{name.replace('_', '-')}", value="…") for name, _, text in REFUSED]
    found += [f"--pg-kl-estimator …: {each.flaw}" for each in KL_ESTIMATORS.values() if each.flaw]
    return collect() | dict.fromkeys(found, "flags")


def on_page(text: str) -> list[str]:
    """The patterns that a page lists: its lines - `pattern`."""
    return [line[3:-1] for line in text.splitlines() if line.startswith("- `") and line.endswith("`")]


def fill(text: str, found: dict[str, str]) -> str:
    """The page with the lines that it lacks, and without those that no code has."""
    lines = [line for line in text.splitlines() if not on_page(line) or on_page(line)[0] in found]
    missing = [(pattern, room) for pattern, room in found.items() if pattern not in on_page(text)]
    for pattern, room in reversed(missing):
        takes = [i for i, line in enumerate(lines) if room in _rooms(line)]
        if not takes:
            lines += ["", f"### New messages of {room}", f"<!-- takes: {room} -->", ""]
            takes = [len(lines) - 2]
        lines.insert(takes[0] + 2, f"- `{pattern}`")
    return "\n".join(lines) + "\n"


def _rooms(line: str) -> list[str]:
    match = re.fullmatch(r"<!-- takes: (.*) -->", line)
    return match[1].split(", ") if match else []


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _returns(function: ast.FunctionDef) -> str:
    return ast.unparse(function.returns) if function.returns else ""


def _tables(body: list[ast.stmt]) -> dict[str, ast.expr]:
    """The literal dicts and tuples that names stand for."""
    found = {}
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Dict, ast.Tuple)):
            is_empty = isinstance(node.value, ast.Dict) and not node.value.keys  # and filled later
            found |= {t.id: node.value for t in node.targets if isinstance(t, ast.Name) and not is_empty}
    return found


class _Module:
    """What a function's names may come from."""

    def __init__(self, tables: dict[str, ast.expr], functions: dict[str, ast.FunctionDef]):
        self._tables, self._functions = tables, functions

    def entries(self, node: ast.expr) -> list[ast.expr] | None:
        """The elements of a literal that is looped over, of a dict as pairs."""
        match node:
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return elements if len(elements) <= _MOST_ENTRIES else None
            case ast.Name(id=name) if name in self._tables:
                return self.entries(self._tables[name])
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="items")) if name in self._tables:
                table = self._tables[name]
                pairs = zip(table.keys, table.values, strict=True)
                return self.entries(ast.Tuple(elts=[ast.Tuple(elts=list(pair)) for pair in pairs]))
        return None

    def alternatives(self, node: ast.expr) -> list[str] | None:
        """The texts that a value may be: an entry of a table, or what a function may answer."""
        match node:
            case ast.Subscript(value=ast.Name(id=name)) if name in self._tables:
                values = self._tables[name].values
                return [value.value for value in values if isinstance(value, ast.Constant) and value.value]
            case ast.Call(func=ast.Name(id=name)) if name in self._functions:
                function = self._functions[name]
                if _returns(function) == "str | None":
                    return list(_Reader(function, self).answers({}))
        return None

    def maker_of(self, node: ast.Call) -> ast.FunctionDef | None:
        """The function that is called, if it makes an exception."""
        function = self._functions.get(ast.unparse(node.func).split(".")[-1])
        return function if function is not None and _returns(function).endswith("Error") else None


class _Reader:
    """The messages of one function."""

    def __init__(self, function: ast.FunctionDef, module: _Module):
        self._function, self._module = function, module
        self._constants: Row = {}  # local names
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                self._remember(node.targets[0], node.value)
        returns = _returns(function)
        self._yields_rules = returns == "Violations"
        self._gives_messages = (returns in ("str", "str | None") and "message" in function.name) or (
            returns.startswith("list[")
            and (function.name in ("reconcile", "_late_changes") or "warnings" in function.name)
        )

    def messages(self) -> Iterator[str]:
        """Every pattern, in order; what makes an exception says what it is called with."""
        if not _returns(self._function).endswith("Error"):
            yield from self._visit(self._function, [{}], self._said)

    def answers(self, arguments: Row) -> Iterator[str]:
        """What is returned."""
        returned = lambda node: node.value if isinstance(node, ast.Return) else None  # noqa: E731
        yield from self._visit(self._function, [arguments], returned)

    def _said(self, node: ast.AST) -> ast.expr | None:
        """The expression that a node says, if it says one."""
        match node:
            case ast.Raise(exc=error):
                return error
            case ast.Call(func=ast.Name(id=name)) if name.endswith("Error"):  # that travels as a value
                return node
            case ast.Yield(value=message) if self._yields_rules:
                return message
            case ast.Call(func=ast.Attribute(attr="warn" | "_say"), args=[message, *_]):
                return message
            case ast.Call(func=ast.Attribute(attr="_assert_async"), args=[_, message]):
                return message
            case ast.Return(value=value) if self._gives_messages:
                return value
            case ast.Call(func=ast.Attribute(attr="append"), args=[message]) if self._gives_messages:
                return message
        return None

    def _visit(self, node: ast.AST, rows: list[Row], said) -> Iterator[str]:
        """The patterns of what is said below a node, once for each row of what the names around it may stand for."""
        rows = [row | more for row, more in product(rows, self._rows(node))]
        if (expression := said(node)) is not None:
            texts = [text for row in rows for text in self._within(expression, row)]
            yield from (text.partition(" ")[2] for text in texts) if isinstance(node, ast.Yield) else texts
            return
        for child in ast.iter_child_nodes(node):
            yield from self._visit(child, rows, said)

    def _rows(self, node: ast.AST) -> list[Row]:
        if isinstance(node, ast.If):
            named = [n for n in ast.walk(node.test) if isinstance(n, ast.NamedExpr)]
            return self._named(named)
        loops = [node] if isinstance(node, ast.For) else getattr(node, "generators", [])
        rows: list[Row] = [{}]
        for loop in loops:
            if (entries := self._module.entries(loop.iter)) is not None:
                rows = [row | self._bound(loop.target, entry) for row, entry in product(rows, entries)]
        return rows

    def _named(self, named: list[ast.NamedExpr]) -> list[Row]:
        rows: list[Row] = [{}]
        for each in named:
            if texts := self._module.alternatives(each.value):
                rows = [row | {each.target.id: text} for row, text in product(rows, texts)]
        return rows

    def _bound(self, target: ast.expr, entry: ast.expr) -> Row:
        pairs = [(target, entry)]
        if isinstance(target, ast.Tuple) and isinstance(entry, ast.Tuple):
            pairs = list(zip(target.elts, entry.elts, strict=False))
        return {
            name.id: value.value
            for name, value in pairs
            if isinstance(name, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str)
        }

    def _remember(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for pair in zip(target.elts, value.elts, strict=False):
                self._remember(*pair)
        elif isinstance(target, ast.Name) and (pattern := self._pattern(value, {})):
            self._constants[target.id] = pattern

    def _within(self, node: ast.expr, row: Row) -> Iterator[str]:
        """The patterns of all whole texts inside an expression; what a function is called with is its own value."""
        pattern = self._pattern(node, row)
        if isinstance(node, ast.Call) and (maker := self._module.maker_of(node)) is not None:
            names = [argument.arg for argument in maker.args.args if argument.arg != "self"]
            given = {name: self._pattern(value, row) or "…" for name, value in zip(names, node.args, strict=False)}
            yield from _Reader(maker, self._module).answers(given)
        elif pattern is None:
            is_call = isinstance(node, ast.Call) and not ast.unparse(node.func).split(".")[-1][:1].isupper()
            children = [] if is_call else [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
            inner = [{}] if not isinstance(node, ast.ListComp) else self._rows(node)
            for child, more in product(children, inner):
                yield from self._within(child, row | more)
        elif sum(c.isalpha() for c in pattern) >= _FEWEST_LETTERS and " " in pattern:
            yield pattern

    def _pattern(self, node: ast.expr, row: Row) -> str | None:
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.Name(id=name):
                return row.get(name, self._constants.get(name))
            case ast.JoinedStr(values=parts):
                return "".join(self._part(part, row) for part in parts)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                sides = self._pattern(left, row), self._pattern(right, row)
                return None if None in sides else "".join(sides)
            case ast.Call(func=ast.Attribute(value=value, attr="replace"), args=[ast.Constant(old), ast.Constant(new)]):
                text = self._pattern(value, row)
                return None if text is None else text.replace(old, new)
        return None

    def _part(self, part: ast.expr, row: Row) -> str:
        if isinstance(part, ast.FormattedValue):
            return self._pattern(part.value, row) or "…"
        return part.value


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), messages()), encoding="utf-8")
