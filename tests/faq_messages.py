"""Every error and warning message of the package, read from its source, for the page that explains them (docs/faq.md).

    python tests/faq_messages.py

brings the page's lists up to date: new messages go into the group that takes those of their room (its comment says so), or into
a new group that needs an explanation; lines that no code has any more go.

A message is what a `raise`, a rule of args.py (`yield "E…", message`), a warning, or a function that returns a message as
`str` or `str | None` is written with. Its pattern is the constant text with … for each value.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "megatron_pg"
PAGE = PACKAGE.parent / "docs" / "faq.md"
_FEWEST_LETTERS = 8  # of constant text; less is a value or a join


def collect() -> dict[str, str]:
    """Pattern -> the room that it is in, for the whole package."""
    found: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for function in _functions(ast.parse(path.read_text(encoding="utf-8"))):
            for pattern in _patterns(function):
                found.setdefault(pattern, room)
    return found


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


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _patterns(function: ast.FunctionDef) -> Iterator[str]:
    texts, gives_messages = _Texts(function), _gives_messages(function)
    for node in ast.walk(function):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from texts.within(node.exc)
        elif isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
            yield from texts.within(node.value.elts[1])
        elif gives_messages and isinstance(node, ast.Return) and node.value is not None:
            yield from texts.within(node.value)
        elif gives_messages and isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "append":
            yield from texts.within(node.args[0])


def _gives_messages(function: ast.FunctionDef) -> bool:
    name = function.name
    returns = ast.unparse(function.returns) if function.returns else ""
    is_text = returns == "str | None" or (returns == "str" and "message" in name)
    return is_text or name in ("reconcile", "_warnings", "_late_changes")


class _Texts:
    """The texts that a function is written with; a local name that is a constant text counts as that text."""

    def __init__(self, function: ast.FunctionDef):
        self._names: dict[str, str] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                self._remember(node.targets[0], node.value)

    def within(self, node: ast.expr) -> Iterator[str]:
        """The patterns of all whole texts inside an expression."""
        pattern = self._pattern(node)
        if pattern is None:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    yield from self.within(child)
        elif sum(c.isalpha() for c in pattern) >= _FEWEST_LETTERS and " " in pattern:
            yield pattern

    def _remember(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for pair in zip(target.elts, value.elts, strict=False):
                self._remember(*pair)
        elif isinstance(target, ast.Name) and (pattern := self._pattern(value)):
            self._names[target.id] = pattern

    def _pattern(self, node: ast.expr) -> str | None:
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.Name(id=name):
                return self._names.get(name)
            case ast.JoinedStr(values=parts):
                return "".join(self._part(part) for part in parts)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                sides = self._pattern(left), self._pattern(right)
                return None if None in sides else "".join(sides)
        return None

    def _part(self, part: ast.expr) -> str:
        if isinstance(part, ast.FormattedValue):
            return self._pattern(part.value) or "…"
        return part.value


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), collect()), encoding="utf-8")
