"""The example under every layout that the GPUs of this machine allow: do the first steps agree?

    python benchmarks/runs/gpu_layouts.py --out runs/layouts            # writes layouts.md and layouts.json there
    python benchmarks/runs/gpu_layouts.py --out runs/layouts --only CP  # those whose name holds the expression

One GPU samples rollouts and trains on them; every layout then trains on the same rollouts from the same weights,
through examples/launch_gpu.sh and Megatron's pretrain(). A layout of a mixture of experts is compared with one GPU of
the same model, steps of documents over two data-parallel ranks with each other: how many documents a rank gives to a
step depends on the number of ranks. Several runs share a GPU, so their times mean nothing: for those, throughput.py.
"""

import argparse
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

import torch

ROOT = Path(__file__).parents[2]
EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "0"),
    *("--moe-token-dispatcher-type", "alltoall", "--disable-bias-linear", "--no-bias-gelu-fusion"),
)
# rope, because Megatron has a second copy of learned positions under pipeline parallelism
PREDICTION = ("--mtp-num-layers", "1", "--position-embedding-type", "rope", "--no-rope-fusion")
OVERLAPPED = (*EXPERTS, "--overlap-moe-expert-parallel-comm")
HYBRID = ("--hybrid-layer-pattern", "*-*-*-*-")
HYBRID_STAGES = ("--hybrid-layer-pattern", "*-*-|*-*-")
SHARDED = (
    "--use-megatron-fsdp",
    "--data-parallel-sharding-strategy",
    "optim_grads_params",
    "--ckpt-format",
    "fsdp_dtensor",
)
TERMS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
DOCUMENTS = ("--docs-per-step", "256")
ENGINE = ("--transformer-impl", "transformer_engine")
# name: processes, environment, further flags, what it is compared with
LAYOUTS = {
    "1 GPU": (1, {}, (), "1 GPU"),
    "1 GPU, --fp32-lm-head": (1, {}, ("--fp32-lm-head",), "1 GPU"),
    "1 GPU, --pg-fused-head": (1, {}, ("--pg-fused-head",), "1 GPU"),
    "DP2": (2, {}, (), "1 GPU"),
    "DP2, overlapped": (2, {}, ("--overlap-grad-reduce", "--overlap-param-gather"), "1 GPU"),
    "TP2": (2, {"TP": "2"}, (), "1 GPU"),
    "TP2 + SP": (2, {"TP": "2", "SP": "1"}, (), "1 GPU"),
    "TP2 + SP, --pg-fused-head": (2, {"TP": "2", "SP": "1"}, ("--pg-fused-head",), "1 GPU"),
    "PP2": (2, {"PP": "2"}, (), "1 GPU"),
    "PP2, two virtual stages": (2, {"PP": "2"}, ("--num-layers-per-virtual-pipeline-stage", "1"), "1 GPU"),
    "CP2": (2, {"CP": "2"}, (), "1 GPU"),
    "DP2, gspo": (2, {}, ("--pg-objective", "gspo"), "1 GPU, gspo"),
    "1 GPU, gspo": (1, {}, ("--pg-objective", "gspo"), "1 GPU, gspo"),
    "CP2, gspo": (2, {"CP": "2"}, ("--pg-objective", "gspo"), "1 GPU, gspo"),
    "1 GPU, 4 experts": (1, {}, EXPERTS, "1 GPU, 4 experts"),
    "EP2, 4 experts": (2, {"EP": "2"}, EXPERTS, "1 GPU, 4 experts"),
    "EP2, 4 experts, overlapped": (2, {"EP": "2", **TERMS}, OVERLAPPED, "EP2, 4 experts"),
    "1 GPU, prediction": (1, {}, PREDICTION, "1 GPU, prediction"),
    "1 GPU, prediction, --fp32-lm-head": (1, {}, (*PREDICTION, "--fp32-lm-head"), "1 GPU, prediction"),
    "1 GPU, prediction, --pg-fused-head": (1, {}, (*PREDICTION, "--pg-fused-head"), "1 GPU, prediction"),
    "DP2, prediction": (2, {}, PREDICTION, "1 GPU, prediction"),
    "TP2 + SP, prediction, --pg-fused-head": (
        2,
        {"TP": "2", "SP": "1"},
        (*PREDICTION, "--pg-fused-head"),
        "1 GPU, prediction",
    ),
    "PP2, prediction": (2, {"PP": "2"}, PREDICTION, "1 GPU, prediction"),
    "PP2, prediction, --pg-fused-head": (2, {"PP": "2"}, (*PREDICTION, "--pg-fused-head"), "1 GPU, prediction"),
    "CP2, prediction": (2, {"CP": "2"}, PREDICTION, "1 GPU, prediction"),
    "EP2, 4 experts, overlapped, prediction": (
        2,
        {"EP": "2", **TERMS},
        (*OVERLAPPED, *PREDICTION),
        "1 GPU, 4 experts, prediction",
    ),
    "1 GPU, 4 experts, prediction": (1, {}, (*EXPERTS, *PREDICTION), "1 GPU, 4 experts, prediction"),
    "DP2, Megatron-FSDP": (2, TERMS, SHARDED, "1 GPU"),
    "DP2, Megatron-FSDP, --fp32-lm-head": (2, TERMS, (*SHARDED, "--fp32-lm-head"), "1 GPU"),
    "DP2, Megatron-FSDP, --pg-fused-head": (2, TERMS, (*SHARDED, "--pg-fused-head"), "1 GPU"),
    "1 GPU, HybridModel": (1, {}, HYBRID, "1 GPU"),
    "DP2, HybridModel": (2, {}, HYBRID, "1 GPU"),
    "TP2 + SP, HybridModel, --pg-fused-head": (2, {"TP": "2", "SP": "1"}, (*HYBRID, "--pg-fused-head"), "1 GPU"),
    "PP2, HybridModel": (2, {"PP": "2"}, HYBRID_STAGES, "1 GPU"),
    "1 GPU, --docs-per-step": (1, {}, DOCUMENTS, "1 GPU"),
    "DP2, --docs-per-step": (2, {}, DOCUMENTS, "DP2, --docs-per-step"),
    "CP2, --docs-per-step": (2, {"CP": "2"}, DOCUMENTS, "1 GPU"),
    "1 GPU, Transformer Engine": (1, {}, ENGINE, "1 GPU"),
    "TP2 + SP, Transformer Engine": (2, {"TP": "2", "SP": "1"}, ENGINE, "1 GPU"),
    "PP2, Transformer Engine": (2, {"PP": "2"}, ENGINE, "1 GPU"),
    "CP2, Transformer Engine": (2, {"CP": "2"}, ENGINE, "1 GPU"),
    "DP2, --docs-per-step, Transformer Engine": (2, {}, DOCUMENTS + ENGINE, "DP2, --docs-per-step"),
    "CP2, --docs-per-step, Transformer Engine": (2, {"CP": "2"}, DOCUMENTS + ENGINE, "1 GPU"),
    "EP2, 4 experts, Transformer Engine": (2, {"EP": "2"}, EXPERTS + ENGINE, "1 GPU, 4 experts"),
    "TP2 × DP2": (4, {"TP": "2"}, (), "1 GPU"),
    "PP2 × DP2": (4, {"PP": "2"}, (), "1 GPU"),
    "CP2 × TP2": (4, {"CP": "2", "TP": "2"}, (), "1 GPU"),
    "TP4 + SP": (4, {"TP": "4", "SP": "1"}, (), "1 GPU"),
    "TP2 + SP × PP2, --pg-fused-head": (4, {"TP": "2", "SP": "1", "PP": "2"}, ("--pg-fused-head",), "1 GPU"),
    "EP2 × DP2, 4 experts": (4, {"EP": "2"}, EXPERTS, "1 GPU, 4 experts"),
    "CP2 × DP2, --docs-per-step": (4, {"CP": "2"}, DOCUMENTS, "DP2, --docs-per-step"),
}
STEPS = 4
SECONDS = 120  # of one run
SHARE = 4  # runs on a GPU at a time
FLAGS = shlex.split(
    f"--loss-aggregation constant --loss-aggregation-divisor 6 --warm-up-iters 0 --train-iters {STEPS} --log-interval "
    "1 --lr-warmup-iters 0 --lr 1e-4 --exact-match-interval 1000 --exact-match-prompts 64 --prompts-per-rollout 32 "
    "--group-size 8 --task digit_sort --vocab-size 12 --hidden-size 256 --num-attention-heads 8 --seq-length 12 "
    "--max-position-embeddings 12 --micro-batch-size 32 --global-batch-size 256"
)


def folder_of(name: str, out: Path) -> Path:
    """Where a layout's run is kept."""
    return out / re.sub(r"[^a-z0-9]+", "-", name.lower())


def launch(name: str, out: Path, rollouts: Path | None, gpus: str | None = None) -> Path:
    """Run a layout, on these GPUs if they are given; its folder."""
    processes, environment, flags, _ = LAYOUTS[name]
    folder = folder_of(name, out)
    given = [*FLAGS, *flags, *(["--rollouts", str(rollouts)] if rollouts else [])]
    run(folder, "layout_run.py", given, environment | {"PROCESSES": str(processes)}, gpus)
    return folder


def run(folder: Path, script: str, flags: list[str], environment: dict[str, str], gpus: str | None = None) -> None:
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
    command = ["timeout", str(SECONDS), "bash", str(ROOT / "examples" / "launch_gpu.sh"), *flags]
    output = folder / "output.txt"
    with output.open("w") as file:  # no pipe: a process that survives would keep it open
        code = subprocess.run(command, env=environment, stdout=file, stderr=file).returncode
    if code:
        lines = re.findall(r"^.*\w+Error: .*$", output.read_text(), re.MULTILINE)
        print(f"{folder.name}: exit code {code}: {lines[0] if lines else 'see output.txt'}", flush=True)


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


def read(folder: Path) -> dict | None:
    """Losses and gradient norms of the steps, peak memory; None if the run failed."""
    if not (folder / "peak.0").exists():
        return None
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "loss": [r["pg_loss"] for r in records],
        "grad_norm": [r["grad_norm"] for r in records],
        "gib": max(int(path.read_text()) for path in folder.glob("peak.*")) / 2**30,
    }


def table(results: dict[str, dict | None]) -> str:
    """Markdown: every layout and the layout that it is compared with."""
    lines = [
        "| layout | pg_loss of step 1 | differs, 4 steps | grad_norm of step 1 | differs, 4 steps | GiB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, result in results.items():
        reference = results.get(LAYOUTS[name][3])
        if result is None or reference is None:
            lines.append(f"| {name} | failed | | | | |")
            continue
        size = max(map(abs, reference["loss"]))
        loss = max(abs(a - b) for a, b in zip(result["loss"], reference["loss"], strict=True)) / size
        norm = max(abs(a / b - 1) for a, b in zip(result["grad_norm"], reference["grad_norm"], strict=True))
        lines.append(
            f"| {name} | {result['loss'][0]:.6f} | {loss:.1e} | {result['grad_norm'][0]:.5f} | {norm:.1e} | "
            f"{result['gib']:.2f} |"
        )
    return "\n".join(lines)


def write(out: Path, names: list[str]) -> None:
    """The table of these layouts, as layouts.md, and its numbers as layouts.json."""
    results = {name: read(folder_of(name, out)) for name in names}
    text = (
        f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}, torch {torch.__version__}\n\n{table(results)}\n"
    )
    (out / "layouts.md").write_text(text)
    (out / "layouts.json").write_text(json.dumps(results, indent=1))
    print(text, flush=True)


def main() -> None:
    """Sample once, train under every layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "layouts")
    parser.add_argument("--only", default="", help="regular expression of the names; the table holds these")
    options = parser.parse_args()
    out, gpus = options.out.resolve(), torch.cuda.device_count()
    rollouts = folder_of("1 GPU", out / "sampled") / "rollouts.jsonl"
    if not (rollouts.parent / "peak.0").exists():
        launch("1 GPU", out / "sampled", None)
    wanted = {n for name in LAYOUTS if re.search(options.only, name) for n in (name, LAYOUTS[name][3])}
    done = []
    for size in (size for size in (1, 2, 4) if size <= gpus):
        names = [name for name in LAYOUTS if name in wanted and LAYOUTS[name][0] == size]
        side_by_side([partial(launch, name, out, rollouts) for name in names], gpus, size, SHARE)
        done += names
        write(out, [name for name in LAYOUTS if name in done])


if __name__ == "__main__":
    main()
