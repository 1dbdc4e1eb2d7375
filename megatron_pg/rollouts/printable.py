"""Text from outside (ids, paths, field names), as error messages and log lines may show it."""

from collections.abc import Iterable, Iterator
from itertools import islice

_LONGEST = 120  # characters
_LONGEST_NAME, _MOST_NAMES = 64, 24  # of a list


def printable(text: str, *, limit: int | None = _LONGEST) -> str:
    """`text` with control characters escaped, so that it cannot drive a terminal or forge a line, cut to `limit`."""
    shown = text if limit is None or len(text) <= limit else text[: limit - 3] + "..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)


def show_path(path: object) -> str:
    """A path with control characters escaped, at its full length."""
    return printable(str(path), limit=None)


def listed(names: Iterable[object]) -> str:
    """Names for a message: the first ones, and how many more there are."""
    shown = [printable(str(name), limit=_LONGEST_NAME) for name in names]
    return ", ".join(shown[:_MOST_NAMES]) + f" and {len(shown) - _MOST_NAMES} more" * (len(shown) > _MOST_NAMES)


def reason_of(error: BaseException | None) -> object:
    """The system's words for an error, or the error itself."""
    return getattr(error, "strerror", None) or error


def shorten(value: object) -> str:
    """A value as messages show it; only the beginning of its text is made, which may be very long or endless."""
    try:
        start = "".join(islice(_pieces(value), 3 * _LONGEST))  # at most every second piece is empty
        return printable(start.replace("\n", ""))  # a tensor's text has several lines
    except Exception:  # an integer of too many digits, a user's class
        return f"a {type(value).__name__} without a text"


def _pieces(value: object) -> Iterator[str]:
    """The text of lists, tuples and dicts item by item, of anything else whole."""
    if type(value) is list or type(value) is tuple:
        opening, closing = "[]" if type(value) is list else "()"
        yield opening
        for i, item in enumerate(value):
            yield ", " * (i > 0)
            yield from _pieces(item)
        yield f",{closing}" if closing == ")" and len(value) == 1 else closing
    elif isinstance(value, dict):
        yield "{"
        for i, (key, item) in enumerate(value.items()):
            yield ", " * (i > 0)
            yield from _pieces(key)
            yield ": "
            yield from _pieces(item)
        yield "}"
    else:
        yield repr(value)
