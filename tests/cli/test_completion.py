"""Completion of command lines by argcomplete's protocol: the request is in the environment, the answer in a file."""

import sys
from io import StringIO

import pytest
from argcomplete import finders

from megatron_pg.cli import SUBCOMMANDS, main


@pytest.fixture
def complete(monkeypatch):
    """The answers to a line, read from where argcomplete writes: two descriptors, which here are pytest's."""

    def completed(line: str) -> list[str]:
        asked = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n"}
        for name, value in {**asked, "_ARGCOMPLETE_STDOUT_FILENAME": "answer"}.items():
            monkeypatch.setenv(name, value)
        answer = StringIO()
        monkeypatch.setattr(finders, "open", lambda *_: answer, raising=False)
        with pytest.raises(SystemExit, match=r"^0$"):
            main([])
        return [word.rstrip() for word in answer.getvalue().splitlines()]

    monkeypatch.setattr(finders.CompletionFinder, "_init_debug_stream", lambda self: None)
    monkeypatch.setattr(finders._io, "debug_stream", StringIO())
    return completed


def test_a_subcommand_completes(complete):
    assert complete("megatron-pg ex") == ["explain"]
    assert SUBCOMMANDS.keys() <= set(complete("megatron-pg "))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("megatron-pg explain --leng", ["--lengths"]),
        ("megatron-pg validate --loss-agg", ["--loss-aggregation", "--loss-aggregation-divisor"]),
        ("megatron-pg explain --loss-aggregation to", ["token_mean"]),
        ("megatron-pg convert --format nemo_rl --overw", ["--overwrite"]),
        ("megatron-pg doctor --js", ["--json"]),
    ],
)
def test_the_flags_of_a_subcommand_and_their_values_complete(line, expected, complete):
    assert complete(line) == expected


def test_without_argcomplete_the_shell_completes_by_itself(monkeypatch):
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    monkeypatch.setenv("COMP_LINE", "megatron-pg ex")
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert main([]) == 1
