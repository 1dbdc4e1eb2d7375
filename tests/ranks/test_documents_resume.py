"""`--docs-per-step` through pretrain(): killed and resumed, or replayed, a run is the run that nothing happened to, bit for bit."""

import random
import subprocess
import sys
from pathlib import Path

import processes
import pytest
from test_resume import FLAGS, beside_each_other, state

# Warm-up of 5 steps, then rollout batches of 64 documents: 14 does not divide them, so that batches straddle steps.
DOCUMENTS = {"docs-per-step": 14, "micro-batch-size": 4, "train-iters": 26}
STEPS = DOCUMENTS["train-iters"]
CALLS = 150_000  # of functions, Python's and C's, in a step: 78,000 to 150,000


def command(run: Path, *flags: str, ranks: int, python: str = sys.executable) -> tuple[list[str], dict[str, str]]:
    environment = processes.environment() | {"PYTHON": python, "RUN_DIR": str(run), "PROCESSES": str(ranks)}
    words = [word for name, value in (FLAGS | DOCUMENTS).items() for word in (f"--{name}", str(value))]
    script = str(processes.ROOT / "examples" / "launch_cpu.sh")
    return ["bash", script, *words, "--save", str(run / "saved"), *flags], environment


def trained(run: Path, *flags: str, ranks: int, python: str = sys.executable) -> str:
    """A run to its end; what it printed."""
    words, environment = command(run, *flags, ranks=ranks, python=python)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=processes.HANG)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def saved_step(run: Path) -> int:
    """The step of the last whole checkpoint, 0 without one."""
    path = run / "saved" / "latest_checkpointed_iteration.txt"
    return int(path.read_text() or 0) if path.exists() else 0


def killed(run: Path, step: int, calls: int, *flags: str, ranks: int) -> None:
    """A run whose ranks all get SIGKILL so many function calls after the checkpoint of `step`."""
    run.mkdir(exist_ok=True)
    words, environment = command(run, *flags, ranks=ranks, python=python_for("killed_example.py", run))
    environment |= {"KILL": f"{step} {calls}"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=processes.HANG)
    assert done.returncode != 0
    assert "Signal 9 (SIGKILL)" in done.stderr, done.stderr[-3000:]  # of the launcher, behind the end of every rank
    assert step <= saved_step(run) < STEPS


def killed_again_and_again(run: Path, rng: random.Random, *, kills: int, ranks: int) -> None:
    """Kill a run at random steps, each time resume it from its last checkpoint, and let it end at last."""
    flags = ()
    for later in reversed(range(kills)):
        done = saved_step(run)
        furthest = max(STEPS - 4 - later, done + 1)  # each run gets a step further, and the last one has some left
        killed(run, rng.randint(done + 1, min(done + 3, furthest)), rng.randrange(CALLS), *flags, ranks=ranks)
        flags = ("--load", str(run / "saved"))
    trained(run, *flags, ranks=ranks)


def assert_same(found: Path, expected: Path, ranks: int) -> int:
    """Number of tensors that were compared."""
    assert len(state(expected, STEPS)) > 30
    assert state(found, STEPS) == state(expected, STEPS)
    for file in ("metrics.jsonl", *(f"rollouts.{rank}.jsonl" for rank in range(ranks))):
        assert (found / file).read_bytes() == (expected / file).read_bytes(), file
    return len(state(expected, STEPS))


def python_for(script: str, folder: Path) -> str:
    """An interpreter that starts another script of this folder for the example."""
    python, other = folder / "python", processes.TESTS / "ranks" / script
    python.write_text(f'#!/bin/bash\nexec "{sys.executable}" "${{@/examples\\/train_grpo.py/{other}}}"\n')
    python.chmod(0o755)
    return str(python)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path, str]:
    """A run that nothing happens to, the same with steps that Megatron runs twice, and what that one printed."""
    whole, replayed = tmp_path_factory.mktemp("documents"), tmp_path_factory.mktemp("replayed")
    python = python_for("rerun_example.py", replayed)
    _, output = beside_each_other(lambda: trained(whole, ranks=1), lambda: trained(replayed, ranks=1, python=python))
    return whole, replayed, output


@pytest.fixture
def whole(runs) -> Path:
    return runs[0]


def test_the_counts_of_every_step_are_what_was_trained(whole):
    records = processes.records(whole / "metrics.jsonl")
    assert [record["num_documents"] for record in records] == [14] * STEPS
    assert [record["documents_seen"] for record in records] == [14 * k for k in range(1, STEPS + 1)]
    assert all(record["num_samples"] == 14 for record in records)
    assert {record["num_microbatches"] for record in records} > {3}
    assert f"consumed samples: {14 * 20:12d} |" in (whole / "megatron.log").read_text()  # of iteration 20


@pytest.mark.proof("Documents per step: replayed by Megatron's rerun machinery, equal bit for bit (tensors)")
def test_a_run_with_replayed_steps_is_the_run_without(runs, evidence):
    whole, replayed, output = runs
    assert f"{STEPS // 2} steps were run again" in output
    evidence(cases=assert_same(replayed, whole, ranks=1))


@pytest.mark.proof("Documents per step: killed (SIGKILL) at random steps and resumed, equal bit for bit (kills)")
def test_a_killed_and_resumed_run_is_the_run_that_was_not_killed(whole, tmp_path, full, evidence):
    one = tmp_path / "one"
    if not full:
        killed_again_and_again(one, random.Random(1), kills=1, ranks=1)
        assert_same(one, whole, ranks=1)
        evidence(cases=1)
        return
    two, two_whole = tmp_path / "two", tmp_path / "two-whole"
    beside_each_other(
        lambda: killed_again_and_again(one, random.Random(1), kills=10, ranks=1),
        lambda: [trained(two_whole, ranks=2), killed_again_and_again(two, random.Random(2), kills=10, ranks=2)],
    )
    assert_same(one, whole, ranks=1)
    assert_same(two, two_whole, ranks=2)
    evidence(cases=20)


@pytest.mark.proof("Documents per step: the documents end, in a last partial step or without it, on 2 ranks (runs)")
def test_the_end_of_the_documents_is_a_clean_end_with_a_checkpoint(whole, tmp_path, full, evidence):
    if not full:
        pytest.skip("further launches belong to `make prove`")
    count = (whole / "rollouts.0.jsonl").read_bytes().count(b"\n") - 1
    steps, left = divmod(count, 25)
    assert left

    def run(end: str) -> None:
        flags = ["--rollouts", str(whole / "rollouts.0.jsonl"), "--docs-per-step", "25", "--docs-per-step-end", end]
        output = trained(tmp_path / end, *flags, "--train-iters", "100", "--save-interval", "1000", ranks=2)
        trained_documents = count if end == "partial" else count - left
        assert f"the documents have ended: {trained_documents} were trained" in output
        sizes = [record["num_documents"] for record in processes.records(tmp_path / end / "metrics.jsonl")]
        assert sizes == [25] * steps + [left] * (end == "partial")
        assert saved_step(tmp_path / end) == len(sizes)

    beside_each_other(lambda: run("partial"), lambda: run("stop"))
    evidence(cases=2)


def test_resuming_with_another_number_of_ranks_is_a_named_error(whole, full):
    if not full:
        pytest.skip("a further launch belongs to `make prove`")
    words, environment = command(whole, "--load", str(whole / "saved"), ranks=2)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=processes.HANG)
    assert done.returncode != 0
    assert "the checkpoint holds the document positions of 1 data-parallel ranks and this run has 2" in done.stderr
