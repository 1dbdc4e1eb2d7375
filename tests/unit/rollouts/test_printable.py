"""What text from outside looks like in a message: it can neither drive a terminal nor forge a line."""

import sys

import pytest

from megatron_pg.rollouts.printable import listed, printable, shorten


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("p0", "p0"),
        ("größe Σ 漢", "größe Σ 漢"),
        ("a\nb", "a\\nb"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\u202eabc", "\\u202eabc"),  # would turn the line round
        ("\ud800", "\\ud800"),  # could not be written as UTF-8
        ("", ""),
    ],
)
def test_only_what_cannot_be_shown_is_escaped(text, shown):
    assert printable(text) == shown


def test_no_character_gets_through_that_a_line_cannot_hold(full):
    for code in range(0, sys.maxunicode + 1, 1 if full else 31):
        shown = printable(chr(code))
        assert shown.isprintable()
        assert shown == chr(code) or shown.isascii()


def test_a_long_text_is_cut_before_it_is_escaped():
    assert printable("x" * 120) == "x" * 120
    assert printable("x" * 121) == "x" * 117 + "..."
    assert printable("x" * 10_000, limit=None) == "x" * 10_000
    assert printable("x" * 10, limit=5) == "xx..."
    assert printable("\n" * 10, limit=5) == "\\n\\n..."


def test_a_list_of_names_says_how_many_it_leaves_out():
    assert listed(["a", "b\n", 3]) == "a, b\\n, 3"
    assert listed(range(24)).endswith("22, 23")
    assert listed(range(26)).endswith("22, 23 and 2 more")
    assert listed([]) == ""
    assert len(listed(["x" * 1000])) == 64


def test_the_begin_of_a_value_is_that_of_its_text():
    for value in ([1, "a"], (1,), (), [], {}, {"a": [1, {2: None}]}, [(1, 2), 3.5], "x", 1, None, list(range(1000))):
        assert shorten(value) == printable(repr(value))


def test_a_value_whose_text_never_ends_is_shown_as_well():
    twice, itself = [0], []
    for _ in range(60):
        twice = [twice, twice]
    itself.append(itself)
    assert shorten(twice).startswith("[" * 60)
    assert shorten(itself) == "[" * 117 + "..."
    assert shorten({"a": twice}).startswith("{'a': [[[")
