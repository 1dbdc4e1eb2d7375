"""The example is deterministic, and a resumed run is the run that was not stopped: weights, metrics and samples, bit
for bit."""

import shutil
import subprocess
from functools import partial
from pathlib import Path

import example_runs
import launches
import processes
import pytest
from example_runs import FLAGS, state

STEPS, STOP = FLAGS["train-iters"], 7  # the checkpoint of step 7 lies inside a rollout batch, that of 9 between two

ENTROPY = {"pg-entropy-coef": 0.01, "pg-entropy-target": "2.1,step=0.001"}  # which has a state


def launch(run: Path, *flags: str, ranks: int = 1, check: bool = True) -> subprocess.CompletedProcess:
    """One run, which saves to its folder."""
    saving = ["--save", str(run / "saved"), *example_runs.words_of(ENTROPY)]
    return example_runs.launch(run, *example_runs.words_of(FLAGS), *saving, *flags, ranks=ranks, check=check)


def trained(run: Path, *flags: str, ranks: int = 1) -> Path:
    launch(run, *flags, ranks=ranks)
    return run


def resumed(run: Path, ranks: int = 1) -> Path:
    return trained(run, "--load", str(run / "saved"), ranks=ranks)


def rewound(source: Path, run: Path, step: int) -> Path:
    """A copy of a run as a crash leaves it: files that go on after the last checkpoint, which is that of `step`."""
    name = f"iter_{step:07d}"
    (run / "saved").mkdir(parents=True)
    shutil.copytree(source / "saved" / name, run / "saved" / name)
    (run / "saved" / "latest_checkpointed_iteration.txt").write_text(str(step), encoding="utf-8")
    for file in ("metrics.jsonl", "rollouts.jsonl"):
        data = (source / file).read_bytes()
        (run / file).write_bytes(data[:-20])  # and a last line that was cut
    return run


def assert_same(found: Path, expected: Path) -> int:
    """Number of tensors that were compared."""
    return example_runs.assert_same(found, expected, STEPS, "metrics.jsonl", "rollouts.jsonl")


def stopped_and_resumed(run: Path, step: int = STOP) -> Path:
    trained(run, "--exit-interval", str(step))
    return resumed(run)


@launches.launch
def whole(folder, full):
    """An uninterrupted run."""
    return trained(folder)


@launches.launch
def cut(folder, full):
    """A run that stopped at a checkpoint inside a rollout batch and was resumed."""
    return stopped_and_resumed(folder)


@pytest.mark.proof(
    "Determinism: two processes with one seed save the same weights, optimizer and random states (tensors)"
)
def test_two_processes_with_one_seed_save_the_same_state(whole, cut, evidence):
    steps = [1, 5, STOP]  # the second run was not stopped yet
    for step in steps:
        assert state(whole, step) == state(cut, step)
    assert state(whole, 1) != state(whole, STOP)
    evidence(cases=sum(len(state(whole, step)) for step in steps))


@pytest.mark.proof("Resume: stopped at a checkpoint inside a rollout batch and resumed, equal bit for bit (tensors)")
def test_a_resumed_run_is_the_run_that_was_not_stopped(whole, cut, evidence):
    assert {r["phase"] for r in processes.records(whole / "metrics.jsonl")} == {"warm-up", "grpo"}
    assert any(r["grad_norm"] > 0 for r in processes.records(whole / "metrics.jsonl")[STOP:])
    assert len({r["entropy_coef"] for r in processes.records(whole / "metrics.jsonl")}) > 3
    evidence(cases=assert_same(cut, whole))


@pytest.mark.full_tier("further resumed runs belong to `make prove`")
@pytest.mark.proof("Resume: from every kind of checkpoint after a crash some steps later, 1 and 2 ranks (tensors)")
def test_a_run_resumed_after_a_crash_is_the_run_that_did_not_crash(whole, tmp_path, evidence):
    two = tmp_path / "two"
    crashed = processes.beside_each_other(
        lambda: assert_same(resumed(rewound(trained(two, ranks=2), tmp_path / "two-7", 7), ranks=2), two),
        lambda: assert_same(stopped_and_resumed(tmp_path / "warm-up", 3), whole),  # no sample was written yet
        *(partial(resumes_exactly, whole, tmp_path / str(step), step) for step in (6, 8, 9)),
    )
    evidence(cases=sum(crashed))


def resumes_exactly(source: Path, run: Path, step: int) -> int:
    return assert_same(resumed(rewound(source, run, step)), source)


@pytest.mark.full_tier("further resumed runs belong to `make prove`")
@pytest.mark.proof("Resume: rollout files that would be missed or overwritten are named errors")
def test_a_rollout_file_that_would_be_missed_or_overwritten_is_a_named_error(whole, tmp_path, evidence):
    run = rewound(whole, tmp_path / "run", STOP)
    (run / "rollouts.jsonl").unlink()
    done = launch(run, "--load", str(run / "saved"), check=False)
    assert f"rollouts.jsonl has 0 of the 16 samples of step {STOP}, whose rollout batch was open" in done.stderr
    run = rewound(whole, tmp_path / "again", STOP)
    before = (run / "rollouts.jsonl").read_bytes()
    done = launch(run, "--rollouts", str(run / "rollouts.jsonl"), check=False)
    assert "is the file that this run would overwrite" in done.stderr
    assert (run / "rollouts.jsonl").read_bytes() == before
    evidence(cases=2)
