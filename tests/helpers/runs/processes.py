"""Launches of scripts of `tests/ranks/programs` on real processes, and what they left behind."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import warm

TESTS = Path(__file__).parents[2]
ROOT = TESTS.parent
# Folders whose modules tests import by their bare names; the same as pytest's pythonpath in pyproject.toml.
FOLDERS = (
    "helpers",
    "helpers/cases",
    "helpers/files",
    "helpers/runs",
    "oracles",
    "mutants",
    "fuzz/programs",
    "ranks/programs",
    "hosts/programs",
)
# The folder that the tests import the package from: a copy of it may be on PYTHONPATH, and what they start tests the
# same one.
PACKAGE = Path(importlib.util.find_spec("megatron_pg").origin).parents[1]
ENVIRONMENT = dict(os.environ)  # before any test changes it: other threads launch during the tests
HANG = 7200.0  # seconds after which a process is given up; no test is about time, and a loaded machine is slow


def environment(*first: Path) -> dict[str, str]:
    """The environment that the tests were started with, with the package, the tests and the examples importable, and
    `first` before all."""
    paths = [
        *map(str, first),
        *(str(TESTS / folder) for folder in FOLDERS),
        str(ROOT / "examples"),
        str(ROOT / "examples" / "recipes"),
        str(PACKAGE),
        str(ROOT),
        ENVIRONMENT.get("PYTHONPATH", ""),
    ]
    settings = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return ENVIRONMENT | settings | {"PYTHON": sys.executable}  # make exports the interpreter that .venv is made of


RUNNING: set[subprocess.Popen] = set()


def begin(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen:
    """A process with its output as text, which ends with the session at the latest."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=env, cwd=PACKAGE, text=True, **pipes)  # tests change the folder
    RUNNING.add(process)
    return process


def end(process: subprocess.Popen) -> None:
    """Nothing is left behind, of a launcher neither: it ends its ranks, which it could not if it were killed."""
    if process in RUNNING:
        RUNNING.discard(process)
        process.terminate()
        process.communicate(timeout=HANG)


def end_all() -> None:
    """For a session that is broken off: whoever began a process waits for it."""
    for process in list(RUNNING):
        process.terminate()


def wait_for(process: subprocess.Popen, *, check: bool = True, timeout: float = HANG) -> subprocess.CompletedProcess:
    """What it printed; with `check` it must have succeeded, and else failed by itself."""
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        end(process)
    assert (process.returncode == 0) == check, (output + errors)[-4000:]
    assert process.returncode >= 0
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def run(command: Sequence[str], env: Mapping[str, str], *, check: bool = True) -> subprocess.CompletedProcess:
    """A process from its begin to its end."""
    return wait_for(begin(command, env), check=check)


def run_warm(*words: str, check: bool = True) -> subprocess.CompletedProcess:
    """A script, or `-c` and code, in an interpreter that has imported torch and Megatron (see `warm`)."""
    env = with_warm_python(environment())
    return run([env["PYTHON"], *words], env, check=check)


def compiled_by(script: str, *words: str, first: Sequence[Path] = (), **variables: str) -> list[dict]:
    """What a script prints, a JSON object per line, in its own process: whether kernels are compiled is chosen when
    they are imported."""
    command = [sys.executable, script, *words]
    env = environment(*first) | {"TRITON_INTERPRET": "0"} | variables
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def with_warm_python(env: Mapping[str, str]) -> dict[str, str]:
    """The environment with an interpreter, PYTHON, that has imported torch and Megatron; torch's launcher takes
    PYTHON_EXEC."""
    python = warm.python(env)
    return {**env, "PYTHON": python, "PYTHON_EXEC": python}


def on_ranks(size: int, env: Mapping[str, str], *words: str) -> subprocess.Popen:
    """A script and its arguments on this many ranks of one node."""
    runner = [env["PYTHON"], "-m", "torch.distributed.run", "--standalone"]
    return begin([*runner, "--nproc-per-node", str(size), *words], env)


def beside_each_other(*jobs: Callable) -> list:
    """Their results, two jobs at a time."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]


def start(size: int, out: Path, cases: Sequence[str], *first: Path, script: str = "ranks.py") -> subprocess.Popen:
    """Run the cases on this many ranks; `first` are folders that come before all others, such as another Megatron."""
    out.mkdir(exist_ok=True)
    env = environment(*first) if first else with_warm_python(environment())
    return on_ranks(size, env, str(TESTS / "ranks/programs" / script), str(out), *cases)


@contextmanager
def finished(launches: Sequence[subprocess.Popen], *, timeout: float = HANG) -> Iterator[None]:
    """Wait for launches that run at the same time; none is left behind."""
    try:
        for process in launches:
            wait_for(process, timeout=timeout)
        yield
    finally:
        for process in launches:
            end(process)


def gradients(folder: Path, case: str) -> dict[str, list[np.ndarray]]:
    """Whole gradients by global name, from the ranks' parts: one per group of tensor-parallel ranks that holds it."""
    shards: dict[tuple[str, int, str], dict[int, list[np.ndarray]]] = {}
    for path in sorted(folder.glob(f"{case}.*.npz")):
        for key, value in np.load(path).items():
            name, axis, tp_rank, pp_rank = key.split("|")
            shards.setdefault((name, int(axis), pp_rank), {}).setdefault(int(tp_rank), []).append(value)
    whole: dict[str, list[np.ndarray]] = {}
    for (name, axis, _), by_rank in shards.items():
        copies = [by_rank[rank] for rank in sorted(by_rank)]
        if axis < 0:
            found = [copy for rank in copies for copy in rank]
        else:
            found = [np.concatenate(parts, axis=axis) for parts in zip(*copies, strict=True)]
        whole.setdefault(name, []).extend(found)
    return whole


def worst_difference(found: dict[str, list[np.ndarray]], expected: dict[str, list[np.ndarray]]) -> float:
    """Largest difference over the largest expected entry, over every copy that a rank holds; inf for what is missing
    or NaN."""
    if found.keys() != expected.keys():
        return float("inf")
    scale = max(np.abs(copies[0]).max() for copies in expected.values())
    worst = 0.0
    for name, copies in found.items():
        for copy in copies:
            reference = expected[name][0]
            if copy.shape != reference.shape or not scale > 0:
                return float("inf")
            error = float(np.abs(copy - reference).max()) / scale
            worst = max(worst, error if math.isfinite(error) else float("inf"))
    return worst


def report(folder: Path, case: str, rank: int) -> dict:
    return json.loads((folder / f"{case}.{rank}.json").read_text(encoding="utf-8"))


def errors(folder: Path, case: str, ranks: int) -> list[dict]:
    """Each rank's error: its message and the seconds until it was raised."""
    return [json.loads((folder / f"{case}.{rank}.error").read_text(encoding="utf-8")) for rank in range(ranks)]


def records(path: Path) -> list[dict]:
    """The lines of a metrics file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
