"""Train while rollouts still arrive: an asynchronous producer, a closed and an open step, and a selection bias.

    torchrun --standalone --nproc-per-node 2 examples/late_rollouts.py --loss-aggregation sample_mean

Every rank gets its own prompt groups, each when the last of its rollouts is done: after a time per token and a random
delay. The closed step waits for all of them; the open step trains each micro-batch as soon as it is full. Both have the
same gradient. The table at the end closes steps after the first arrivals instead: these are the short rollouts.
docs/own_loop.md explains the calls.
"""

import queue
import random
import statistics
import threading
import time
from collections.abc import Iterator

import own_loop  # enables the CPU before Megatron is imported where there is no GPU
import torch
from megatron.core import parallel_state as mpu
from torch.distributed.elastic.multiprocessing.errors import record

from megatron_pg import LossSettings, PackedBatch, PolicyGradientStep, Sample, StepReport, pack

GROUPS, GROUP_SIZE = 48, 4  # of a rank; rollouts of a prompt
SECONDS_PER_TOKEN, MEAN_DELAY = 0.6, 1.0
Group = list[Sample]


def length_of(rng: random.Random) -> int:
    """Response tokens of a rollout: most are short."""
    return min(1 + int(rng.expovariate(1 / 3)), own_loop.SEQUENCE_LENGTH - 2)


def seconds_of(length: int, rng: random.Random) -> float:
    """When a rollout is done."""
    return SECONDS_PER_TOKEN * length + rng.expovariate(1 / MEAN_DELAY)


def groups_of(rank: int) -> list[tuple[float, Group]]:
    """This rank's prompt groups in the order of their arrival, each with its second."""
    rng, found = random.Random(rank), []
    for prompt in range(GROUPS):
        lengths = [length_of(rng) for _ in range(GROUP_SIZE)]
        samples = [
            Sample.build(
                tokens=[rng.randrange(own_loop.VOCABULARY) for _ in range(2 + length)],
                response_length=length,
                loss_mask=[1] * length,
                old_logprobs=[-2.5] * length,
                advantage=rng.choice([-1.0, 1.0]),
                prompt_id=f"{rank}-{prompt}",
                rollout_id=f"{rank}-{prompt}-{number}",
            )
            for number, length in enumerate(lengths)
        ]
        found.append((max(seconds_of(length, rng) for length in lengths), samples))
    return sorted(found, key=lambda arrival: arrival[0])


def arriving(groups: list[tuple[float, Group]]) -> Iterator[list[Group]]:
    """What has arrived since the last time, and at least one group: the consumer's side of a queue."""
    arrived: queue.Queue[Group] = queue.Queue()

    def produce() -> None:
        begun = time.monotonic()
        for second, group in groups:
            time.sleep(max(second - (time.monotonic() - begun), 0))
            arrived.put(group)

    threading.Thread(target=produce, daemon=True).start()
    missing = len(groups)
    while missing:
        found = [arrived.get()]
        while not arrived.empty():
            found.append(arrived.get())
        missing -= len(found)
        yield found


def microbatches(groups: list[Group], rows: int) -> list[PackedBatch]:
    """Micro-batches of `rows` samples."""
    samples = [sample for group in groups for sample in group]
    shape = {"qkv_format": "bshd", "rows": rows, "max_seq_len": own_loop.SEQUENCE_LENGTH}
    return [pack(samples[i : i + rows], **shape) for i in range(0, len(samples), rows)]


def closed_step(step: PolicyGradientStep, model: torch.nn.Module, rank: int, rows: int) -> None:
    """Wait for all rollouts, then train them."""
    batches = microbatches([group for groups in arriving(groups_of(rank)) for group in groups], rows)
    model.zero_grad_buffer()
    step.forward_backward(
        own_loop.get_forward_backward_func(),
        forward_step_func=step.forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=own_loop.SEQUENCE_LENGTH,
        micro_batch_size=rows,
    )


def open_step(step: PolicyGradientStep, model: torch.nn.Module, rank: int, rows: int) -> None:
    """Train what has arrived, as soon as it has."""
    expected = GROUPS * GROUP_SIZE * mpu.get_data_parallel_world_size()
    opened = step.open_step(model, expected=expected, seq_length=own_loop.SEQUENCE_LENGTH, micro_batch_size=rows)
    for groups in arriving(groups_of(rank)):
        opened.add(microbatches(groups, rows))
    opened.close()


def first_arrivals(fraction: float, rng: random.Random) -> tuple[float, float]:
    """Mean length of all rollouts of a large step, and of the fraction that arrives first."""
    lengths = [length_of(rng) for _ in range(20_000)]
    order = sorted(lengths, key=lambda length: seconds_of(length, rng))
    return statistics.mean(lengths), statistics.mean(order[: int(fraction * len(order))])


@record
def main() -> None:
    """Run both steps on the same rollouts."""
    args = own_loop.parse_arguments()
    own_loop.start_processes(args.backend)
    reports: list[StepReport] = []
    step = PolicyGradientStep(LossSettings.from_args(args), on_report=reports.append)
    model, rank, gradients = own_loop.build_model(step, args), mpu.get_data_parallel_rank(), []
    closed_step(step, model, rank, args.micro_batch_size)  # the first step also starts threads and communication
    for name, run in {"closed": closed_step, "open": open_step}.items():
        torch.distributed.barrier()
        begun = time.monotonic()
        run(step, model, rank, args.micro_batch_size)
        seconds = time.monotonic() - begun
        gradients.append(torch.cat([parameter.main_grad.flatten() for parameter in model.parameters()]))
        if rank == 0:
            last, loss = groups_of(0)[-1][0], reports[-1].metrics["pg_loss"]
            print(f"{name}: {seconds:.2f} s, last arrival at {last:.2f} s, pg_loss {loss:+.7f}")
    if rank == 0:
        difference = (gradients[1] - gradients[0]).abs().max() / gradients[0].abs().max()
        print(f"largest difference of the gradients: {difference:.1e} of the largest entry")
        for fraction in (0.5, 0.75, 0.9):
            every, first = first_arrivals(fraction, random.Random(0))
            print(f"the first {fraction:.0%} have {first:.2f} tokens on average, all have {every:.2f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
