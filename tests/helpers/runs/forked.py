"""Ranks that a script forks, as a launcher would start them but without its seconds of importing: what they need of
one."""

import json
import os
import sys
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import NoReturn

import torch

Running = dict[int, tuple[Hashable, int]]  # case and rank, by process


def begin_stores(count: int) -> list[int]:
    """Ports of stores over which the ranks of a case find each other. A launcher has it in a process that outlives
    them."""
    (mine, its), (ports_of, gives_ports) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(its)
        stores = [
            torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(count)
        ]
        with os.fdopen(gives_ports, "w") as file:
            file.write(json.dumps([store.port for store in stores]))
        os.read(mine, 1)  # until this script and its ranks have ended, however they do
        os._exit(0)
    os.close(gives_ports)
    with os.fdopen(ports_of) as file:
        return json.loads(file.read())


def become(rank: int, size: int, port: int, folder: Path) -> None:
    """This process is a rank: the environment that a launcher gives it, and its output in files of the folder."""
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        with (folder / f"{rank}.{name}").open("w", encoding="utf-8") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}


def run_all(
    sizes: Mapping[Hashable, int],
    run_child: Callable[[Hashable, int, int], NoReturn],
    on_end: Callable[[Hashable, int, int, Running], None],
    *,
    at_a_time: int,
) -> None:
    """Run cases on so many ranks each, with at most `at_a_time` ranks at the same time or one case.

    A rank calls `run_child(case, rank, port)`; `on_end(case, rank, exit code, running)` is called when it has ended.
    """
    waiting, running = list(zip(sizes.items(), begin_stores(len(sizes)), strict=True)), {}
    while waiting or running:
        while waiting and (not running or len(running) + waiting[0][0][1] <= at_a_time):
            (case, size), port = waiting.pop(0)
            for rank in range(size):
                if (pid := os.fork()) == 0:
                    run_child(case, rank, port)
                running[pid] = case, rank
        pid, status = os.wait()
        case, rank = running.pop(pid)
        on_end(case, rank, os.waitstatus_to_exitcode(status), running)
