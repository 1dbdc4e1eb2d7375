"""Tensor-parallel ranks of the fused head on one GPU: the time of a shard, and gradients of ranks that share the GPU.

    python benchmarks/head_shards.py                          # a rank's time over its three GEMMs, without its exchange
    torchrun --nproc-per-node 4 benchmarks/head_shards.py     # every rank's gradients against float64

Ranks that share a GPU exchange by gloo through the host's memory, so their times mean nothing; where a host has a GPU
for each rank, `torchrun benchmarks/lm_head.py` has both.
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
from lm_head import Problem, bare, gradient_errors, medians_ms, ours
from torch import Tensor

from megatron_pg.declarations.choices import HEAD_MODES

TENSOR_PARALLEL = (2, 4)


class Arrived:
    """An exchange that is over."""

    def wait(self) -> None:
        """It is."""


class Shard:
    """The first of `ranks` tensor-parallel ranks, whose peers are not there."""

    def __init__(self, ranks: int):
        self._ranks = ranks

    def size(self) -> int:
        """How many share the vocabulary."""
        return self._ranks

    def rank(self) -> int:
        """The first columns."""
        return 0


def leave_out_exchanges() -> None:
    """What this rank would receive is what it has: the copies stay, the network does not."""

    def all_gather_into_tensor(whole: Tensor, own: Tensor, group=None, async_op: bool = False) -> Arrived:
        whole.view(-1, *own.shape)[:] = own
        return Arrived()

    dist.all_gather_into_tensor = all_gather_into_tensor
    dist.all_reduce = lambda *_, **__: Arrived()


def exchange_through_the_host() -> None:
    """gloo's own operations, on copies in the host's memory."""
    all_gather_into_tensor, all_reduce, all_gather = dist.all_gather_into_tensor, dist.all_reduce, dist.all_gather

    def gather_into_tensor(whole: Tensor, own: Tensor, group=None, async_op: bool = False) -> Arrived:
        on_host = torch.empty(whole.shape, dtype=whole.dtype)
        all_gather_into_tensor(on_host, own.cpu(), group=group)
        whole.copy_(on_host)
        return Arrived()

    def reduce(values: Tensor, group=None, async_op: bool = False) -> Arrived:
        on_host = values.cpu()
        all_reduce(on_host, group=group)
        values.copy_(on_host)
        return Arrived()

    def gather(parts: list[Tensor], own: Tensor, group=None) -> None:
        on_host = [torch.empty(part.shape, dtype=part.dtype) for part in parts]
        all_gather(on_host, own.cpu(), group=group)
        for part, values in zip(parts, on_host, strict=True):
            part.copy_(values)

    dist.all_gather_into_tensor, dist.all_reduce, dist.all_gather = gather_into_tensor, reduce, gather


def print_times(widths: list[int], repetitions: int) -> None:
    """Print the table for 8,192 tokens and 151,936 columns; modes and products are interleaved."""
    leave_out_exchanges()
    print("| tensor parallel | H | products, ms | " + " | ".join(f"`{mode}`" for mode in HEAD_MODES) + " |")
    for ranks in TENSOR_PARALLEL:
        for width in widths:
            torch.cuda.empty_cache()
            problem = Problem(8192, tp_group=Shard(ranks), width=width)
            unit, *times = medians_ms([bare(problem), *(ours(problem, mode=mode) for mode in HEAD_MODES)], repetitions)
            cells = " | ".join(f"{time / unit:.2f}" for time in times)
            print(f"| {ranks} | {width} | {unit:.2f} | {cells} |", flush=True)


def print_errors(widths: list[int]) -> None:
    """A line of JSON per width, of every rank."""
    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    exchange_through_the_host()
    for width in widths:
        errors = gradient_errors(Problem(1024, columns=32768, tp_group=dist.group.WORLD, width=width))
        found = {name: float(f"{error:.1e}") for name, error in errors.items()}
        print(json.dumps({"rank": dist.get_rank(), "width": width} | found), flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 2048, 4096])
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if "WORLD_SIZE" in os.environ:
        print_errors(args.widths)
    else:
        print_times(args.widths, args.repetitions)


if __name__ == "__main__":
    main()
