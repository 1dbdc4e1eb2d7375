"""A model of real size under Megatron's pretrain() on GPUs: tokens per second and memory of layouts and heads.

    python benchmarks/runs/throughput.py --out runs/throughput         # writes throughput.md there
    python benchmarks/runs/throughput.py --model experts               # 64 experts and multi-token prediction

The example with a GPT of 1.5 billion parameters (28 layers of 1536, a vocabulary of 151,936) on random rows of 4096
tokens, half of them response; and the same model on the same rows with Megatron's own cross-entropy. A step is 131,072
tokens. `--model experts` is a mixture of 64 experts of 2.2 billion parameters with one depth of multi-token prediction
and rows of 2048. Its weights follow from their names, so that losses and gradient norms of the layouts can be compared.
"""

import argparse
import json
import re
import shlex
import statistics
from pathlib import Path
from typing import NamedTuple

import torch
from gpu_layouts import ENGINE, ROOT, folder_of, run

STEPS = 10
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
HEADS = {"": (), ", --fp32-lm-head": ("--fp32-lm-head",), ", --pg-fused-head": ("--pg-fused-head",)}
EXPERT_LAYOUTS = {  # name: GPUs, environment, flags
    "1 GPU": (1, {}, ()),
    "1 GPU, micro-batches of one row": (1, {}, ("--micro-batch-size", "1")),  # how much is noise
    "EP2": (2, {"EP": "2"}, ()),
    "EP2, overlapped": (2, {"EP": "2", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}, ("--overlap-moe-expert-parallel-comm",)),
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
}
LOCAL = shlex.split("--no-rope-fusion --recompute-granularity selective --recompute-modules core_attn")
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


def read(folder: Path, gpus: int) -> Result | None:
    """What a run has left; None if it failed."""
    if not (folder / "peak.0").exists():
        return None
    text = "".join(p.read_text() for p in (folder / "megatron.log", folder / "output.txt") if p.exists())
    times = [float(t) for t in re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", text)]
    peak = max(int(path.read_text()) for path in folder.glob("peak.*"))
    lines = folder / "metrics.jsonl"
    records = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    losses, norms = ([record[name] for record in records] for name in ("pg_loss", "grad_norm"))
    return Result(gpus, statistics.median(times[3:]), peak / 2**30, losses, norms)


def table(results: dict[str, Result | None], tokens: int) -> str:
    """Markdown: speed relative to the same layout with Megatron's own loss; loss and gradient norm against our first
    run."""
    lines = [
        (
            "| layout and head | ms a step | tokens/s | tokens/s per GPU | GiB | times the speed of cross-entropy | "
            "loss differs | norm differs |"
        ),
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    first = next((result for result in results.values() if result and result.losses), None)
    for name, result in results.items():
        if result is None:
            lines.append(f"| {name} | failed | | | | | | |")
            continue
        baseline = results.get(re.split(r", (?=--|Meg|over)", name)[0] + BASELINE)
        share = f"{baseline.milliseconds / result.milliseconds:.3f}" if baseline else ""
        speed = tokens / (result.milliseconds / 1e3)
        lines.append(
            f"| {name} | {result.milliseconds:.0f} | {speed:,.0f} | {speed / result.gpus:,.0f} | {result.gib:.1f} | "
            f"{share} | {differences(result, first)} |"
        )
    return "\n".join(lines)


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
        "--local-attention",
        action="store_true",
        help="without Transformer Engine: Megatron's local layers, scores computed twice",
    )
    parser.add_argument("--model", choices=MODELS, default="dense")
    options = parser.parse_args()
    layers, out, results = LOCAL if options.local_attention else ENGINE, options.out.resolve(), {}
    length, rows, own = MODELS[options.model]
    shape = [*shlex.split(own), "--seq-length", str(length), "--max-position-embeddings", str(length)]
    shape += ["--global-batch-size", str(rows)]
    named = {"SAME_WEIGHTS": "1"} if options.model == "experts" else {}
    heading = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    for name, (processes, environment, flags) in runs(
        options.model
    ).items():  # in turn: they would share the host's processors
        if processes > torch.cuda.device_count() or not re.search(options.only, name):
            continue
        folder = folder_of(name, out)
        given = [*COMMON, *shape, *layers, *flags]
        run(folder, "throughput_run.py", given, environment | named | {"PROCESSES": str(processes)})
        results[name] = read(folder, processes)
        (out / "throughput.md").write_text(f"{heading}\n\n{table(results, length * rows)}\n")
        print(name, results[name], flush=True)
    print(table(results, length * rows))


if __name__ == "__main__":
    main()
