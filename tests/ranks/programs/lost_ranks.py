"""Ranks that are killed, stopped or fail in the middle of a job: what the others see, and what lies on the disk.

    python tests/ranks/programs/lost_ranks.py OUT_DIR WRITERS case [case …]

A case is `layout-signal-point-victim`, such as `dp2-kill-forward-1`, in the package's loop (`lost_in_step.py`), or
after `pretrain-` a launch script (`lost_in_pretrain.py`). This process imports everything once and forks the ranks of
each case, because a lost rank cannot be used again; cases wait for timeouts at the same time. WRITERS processes are
killed while they write files. Only the peers of a stopped rank wait by the clock: they cannot notice it otherwise.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import forked
import lost_in_step  # enables the CPU before lost_in_pretrain asks for it

# isort: split
import lost_in_pretrain
import ranks
import torch
from lost import Case, error_of

from megatron_pg import RolloutWriter
from megatron_pg.metrics.file import MetricsFile

AT_A_TIME = 8  # ranks


def run_child(case: Case, rank: int, port: int, folder: Path) -> NoReturn:
    """One rank, with the environment that a launcher gives it, and its own error output. It exits as a script does."""
    os.chdir(folder)
    forked.become(rank, case.size, port, folder)
    try:
        (lost_in_pretrain if case.through_pretrain else lost_in_step).train(case, rank)
    except Exception:
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
    raise SystemExit(0)


def run_all(cases: list[Case], out: Path) -> None:
    """Run the cases, a few at the same time; result.json of each says how and when its ranks ended."""
    ended: dict[Case, dict] = {case: {} for case in cases}
    for case in cases:
        (out / case.name).mkdir()

    def child(case: Case, rank: int, port: int) -> NoReturn:
        run_child(case, rank, port, out / case.name)

    def on_end(case: Case, rank: int, code: int, running: forked.Running) -> None:
        ended[case][rank] = {"exit code": code, "time": time.time()}
        if len(ended[case]) == case.size:
            save_result(case, out / case.name, ended[case])
        end_stopped_ranks(running, ended)

    forked.run_all({case: case.size for case in cases}, child, on_end, at_a_time=AT_A_TIME)


def end_stopped_ranks(running: dict, ended: dict) -> None:
    """Kill each stopped rank whose peers have ended."""
    for pid, (case, rank) in running.items():
        is_stopped = case.kind == "stop" and rank == case.victim
        if is_stopped and all(peer in ended[case] for peer in case.survivors):
            os.kill(pid, signal.SIGKILL)


def save_result(case: Case, folder: Path, ended: dict[int, dict]) -> None:
    lost_at = folder / "lost_at"
    last = max(ended[rank]["time"] for rank in case.survivors)
    result = {
        "exit codes": [ended[rank]["exit code"] for rank in range(case.size)],
        "errors": [error_of((folder / f"{rank}.err").read_text(encoding="utf-8")) for rank in range(case.size)],
        "seconds": last - float(lost_at.read_text(encoding="utf-8")) if lost_at.exists() else 0.0,
    }
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def kill_writers(count: int, out: Path) -> None:
    """Processes that write the two files of a run as fast as they can, killed when a random number of bytes is
    there."""
    rng, samples = random.Random(2), [s for s in ranks.samples() if s.num_trained]
    for number in range(count):
        folder = out / f"writer-{number}"
        folder.mkdir()
        written, say = os.pipe()
        pid = os.fork()
        if pid == 0:
            metrics, rollouts = MetricsFile(folder / "metrics.jsonl"), RolloutWriter(folder / "rollouts.jsonl")
            for iteration in itertools.count(1):
                metrics.write({"iteration": iteration, **{f"metric_{k}": 1.0 / iteration for k in range(200)}})
                rollouts.write(samples)
                os.write(say, b".")
        os.close(say)
        path, size = folder / "rollouts.jsonl", rng.randrange(200_000)
        while os.read(written, 1) and path.stat().st_size < size:
            pass
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(written)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise RuntimeError(f"the writer of {path} has failed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1]).absolute()
    kill_writers(int(sys.argv[2]), folder)
    run_all([Case.parse(name) for name in sys.argv[3:]], folder)
