"""The example is deterministic, and a resumed run is the run that was not stopped: weights, metrics and samples, bit for bit."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import processes
import pytest

# Warm-up to step 5, then rollout batches of 4 steps: the checkpoint of step 7 lies inside a batch, that of 9 between two.
STEPS = 14
FLAGS = {
    "warm-up-iters": 5,
    "train-iters": STEPS,
    "prompts-per-rollout": 8,
    "exact-match-interval": 4,
    "exact-match-prompts": 16,
    "progress-interval": 1,
    "lr-warmup-iters": 1,
    "lr": 0.01,  # so that warm-up of 5 steps is enough for rewards
    "global-batch-size": 16,
    "micro-batch-size": 8,
    "ckpt-format": "torch",  # Megatron's default format needs a further package on a CPU
    "save-interval": 1,
}
STOP = 7


def launch(run: Path, *flags: str, ranks: int = 1) -> subprocess.CompletedProcess:
    """One run of the launch script, which saves to the run's folder."""
    environment = processes.environment() | {"PYTHON": sys.executable, "RUN_DIR": str(run), "PROCESSES": str(ranks)}
    words = [word for name, value in FLAGS.items() for word in (f"--{name}", str(value))]
    command = ["bash", str(processes.ROOT / "examples" / "launch_cpu.sh"), *words, "--save", str(run / "saved"), *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=processes.HANG)


def trained(run: Path, *flags: str, ranks: int = 1) -> Path:
    done = launch(run, *flags, ranks=ranks)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return run


def resumed(run: Path, ranks: int = 1) -> Path:
    return trained(run, "--load", str(run / "saved"), ranks=ranks)


def rewound(source: Path, run: Path, step: int) -> Path:
    """A copy of a run as a crash leaves it: files that go on behind the last checkpoint, which is that of `step`."""
    name = f"iter_{step:07d}"
    (run / "saved").mkdir(parents=True)
    shutil.copytree(source / "saved" / name, run / "saved" / name)
    (run / "saved" / "latest_checkpointed_iteration.txt").write_text(str(step), encoding="utf-8")
    for file in ("metrics.jsonl", "rollouts.jsonl"):
        data = (source / file).read_bytes()
        (run / file).write_bytes(data[:-20])  # and a last line that was cut
    return run


def state(run: Path, step: int = STEPS) -> dict[str, str]:
    """sha256 of every tensor in a checkpoint: weights, optimizer and random states; read from the archive, not unpickled."""
    found = {}
    for path in sorted((run / "saved" / f"iter_{step:07d}").rglob("*.pt")):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if "/data/" in name:
                    found[f"{path.parent.name}/{name}"] = hashlib.sha256(archive.read(name)).hexdigest()
    return found


def assert_same(found: Path, expected: Path) -> int:
    """Number of tensors that were compared."""
    assert len(state(expected)) > 30
    assert state(found) == state(expected)
    for file in ("metrics.jsonl", "rollouts.jsonl"):
        assert (found / file).read_bytes() == (expected / file).read_bytes(), file
    return len(state(expected))


def beside_each_other(*jobs: Callable) -> list:
    with ThreadPoolExecutor(max_workers=2) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]


def stopped_and_resumed(run: Path, step: int = STOP) -> Path:
    trained(run, "--exit-interval", str(step))
    return resumed(run)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """An uninterrupted run, and one that stopped at a checkpoint inside a rollout batch and was resumed."""
    whole, cut = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("cut")
    return beside_each_other(lambda: trained(whole), lambda: stopped_and_resumed(cut))


@pytest.mark.proof(
    "Determinism: two processes with one seed save the same weights, optimizer and random states (tensors)"
)
def test_two_processes_with_one_seed_save_the_same_state(runs, evidence):
    whole, cut = runs
    steps = [1, 5, STOP]  # the second run was not stopped yet
    for step in steps:
        assert state(whole, step) == state(cut, step)
    assert state(whole, 1) != state(whole, STOP)
    evidence(cases=sum(len(state(whole, step)) for step in steps))


@pytest.mark.proof("Resume: stopped at a checkpoint inside a rollout batch and resumed, equal bit for bit (tensors)")
def test_a_resumed_run_is_the_run_that_was_not_stopped(runs, evidence):
    whole, cut = runs
    assert {r["phase"] for r in processes.records(whole / "metrics.jsonl")} == {"warm-up", "grpo"}
    assert any(r["grad_norm"] > 0 for r in processes.records(whole / "metrics.jsonl")[STOP:])
    evidence(cases=assert_same(cut, whole))


@pytest.mark.proof(
    "Resume: from every kind of checkpoint after a crash that went on behind it, 1 and 2 ranks (tensors)"
)
def test_a_run_resumed_after_a_crash_is_the_run_that_did_not_crash(runs, tmp_path, full, evidence):
    if not full:
        pytest.skip("further resumed runs belong to `make prove`")
    whole, two = runs[0], tmp_path / "two"
    crashed = beside_each_other(
        lambda: assert_same(resumed(rewound(trained(two, ranks=2), tmp_path / "two-7", 7), ranks=2), two),
        lambda: assert_same(stopped_and_resumed(tmp_path / "warm-up", 3), whole),  # no sample was written yet
        *(partial(resumes_exactly, whole, tmp_path / str(step), step) for step in (6, 8, 9)),
    )
    evidence(cases=sum(crashed))


def resumes_exactly(source: Path, run: Path, step: int) -> int:
    return assert_same(resumed(rewound(source, run, step)), source)


@pytest.mark.proof("Resume: rollout files that would be missed or overwritten are named errors")
def test_a_rollout_file_that_would_be_missed_or_overwritten_is_a_named_error(runs, tmp_path, full, evidence):
    if not full:
        pytest.skip("further resumed runs belong to `make prove`")
    run = rewound(runs[0], tmp_path / "run", STOP)
    (run / "rollouts.jsonl").unlink()
    done = launch(run, "--load", str(run / "saved"))
    assert done.returncode != 0
    assert f"rollouts.jsonl holds 0 of the 16 samples of step {STOP}, whose rollout batch was open" in done.stderr
    run = rewound(runs[0], tmp_path / "again", STOP)
    before = (run / "rollouts.jsonl").read_bytes()
    done = launch(run, "--rollouts", str(run / "rollouts.jsonl"))
    assert done.returncode != 0
    assert "is the file that this run would write anew" in done.stderr
    assert (run / "rollouts.jsonl").read_bytes() == before
    evidence(cases=2)
