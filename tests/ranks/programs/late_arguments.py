"""Invalid arguments with the form of megatron-core 0.18, which parses and validates before there is a process group.

    python late_arguments.py FOLDER RANK...

The given ranks get an invalid argument. Rank 0 waits until rank 1 joins the process group or ends. As a launcher does,
this script ends all ranks as soon as one has ended. What the ranks print is in the files `0.err` and `1.err` of the
folder.
"""

import os
import signal
import sys
from argparse import ArgumentParser
from pathlib import Path

import forked
import torch
from megatron.training import argument_utils, arguments, training

from megatron_pg.pretrain import pretrain, run

INVALID = ["--loss-aggregation", "constant"]  # without its divisor


def run_rank(rank: int, flags: list[str], pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.close(writer if rank == 0 else reader)

    def parse_and_validate_args(extra_args_provider, args_defaults):
        args = extra_args_provider(ArgumentParser()).parse_args(flags)
        if rank == 0 and not os.read(reader, 1):  # rank 1 has ended
            signal.pause()
        run.get_args = lambda: args
        return args

    def of_megatron(cfg_container, model_provider, **rest):
        if rank == 1:
            os.write(writer, b"1")
        torch.distributed.init_process_group("gloo")
        model_provider()

    def provider():
        pass

    provider.is_distributed = True
    argument_utils.pretrain_cfg_container_from_args = lambda args: args
    arguments.parse_and_validate_args, training.pretrain = parse_and_validate_args, of_megatron
    pretrain(provider, provider, None)


def main(folder: Path, invalid: list[int]) -> None:
    (port,) = forked.begin_stores(1)
    ranks, pipe = {}, os.pipe()
    for rank in range(2):
        if (process := os.fork()) == 0:
            forked.become(rank, 2, port, folder)
            run_rank(rank, INVALID if rank in invalid else [], pipe)
            sys.exit()
        ranks[process] = rank
    for end in pipe:
        os.close(end)
    ended, _ = os.wait()
    while ended not in ranks:  # the process of the store
        ended, _ = os.wait()
    for process in set(ranks) - {ended}:
        os.kill(process, signal.SIGTERM)
        os.waitpid(process, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(rank) for rank in sys.argv[2:]])
