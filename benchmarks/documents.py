"""The cost of `--docs-per-step` compared with the static path: the same micro-batches, taken in rounds or in order.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/documents.py --documents 256

Every rank packs the same documents into the same rows either way; interleaved repetitions in one run, medians. Without
a
model: what is timed is all that the flag adds to a step (rounds, counts, one small all-gather each).
"""

import argparse
import random
import statistics
import sys
import time

import torch
import torch.distributed as dist

from megatron_pg import Sample
from megatron_pg.plan.collectives import device_of
from megatron_pg.plan.documents import DocumentAccumulator, Packing, Position, StepRule
from megatron_pg.plan.plan import plan_from_table
from megatron_pg.plan.table import PlanRule, local_table_of

POLICIES = ("exact", "at_least")


def documents(count: int, longest: int, rank: int) -> list[Sample]:
    """Documents of 64 to `longest` tokens, half of them response."""
    rng, samples = random.Random(rank), []
    for i in range(count):
        half = rng.randint(32, longest // 2)
        samples.append(
            Sample.build(
                tokens=[rng.randrange(1000) for _ in range(2 * half)],
                response_length=half,
                loss_mask=[1] * half,
                old_logprobs=[-1.0] * half,
                advantage=1.0,
                rollout_id=f"{rank}-{i}",
            )
        )
    return samples


def plan(batches: list, group: dist.ProcessGroup) -> None:
    """The exchange that the static path has too."""
    rule = PlanRule(aggregation="sample_mean")
    plan_from_table(local_table_of(batches, rule, group), rule, error=None, group=group)


def main() -> None:
    """Measure, and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=256, help="of a step, over all ranks")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of the longest document")
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    group, rank = dist.group.WORLD, dist.get_rank()
    packing = Packing(qkv_format="thd", seq_length=options.budget, micro_batch_size=1)
    mine = documents(options.documents, options.longest, rank)
    times: dict[str, list[float]] = {}
    counts: dict[str, tuple[int, int]] = {}

    def timed(name: str, function) -> None:
        dist.barrier()
        start = time.perf_counter()
        function()
        dist.barrier()
        times.setdefault(name, []).append(time.perf_counter() - start)

    def dynamic(policy: str) -> list:
        rule = StepRule(num_documents=options.documents, policy=policy, end="partial")
        position = Position(0, (0,) * dist.get_world_size())
        accumulator = DocumentAccumulator(rule=rule, packing=packing, position=position)
        batches, taken, _ = accumulator.take(iter(mine), group=group)
        counts[policy] = taken.num_documents, taken.num_microbatches
        plan(batches, group)
        return batches

    for _ in range(options.repeats):
        for policy in POLICIES:
            parts = []
            timed(f"{policy}, in rounds", lambda policy=policy, parts=parts: parts.extend(dynamic(policy)))
            same = [batch.samples for batch in parts]
            timed(f"{policy}, static", lambda same=same: plan([packing.pack(part) for part in same], group))
    if rank == 0:
        lines = [
            f"{device_of(group).type}, {dist.get_world_size()} ranks, torch {torch.__version__}, {options.repeats} "
            "repeats"
        ]
        for policy in POLICIES:
            rounds, static = (statistics.median(times[f"{policy}, {way}"]) * 1e3 for way in ("in rounds", "static"))
            number, microbatches = counts[policy]
            lines.append(
                f"{policy:<9} {number} documents in {microbatches} micro-batches: static {static:.2f} ms, in rounds "
                f"{rounds:.2f} ms, {(rounds - static) / microbatches:.3f} ms more per micro-batch"
            )
        sys.stdout.write("\n".join(lines) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
