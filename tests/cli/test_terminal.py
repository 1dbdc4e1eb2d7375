"""What the subcommands share on the terminal."""

import io
import os
import re
import sys
import threading

import pytest

from megatron_pg.cli import main, terminal


@pytest.mark.parametrize(
    ("total", "done", "expected"),
    [(0, 0, r"work: \d+ s\n"), (8, 0, r"work: \d+ s\n"), (8, 2, r"work: 2 B of 8 B, \d+ s left\n")],
)
def test_work_that_lasts_says_how_far_it_is(total, done, expected, monkeypatch):
    reported = threading.Event()

    class Errors(io.StringIO):
        def write(self, text: str) -> int:
            if re.fullmatch(expected, text):
                reported.set()
            return super().write(text)

    monkeypatch.setattr(sys, "stderr", Errors())
    for name in ("DELAY", "LOG_PERIOD"):
        monkeypatch.setattr(terminal, name, 0.0)
    with terminal.progress("work", total, lambda amount: f"{amount} B") as update:
        update(done)
        reported.wait()


def test_work_that_does_not_last_says_nothing(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "DELAY", threading.TIMEOUT_MAX)
    with terminal.progress("work"):
        pass
    assert capsys.readouterr().err == ""


# --- a standard output that takes no more ---


@pytest.fixture
def to(monkeypatch):
    """Exit code and standard error of a command whose standard output is this file descriptor."""

    def run(descriptor: int, *words: str) -> tuple[int, str]:
        with open(descriptor, "w") as output, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", output)
            patch.setattr(sys, "stderr", errors := io.StringIO())
            code = main(words)
        return code, errors.getvalue()

    return run


@pytest.mark.parametrize("command", ["explain", "validate"])
def test_a_full_disk_is_one_line(to, command):
    code, said = to(os.open("/dev/full", os.O_WRONLY), command, "--pg-temperature", "2")
    assert code == 2
    assert said == (
        f"megatron-pg {command}: standard output cannot be written (No space left on device) and "
        "is incomplete. Free disk space.\n"
    )


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["plot", "--help"]], ids=" ".join)
def test_help_that_cannot_be_printed_is_an_error(to, words):
    code, said = to(os.open("/dev/full", os.O_WRONLY), *words)
    assert code == 2
    assert said.endswith(
        ": standard output cannot be written (No space left on device) and is incomplete. Free disk space.\n"
    )


def test_a_reader_that_has_left_ends_the_command_quietly(to):
    reading, writing = os.pipe()
    os.close(reading)
    assert to(writing, "explain", "--pg-temperature", "2") == (141, "")


def test_a_closed_standard_output_is_no_traceback(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["validate", "--pg-temperature", "2"]) == 0
    sys.stdout.close()  # the null device


def test_the_error_of_a_path_is_not_taken_for_one_of_the_standard_output(capsys, monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["plot", "a", "b"]) == 2
    assert (
        capsys.readouterr().err
        == "megatron-pg plot: the system: No such file or directory. Give another path, or free disk space.\n"
    )
