"""Jobs under Megatron's pretrain() in which a rank is killed, stopped or fails: what does every other rank end with?

    python benchmarks/runs/lost_jobs.py --out runs/lost --cases pretrain-dp2-kill-forward-1 pretrain-tp2-stop-backward-0

A case is layout, fault, point and rank. Its ranks are processes as a launcher starts them, without its habit of ending
all of them when one has ended. Several cases run at a time. A line of JSON tells how a case ended.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/ranks/programs"))

from lost import Case, error_of
from records import FAILED, NOT_RUN, OUT_OF_TIME, Deadline, error_in

ROOT = Path(__file__).parents[2]
SECONDS = 240  # of a case, at most: its start, and the timeout of a collective
NAMED, ABORTED = "LostPeerError", "SIGABRT, "  # over NCCL, torch ends a process after the error was printed


def begin(case: Case, rank: int, folder: Path, port: int, backend: str) -> subprocess.Popen:
    """A rank, with the environment that a launcher gives it; its error output goes to a file."""
    environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.size)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, str(Path(__file__).with_name("lost_run.py")), case.name, backend]
    with (folder / f"{rank}.out").open("w") as out, (folder / f"{rank}.err").open("w") as err:
        return subprocess.Popen(command, env=environment, cwd=folder, stdout=out, stderr=err)


def run(case: Case, out: Path, backend: str, seconds: float) -> dict[str, object]:
    """Run a case until its surviving ranks have ended, and end the rest; how they ended."""
    folder = out / case.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # In this process, which outlives the ranks: it must not close when rank 0 is lost.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [begin(case, rank, folder, store.port, backend) for rank in range(case.size)]
    limit, ended = Deadline(seconds / 60), {}
    while len(ended) < len(case.survivors) and limit.left() > 0:
        for rank in case.survivors:
            if rank not in ended and ranks[rank].poll() is not None:
                ended[rank] = time.time()
        time.sleep(0.1)
    for process in ranks:
        process.kill()
        process.wait()
    return result_of(case, folder, {rank: ranks[rank].returncode for rank in ended}, max(ended.values(), default=0.0))


def result_of(case: Case, folder: Path, codes: dict[int, int], last: float) -> dict[str, object]:
    """A row: how many survivors have the named error, what each ended with, and seconds from the fault to the last."""
    ends = {rank: end_of(folder / f"{rank}.err", codes.get(rank)) for rank in case.survivors}
    named = sum(end.removeprefix(ABORTED).startswith(NAMED) for end in ends.values())
    lost_at, shown = folder / "lost_at", "; ".join(f"rank {rank}: {end}" for rank, end in ends.items())
    if not lost_at.exists():
        return {"case": case.name, FAILED: f"no rank was lost; {shown}"}
    return {
        "case": case.name,
        "named error": f"{named} of {len(ends)}",
        "seconds": last - float(lost_at.read_text()) if len(codes) == len(ends) else "",
        "ended with": shown,
    }


def end_of(errors: Path, code: int | None) -> str:
    """The error that a rank showed, or the signal that ended it with the last line of its output."""
    if code is None:
        return "still running"
    shown = error_of(errors.read_text(errors="replace")).split("\n")[0][:160]
    if code < 0:
        return f"{signal.Signals(-code).name}, {shown or error_in(errors)[:160]}"
    return shown or f"exit code {code}, {error_in(errors)[:160]}"


def main() -> None:
    """Run the cases, with a processor for each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "lost")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--minutes", type=float, help="no case begins or goes on after them")
    parser.add_argument("--cases", nargs="+", required=True, metavar="CASE")
    options = parser.parse_args()
    cases, deadline = [Case.parse(name) for name in options.cases], Deadline(options.minutes)
    places = threading.Semaphore(max(1, os.cpu_count() // max(case.size for case in cases)))

    def run_in_turn(case: Case) -> None:
        with places:
            found: dict[str, object] = {"case": case.name, NOT_RUN: OUT_OF_TIME}
            if (left := deadline.left()) > SECONDS / 2:
                found = run(case, options.out.resolve(), options.backend, min(SECONDS, left))
            print(json.dumps(found) + "\n", end="", flush=True)  # one write: several threads print

    with ThreadPoolExecutor(len(cases)) as pool:
        list(pool.map(run_in_turn, cases))


if __name__ == "__main__":
    main()
