"""Hidden states to loss and both gradients: `grpo_head_loss`, naive torch and peers, relative to three bf16 GEMMs.

    python benchmarks/lm_head.py --out docs/lm_head        # one GPU: docs/lm_head.json, docs/lm_head.png, a table
    python benchmarks/lm_head.py --widths 1024 2048 4096 8192  # all modes: a table
    torchrun --nproc-per-node 2 benchmarks/lm_head.py      # the vocabulary over the GPUs of a host, of the worst rank

Random hidden states and weights in bfloat16, logits of unit variance; nothing masked unless the row says so. A forward
and a backward are timed. The unit is the three products alone, by cuBLAS in bfloat16: logits, gradient of the hidden
states, gradient of the weight. Ours adds the weight gradient in float32 to a `main_grad` that is there already, as
Megatron does; the others return a bfloat16 one. Memory is the peak beyond inputs and `main_grad`, outputs included.
"""

import argparse
import json
import math
import os
import statistics
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import triton

from megatron_pg import lm_head
from megatron_pg.declarations.choices import HEAD_MODES
from megatron_pg.kernels import grpo_loss

HIDDEN, VOCABULARY = 4096, 151936
OTHERS = ("Liger fused linear cross-entropy", "cut-cross-entropy")  # losses of other libraries
LABELS = {  # of the picture
    "ours": "--pg-fused-head forward",
    "ours, entropy": "forward, with entropies",
    "ours, 50 % masked": "forward, 50 % masked",
    "ours, split backward": "forward, --fp32-lm-head-backward split",
    "ours, recompute": "--pg-fused-head recompute",
    "float32 logits stored, then the kernel": "--fp32-lm-head",
    "torch, bfloat16 logits": "PyTorch, bfloat16 logits",
    "torch, upcast to float32": "PyTorch, upcast to float32",
    "Liger fused linear cross-entropy": "Liger 0.8.5, cross-entropy (no policy loss)",
    "cut-cross-entropy": "cut-cross-entropy (no policy loss)",
}
CLIP = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}
GIB = 2**30


class Problem:
    """Hidden states, weight and the fields of a loss, on a GPU."""

    def __init__(self, rows: int, columns: int = VOCABULARY, masked: float = 0.0, tp_group=None, width: int = HIDDEN):
        torch.manual_seed(0)
        self.hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
        self.tp_group, ranks = tp_group, 1 if tp_group is None else tp_group.size()
        torch.manual_seed(100 if tp_group is None else 100 + tp_group.rank())
        weight = torch.randn(columns // ranks, width, device="cuda", dtype=torch.bfloat16) * width**-0.5
        self.weight = weight.requires_grad_()
        self.main_grad = torch.zeros(weight.shape, device="cuda", dtype=torch.float32)
        torch.manual_seed(1)
        self.targets = torch.randint(0, columns, (rows,), device="cuda")
        self.mask = torch.arange(rows, device="cuda") % 1024 >= masked * 1024
        self.rows = self.mask.nonzero()[:, 0]
        self.advantages = torch.randn(rows, device="cuda")
        self.weights = torch.where(self.mask, 1.0 / rows, 0.0)
        with torch.no_grad():
            where = {"rows": torch.arange(rows, device="cuda"), "tp_group": tp_group}
            self.old_logprobs = lm_head.logprobs_and_entropy(self.hidden, self.weight, self.targets, **where)[0]
        self.old_logprobs += 0.1 * torch.randn(rows, device="cuda")

    def fields(self) -> dict:
        """What the losses take."""
        return {
            "targets": self.targets,
            "old_logprobs": self.old_logprobs,
            "advantages": self.advantages,
            "weights": self.weights,
            "mask": self.mask,
            "tp_group": self.tp_group,
        }


def bare(problem: Problem) -> Callable:
    """The three products that any head needs, into buffers that are there already."""
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    logits = torch.empty(len(hidden), len(weight), device="cuda", dtype=torch.bfloat16)
    gradient = torch.randn(len(hidden), len(weight), device="cuda", dtype=torch.bfloat16)
    of_hidden, of_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def run():
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(gradient, weight, out=of_hidden)
        torch.mm(gradient.t(), hidden, out=of_weight)

    return run


def logits_product(problem: Problem, dtype: torch.dtype) -> Callable:
    """The logits alone, into a buffer that is there already."""
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    logits = torch.empty(len(hidden), len(weight), device="cuda", dtype=dtype)
    options = {} if dtype == torch.bfloat16 else {"out_dtype": dtype}
    return lambda: torch.mm(hidden, weight.t(), out=logits, **options)


def ours(problem: Problem, **options) -> Callable:
    """Forward and backward of the fused head."""

    def run():
        out = lm_head.grpo_head_loss(
            problem.hidden,
            problem.weight,
            **problem.fields(),
            **CLIP,
            rows=problem.rows,
            main_grad=problem.main_grad,
            **options,
        )
        out.loss.backward()
        problem.hidden.grad = None
        return out

    return run


def logprobs_only(problem: Problem) -> Callable:
    """Log-probabilities and entropies, as for the old and the reference policy."""

    def run():
        with torch.no_grad():
            return lm_head.logprobs_and_entropy(problem.hidden, problem.weight, problem.targets, rows=problem.rows)

    return run


def whole_logits(problem: Problem) -> Callable:
    """Float32 logits, stored whole, then the kernel over them."""

    def run():
        logits = lm_head.fp32_logits(problem.hidden, problem.weight, main_grad=problem.main_grad)
        grpo_loss(logits, **problem.fields(), **CLIP, inplace=True).loss.backward()
        problem.hidden.grad = None

    return run


def naive(problem: Problem, upcast: bool) -> Callable:
    """Eager torch: logits rounded to bfloat16, or hidden states and weight upcast and true float32 products."""

    def run():
        if upcast:
            logits = problem.hidden.float() @ problem.weight.float().t()
        else:
            logits = (problem.hidden @ problem.weight.t()).float()
        logprobs = logits.log_softmax(-1).gather(1, problem.targets[:, None])[:, 0]
        ratio = (logprobs - problem.old_logprobs).exp()
        clipped = ratio.clamp(1 - CLIP["clip_eps_low"], 1 + CLIP["clip_eps_high"])
        loss = (problem.weights * -torch.minimum(ratio * problem.advantages, clipped * problem.advantages)).sum()
        loss.backward()
        problem.hidden.grad = problem.weight.grad = None

    return run


def peers(problem: Problem) -> dict[str, Callable]:
    """Fused linear cross-entropies that are installed; a policy loss needs the same passes."""
    found = {}
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        found["Liger fused linear cross-entropy"] = lambda: liger_fused_linear_cross_entropy(
            problem.hidden, problem.weight, problem.targets
        )
    except ImportError:
        warnings.warn("liger-kernel is not installed: its row is left out", stacklevel=1)
    try:
        from cut_cross_entropy import linear_cross_entropy

        found["cut-cross-entropy"] = lambda: linear_cross_entropy(problem.hidden, problem.weight, problem.targets)
    except ImportError:
        warnings.warn("cut-cross-entropy is not installed: its row is left out", stacklevel=1)

    def with_backward(loss):
        def run():
            found = loss()
            (found[0] if isinstance(found, tuple) else found).backward()
            problem.hidden.grad = problem.weight.grad = None

        return run

    return {name: with_backward(loss) for name, loss in found.items()}


def median_ms(run: Callable, repetitions: int) -> float:
    """Median time by events on the device, after two runs that are not counted."""
    return medians_ms([run], repetitions)[0]


def medians_ms(runs: list[Callable], repetitions: int, start: Callable = lambda: None) -> list[float]:
    """Medians of several interleaved runs, because the chip's power limit makes times drift; `start` precedes each."""
    events = [[] for _ in runs]
    for _ in range(repetitions + 2):
        for run, found in zip(runs, events, strict=True):
            start()
            found.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            found[-1][0].record()
            run()
            found[-1][1].record()
    torch.cuda.synchronize()
    return [statistics.median(start.elapsed_time(end) for start, end in found[2:]) for found in events]


def peak_bytes(run: Callable) -> int:
    """Most memory that `run` takes beyond what is there before it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def accuracy(problem: Problem, rows: int = 256) -> dict:
    """Largest error of a log-probability against float64, of the fused head and of bfloat16 logits; and on-policy
    ratios."""
    hidden, weight = problem.hidden.detach()[:rows], problem.weight.detach()
    targets = problem.targets[:rows]
    table = torch.cat([(part.double() @ weight.double().t()).log_softmax(-1) for part in hidden.split(64)])
    exact = table.gather(1, targets[:, None])[:, 0]
    del table
    with torch.no_grad():
        rounded = (hidden @ weight.t()).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
        sampler = (hidden.float() @ weight.float().t()).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    fields = (targets, problem.old_logprobs[:rows], problem.advantages[:rows], problem.weights[:rows])
    found = {"bfloat16 logits": rounded}
    for mode in HEAD_MODES:
        out = lm_head.grpo_head_loss(hidden.clone().requires_grad_(), weight, *fields, **CLIP, mode=mode)
        found[mode] = out.logprobs.detach()
    return {
        **{f"log-probability, {name}": float((values - exact).abs().max()) for name, values in found.items()},
        **{f"on-policy ratio, {name}": float(((v - sampler).exp() - 1).abs().max()) for name, v in found.items()},
    }


def gradient_errors(problem: Problem, rows: int = 512, columns: int = 8192) -> dict:
    """Relative errors of both gradients of a part of the problem against float64, of this rank's part of the
    vocabulary."""
    group, ranks = problem.tp_group, 1 if problem.tp_group is None else problem.tp_group.size()
    hidden, weight = problem.hidden.detach()[:rows], problem.weight.detach()[: columns // ranks].clone()
    parts = [torch.empty_like(weight) for _ in range(ranks)]
    if group is not None:
        torch.distributed.all_gather(parts, weight, group=group)
    whole = weight if group is None else torch.cat(parts)
    targets = problem.targets[:rows] % columns
    exact_hidden, exact_weight = (values.double().requires_grad_() for values in (hidden, whole))
    with torch.no_grad():  # near the policy: else the few tokens with the largest ratios would be the gradient
        logprobs = (exact_hidden @ exact_weight.t()).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    old_logprobs = (logprobs + 0.1 * torch.sin(torch.arange(rows, device="cuda"))).float()
    fields = (targets, old_logprobs, problem.advantages[:rows], problem.weights[:rows])
    options = {**CLIP, "clip_eps_low": 1.0, "clip_eps_high": 1e9}
    grpo_loss(exact_hidden @ exact_weight.t(), *fields, **options, impl="torch").loss.backward()
    exact_part = exact_weight.grad.chunk(ranks)[0 if group is None else group.rank()]
    found = {}
    for mode, backward in (("forward", "bf16"), ("scaled_exp", "bf16"), ("forward", "split"), ("recompute", "bf16")):
        total = torch.zeros(weight.shape, device="cuda")
        leaf, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        options |= {"mode": mode, "backward": backward, "main_grad": total, "tp_group": group}
        lm_head.grpo_head_loss(leaf, head, *fields, **options).loss.backward()
        name = f"{mode}, {backward}"
        found[f"weight gradient, {name}"] = float((total - exact_part).norm() / exact_part.norm())
        found[f"hidden gradient, {name}"] = float((leaf.grad - exact_hidden.grad).norm() / exact_hidden.grad.norm())
    return found


def bench(rows: int, repetitions: int, *, with_peers: bool) -> dict:
    """All variants of one number of tokens."""
    problem, half = Problem(rows), Problem(rows, masked=0.5)
    unit = median_ms(bare(problem), repetitions)
    torch.cuda.empty_cache()
    variants = {
        "ours": (ours(problem), repetitions),
        "ours, scaled_exp": (ours(problem, mode="scaled_exp"), repetitions),
        "ours, scaled_exp, 50 % masked": (ours(half, mode="scaled_exp"), repetitions),
        "ours, entropy": (ours(problem, entropy=True), repetitions),
        "ours, 50 % masked": (ours(half), repetitions),
        "ours, split backward": (ours(problem, backward="split"), repetitions),
        "ours, recompute": (ours(problem, mode="recompute"), repetitions),
        "ours, log-probabilities and entropy only": (logprobs_only(problem), repetitions),
    }
    if with_peers:
        variants |= {
            "float32 logits stored, then the kernel": (whole_logits(problem), repetitions),
            "torch, bfloat16 logits": (naive(problem, False), 7),
            "torch, upcast to float32": (naive(problem, True), 3),
        } | {name: (run, 7) for name, run in peers(problem).items()}
    result = {"device": torch.cuda.get_device_name(), "rows": rows, "bare_ms": unit, "milliseconds": {}, "peak_gib": {}}
    for name, (run, times) in variants.items():
        torch.cuda.empty_cache()
        try:
            result["milliseconds"][name] = median_ms(run, times)
            result["peak_gib"][name] = peak_bytes(run) / GIB
        except Exception as error:  # a peer that fails stays in the table
            result["milliseconds"][name] = result["peak_gib"][name] = None
            print(f"{name} failed: {type(error).__name__}: {str(error)[:300]}")
            problem.hidden.grad = problem.weight.grad = None
    if with_peers:
        torch.cuda.empty_cache()
        products = {name: median_ms(logits_product(problem, dtype), repetitions) for name, dtype in LOGITS.items()}
        result["logits_ms"], result["errors"] = products, accuracy(problem) | gradient_errors(problem)
    return result


def by_width(widths: list[int], rows: int, repetitions: int) -> list[dict]:
    """The modes at several widths: time over the bare products of the same run, peak memory and errors."""
    results = []
    for width in widths:
        problem = Problem(rows, width=width)
        unit = bare(problem)
        result = {"width": width, "rows": rows, "bare_ms": {}, "ratio": {}, "peak_gib": {}}
        for mode in HEAD_MODES:
            torch.cuda.empty_cache()
            run = ours(problem, mode=mode)
            result["bare_ms"][mode], time = medians_ms([unit, run], repetitions)
            result["ratio"][mode] = time / result["bare_ms"][mode]
            result["peak_gib"][mode] = peak_bytes(run) / GIB
        del unit
        torch.cuda.empty_cache()
        results.append(result | {"errors": accuracy(problem) | gradient_errors(problem)})
        print(json.dumps(results[-1]), flush=True)
    return results


def bench_sharded(width: int, rows: int, repetitions: int) -> dict:
    """The modes with the vocabulary over all ranks: time over the shard's bare products, memory and errors, each the
    largest of any rank. Ranks start a run together, because one that is ahead would wait inside of it."""
    problem = Problem(rows, tp_group=torch.distributed.group.WORLD, width=width)
    runs = {"bare, ms": bare(problem)} | {mode: ours(problem, mode=mode) for mode in HEAD_MODES}
    flag = torch.zeros((), device="cuda")
    times = medians_ms([*runs.values()], repetitions, start=lambda: torch.distributed.all_reduce(flag))
    found = dict(zip(runs, times, strict=True)) | gradient_errors(problem)
    found |= {f"{mode}, GiB": peak_bytes(runs[mode]) / GIB for mode in HEAD_MODES}
    worst = torch.tensor([*found.values()], device="cuda", dtype=torch.float64)
    torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
    found = dict(zip(found, worst.tolist(), strict=True))
    return {"case": str(width)} | found | {mode: found[mode] / found["bare, ms"] for mode in HEAD_MODES}


def print_sharded(widths: list[int], rows: int, repetitions: int) -> None:
    """A line of JSON per width, from the first rank."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl", timeout=timedelta(minutes=2))  # a lost rank is an error
    for width in widths:
        torch.cuda.empty_cache()
        found = bench_sharded(width, rows, repetitions)
        if torch.distributed.get_rank() == 0:
            print(json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()


def table_by_width(results: list[dict]) -> str:
    """Markdown: a line per width and mode."""
    columns = ("log-probability", "on-policy ratio", "hidden gradient", "weight gradient")
    lines = [
        f"| H | mode | time, × bare | GiB | {' | '.join(columns)} |",
        "|---:|---|---:|---:|" + "---:|" * len(columns),
    ]
    for result in results:
        for mode, ratio in result["ratio"].items():
            names = [f"{column}, {mode}" + ", bf16" * column.endswith("gradient") for column in columns]
            errors = " | ".join(f"{result['errors'][name]:.1e}" for name in names)
            lines.append(f"| {result['width']} | `{mode}` | {ratio:.3f} | {result['peak_gib'][mode]:.2f} | {errors} |")
    return "\n".join(lines)


LOGITS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def table(results: list[dict]) -> str:
    """Markdown: a line per variant, time over the bare products and peak memory."""
    heads = [f"{r['rows']} tokens: time, × bare | GiB" for r in results]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---:|---:|" * len(results)]
    lines.append("| three bare products | " + " | ".join(f"1.00 ({r['bare_ms']:.1f} ms) | –" for r in results) + " |")
    for name in results[0]["milliseconds"]:
        cells = []
        for r in results:
            time = r["milliseconds"].get(name)
            cells.append("– | –" if time is None else f"{time / r['bare_ms']:.2f} | {r['peak_gib'][name]:.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _color(name: str) -> str:
    """Blue for ours, orange for PyTorch, grey for other libraries' losses."""
    return "#9aa5b1" if name in OTHERS else "#e08214" if name.startswith("torch") else "#1f77b4"


def plot(result: dict, path: Path) -> None:
    """Time and memory of each variant, as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name, time in result["milliseconds"].items() if time is not None]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 0.4 * len(names) + 1.2), sharey=True)
    times = [result["milliseconds"][name] / result["bare_ms"] for name in names]
    for axis, values, cut, label in (
        (axes[0], times, 5, "time / time of three bfloat16 GEMMs (bar with ≈: cut at 5)"),
        (
            axes[1],
            [result["peak_gib"][name] for name in names],
            math.inf,
            "peak memory beyond inputs and main_grad, GiB",
        ),
    ):
        bars = axis.barh(range(len(names)), [min(v, cut) for v in values], color=[_color(name) for name in names])
        texts = axis.bar_label(bars, [f"{v:.2f}" for v in values], fontsize=8, padding=4)
        for text in texts:
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        for place in (i for i, v in enumerate(values) if v > cut):
            axis.text(cut - 0.4, place, "≈", color="white", fontsize=16, rotation=90, ha="center", va="center")
        axis.set_xlabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].axvline(1, color="black", linewidth=0.8)
    axes[0].invert_yaxis()
    axes[0].set_yticks(range(len(names)), [LABELS.get(name, name) for name in names])
    shape = f"{result['rows']:,} tokens, H = {HIDDEN}, {VOCABULARY:,} columns"
    figure.suptitle(f"LM head, loss and both gradients: {shape}, {result['device']}", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Runs, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="path without suffix: .json and .png are written")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--widths", type=int, nargs="*", help="H: only the modes, at each of these widths")
    parser.add_argument("--rows", type=int, default=8192, help="tokens, with --widths")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if "WORLD_SIZE" in os.environ:
        print_sharded(args.widths or [HIDDEN], args.rows, args.repetitions)
        return
    if args.widths:
        results = by_width(args.widths, args.rows, args.repetitions)
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
        print(table_by_width(results))
        if args.out:
            args.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        return
    results = [bench(8192, args.repetitions, with_peers=True)]
    torch.cuda.empty_cache()
    results.append(bench(65536, 5, with_peers=False))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(table(results))
    print(json.dumps({"logits_ms": results[0]["logits_ms"], "errors": results[0]["errors"]}, indent=1))
    if args.out:
        args.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        plot(results[0], args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
