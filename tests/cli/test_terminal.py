"""What the subcommands share on the terminal."""

import io
import re
import sys
import time

import pytest

from megatron_pg.cli import terminal


@pytest.mark.parametrize(
    ("total", "done", "expected"),
    [(0, 0, r"work: \d+ s\n"), (8, 0, r"work: \d+ s\n"), (8, 2, r"work: 2 B of 8 B, \d+ s left\n")],
)
def test_work_that_lasts_says_how_far_it_is(total, done, expected, monkeypatch):
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr(terminal, "DELAY", 0.05)
    with terminal.progress("work", total, lambda amount: f"{amount} B") as update:
        update(done)
        while not errors.getvalue().endswith("\n"):
            time.sleep(0.001)
    assert re.match(expected, errors.getvalue())


def test_work_that_does_not_last_says_nothing(capsys):
    with terminal.progress("work"):
        pass
    assert capsys.readouterr().err == ""
