"""A model of real size under Megatron's pretrain() on GPUs: tokens per second and memory of layouts and heads.

    python benchmarks/runs/throughput.py --out runs/throughput         # writes throughput.md there
    python benchmarks/runs/throughput.py --model experts               # 64 experts and multi-token prediction

The example with a GPT of 1.5 billion parameters (28 layers of 1536, a vocabulary of 151,936) on random rows of 4096
tokens, half of them response; and the same model on the same rows with Megatron's own cross-entropy. A step is 131,072
tokens. `--model experts` is a mixture of 64 experts of 2.2 billion parameters with one depth of multi-token prediction
and rows of 2048. Its weights follow from their names, so that losses and gradient norms of the layouts can be compared.

A run that --out holds is not repeated, so a second call continues after --minutes are over.
"""

import argparse
import importlib.util
import json
import re
import shlex
import statistics
from pathlib import Path
from typing import NamedTuple

from gpu_layouts import ROOT, folder_of, is_complete, run_in_time
from layouts import ENGINE, FP8
from records import FAILED, NOT_RUN, OUT_OF_TIME, Deadline, Machine, error_in, not_run

STEPS = 10
SECONDS = 240  # of one run, at most
LEAST = 60  # seconds that a new run should have
COMMON = shlex.split(
    f"--rollouts random --warm-up-iters 0 --train-iters {STEPS} --log-interval 1 --lr-warmup-iters 0 "
    "--exact-match-interval 1000 --micro-batch-size 2 --prompts-per-rollout 4 --task digit_sort --group-size 8 "
    "--swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention --num-query-groups 4 "
    "--position-embedding-type rope --loss-aggregation constant --loss-aggregation-divisor 4096 --pg-metrics basic"
)
MODELS = {  # tokens of a row, rows of a step, flags
    "dense": (4096, 32, "--num-layers 28 --hidden-size 1536 --ffn-hidden-size 8960 --num-attention-heads 12"),
    "experts": (
        2048,
        8,  # of Megatron's own experts, which run one after the other
        "--num-layers 18 --hidden-size 1024 --ffn-hidden-size 512 --num-attention-heads 16 --num-experts 64 "
        "--moe-ffn-hidden-size 512 --moe-router-topk 4 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.001 "
        "--mtp-num-layers 1 --pg-clip-eps-low 1 --pg-clip-eps-high 1e6",  # no bound that noise could cross
    ),
}
HEADS = {"": (), ", --fp32-lm-head": ("--fp32-lm-head",), ", --pg-fused-head forward": ("--pg-fused-head", "forward")}
EXPERT_LAYOUTS = {  # name: GPUs, environment, flags
    "1 GPU": (1, {}, ()),
    "1 GPU, micro-batches of one row": (1, {}, ("--micro-batch-size", "1")),  # how much is noise
    "EP2": (2, {"EP": "2"}, ()),
    "EP2, overlapped": (2, {"EP": "2", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}, ("--overlap-moe-expert-parallel-comm",)),
    "EP4": (4, {"EP": "4"}, ()),
    "EP8, micro-batches of one row": (8, {"EP": "8"}, ("--micro-batch-size", "1")),  # a step has 8 rows
}
LAYOUTS = {  # name: GPUs, environment
    "1 GPU": (1, {}),
    "DP2": (2, {}),
    "TP2 + SP": (2, {"TP": "2", "SP": "1"}),
    "PP2": (2, {"PP": "2"}),
    "CP2": (2, {"CP": "2"}),
    "DP4": (4, {}),
    "TP4 + SP": (4, {"TP": "4", "SP": "1"}),
    "CP2 × DP2": (4, {"CP": "2"}),
    "PP2 × DP2": (4, {"PP": "2"}),
    "DP8": (8, {}),
    "TP4 + SP × DP2": (8, {"TP": "4", "SP": "1"}),
    "CP2 × DP4": (8, {"CP": "2"}),
    "PP2 × DP4": (8, {"PP": "2"}),
}
LAYERS = {
    "engine": ENGINE,
    "fp8": FP8,
    "local": shlex.split("--no-rope-fusion --recompute-granularity selective --recompute-modules core_attn"),
}
BASELINE = ", Megatron's cross-entropy"


def runs(model: str) -> dict[str, tuple[int, dict[str, str], tuple[str, ...]]]:
    """Every layout of a model with every head. name: GPUs, environment, flags."""
    heads = {BASELINE: ("--cross-entropy",), **HEADS}
    layouts = EXPERT_LAYOUTS if model == "experts" else {name: (*sizes, ()) for name, sizes in LAYOUTS.items()}
    return {
        name + head: (processes, environment, (*own, *flags))
        for name, (processes, environment, own) in layouts.items()
        for head, flags in heads.items()
        if not ("overlapped" in name and head == BASELINE)  # a schedule plan asks more of a forward step than that has
    }


class Result(NamedTuple):
    """Of a run."""

    gpus: int
    milliseconds: float  # of a step
    gib: float  # of a rank, at most
    losses: list[float]  # of every step; none with Megatron's own loss
    norms: list[float]


def read(folder: Path, gpus: int) -> Result:
    """What a complete run has left."""
    text = "".join(p.read_text() for p in (folder / "megatron.log", folder / "output.txt") if p.exists())
    times = [float(t) for t in re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", text)]
    peak = max(int(path.read_text()) for path in folder.glob("peak.*"))
    lines = folder / "metrics.jsonl"
    records = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    losses, norms = ([record[name] for record in records] for name in ("pg_loss", "grad_norm"))
    return Result(gpus, statistics.median(times[3:]), peak / 2**30, losses, norms)


def result_of(folder: Path, processes: int, flags: list[str], gpus: int) -> Result | dict[str, str]:
    """The figures of a run, its error, or why it did not run."""
    if is_complete(folder, processes):
        return read(folder, processes)
    if reason := cannot_run(processes, flags, gpus):
        return {NOT_RUN: reason}
    if (folder / "output.txt").exists():
        return {FAILED: error_in(folder / "output.txt")}
    return {NOT_RUN: OUT_OF_TIME}


def cannot_run(processes: int, flags: list[str], gpus: int) -> str | None:
    """Why the machine cannot run a layout."""
    if processes > gpus:
        return f"needs {processes} GPUs"
    if ENGINE[1] in flags and importlib.util.find_spec("transformer_engine") is None:
        return "needs Transformer Engine, or give --layers local"
    return None


def table(results: dict[str, Result | dict[str, str]], tokens: int) -> str:
    """Markdown: speed relative to the same layout with Megatron's own loss; loss and gradient norm against our first
    run."""
    lines = [
        (
            "| layout and head | ms a step | tokens/s | tokens/s per GPU | GiB | times the speed of cross-entropy | "
            "loss differs | norm differs |"
        ),
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    measured = {name: result for name, result in results.items() if isinstance(result, Result)}
    reasons = {name: result[NOT_RUN] for name, result in results.items() if NOT_RUN in result}
    first = next((result for result in measured.values() if result.losses), None)
    for name, result in results.items():
        if name not in measured:
            lines += [] if name in reasons else [f"| {name} | failed: {result[FAILED]} | | | | | | |"]
            continue
        baseline = measured.get(re.split(r", (?=--|Meg|over)", name)[0] + BASELINE)
        share = f"{baseline.milliseconds / result.milliseconds:.3f}" if baseline else ""
        speed = tokens / (result.milliseconds / 1e3)
        lines.append(
            f"| {name} | {result.milliseconds:.0f} | {speed:,.0f} | {speed / result.gpus:,.0f} | {result.gib:.1f} | "
            f"{share} | {differences(result, first)} |"
        )
    return "\n".join([*lines, *not_run(reasons)])


def differences(result: Result, first: Result | None) -> str:
    """Largest difference of the losses, as a share of the largest, and of the gradient norms."""
    if first is None or not result.losses:
        return " | "
    size = max(map(abs, first.losses))
    loss = max(abs(a - b) for a, b in zip(result.losses, first.losses, strict=True)) / size
    norm = max(abs(a / b - 1) for a, b in zip(result.norms, first.norms, strict=True))
    return f"{loss:.1e} | {norm:.1e}"


def main() -> None:
    """Run everything, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "throughput")
    parser.add_argument("--only", default="", help="regular expression of the names; the table holds these")
    parser.add_argument(
        "--layers",
        choices=LAYERS,
        default="engine",
        help="Transformer Engine's (engine), the same in FP8 (fp8), or Megatron's own, scores computed twice (local)",
    )
    parser.add_argument("--model", choices=MODELS, default="dense")
    parser.add_argument("--gpus", type=int, help="only the layouts of that many GPUs")
    parser.add_argument("--minutes", type=float, help="no run begins or goes on after them")
    options = parser.parse_args()
    wanted = chosen(options.model, options.only, options.gpus)
    if not wanted:
        parser.error(f"no layout of --model {options.model} is selected by --only {options.only!r} and --gpus.")
    machine, deadline, out, results = Machine.here(), Deadline(options.minutes), options.out.resolve(), {}
    out.mkdir(parents=True, exist_ok=True)
    for name, (processes, environment, flags) in wanted.items():
        given = [*flags_of(options.model, options.layers), *flags]
        folder, environment = folder_of(name, out), environment | {"PROCESSES": str(processes)}
        if not (is_complete(folder, processes) or cannot_run(processes, given, machine.gpus)):
            # One at a time: runs would share the host's processors.
            run_in_time(deadline, LEAST, SECONDS, folder, "throughput_run.py", given, environment)
        results[name] = result_of(folder, processes, given, machine.gpus)
        length, rows, _ = MODELS[options.model]
        text = f"{machine.heading}, {options.model}\n\n{table(results, length * rows)}\n"
        (out / "throughput.md").write_text(text)
        written = {n: r._asdict() if isinstance(r, Result) else r for n, r in results.items()}
        (out / "throughput.json").write_text(json.dumps(machine._asdict() | {"rows": written}, indent=1))
    print(text)


def chosen(model: str, only: str, gpus: int | None) -> dict[str, tuple[int, dict[str, str], tuple[str, ...]]]:
    """The runs of a model whose name holds the expression, of any number of GPUs or of one."""
    same_weights = {"SAME_WEIGHTS": "1"} if model == "experts" else {}
    return {
        name: (processes, environment | same_weights, flags)
        for name, (processes, environment, flags) in runs(model).items()
        if re.search(only, name) and gpus in (None, processes)
    }


def flags_of(model: str, layers: str) -> list[str]:
    """The flags of every run of a model with these of LAYERS."""
    length, rows, own = MODELS[model]
    shape = f"{own} --seq-length {length} --max-position-embeddings {length} --global-batch-size {rows}"
    return [*COMMON, *shlex.split(shape), *LAYERS[layers]]


if __name__ == "__main__":
    main()
