"""A model of real size under Megatron's pretrain() on GPUs: tokens per second and memory of layouts and heads.

    python benchmarks/throughput.py --out runs/throughput         # writes throughput.md there

The example with a GPT of 1.5 billion parameters (28 layers of 1536, a vocabulary of 151,936) on random rows of 4096 tokens, half of
them response; beside it, the same model on the same rows by Megatron's own cross-entropy. A step is 131,072 tokens.
"""

import argparse
import re
import shlex
import statistics
from pathlib import Path

import torch
from gpu_layouts import ENGINE, ROOT, folder_of, run

LENGTH, ROWS, STEPS = 4096, 32, 8
FLAGS = shlex.split(
    f"--rollouts random --warm-up-iters 0 --train-iters {STEPS} --log-interval 1 --lr-warmup-iters 0 --exact-match-interval 1000 "
    f"--seq-length {LENGTH} --max-position-embeddings {LENGTH} --micro-batch-size 2 --global-batch-size {ROWS} "
    "--prompts-per-rollout 4 --num-layers 28 --hidden-size 1536 --ffn-hidden-size 8960 --num-attention-heads 12 "
    "--group-query-attention --num-query-groups 4 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --loss-aggregation constant --loss-aggregation-divisor 4096 --pg-metrics basic"
)
HEADS = {"": (), ", --fp32-lm-head": ("--fp32-lm-head",), ", --pg-fused-head": ("--pg-fused-head",)}
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


def runs() -> dict[str, tuple[int, dict[str, str], tuple[str, ...]]]:
    """Every layout with every head. name: GPUs, environment, flags."""
    heads = {BASELINE: ("--cross-entropy",), **HEADS}
    return {
        name + head: (processes, environment, flags)
        for name, (processes, environment) in LAYOUTS.items()
        for head, flags in heads.items()
    }


def read(folder: Path) -> tuple[float, float] | None:
    """Milliseconds of a step and peak GiB of a rank; None if the run failed."""
    if not (folder / "peak.0").exists():
        return None
    text = "".join(p.read_text() for p in (folder / "megatron.log", folder / "output.txt") if p.exists())
    times = [float(t) for t in re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", text)]
    peak = max(int(path.read_text()) for path in folder.glob("peak.*"))
    return statistics.median(times[3:]), peak / 2**30


def table(results: dict[str, tuple[float, float] | None]) -> str:
    """Markdown; the last column is beside the same layout with Megatron's own loss."""
    lines = [
        "| layout and head | ms a step | tokens/s | tokens/s per GPU | GiB | times the speed of cross-entropy |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, result in results.items():
        if result is None:
            lines.append(f"| {name} | failed | | | | |")
            continue
        layout = re.split(r", (?=--|Meg)", name)[0]
        baseline = results.get(layout + BASELINE)
        share = f"{baseline[0] / result[0]:.3f}" if baseline else ""
        speed = LENGTH * ROWS / (result[0] / 1e3)
        lines.append(
            f"| {name} | {result[0]:.0f} | {speed:,.0f} | {speed / LAYOUTS[layout][0]:,.0f} | {result[1]:.1f} | {share} |"
        )
    return "\n".join(lines)


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
    options = parser.parse_args()
    layers, out, results = LOCAL if options.local_attention else ENGINE, options.out.resolve(), {}
    heading = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    for name, (processes, environment, flags) in runs().items():  # in turn: they would share the host's processors
        if processes > torch.cuda.device_count() or not re.search(options.only, name):
            continue
        folder = folder_of(name, out)
        run(folder, "throughput_run.py", [*FLAGS, *layers, *flags], environment | {"PROCESSES": str(processes)})
        results[name] = read(folder)
        (out / "throughput.md").write_text(f"{heading}\n\n{table(results)}\n")
        print(name, results[name], flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
