"""`--docs-per-step` through pretrain(): killed and resumed, or replayed, a run is the run that nothing happened to,
bit for bit."""

import random
import subprocess
from pathlib import Path

import example_runs
import launches
import processes
import pytest
from example_runs import saved_step

# Warm-up of 5 steps, then rollout batches of 64 documents: 14 does not divide them, so that batches straddle steps.
STEPS = 26
FLAGS = example_runs.FLAGS | {"docs-per-step": 14, "micro-batch-size": 4, "train-iters": STEPS}
FLAGS |= {"pg-entropy-coef": 0.01, "pg-entropy-target": "2.1,step=0.001"}  # which has a state
CALLS = 150_000  # of functions, Python's and C's, in a step: 78,000 to 150,000


def launch(run: Path, *flags: str, **how) -> subprocess.CompletedProcess:
    """One run, which saves to its folder."""
    saving = ["--save", str(run / "saved")]
    return example_runs.launch(run, *example_runs.words_of(FLAGS), *saving, *flags, **how)


def killed(run: Path, step: int, calls: int, *flags: str, ranks: int) -> None:
    """A run whose ranks all get SIGKILL so many function calls after the checkpoint of `step`."""
    how = {"ranks": ranks, "script": "killed_example.py", "KILL": f"{step} {calls}"}
    done = launch(run, *flags, **how, check=False)
    assert "Signal 9 (SIGKILL)" in done.stderr, done.stderr[-3000:]  # of the launcher, after the end of every rank
    assert step <= saved_step(run) < STEPS


def killed_again_and_again(run: Path, rng: random.Random, *, kills: int, ranks: int) -> None:
    """Kill a run at random steps, each time resume it from its last checkpoint, and let it end at last."""
    flags = ()
    for later in reversed(range(kills)):
        done = saved_step(run)
        furthest = max(STEPS - 4 - later, done + 1)  # each run gets a step further, and the last one has some left
        killed(run, rng.randint(done + 1, min(done + 3, furthest)), rng.randrange(CALLS), *flags, ranks=ranks)
        flags = ("--load", str(run / "saved"))
    launch(run, *flags, ranks=ranks)


def assert_same(found: Path, expected: Path, ranks: int) -> int:
    """Number of tensors that were compared."""
    files = ("metrics.jsonl", *(f"rollouts.{rank}.jsonl" for rank in range(ranks)))
    return example_runs.assert_same(found, expected, STEPS, *files)


@launches.launch
def whole(folder, full) -> Path:
    """A run that nothing happens to."""
    launch(folder, ranks=1)
    return folder


@launches.launch
def replayed(folder, full) -> tuple[Path, str]:
    """The same with steps that Megatron runs twice, and what it printed."""
    return folder, launch(folder, ranks=1, script="rerun_example.py").stdout


@launches.launch
def killed_runs(folder, full) -> Path:
    """Runs that were killed and resumed: on one rank, and in the full tier on two, with one that was not."""

    def on_two() -> None:
        launch(folder / "two-whole", ranks=2)
        killed_again_and_again(folder / "two", random.Random(2), kills=10, ranks=2)

    def on_one() -> None:
        killed_again_and_again(folder / "one", random.Random(1), kills=10 if full else 1, ranks=1)

    processes.beside_each_other(on_one, *[on_two] * full)
    return folder


def test_the_counts_of_every_step_are_what_was_trained(whole):
    records = processes.records(whole / "metrics.jsonl")
    assert [record["num_documents"] for record in records] == [14] * STEPS
    assert [record["documents_seen"] for record in records] == [14 * k for k in range(1, STEPS + 1)]
    assert all(record["num_samples"] == 14 for record in records)
    assert {record["num_microbatches"] for record in records} > {3}
    assert f"consumed samples: {14 * 20:12d} |" in (whole / "megatron.log").read_text()  # of iteration 20


@pytest.mark.proof("Documents per step: replayed by Megatron's rerun machinery, equal bit for bit (tensors)")
def test_a_run_with_replayed_steps_is_the_run_without(whole, replayed, evidence):
    run, output = replayed
    assert f"{STEPS // 2} steps were run again" in output
    assert len({record["entropy_coef"] for record in processes.records(whole / "metrics.jsonl")}) > 3
    evidence(cases=assert_same(run, whole, ranks=1))


@pytest.mark.proof("Documents per step: killed (SIGKILL) at random steps and resumed, equal bit for bit (kills)")
def test_a_killed_and_resumed_run_is_the_run_that_was_not_killed(whole, killed_runs, full, evidence):
    assert_same(killed_runs / "one", whole, ranks=1)
    if full:
        assert_same(killed_runs / "two", killed_runs / "two-whole", ranks=2)
    evidence(cases=20 if full else 1)


@pytest.mark.full_tier("further launches belong to `make prove`")
@pytest.mark.proof("Documents per step: the documents end, in a last partial step or without it, on 2 ranks (runs)")
def test_the_end_of_the_documents_is_a_clean_end_with_a_checkpoint(whole, tmp_path, evidence):
    count = (whole / "rollouts.0.jsonl").read_bytes().count(b"\n") - 1
    steps, left = divmod(count, 25)
    assert left

    def run(end: str) -> None:
        flags = ["--rollouts", str(whole / "rollouts.0.jsonl"), "--docs-per-step", "25", "--docs-per-step-end", end]
        more = ["--train-iters", "100", "--save-interval", "1000"]
        output = launch(tmp_path / end, *flags, *more, ranks=2).stdout
        trained_documents = count if end == "partial" else count - left
        assert f"the documents have ended: {trained_documents} were trained" in output
        sizes = [record["num_documents"] for record in processes.records(tmp_path / end / "metrics.jsonl")]
        assert sizes == [25] * steps + [left] * (end == "partial")
        assert saved_step(tmp_path / end) == len(sizes)

    processes.beside_each_other(lambda: run("partial"), lambda: run("stop"))
    evidence(cases=2)


@pytest.mark.full_tier("a further launch belongs to `make prove`")
@pytest.mark.proof("Documents per step: resuming on another number of ranks is a named error (runs)")
def test_resuming_with_another_number_of_ranks_is_a_named_error(whole, evidence):
    done = launch(whole, "--load", str(whole / "saved"), ranks=2, check=False)
    assert "the checkpoint has the document positions of 1 data-parallel ranks and this run has 2" in done.stderr
    evidence(cases=1)
