"""Text from outside (ids, paths, field names), as error messages and log lines may show it."""

from collections.abc import Iterator
from itertools import chain

_LONGEST = 120  # characters


def printable(text: str, *, limit: int | None = _LONGEST) -> str:
    """`text` with control characters escaped, so that it cannot drive a terminal or forge a line, cut to `limit`."""
    shown = text if limit is None or len(text) <= limit else text[: limit - 3] + "..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)


def show_path(path: object) -> str:
    """A path with control characters escaped, at its full length."""
    return printable(str(path), limit=None)


def reason_of(error: BaseException | None) -> object:
    """The system's words for an error, or the error itself."""
    return getattr(error, "strerror", None) or error


def shorten(value: object) -> str:
    """A value as messages show it."""
    try:
        return printable(_start(value).replace("\n", ""))  # a tensor's text has several lines
    except Exception:  # an integer of too many digits, a user's class
        return f"a {type(value).__name__} without a text"


def _start(value: object) -> str:
    """The first characters of a value's text, as many as are shown: a list that contains itself has an endless text."""
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > _LONGEST:
            break
    return text


def _pieces(value: object) -> Iterator[str]:
    """The text of lists, tuples and dicts item by item, of anything else whole."""
    if type(value) is list or type(value) is tuple:
        opening, closing = "[]" if type(value) is list else "()"
        yield opening
        for i, item in enumerate(value):
            yield from _pieces(item) if i == 0 else chain((", ",), _pieces(item))
        yield f",{closing}" if closing == ")" and len(value) == 1 else closing
    elif isinstance(value, dict):
        yield "{"
        for i, (key, item) in enumerate(value.items()):
            yield f"{', ' * (i > 0)}"
            yield from _pieces(key)
            yield ": "
            yield from _pieces(item)
        yield "}"
    else:
        yield repr(value)
