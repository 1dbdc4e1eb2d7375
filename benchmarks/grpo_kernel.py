"""Loss and gradient of the logits: `grpo_loss`, eager torch, torch.compile and Liger, relative to one copy of the
logits.

    python benchmarks/grpo_kernel.py --out docs/kernels          # one GPU: docs/kernels.json, docs/kernels.png, a table
    python benchmarks/grpo_kernel.py --small 1000 50257          # ours and Liger alternately, bfloat16
    torchrun --nproc-per-node 2 benchmarks/grpo_kernel.py        # the vocabulary over the GPUs of a host

Random logits of unit variance, no masked rows unless the row says so. Before each repetition the logits are copied from
a master, outside the timed region, so that little of them is in the L2 cache. Medians; every figure is a ratio to the
copy `out.copy_(logits)` of the same shape in the same run. A forward and a backward of the reported loss are timed.
"""

import argparse
import json
import math
import os
import random
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from megatron_pg.kernels import grpo_loss

SHAPES = [
    (8192, 151936, torch.bfloat16),
    (8192, 128256, torch.bfloat16),
    (16384, 37984, torch.bfloat16),
    (32768, 19008, torch.bfloat16),
    (4096, 151936, torch.float32),
]
CLIP = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}
DOCUMENT = 1024  # rows; a masked share is the prompt of each, as in RL batches


def fields_of(logits: torch.Tensor, masked: float = 0.0, *, runs: bool = True) -> dict:
    """Targets, old log-probabilities near the new ones, advantages, weights and a mask."""
    rows, columns = logits.shape
    index = torch.arange(rows, device=logits.device)
    mask = index % DOCUMENT >= masked * DOCUMENT if runs else torch.rand(rows, device=logits.device) >= masked
    targets = torch.randint(0, columns, (rows,), device=logits.device)
    return {
        "targets": targets,
        "old_logprobs": torch.randn(rows, device=logits.device) * 0.1 - math.log(columns) - 0.5,
        "advantages": torch.randn(rows, device=logits.device),
        "weights": torch.where(mask, 1.0 / rows, 0.0),
        "mask": mask,
    }


def ours(fields: dict, **options) -> Callable:
    """Forward and backward of `grpo_loss`, on a leaf as the others, which in place is refused."""

    def run(logits):
        if options.get("inplace"):
            logits = ModelOutput.apply(torch.ones((), device=logits.device, requires_grad=True), logits)
        else:
            logits = logits.requires_grad_()
        out = grpo_loss(logits, **fields, **CLIP, **options)
        return out, torch.autograd.grad(out.loss, logits)[0]

    return run


class ModelOutput(torch.autograd.Function):
    """Logits as the output of a model, neither a leaf nor a view, so that their memory may be overwritten."""

    @staticmethod
    def forward(ctx, weight, logits):
        """The logits, differentiable, in the same memory."""
        return logits.new_empty(0).set_(logits)

    @staticmethod
    def backward(ctx, gradient):
        """No gradient: it is taken at the logits."""
        return None, None


def eager_loss(logits, targets, old_logprobs, advantages, weights, mask):
    """What most trainers do: float32 log_softmax, gather, ratio, clip, weighted sum."""
    logprobs = logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - CLIP["clip_eps_low"], 1 + CLIP["clip_eps_high"])
    return (weights * -torch.minimum(ratio * advantages, clipped * advantages)).sum()


def autograd_of(loss: Callable, fields: dict) -> Callable:
    """Forward and backward of a loss written in torch."""

    def run(logits):
        logits = logits.requires_grad_()
        return None, torch.autograd.grad(loss(logits, **fields), logits)[0]

    return run


def liger(fields: dict, *, inplace: bool) -> Callable:
    """Liger's GRPO kernel on the same rows, as one sequence; its last position is dropped, so one row is added."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    rows = len(fields["targets"])

    def run(logits):
        leaf = logits.requires_grad_()
        whole = leaf.view_as(leaf)[None]
        loss, *_ = triton_grpo_loss(
            whole,
            fields["old_logprobs"][None, : rows - 1].contiguous(),
            None,
            fields["targets"][None, : rows - 1].contiguous(),
            fields["advantages"][:1].contiguous(),
            None,
            1.0,
            0.0,
            CLIP["clip_eps_low"],
            CLIP["clip_eps_high"],
            inplace=inplace,
            loss_type="grpo",
            reduce=True,
        )
        return None, torch.autograd.grad(loss, leaf)[0]

    return run


def medians_ms(master: torch.Tensor, runs: dict[str, Callable], repetitions: int) -> dict[str, float]:
    """Median time of each on a fresh copy of `master`, in random order, by events that never wait for the host."""
    events, work, order = {name: [] for name in runs}, torch.empty_like(master), random.Random(0)
    for _ in range(repetitions + 3):
        for name in order.sample([*runs], len(runs)):
            with torch.no_grad():
                work = work.detach().copy_(master)
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            result = runs[name](work)
            pair[1].record()
            events[name].append(pair)
            del result
    torch.cuda.synchronize()
    return {name: statistics.median(start.elapsed_time(end) for start, end in events[name][3:]) for name in runs}


def median_ms(master: torch.Tensor, run: Callable, repetitions: int) -> float:
    """That of one alone."""
    return medians_ms(master, {"": run}, repetitions)[""]


def copy_ms(master: torch.Tensor, repetitions: int) -> float:
    """Median time of a copy of the logits, the unit of every figure."""
    other = torch.empty_like(master)
    return median_ms(master, other.copy_, repetitions)


def peak_bytes(master: torch.Tensor, run: Callable) -> int:
    """Most memory that `run` takes beyond its input, outputs included."""
    work = master.detach().clone()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(work)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def accuracy(master: torch.Tensor, fields: dict, rows: int = 128) -> dict:
    """Largest errors of our log-probabilities and entropies, and of the gradient per rounding of the exact one."""
    logits, few = master[:rows].clone(), {name: values[:rows] for name, values in fields.items()}
    out, gradient = ours(few, entropy=True)(logits)
    z = master[:rows].double()
    log_p = z.log_softmax(-1)
    logprobs = log_p.gather(1, few["targets"][:, None])[:, 0]
    ratio = (logprobs - few["old_logprobs"].double()).exp()
    advantage = few["advantages"].double()
    alive = torch.where(advantage >= 0, ratio <= 1.28, ratio >= 0.8)
    slope = torch.where(alive, ratio * advantage * few["weights"].double(), 0)[:, None]
    exact = slope * log_p.exp()
    exact.scatter_add_(1, few["targets"][:, None], -slope)
    rounding = (
        (exact.to(master.dtype).double() - exact).norm() if master.dtype != torch.float32 else exact.norm() * 2**-24
    )
    return {
        "logprob": float((out.logprobs - logprobs).abs().max()),
        "entropy": float((out.entropy + (log_p.exp() * log_p).sum(-1)).abs().max()),
        "gradient over rounding": float((gradient.double() - exact).norm() / rounding),
    }


def bench_shape(rows: int, columns: int, dtype: torch.dtype, repetitions: int) -> dict:
    """All variants of one shape."""
    torch.manual_seed(0)
    master = torch.randn(rows, columns, device="cuda", dtype=dtype)
    fields = fields_of(master)
    copy = copy_ms(master, repetitions)
    compiled = torch.compile(eager_loss)
    variants = {
        "ours": (ours(fields), repetitions),
        "ours, entropy": (ours(fields, entropy=True), repetitions),
        "ours, entropy, in place": (ours(fields, entropy=True, inplace=True), repetitions),
        "ours, entropy, 50 % masked": (ours(fields_of(master, 0.5), entropy=True), repetitions),
        "ours, entropy, 80 % masked": (ours(fields_of(master, 0.8), entropy=True), repetitions),
        "ours, entropy, 50 % masked at random": (ours(fields_of(master, 0.5, runs=False), entropy=True), repetitions),
        "torch.compile": (autograd_of(compiled, fields), 7),
        "eager": (autograd_of(eager_loss, fields), 7),
    }
    try:
        variants |= {"Liger": (liger(fields, inplace=False), 15), "Liger, in place": (liger(fields, inplace=True), 15)}
    except ImportError:
        warnings.warn("liger-kernel is not installed: its rows are left out", stacklevel=1)
    row = {"rows": rows, "columns": columns, "dtype": str(dtype).removeprefix("torch."), "copy_ms": copy} | {
        "device": torch.cuda.get_device_name()
    }
    row["terabytes_per_second"] = 2 * master.numel() * master.element_size() / copy / 1e9
    row["accuracy"] = accuracy(master, fields)
    row["ratios"], row["peak_of_logits"] = {}, {}
    for name, (run, times) in variants.items():
        torch.cuda.empty_cache()
        try:
            row["ratios"][name] = median_ms(master, run, times) / copy
            row["peak_of_logits"][name] = peak_bytes(master, run) / (master.numel() * master.element_size())
        except Exception as error:  # a peer that fails stays in the table
            row["ratios"][name] = row["peak_of_logits"][name] = None
            print(f"{name} failed: {type(error).__name__}: {str(error)[:300]}")
    return row


def bench_small(rows: int, columns: int, repetitions: int) -> str:
    """Ours and Liger alternately, because a small shape takes the time of the host, which varies."""
    torch.manual_seed(0)
    master = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    fields = fields_of(master)
    runs = {"ours": ours(fields), "Liger": liger(fields, inplace=False), "copy": torch.empty_like(master).copy_}
    times = medians_ms(master, runs, repetitions)
    cells = [f"{name} {ms:.3f} ms ({ms / times['copy']:.1f} copies)" for name, ms in times.items()]
    return f"{rows} x {columns}: {', '.join(cells)}; ours / Liger {times['ours'] / times['Liger']:.3f}"


def bench_sharded(rows: int, columns: int, dtype: torch.dtype, repetitions: int) -> dict:
    """The vocabulary over the ranks of this host: loss and gradient, the all-gather apart."""
    import torch.distributed as dist

    torch.manual_seed(dist.get_rank())
    master = torch.randn(rows, columns, device="cuda", dtype=dtype)
    torch.manual_seed(0)
    fields = fields_of(master)
    shares = torch.zeros(rows, 4, device="cuda")
    gathered = shares.new_empty(dist.get_world_size() * rows, 4)
    calls = []
    gather = dist.all_gather_into_tensor
    dist.all_gather_into_tensor = lambda *args, **kwargs: (calls.append(1), gather(*args, **kwargs))[1]
    run = ours(fields, entropy=True, tp_group=dist.group.WORLD)
    out, _ = run(master.clone())
    collectives = len(calls)
    times = {
        "copy": copy_ms(master, repetitions),
        "loss and gradient": median_ms(master, run, repetitions),
        "all-gather": median_ms(master, lambda _: gather(gathered, shares), repetitions),
    }
    worst = torch.tensor([times[name] for name in sorted(times)], device="cuda", dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    times = dict(zip(sorted(times), worst.tolist(), strict=True))
    bits = torch.stack([out.logprobs.double().sum(), out.entropy.double().sum(), out.loss.detach().double()])
    all_bits = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(all_bits, bits)
    return {
        "rows": rows,
        "columns": columns,
        "dtype": str(dtype).removeprefix("torch."),
        "ranks": dist.get_world_size(),
        "copy_ms": times["copy"],
        "ratio": (times["loss and gradient"] - times["all-gather"]) / times["copy"],
        "all_gather_ratio": times["all-gather"] / times["copy"],
        "collectives": collectives,
        "equal_bits": all(torch.equal(b, all_bits[0]) for b in all_bits),
    }


def table(rows: list[dict]) -> str:
    """Markdown: one line per variant, one column per shape."""
    heads = [f"{r['rows']} × {r['columns']} {r['dtype']}" for r in rows]
    lines = ["| ratio to a copy | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(rows)]
    for name in rows[0]["ratios"]:
        cells = ["failed" if r["ratios"].get(name) is None else f"{r['ratios'][name]:.2f}" for r in rows]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines.append(
        "| copy, ms (TB/s) | "
        + " | ".join(f"{r['copy_ms']:.3f} ({r['terabytes_per_second']:.2f})" for r in rows)
        + " |"
    )
    for name in rows[0]["accuracy"]:
        lines.append(f"| error: {name} | " + " | ".join(f"{r['accuracy'][name]:.1e}" for r in rows) + " |")
    for name in ("ours, entropy", "ours, entropy, in place", "Liger", "eager"):
        if name in rows[0]["peak_of_logits"]:
            cells = ["" if r["peak_of_logits"][name] is None else f"{r['peak_of_logits'][name]:.3f}" for r in rows]
            lines.append(f"| extra memory, of the logits: {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


CUT = 6  # largest ratio of the picture
LABELS = {"ours, entropy": "ours, with entropies", "Liger": "Liger, without entropies", "eager": "eager PyTorch"}


def plot(rows: list[dict], path: Path) -> None:
    """Bars: each variant's ratio by shape; a bar that is cut has a mark."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [n for n in ("ours, entropy", "Liger", "torch.compile", "eager") if n in rows[0]["ratios"]]
    figure, axes = pyplot.subplots(figsize=(9, 4.4))
    for i, name in enumerate(names):
        ratios = [r["ratios"][name] or 0 for r in rows]
        places = [j + i * 0.2 for j in range(len(rows))]
        bars = axes.bar(places, [min(ratio, CUT) for ratio in ratios], 0.19, label=LABELS.get(name, name))
        axes.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], fontsize=7)
        for place in (place for place, ratio in zip(places, ratios, strict=True) if ratio > CUT):
            axes.text(place, CUT - 0.55, "≈", color="white", fontsize=16, ha="center", va="center", clip_on=True)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks([j + 0.3 for j in range(len(rows))], [f"{r['rows']} × {r['columns']}\n{r['dtype']}" for r in rows])
    axes.set_xlabel("tokens × vocabulary")
    axes.set_ylabel("time / time to copy the logits")
    axes.set_xlim(-0.3, len(rows) + 0.15)
    axes.annotate("one copy", (len(rows) + 0.12, 1), va="bottom", ha="right", fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    title = f"GRPO loss and gradient from stored logits, {rows[0]['device']}; bars with ≈ are cut at {CUT}"
    axes.set_title(title, pad=26, fontsize=11)
    axes.legend(ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Runs, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="path without suffix: .json and .png are written")
    parser.add_argument("--repetitions", type=int, default=50)
    parser.add_argument("--small", type=int, nargs=2, metavar=("ROWS", "COLUMNS"), help="this shape, and Liger only")
    args = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl")
        shapes = [(16384, 37984, torch.bfloat16), (8192, 75968, torch.bfloat16)]
        rows = [bench_sharded(*shape, args.repetitions) for shape in shapes]
        if torch.distributed.get_rank() == 0:
            print("\n".join(json.dumps(row) for row in rows))
        torch.distributed.destroy_process_group()
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    if args.small:
        print(bench_small(*args.small, args.repetitions))
        return
    rows = [bench_shape(*shape, args.repetitions) for shape in SHAPES]
    print(table(rows))
    if args.out:
        args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
        plot(rows, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
