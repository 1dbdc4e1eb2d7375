"""`megatron-pg` in the process of the test."""

import json
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
from rollout_files import write_lines

from megatron_pg import Sample, read_rollouts
from megatron_pg.cli import main
from megatron_pg.metrics.file import MetricsFile


class CommandLine:
    """Runs commands. Strings are split as a shell splits them, paths are one word each."""

    def __init__(self, capsys, folder: Path) -> None:
        self._capsys, self._folder = capsys, folder

    def __call__(self, *words: str | Path) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        split = [[str(word)] if isinstance(word, Path) else shlex.split(word) for word in words]
        code = main([word for parts in split for word in parts])
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def done(self, *words: str | Path) -> str:
        """What a command prints that succeeds."""
        code, out, err = self(*words)
        assert (code, err) == (0, "")
        return out

    def json(self, *words: str | Path) -> dict:
        """What a command prints with --json."""
        return json.loads(self.done(*words, "--json"))

    def refused(self, *words: str | Path) -> str:
        """The one line of a command that fails and leaves the files as they were."""
        before = self._contents()
        code, out, err = self(*words)
        assert (code, out) == (2, ""), err
        assert err.startswith(f"megatron-pg {words[0].split()[0]}: ")
        assert err.count("\n") == 1
        assert self._contents() == before
        return err

    def _contents(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self._folder.rglob("*") if path.is_file()}


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch) -> CommandLine:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of a user's module: nothing else may appear in the folder
    return CommandLine(capsys, tmp_path)


@pytest.fixture
def lines(tmp_path):
    """`lines(records, name)` writes a file of JSON lines."""
    return lambda records, name="rollouts.jsonl": write_lines(tmp_path / name, records)


class Converted(NamedTuple):
    """The file that a conversion writes, and what it prints."""

    samples: list[Sample]
    records: list[dict]  # its lines after the header
    header: dict
    said: str


@pytest.fixture
def convert(cli, tmp_path) -> Callable[..., Converted]:
    """`convert(words, *dumps)` converts the dumps to converted.jsonl."""

    def run(*words: str | Path) -> Converted:
        output = tmp_path / "converted.jsonl"
        said = cli.done("convert", *words, "--overwrite --output", output)
        header, *records = map(json.loads, output.read_text(encoding="utf-8").splitlines())
        return Converted(read_rollouts(output), records, header, said)

    return run


@pytest.fixture
def refused(cli, tmp_path) -> Callable[..., str]:
    """`refused(words, *dumps)` is the one line of a conversion that fails."""
    return lambda *words: cli.refused("convert", *words, "--output", tmp_path / "out.jsonl")


@pytest.fixture
def make_run(tmp_path) -> Callable[..., Path]:
    """`make_run(name, records)` writes the metrics file of a run, one record a step."""

    def make(name: str, records: Iterable[dict]) -> Path:
        writer = MetricsFile(tmp_path / name / "metrics.jsonl")
        for step, record in enumerate(records, start=1):
            writer.write({"iteration": step} | record)
        writer.close()
        return tmp_path / name

    return make
