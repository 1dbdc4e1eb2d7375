"""The writing rules of CONTRIBUTING.md: phrases that stay out of comments, docstrings and messages of the source."""

import io
import re
import tokenize
from pathlib import Path

import processes
import pytest

# Pattern -> what to write instead. A line whose comment contains `literal` means the word literally.
BANNED = {
    r"\bwhatever\b": "name the cases",
    r"\blikewise\b": "repeat the statement",
    r"\banew\b": "again",
    r"\bwithout a word\b|\bin silence\b": "without a warning",
    r"\bof (its|their|your|our) own\b(?! [a-z])": "its own X, custom X",
    r"\bwhat is left\b": "the rest, the remaining X",
    r"\btold apart\b": "distinguished",
    r"\blooked at\b": "checked",
    r"\btaken over\b": "inherited",
    r"\bmended\b": "fixed",
    r"\bway on\b": "hint",
    r"\bgoes with\b|\bgo with\b": "can be combined with",
    r"\bone and the same\b": "the same",
    r"\bby turns\b": "alternately",
    r"\bfor want of\b": "without",
    r"\bhardly\b": "rarely, barely",
    r"\blikeliest\b": "top-k",
    r"\bthere is not\b|\bthere are not\b": "missing, unknown",
    r"\bbeside\b": "in addition to, together with, compared with",
    r"(?<!there )\bis no (?!longer|more|such)\w+": "is not a …",
    r"\b(does|do) not (know|hear)\b|\bknows nothing\b": "does not contain, does not receive",
}
ANY = re.compile("|".join(BANNED), re.IGNORECASE)
FOLDERS = ("megatron_pg", "examples", "benchmarks", "papers", "tests")
FILES = sorted(path for folder in FOLDERS for path in (processes.ROOT / folder).rglob("*.py"))
HERE = "tests/docs/test_language.py"


def texts(source: str) -> list[tuple[int, str]]:
    """Line number and text of every line of a comment or string; from Python 3.12 on, f-strings are several tokens."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.NAME:
            found += [(token.start[0] + i, line) for i, line in enumerate(token.string.splitlines())]
    return found


def hits(source: str) -> list[tuple[int, str, str]]:
    if not ANY.search(source):  # few files have one
        return []
    lines = source.splitlines()
    return [
        (number, match[0], instead)
        for number, text in texts(source)
        for pattern, instead in BANNED.items()
        if (match := re.search(pattern, text, re.IGNORECASE)) and "# literal" not in lines[number - 1]
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_source_has_a_banned_phrase(folder):
    found = [
        f"{path.relative_to(processes.ROOT)}:{number} {phrase!r}: write {instead}"
        for path in FILES
        if path.is_relative_to(processes.ROOT / folder) and path != Path(__file__)
        for number, phrase, instead in hits(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_a_banned_phrase_is_found_in_comments_strings_and_docstrings_but_not_in_names():
    source = '"""Likewise."""\nlikewise = 1  # whatever\nx = f"in memory of its own"\ny = "its own term"\n'
    assert [(number, phrase.lower()) for number, phrase, _ in hits(source)] == [
        (1, "likewise"), (2, "whatever"), (3, "of its own"),
    ]  # fmt: skip
    assert not hits("# likewise  # literal\n")
