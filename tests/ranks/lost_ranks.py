"""Ranks that are killed, stopped or fail in the middle of a step: what the others see, and what lies on the disk.

    python tests/ranks/lost_ranks.py OUT_DIR WRITERS case [case …]

A case is `layout-signal-point-victim`, such as `dp2-kill-forward-1`. This process imports everything once and forks two
ranks per case, because a lost rank cannot be used again; cases wait for timeouts beside each other. WRITERS processes
are killed while they write files. Nothing but a stopped rank is waited for by the clock: its peer cannot see it otherwise.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import rank_model
import ranks  # enables the CPU before Megatron is imported
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from rank_model import WIDTH, Layout
from torch.distributed import distributed_c10d

from megatron_pg import RolloutWriter
from megatron_pg.metrics.file import MetricsFile
from megatron_pg.step.forward_step import PolicyGradientStep

SILENCE = timedelta(seconds=8)  # that a stopped rank is waited for: --distributed-timeout-minutes of a real job
PATIENCE = timedelta(minutes=15)  # for every other wait, and before the fault: a loaded machine is slow
LOST_STEP, STEPS = 2, 4  # the fault is in the second step
BESIDE = 4  # cases at a time


def lose(kind: str) -> None:
    """End, freeze or fail this rank, and note when."""
    Path("lost_at").write_text(repr(time.time()), encoding="utf-8")
    if kind == "raise":
        raise ArithmeticError("this rank fails on its own")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])


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


def train(case: str, rank: int) -> None:
    """Steps of one tiny model with both files of a run, written by rank 0, in the current folder."""
    layout_name, kind, point, victim = case.split("-")
    layout, calls = Layout(layout_name), []
    store = f"file://{Path('store').absolute()}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=PATIENCE)
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
    if rank == int(victim):
        seed_fault(point, lambda: lose(kind), chunk, calls)
    for number in range(1, STEPS + 1):
        calls.append(number)
        if number == LOST_STEP and kind == "stop":
            wait_no_longer_than(SILENCE)
        wrapped.zero_grad_buffer()
        if rollouts is not None:
            rollouts.write([s for s in ranks.samples() if s.num_trained])
        if number == LOST_STEP and point == "data" and rank == int(victim):
            lose(kind)
        case_parts = ranks.parts_of(ranks.Case(case, layout, "constant"))
        step.forward_backward(
            get_forward_backward_func(),
            forward_step_func=step.forward_step,
            data_iterator=iter(ranks.pack_parts(layout, case_parts)),
            model=wrapped,
            num_microbatches=len(case_parts),
            seq_length=WIDTH,
            micro_batch_size=len(ranks.samples()) // 2 + 1,
        )


def wait_no_longer_than(silence: timedelta) -> None:
    """In every group. A peer that is only slow is then taken for a stopped one, which is the same error.

    Between stages a group's first timeout holds for ever, so that it is given to every wait, and is longer: the other
    collectives end by their group's.
    """
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(silence, group)
    wait = distributed_c10d.Work.wait
    distributed_c10d.Work.wait = lambda work: wait(work, 1.5 * silence)


def run_child(case: str, rank: int, folder: Path) -> None:
    """One rank: trains, leaves its error, and exits as a script does."""
    os.chdir(folder)
    try:
        train(case, rank)
    except Exception as error:
        Path(f"{rank}.error").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        raise SystemExit(1) from None
    raise SystemExit(0)


def run_all(cases: list[str], out: Path) -> None:
    """Run the cases, a few beside each other; result.json of each says how and when its ranks ended."""
    waiting, running, ended = list(cases), {}, {case: {} for case in cases}
    while waiting or running:
        while waiting and len(running) < 2 * BESIDE:
            case = waiting.pop(0)
            (out / case).mkdir()
            for rank in (0, 1):
                pid = os.fork()
                if pid == 0:
                    run_child(case, rank, out / case)
                running[pid] = (case, rank, time.time())
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            case, rank, _ = running.pop(pid)
            ended[case][rank] = {"status": os.waitstatus_to_exitcode(status), "time": time.time()}
        else:
            time.sleep(0.02)
        end_the_rest(running, ended)
    for case in cases:
        save_result(out / case, ended[case])


def end_the_rest(running: dict, ended: dict) -> None:
    """Kill a victim whose peer has ended, and both where nothing happens."""
    for pid, (case, rank, started) in running.items():
        is_victim = rank == int(case.split("-")[3])
        if (is_victim and 1 - rank in ended[case]) or time.time() - started > 2 * PATIENCE.total_seconds():
            os.kill(pid, signal.SIGKILL)


def save_result(folder: Path, ended: dict[int, dict]) -> None:
    survivor = 1 - int(folder.name.split("-")[3])
    error, lost_at = folder / f"{survivor}.error", folder / "lost_at"
    lost = float(lost_at.read_text(encoding="utf-8")) if lost_at.exists() else ended[survivor]["time"]
    result = {
        "exit code": ended[survivor]["status"],
        "seconds": ended[survivor]["time"] - lost,
        "message": error.read_text(encoding="utf-8") if error.exists() else "",
    }
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def kill_writers(count: int, out: Path) -> None:
    """Processes that write the two files of a run as fast as they can, killed when a random number of bytes is there."""
    rng, samples = random.Random(2), [s for s in ranks.samples() if s.num_trained]
    for number in range(count):
        folder = out / f"writer-{number}"
        folder.mkdir()
        pid = os.fork()
        if pid == 0:
            metrics, rollouts = MetricsFile(folder / "metrics.jsonl"), RolloutWriter(folder / "rollouts.jsonl")
            for iteration in itertools.count(1):
                metrics.write({"iteration": iteration, **{f"metric_{k}": 1.0 / iteration for k in range(200)}})
                rollouts.write(samples)
        wait_for_bytes(folder / "rollouts.jsonl", rng.randrange(200_000), pid)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def wait_for_bytes(path: Path, count: int, writer: int) -> None:
    """Until the file has a whole line of samples and at least so many bytes."""
    while not path.exists() or path.stat().st_size < count or path.read_bytes().count(b"\n") < 2:
        if os.waitpid(writer, os.WNOHANG)[0]:
            raise RuntimeError(f"the writer of {path} has failed")
        time.sleep(0.001)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1]).absolute()
    kill_writers(int(sys.argv[2]), folder)
    run_all(sys.argv[3:], folder)
