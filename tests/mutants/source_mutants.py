"""Mistakes in the source, each with the test that notices it: `source_mutants.txt`, tried on a copy of the package.

    == file of the package
    what is then wrong | the test, below tests/
    -its text, which occurs once
    +the mistake's

One process imports torch and Megatron, which no mutant changes, and forks for every mutant.
"""

import contextlib
import io
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve()
REPOSITORY = HERE.parents[2]
# What fails where a mutant is not a program any more, or before a test of it begins.
BROKEN = frozenset(("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError", "setup", "teardown"))
HANG = 600.0  # seconds for one test: a loaded machine is slow


class Mutant(NamedTuple):
    what: str
    path: str
    old: str  # occurs once
    new: str
    test: str


def noticed(folder: Path) -> dict[str, list[str]]:
    """What failed in the test of each mutant, by `what`; "" is the package as it is, under the tests of all of them."""
    from processes import beside_each_other

    one, other = beside_each_other(lambda: _noticed(folder / "0", 0), lambda: _noticed(folder / "1", 1))
    return one | other | {"": one[""] + other[""]}


def _noticed(folder: Path, half: int) -> dict[str, list[str]]:
    shutil.copytree(REPOSITORY / "megatron_pg", folder / "megatron_pg", ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(HERE), str(folder), str(half)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def failures_of(tests: Sequence[str]) -> list[str]:
    """Types of the errors of the tests, up to the first; a test that cannot be collected is an error."""
    import pytest

    found = []

    class Plugin:
        def pytest_runtest_makereport(self, item, call):
            if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
                found.append(call.excinfo.typename if call.when == "call" else call.when)

    with contextlib.redirect_stdout(io.StringIO()) as said:
        arguments = ["-q", "-x", "--tb=line", "-p", "no:cacheprovider", *(f"tests/{test}" for test in tests)]
        code = pytest.main(arguments, plugins=[Plugin()])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {code!r}: {said.getvalue()[-2000:]}")
    return found


def attempt(folder: Path, mutant: Mutant) -> list[str]:
    """What fails with the mutant in its place."""
    file = folder / "megatron_pg" / mutant.path
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return forked(failures_of, [mutant.test], limit=HANG)
    finally:
        file.write_text(text, encoding="utf-8")


def forked(function, *arguments, limit: float | None = None):
    """The function's result in a fork of this process, which has imported what no mutant changes.

    `limit`: seconds until a TimeoutError; None: it may take any time.
    """
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply_async(function, arguments).get(limit)


def main(folder: str, half: str) -> None:
    import megatron.training.training  # noqa: F401
    import torch  # noqa: F401

    mutants = MUTANTS[int(half) :: 2]
    found = {"": forked(failures_of, sorted({mutant.test for mutant in mutants}))}
    found |= {mutant.what: attempt(Path(folder), mutant) for mutant in mutants}
    print(json.dumps(found))


def _read(text: str) -> Iterator[Mutant]:
    path = ""
    for block in text.split("\n\n"):
        first, *change = block.rstrip("\n").split("\n")
        if first.startswith("== "):
            path = first[3:]
            continue
        what, test = first.split(" | ")
        old, new = ("\n".join(line[1:] for line in change if line[0] == sign) for sign in "-+")
        yield Mutant(what, path, old, new, test)


MUTANTS = tuple(_read(HERE.with_suffix(".txt").read_text(encoding="utf-8")))


if __name__ == "__main__":
    main(*sys.argv[1:])
