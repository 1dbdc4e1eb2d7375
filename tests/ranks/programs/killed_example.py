"""examples/train_grpo.py, of which every rank gets SIGKILL so many function calls after the checkpoint of a step.

    KILL="step calls"

Calls, not seconds: the point is anywhere in a step, in a file that is being written too, and on
no machine after the end.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import train_grpo

from megatron_pg.step.forward_step import PolicyGradientStep

RUN, RANK = Path(os.environ["RUN_DIR"]), int(os.environ["RANK"])
step, calls_left = map(int, os.environ["KILL"].split())
forward_backward = PolicyGradientStep.forward_backward


def saved_step() -> int:
    path = RUN / "saved" / "latest_checkpointed_iteration.txt"
    return int(path.read_text() or 0) if path.exists() else 0


def counted(frame, event, argument):
    global calls_left
    calls_left -= event in ("call", "c_call")
    if calls_left < 0:
        sys.setprofile(None)
        for pid in [pid for pid in pids if pid != os.getpid()] + [os.getpid()]:
            os.kill(pid, signal.SIGKILL)


def watched(self, *positional, **keywords):
    if not pids:
        pids.extend([0] * torch.distributed.get_world_size())
        torch.distributed.all_gather_object(pids, os.getpid())
    if RANK == 0 and saved_step() >= step:
        sys.setprofile(counted)
    return forward_backward(self, *positional, **keywords)


pids: list[int] = []
PolicyGradientStep.forward_backward = watched

if __name__ == "__main__":
    train_grpo.main()
