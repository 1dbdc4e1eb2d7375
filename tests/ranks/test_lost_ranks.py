"""A rank that is killed, stopped or fails in the middle of a step: a named error on the other one, whole lines on the disk."""

import json
import re
import sys
from collections import Counter
from itertools import product

import launches
import processes
import pytest

from megatron_pg import RolloutFileError, Sample, read_rollouts
from megatron_pg.metrics.file import MetricsFile

FAST = ["dp2-kill-forward-1", "dp2-stop-data-0", "tp2-stop-backward-1", "pp2-raise-forward-0"]
FULL = [
    "-".join(p)
    for p in product(
        ("dp2", "tp2", "pp2"), ("kill", "stop", "raise"), ("data", "forward", "backward", "finalize"), "01"
    )
]
WRITERS = 12


@pytest.fixture(scope="module")
def cases(full):
    return FULL if full else FAST


@launches.launch
def results(folder, full):
    cases = FULL if full else FAST
    script = [sys.executable, str(processes.TESTS / "ranks" / "lost_ranks.py"), str(folder), str(WRITERS)]
    processes.run([*script, *cases], processes.environment())
    return folder


@pytest.mark.proof(
    "Faults: a rank killed, stopped or failing inside a step is a named error on the other (worst: seconds)"
)
def test_a_lost_rank_is_a_named_error_on_the_other(results, cases, evidence):
    found = {case: json.loads((results / case / "result.json").read_text(encoding="utf-8")) for case in cases}
    for case, result in found.items():
        survivor = 1 - int(case.split("-")[3])
        named = rf"LostPeerError: rank {survivor} of 2 lost another rank in its step [23],"
        assert re.match(named, result["message"]), (case, result)
        assert result["exit code"] == 1, (case, result)  # its own: what hangs is killed
    evidence(cases=len(found), worst=max(result["seconds"] for result in found.values()))


@pytest.mark.proof(
    "Faults: files of lost ranks and of killed writers hold whole lines, but for a last one without its end"
)
def test_files_hold_whole_lines_of_finished_steps(results, cases, evidence):
    for case in cases:
        assert iterations(results / case) in ([1], [1, 2]), case
        copies = Counter(tuple(sample.tokens.tolist()) for sample in samples(results / case))
        assert len(set(copies.values())) == 1, case  # the same samples in every step, none of them cut
    for number in range(WRITERS):
        steps = iterations(results / f"writer-{number}")
        assert steps == list(range(1, len(steps) + 1))
        assert samples(results / f"writer-{number}")
    evidence(cases=len(cases) + WRITERS)


def iterations(folder) -> list[int]:
    """Of the lines that a run goes on behind: nobody holds the file any more, and only a last line may be torn."""
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
