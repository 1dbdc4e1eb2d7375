"""Text from outside (ids, paths, field names), as error messages and log lines may show it."""


def printable(text: str, *, limit: int | None = 120) -> str:
    """`text` with control characters escaped, so that it cannot drive a terminal or forge a line, cut to `limit`."""
    shown = text if limit is None or len(text) <= limit else text[: limit - 3] + "..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)


def shorten(value: object) -> str:
    """A value as messages show it."""
    try:
        return printable(repr(value).replace("\n", ""))  # a tensor's text has several lines
    except Exception:  # an integer of too many digits, a user's class
        return f"a {type(value).__name__} without a text"
