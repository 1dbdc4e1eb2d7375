"""The refused options of a host, from tests/hosts/refused_flags.txt."""

from ast import literal_eval
from pathlib import Path

TEXT = (Path(__file__).parents[1] / "refused_flags.txt").read_text(encoding="utf-8")


def rows(host: str) -> list[tuple[dict, str]]:
    """The options and a part of the message, for every line of the host's section."""
    (section,) = (part for part in TEXT.split("== ")[1:] if part.startswith(f"{host}\n"))
    lines = [line.split(" | ", 1) for line in section.splitlines() if " | " in line]
    return [(literal_eval(given), message) for given, message in lines]
