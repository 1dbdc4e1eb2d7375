"""The example under every layout that the GPUs of this machine allow: do the first steps agree?

    python benchmarks/runs/gpu_layouts.py --out runs/layouts            # writes layouts.md and layouts.json there
    python benchmarks/runs/gpu_layouts.py --out runs/layouts --only CP  # those whose name holds the expression

One GPU samples rollouts and trains on them; every layout then trains on the same rollouts from the same weights,
through examples/launch_gpu.sh and Megatron's pretrain(). A layout of a mixture of experts is compared with one GPU of
the same model, steps of documents over two data-parallel ranks with each other: how many documents a rank gives to a
step depends on the number of ranks. An open step is compared with the closed one, a critic with itself on one GPU.
Several runs share a GPU, so their times mean nothing: for those, throughput.py.

A run that --out holds is not repeated, so a second call continues after --minutes are over. Remove its folder to repeat
it. Reference and teacher are random (layout_samples.py): only the difference between layouts has a meaning.
"""

import argparse
import importlib.util
import json
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from layout_samples import write_scored
from layouts import ENGINE, LAYOUTS, NOT_COVERED, SAMPLED, Layout
from records import FAILED, NOT_RUN, OUT_OF_TIME, Deadline, Machine, Row, error_in, is_measured, not_run

ROOT = Path(__file__).parents[2]
STEPS = 4
SECONDS = 120  # of one run, at most
LEAST = 40  # seconds that a new run should have
SHARE = 4  # runs on a GPU at a time
SIZES = (1, 2, 4, 8)
FLAGS = shlex.split(
    f"--loss-aggregation constant --loss-aggregation-divisor 6 --warm-up-iters 0 --train-iters {STEPS} --log-interval "
    "1 --lr-warmup-iters 0 --lr 1e-4 --exact-match-interval 1000 --exact-match-prompts 64 --prompts-per-rollout 32 "
    "--group-size 8 --task digit_sort --vocab-size 12 --hidden-size 256 --num-attention-heads 8 --seq-length 12 "
    "--max-position-embeddings 12 --micro-batch-size 32 --global-batch-size 256"
)


def folder_of(name: str, out: Path) -> Path:
    """Where a layout's run is kept."""
    return out / re.sub(r"[^a-z0-9]+", "-", name.lower())


def is_complete(folder: Path, processes: int) -> bool:
    """Whether the folder holds a run that every rank has ended."""
    return all((folder / f"peak.{rank}").exists() for rank in range(processes))


def sample(out: Path, deadline: Deadline) -> dict[str, Path]:
    """Sample the rollout files on one GPU, those that are missing; the paths of those that exist."""
    names = [name for name in SAMPLED if not is_complete(out / "sampled" / name, 1)]
    jobs = [partial(sample_one, name, out, deadline) for name in names]
    side_by_side(jobs, 1, 1, len(SAMPLED))
    files = {name: out / "sampled" / name / "rollouts.jsonl" for name in SAMPLED}
    found = {name: path for name, path in files.items() if is_complete(path.parent, 1)}
    if "plain" in found:
        found["scored"] = write_scored(found["plain"], out / "sampled" / "scored.jsonl")
    return found


def sample_one(name: str, out: Path, deadline: Deadline, gpus: str) -> None:
    """Sample one of the rollout files."""
    with_flags = ("layout_run.py", [*FLAGS, *SAMPLED[name]], {"PROCESSES": "1"}, gpus)
    run_in_time(deadline, LEAST, SECONDS, out / "sampled" / name, *with_flags)


def launch(name: str, out: Path, rollouts: dict[str, Path], deadline: Deadline, gpus: str) -> None:
    """Run a layout on these GPUs, unless it has run, its rollouts are missing or the time is over."""
    layout, folder = LAYOUTS[name], folder_of(name, out)
    if is_complete(folder, layout.processes) or layout.rollouts not in rollouts:
        return
    given = [*FLAGS, *layout.flags, "--rollouts", str(rollouts[layout.rollouts])]
    environment = layout.environment | {"PROCESSES": str(layout.processes)}
    run_in_time(deadline, LEAST, SECONDS, folder, "layout_run.py", given, environment, gpus)


def run_in_time(
    deadline: Deadline,
    least: float,
    longest: float,
    folder: Path,
    script: str,
    flags: list[str],
    environment: dict[str, str],
    gpus: str | None = None,
) -> None:
    """`run` with the seconds that are left, `longest` at most; nothing if they are fewer than `least`."""
    if deadline.left() < least:
        return
    run(folder, script, flags, environment, gpus, min(longest, deadline.left()))
    if deadline.left() < 1 and not is_complete(folder, int(environment["PROCESSES"])):
        shutil.rmtree(folder)  # the deadline ended it, and not an error


def run(
    folder: Path, script: str, flags: list[str], environment: dict[str, str], gpus: str | None, seconds: float
) -> None:
    """One run of examples/launch_gpu.sh with a script of this folder; what it prints goes to output.txt in its own."""
    shutil.rmtree(folder, ignore_errors=True)  # no output of an earlier run is mistaken for this one's
    environment = os.environ | environment
    environment |= {
        "CACHED": "",
        "RUN_DIR": str(folder),
        "SCRIPT": str(Path(__file__).with_name(script)),
        "PYTHON": sys.executable,
    }
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    folder.mkdir(parents=True, exist_ok=True)
    command = ["timeout", f"{seconds:.0f}", "bash", str(ROOT / "examples" / "launch_gpu.sh"), *flags]
    output = folder / "output.txt"
    with output.open("w") as file:  # no pipe: a process that survives would keep it open
        code = subprocess.run(command, env=environment, stdout=file, stderr=file).returncode
        if code == 124:  # of timeout
            file.write(f"\nTimeoutError: ended after {seconds:.0f} s\n")
    if code:
        print(f"{folder.name}: exit code {code}: {error_in(output)}", flush=True)


def side_by_side(jobs: list[Callable[[str], object]], gpus: int, size: int, share: int) -> None:
    """Call every job with the GPUs that it may use, `size` of them, and `share` jobs on a GPU at a time."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    places = [",".join(names[first : first + size]) for first in range(0, gpus - size + 1, size)] * share
    free = queue.Queue()
    for place in places:
        free.put(place)

    def run_on_free_gpus(job: Callable[[str], object]) -> None:
        mine = free.get()
        try:
            job(mine)
        finally:
            free.put(mine)

    with ThreadPoolExecutor(len(places)) as pool:
        list(pool.map(run_on_free_gpus, jobs))


def read(folder: Path) -> Row:
    """Losses and gradient norms of the steps, and peak memory."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "loss": [r["value_loss" if "value_loss" in r else "pg_loss"] for r in records],
        "grad_norm": [r["grad_norm"] for r in records],
        "gib": max(int(path.read_text()) for path in folder.glob("peak.*")) / 2**30,
    }


def row_of(name: str, out: Path, gpus: int) -> Row:
    """The figures of a layout, its error, or why it did not run."""
    layout, folder = LAYOUTS[name], folder_of(name, out)
    if is_complete(folder, layout.processes):
        return read(folder)
    if reason := cannot_run(layout, gpus):
        return {NOT_RUN: reason}
    if (folder / "output.txt").exists():
        return {FAILED: error_in(folder / "output.txt")}
    sampled = out / "sampled" / ("plain" if layout.rollouts == "scored" else layout.rollouts)
    if (sampled / "output.txt").exists() and not is_complete(sampled, 1):
        return {FAILED: f"no rollouts: {error_in(sampled / 'output.txt')}"}
    return {NOT_RUN: OUT_OF_TIME}


def cannot_run(layout: Layout, gpus: int) -> str | None:
    """Why the machine cannot run a layout."""
    if layout.processes > gpus:
        return f"needs {layout.processes} GPUs"
    if ENGINE[1] in layout.flags and importlib.util.find_spec("transformer_engine") is None:
        return "needs Transformer Engine"
    return None


def table(rows: dict[str, Row]) -> str:
    """Markdown: every layout compared with its reference, then what did not run."""
    lines = [
        "| layout | pg_loss of step 1 | differs, 4 steps | grad_norm of step 1 | differs, 4 steps | GiB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    reasons = {name: row[NOT_RUN] for name, row in rows.items() if NOT_RUN in row}
    for name, row in rows.items():
        if name in reasons:
            continue
        if FAILED in row:
            lines.append(f"| {name} | failed: {row[FAILED]} | | | | |")
            continue
        loss, norm = differences(row, rows.get(LAYOUTS[name].reference))
        lines.append(
            f"| {name} | {row['loss'][0]:.6f} | {loss} | {row['grad_norm'][0]:.5f} | {norm} | {row['gib']:.2f} |"
        )
    return "\n".join([*lines, *not_run(reasons | NOT_COVERED)])


def differences(row: Row, reference: Row | None) -> tuple[str, str]:
    """Largest difference of the losses, as a share of the largest, and of the gradient norms."""
    if not is_measured(reference):
        return "no reference", "no reference"
    size = max(map(abs, reference["loss"]))
    loss = max(abs(a - b) for a, b in zip(row["loss"], reference["loss"], strict=True)) / size
    norm = max(abs(a / b - 1) for a, b in zip(row["grad_norm"], reference["grad_norm"], strict=True))
    return f"{loss:.1e}", f"{norm:.1e}"


def write(out: Path, names: list[str], machine: Machine) -> None:
    """The table of these layouts, as layouts.md, and its numbers as layouts.json."""
    rows = {name: row_of(name, out, machine.gpus) for name in names}
    text = f"{machine.heading}\n\n{table(rows)}\n"
    (out / "layouts.md").write_text(text)
    (out / "layouts.json").write_text(json.dumps(machine._asdict() | {"rows": rows}, indent=1))


def main() -> None:
    """Sample once, train under every layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "layouts")
    parser.add_argument("--only", default="", help="regular expression of the names; the table holds these")
    parser.add_argument("--minutes", type=float, help="no run begins or goes on after them")
    parser.add_argument("--share", type=int, default=SHARE, help="runs on a GPU at a time")
    options = parser.parse_args()
    out, machine, deadline = options.out.resolve(), Machine.here(), Deadline(options.minutes)
    out.mkdir(parents=True, exist_ok=True)
    rollouts = sample(out, deadline)
    wanted = {n for name in LAYOUTS if re.search(options.only, name) for n in (name, LAYOUTS[name].reference)}
    for size in (size for size in SIZES if size <= machine.gpus):
        names = [n for n in LAYOUTS if n in wanted and LAYOUTS[n].processes == size]
        names = [name for name in names if not cannot_run(LAYOUTS[name], machine.gpus)]
        jobs = [partial(launch, name, out, rollouts, deadline) for name in names]
        side_by_side(jobs, machine.gpus, size, options.share)
        write(out, [name for name in LAYOUTS if name in wanted], machine)  # also when a later size is interrupted
    print((out / "layouts.md").read_text(), flush=True)


if __name__ == "__main__":
    main()
