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
from typing import NoReturn

import forked
import torch
import train_grpo


def run_child(rank: int, size: int, port: int, folder: Path, flags: list[str]) -> NoReturn:
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
    sizes = {name: size for name, (size, *_) in cases.items()}
    codes = {name: [None] * size for name, size in sizes.items()}
    for name in cases:
        (out / name).mkdir()

    def child(name: str, rank: int, port: int) -> NoReturn:
        size, *flags = cases[name]
        run_child(rank, size, port, out / name, flags)

    def ended(name: str, rank: int, code: int, _: forked.Running) -> None:
        codes[name][rank] = code
        (out / name / "exit_codes").write_text(json.dumps(codes[name]), encoding="utf-8")

    forked.run_all(sizes, child, ended, at_a_time=4)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_all(json.loads(os.environ["CASES"]), Path(os.environ["RUN_DIR"]).absolute())
