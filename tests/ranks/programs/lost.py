"""What is lost: a case's name, and the ways in which a rank ends, freezes or fails in the middle of a job."""

import math
import os
import re
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import distributed_c10d

SILENCE = timedelta(seconds=8)  # that a stopped rank is waited for: --distributed-timeout-minutes of a real job
NCCL_SILENCE = timedelta(seconds=30)  # on GPUs, where ranks of several jobs share them
PATIENCE = timedelta(minutes=15)  # for every other wait, and before the fault: a loaded machine is slow
LOST_STEP, STEPS = 2, 4  # the fault is in the second step, or after it

STARTUP = ("arguments", "model", "data", "barrier")  # points of `lost_in_pretrain` before the first step


@dataclass(frozen=True)
class Case:
    """`dp2-kill-forward-1`: layout, fault, point and rank. Through `pretrain` its name begins with that."""

    name: str
    layout: str
    kind: str
    point: str
    victim: int

    @classmethod
    def parse(cls, name: str) -> "Case":
        layout, kind, point, victim = name.removeprefix("pretrain-").split("-")
        return cls(name, layout, kind, point, int(victim))

    @property
    def through_pretrain(self) -> bool:
        return self.name.startswith("pretrain-")

    @property
    def is_at_startup(self) -> bool:
        return self.through_pretrain and self.point in STARTUP

    @property
    def size(self) -> int:
        return math.prod(int(number) for number in re.findall(r"\d", self.layout))

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.victim]


def lose(kind: str) -> None:
    """End, freeze or fail this rank, and note when."""
    Path("lost_at").write_text(repr(time.time()), encoding="utf-8")
    if kind == "raise":
        raise ArithmeticError("this rank fails on its own")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])


def error_of(shown: str) -> str:
    """What a rank's terminal shows last of an error: its class, without the modules, and its text."""
    *_, last = ["", *re.finditer(r"^(?:\[rank\d\]: )?(?:\w+\.)*(?=\w+Error: )", shown, re.MULTILINE)]
    return shown[last.end() :][:2000] if last else ""


def time_out_after(silence: timedelta) -> None:
    """Every group's collectives, from now on."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(silence, group)


def wait_no_longer_than(silence: timedelta) -> None:
    """In every group. A peer that is only slow is then taken for a stopped one, which is the same error.

    Between stages a group's first timeout never changes. So every wait gets one, which is longer: the other
    collectives end by their group's.
    """
    time_out_after(silence)
    wait = distributed_c10d.Work.wait
    distributed_c10d.Work.wait = lambda work, longest=1.5 * silence: wait(work, longest)
