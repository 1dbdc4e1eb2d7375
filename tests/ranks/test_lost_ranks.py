"""A rank that is killed, stopped or fails in the middle of a job: a named error on the others, whole lines on the
disk."""

import json
import re
import signal
import zipfile
from collections import Counter
from itertools import product

import launches
import processes
import pytest
from lost import Case

from megatron_pg import RolloutFileError, Sample, read_rollouts
from megatron_pg.metrics.file import MetricsFile

KINDS = ("kill", "stop", "raise")
ABORTED = "terminate called without an active exception"  # by torch, if gloo's thread still runs at the end
IN_STEP = [
    "-".join(p)
    for p in product(
        ("dp2", "tp2", "pp2"), KINDS, ("data", "forward", "backward", "finalize", "openforward", "openbackward"), "01"
    )
]
POINTS = ("arguments", "model", "data", "batch", "forward", "backward", "optimizer", "between", "checkpoint")
TOLD = ("model", "data", "batch", "between")  # the ranks agree before they go on, so that all hear what has failed
LAYOUTS = {"dp2": 2, "tp2": 2, "pp2": 2, "dp4": 4, "tp2pp2": 4}
THROUGH_PRETRAIN = [
    *(
        f"pretrain-{layout}-{kind}-{point}-{number % size}"
        for layout, size in LAYOUTS.items()
        for number, (point, kind) in enumerate(product(POINTS, KINDS))
    ),
    *(f"pretrain-{layout}-{kind}-writing-0" for layout, kind in product(LAYOUTS, KINDS)),
    *(f"pretrain-{layout}-raise-barrier-1" for layout in LAYOUTS),
]
FAST = [
    "dp2-kill-openbackward-1",
    "dp2-stop-data-0",
    "pp2-raise-forward-0",
    "pretrain-dp2-kill-optimizer-1",
    "pretrain-tp2pp2-kill-between-2",
]
WRITERS = 12


def cases_of(full: bool) -> list[Case]:
    return [Case.parse(name) for name in (IN_STEP + THROUGH_PRETRAIN if full else FAST)]


@pytest.fixture(scope="module")
def cases(full):
    return cases_of(full)


@launches.launch
def results(folder, full):
    names = [case.name for case in cases_of(full)]
    processes.run_warm(str(processes.TESTS / "ranks/programs/lost_ranks.py"), str(folder), str(WRITERS), *names)
    return folder


def result_of(results, case: Case) -> dict:
    return json.loads((results / case.name / "result.json").read_text(encoding="utf-8"))


@pytest.mark.proof("Faults: a rank killed, stopped or failing inside a step is a named error on the other")
def test_a_lost_rank_is_a_named_error_on_the_other(results, cases, evidence):
    found = {case: result_of(results, case) for case in cases if not case.through_pretrain}
    for case, result in found.items():
        (survivor,) = case.survivors
        named = (
            rf"LostPeerError: rank {survivor} of 2 lost another rank in its step [23], before the optimizer moved, in "
        )
        assert re.match(named, result["errors"][survivor]), (case, result)
        is_aborted = result["errors"][survivor].rstrip().endswith(ABORTED)  # after its error
        wanted = -signal.SIGABRT if is_aborted else 1  # its own: what hangs is killed
        assert result["exit codes"][survivor] == wanted, (case, result)
    evidence(cases=len(found), slowest=max(result["seconds"] for result in found.values()))


@pytest.mark.proof(
    "Faults under `pretrain`: a rank killed, stopped or failing anywhere in a job on 2 and 4 ranks is a named error on "
    "every other one"
)
def test_a_rank_that_pretrain_loses_is_a_named_error_on_every_other_one(results, cases, evidence):
    found = {case: result_of(results, case) for case in cases if case.through_pretrain}
    for case, result in found.items():
        for rank in case.survivors:
            assert result["exit codes"][rank] == 1, (case, result)
            assert names_the_loss(case, rank, result["errors"]), (case, result)
        if case.kind == "raise" and case.point != "batch":  # every rank has that one, so rank 0 shows it
            assert result["errors"][case.victim].startswith(OWN), (case, result)  # nothing stands before it
    evidence(cases=len(found), slowest=max(result["seconds"] for result in found.values()))


OWN = "ArithmeticError: this rank fails on its own"


def names_the_loss(case: Case, rank: int, errors: list[str]) -> bool:
    """Of a rank's error; what every rank has heard of is shown by rank 0, for all."""
    if case.kind == "raise" and case.point in TOLD:
        return errors[0].startswith(OWN) if case.victim == 0 else f"rank {case.victim}: {OWN}" in errors[0]
    place = "before its first step" if case.is_at_startup else "(in|after) its step [123]"
    named = rf"LostPeerError: rank {rank} of {case.size} lost another rank {place}.*, in .+, called by .+:\d+\)"
    return bool(re.match(named, errors[rank]))


@pytest.mark.proof("Faults under `pretrain`: the last checkpoint that is named is whole and before the fault")
def test_a_job_that_was_lost_is_resumed_from_a_whole_checkpoint(results, cases, evidence):
    found = [case for case in cases if case.through_pretrain]
    for case in found:
        tracker = results / case.name / "saved" / "latest_checkpointed_iteration.txt"
        assert (tracker.read_text() if tracker.exists() else "") == ("" if case.is_at_startup else "1"), case
        if not case.is_at_startup:
            for path in (results / case.name / "saved" / "iter_0000001").rglob("*.pt"):
                assert zipfile.ZipFile(path).testzip() is None, path
    evidence(cases=len(found))


@pytest.mark.proof(
    "Faults: files of lost ranks and of killed writers hold whole lines, but for a last one without its end"
)
def test_files_hold_whole_lines_of_finished_steps(results, cases, evidence):
    for case in cases:
        if case.through_pretrain:
            assert case.is_at_startup or iterations(results / case.name) in ([1], [1, 2]), case
            continue
        assert iterations(results / case.name) in ([1], [1, 2]), case
        copies = Counter(tuple(sample.tokens.tolist()) for sample in samples(results / case.name))
        assert len(set(copies.values())) == 1, case  # the same samples in every step, none of them cut
    for number in range(WRITERS):
        steps = iterations(results / f"writer-{number}")
        assert steps == list(range(1, len(steps) + 1))
        assert samples(results / f"writer-{number}")
    evidence(cases=len(cases) + WRITERS)


def iterations(folder) -> list[int]:
    """The lines after which a run continues: nobody has the file open, and only a last line may be torn."""
    path, goes_on_at = folder / "metrics.jsonl", 10**9
    resumed = MetricsFile(path)
    resumed.write({"iteration": goes_on_at})
    resumed.close()
    *written, last = (json.loads(line)["iteration"] for line in path.read_text(encoding="utf-8").splitlines())
    assert last == goes_on_at
    return written


def samples(folder) -> list[Sample]:
    """Of all lines that have an end; a last line without one is refused with its number."""
    path = folder / "rollouts.jsonl"
    whole, _, torn = path.read_bytes().rpartition(b"\n")
    if torn:
        last = whole.count(b"\n") + 2
        with pytest.raises(RolloutFileError, match=rf"rollouts.jsonl:{last}: .*its writer was killed"):
            read_rollouts(path)
    path.write_bytes(whole + b"\n")
    return read_rollouts(path)
