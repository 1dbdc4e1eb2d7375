"""Steps of one tiny model in its own loop, in which a rank is lost."""

from collections.abc import Callable
from pathlib import Path

import ranks  # enables the CPU before Megatron is imported

# isort: split
import rank_model
import torch
from lost import LOST_STEP, PATIENCE, SILENCE, STEPS, Case, lose, wait_no_longer_than
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from rank_model import WIDTH, Layout

from megatron_pg import RolloutWriter
from megatron_pg.metrics.file import MetricsFile
from megatron_pg.step.forward_step import PolicyGradientStep


def seed_fault(point: str, fault: Callable[[], None], chunk: torch.nn.Module, calls: list[int]) -> None:
    """Call `fault` at a point of the second step: in the forward, in the backward, or when gradients are reduced."""

    def in_step(*_: object) -> None:
        if len(calls) == LOST_STEP:
            fault()

    if point == "forward":
        chunk.register_forward_pre_hook(in_step)
    elif point == "backward":
        next(p for p in chunk.parameters() if p.requires_grad).register_hook(in_step)
    elif point == "finalize":
        original = chunk.config.finalize_model_grads_func

        def finalize(*positional: object, **keywords: object) -> None:
            in_step()
            original(*positional, **keywords)

        chunk.config.finalize_model_grads_func = finalize


def train_open(step: PolicyGradientStep, model: torch.nn.Module, layout: Layout) -> None:
    """A step of one add for each prompt group of this rank."""
    opened = step.open_step(model, expected=8, seq_length=WIDTH, micro_batch_size=ranks.NUM_SAMPLES // 2 + 1)
    for group in ranks.groups_of(ranks.Case("", layout, "constant")):
        opened.add(ranks.pack_parts(layout, [group, []]))
    opened.close()


def train(case: Case, rank: int) -> None:
    """Train with both files of a run, written by rank 0, in the current folder."""
    layout, calls = Layout(case.layout), []
    store = f"file://{Path('store').absolute()}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=case.size, timeout=PATIENCE)
    rank_model.initialize(layout, timeout_minutes=PATIENCE.total_seconds() / 60)
    model_parallel_cuda_manual_seed(1)
    metrics, rollouts = (MetricsFile("metrics.jsonl"), RolloutWriter("rollouts.jsonl")) if rank == 0 else (None, None)

    def record(report) -> None:
        if metrics is not None:
            metrics.write({"iteration": len(calls), **report.metrics})

    step = PolicyGradientStep(ranks.settings("constant"), record)
    (chunk,) = rank_model.build(layout, per_token=False)
    if chunk.post_process:
        step.attach(chunk)
    (wrapped,) = rank_model.wrap(layout, [chunk])
    if rank == case.victim:
        seed_fault(case.point.removeprefix("open"), lambda: lose(case.kind), chunk, calls)
    for number in range(1, STEPS + 1):
        calls.append(number)
        if number == LOST_STEP and case.kind == "stop":
            wait_no_longer_than(SILENCE)
        wrapped.zero_grad_buffer()
        if rollouts is not None:
            rollouts.write([s for s in ranks.samples() if s.num_trained])
        if number == LOST_STEP and case.point == "data" and rank == case.victim:
            lose(case.kind)
        if case.point.startswith("open"):
            train_open(step, wrapped, layout)
            continue
        case_parts = ranks.parts_of(ranks.Case(case.name, layout, "constant"))
        step.forward_backward(
            get_forward_backward_func(),
            forward_step_func=step.forward_step,
            data_iterator=iter(ranks.pack_parts(layout, case_parts)),
            model=wrapped,
            num_microbatches=len(case_parts),
            seq_length=WIDTH,
            micro_batch_size=ranks.NUM_SAMPLES // 2 + 1,
        )
