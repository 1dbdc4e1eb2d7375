"""examples/train_grpo.py once per case, each with its own flags; the ranks are forked, because importing is what takes
long.

    CASES='{"name": [ranks, "--flag", …], …}'

It is started by the example's launch script on one process. Each case leaves the example's files in a folder of its
name under RUN_DIR, the output of its ranks, and their exit codes in `exit_codes`.
"""

import json
import os
import sys
from pathlib import Path

import forked
import torch
import train_grpo

AT_A_TIME = 2  # cases


def run_child(rank: int, size: int, port: int, folder: Path, flags: list[str]) -> None:
    """One rank. It exits as the example does."""
    forked.become(rank, size, port, folder)
    files = {"run-dir": folder, "megatron-log": folder / f"{rank}.log", "tensorboard-dir": folder / "tensorboard"}
    sys.argv += [word for name, path in files.items() for word in (f"--{name}", str(path))] + flags
    try:
        train_grpo.main()
    except Exception:
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
    raise SystemExit(0)


def run_all(cases: dict[str, list], out: Path) -> None:
    waiting, running = list(zip(cases.items(), forked.begin_stores(len(cases)), strict=True)), {}
    codes: dict[str, dict[int, int]] = {name: {} for name in cases}
    while waiting or running:
        while waiting and len({name for name, _ in running.values()}) < AT_A_TIME:
            (name, (size, *flags)), port = waiting.pop(0)
            (out / name).mkdir()
            for rank in range(size):
                pid = os.fork()
                if pid == 0:
                    run_child(rank, size, port, out / name, flags)
                running[pid] = (name, rank)
        pid, status = os.wait()
        name, rank = running.pop(pid)
        codes[name][rank] = os.waitstatus_to_exitcode(status)
        text = json.dumps([codes[name].get(rank) for rank in range(cases[name][0])])
        (out / name / "exit_codes").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_all(json.loads(os.environ["CASES"]), Path(os.environ["RUN_DIR"]).absolute())
