"""The fastest heads and cross-entropies of Liger and QuACK for Hopper, and ours, interleaved in one process.

    pip install liger-kernel quack-kernels "nvidia-cutlass-dsl[cu13]"
    python benchmarks/rivals.py                        # heads at four widths, then cross-entropies from logits
    python benchmarks/rivals.py --widths               # the cross-entropies alone

Theirs are cross-entropies without a policy loss, which needs the same products. Forward and backward are timed: heads
relative to their three bare bfloat16 products, losses from logits relative to one copy of the logits. Errors are those
of both gradients against float64, of 512 tokens and 8,448 columns; ours are errors of the policy loss.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable

import torch
from grpo_kernel import copy_ms, fields_of, median_ms
from grpo_kernel import ours as loss_from_logits
from lm_head import GIB, Problem, bare, gradient_errors, medians_ms, ours, peak_bytes

ROWS, VOCABULARY = 8192, 152064  # a multiple of 256, which Liger's head needs, and of 192, QuACK's fastest tile
LOGITS = [(8192, 152064), (4096, 131072)]  # beyond 131,072 columns, Liger reads a row twice
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # of hidden states, weight, targets


def liger_fused_linear() -> Loss:
    """Liger's head with its bfloat16 logits stored whole."""
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import LigerFusedLinearCrossEntropySM90Function

    return LigerFusedLinearCrossEntropySM90Function.apply


def liger_fused_scaled() -> Loss:
    """Liger's head that stores no logits and makes them again in the backward."""
    from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import LigerFusedScaledCrossEntropySM90Function

    return lambda *given: LigerFusedScaledCrossEntropySM90Function.apply(*given).mean()


def quack_scaled_exp() -> Loss:
    """QuACK's head by scaled exponentials."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda *given: chunked_linear_cross_entropy(*given, use_scaled_exp=True)


def quack_chunked() -> Loss:
    """QuACK's head by chunks of bfloat16 logits, without a search for the fastest tiles."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda *given: chunked_linear_cross_entropy(*given, tuned=False, use_scaled_exp=False)


HEADS = {
    "Liger fused linear, SM90": liger_fused_linear,
    "Liger fused scaled, SM90": liger_fused_scaled,
    "QuACK scaled_exp": quack_scaled_exp,
    "QuACK chunked": quack_chunked,
}


def head(problem: Problem, loss: Loss) -> Callable:
    """Forward and backward of a head."""

    def run():
        loss(problem.hidden, problem.weight, problem.targets).backward()
        problem.hidden.grad = problem.weight.grad = None

    return run


def errors(loss: Loss, width: int) -> str:
    """Of the mean loss and of both gradients of a small problem."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(512, width, device="cuda"), torch.randn(8448, width, device="cuda") * width**-0.5
    leaves = [each.bfloat16().requires_grad_() for each in (hidden, weight)]
    exact = [each.detach().double().requires_grad_() for each in leaves]
    targets = torch.randint(0, 8448, (512,), device="cuda")
    found = loss(*leaves, targets)
    found.backward()
    wanted = torch.nn.functional.cross_entropy(exact[0] @ exact[1].t(), targets)
    wanted.backward()
    of_gradients = [float((a.grad - b.grad).norm() / b.grad.norm()) for a, b in zip(leaves, exact, strict=True)]
    return f"{float((found - wanted).abs()):.1e} | " + " | ".join(f"{value:.1e}" for value in of_gradients)


def that_run(variants: dict[str, Callable]) -> dict[str, Callable]:
    """Those whose first call succeeds; the others are reported in a line each."""
    found = {}
    for name, make in variants.items():
        start = time.perf_counter()
        try:
            found[name] = make()
            torch.cuda.synchronize()
        except Exception as error:  # a rival that fails stays in the report
            print(f"{name} failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        print(f"{name}: {time.perf_counter() - start:.1f} s to its first result", file=sys.stderr)
    return found


def bench_heads(width: int, repetitions: int) -> None:
    """A line per head."""
    problem = Problem(ROWS, VOCABULARY, width=width)
    runs = {"three bare products": bare(problem)}
    runs |= {f"ours, {mode}": ours(problem, mode=mode) for mode in ("forward", "scaled_exp")}

    def tried(make: Callable[[], Loss]) -> tuple[Callable, str]:
        loss = make()
        found = errors(loss, width)
        run = head(problem, loss)
        run()
        return run, found

    rivals = that_run({name: lambda make=make: tried(make) for name, make in HEADS.items()})
    runs |= {name: run for name, (run, _) in rivals.items()}
    peaks = {name: peak_bytes(run) / GIB for name, run in runs.items()}
    times = dict(zip(runs, medians_ms([*runs.values()], repetitions), strict=True))
    of_ours = gradient_errors(problem)
    for name, milliseconds in times.items():
        found = rivals[name][1] if name in rivals else ""
        if name.startswith("ours"):
            of_mode = [of_ours[f"{of} gradient, {name.removeprefix('ours, ')}, bf16"] for of in ("hidden", "weight")]
            found = f"– | {of_mode[0]:.1e} | {of_mode[1]:.1e}"
        ratio = milliseconds / times["three bare products"]
        print(f"| {width} | {name} | {ratio:.3f} ({milliseconds:.2f} ms) | {peaks[name]:.2f} | {found} |", flush=True)


def liger_loss(targets: torch.Tensor) -> Callable:
    """Liger's loss and gradient, in place."""
    from cuda.bindings.driver import CUstream
    from liger_kernel.ops.cutedsl.ops._fused_linear_cross_entropy_forward_sm90 import cross_entropy_dz

    losses, scale = torch.empty(len(targets), device="cuda"), 1.0 / len(targets)
    stream = CUstream(torch.cuda.current_stream().cuda_stream)
    return lambda logits: cross_entropy_dz(logits, targets, losses, scale, -100, stream)


def quack_loss(targets: torch.Tensor) -> Callable:
    """QuACK's loss and gradient of the logits, in place."""
    from quack.cross_entropy import cross_entropy_fwd_out

    losses = torch.empty(len(targets), device="cuda")
    return lambda logits: cross_entropy_fwd_out(logits, targets, None, losses, None, logits, None)


def bench_logits(rows: int, columns: int, repetitions: int) -> None:
    """A line per loss."""
    torch.manual_seed(0)
    master = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    fields = fields_of(master)

    def tried(make: Callable[[torch.Tensor], Callable]) -> Callable:
        run = make(fields["targets"])
        run(master.clone())
        return run

    runs = {"ours": loss_from_logits(fields, inplace=True)}
    runs["ours, with entropy"] = loss_from_logits(fields, inplace=True, entropy=True)
    makes = {"Liger, one read up to 131,072 columns": liger_loss, "QuACK, one read": quack_loss}
    runs |= that_run({name: lambda make=make: tried(make) for name, make in makes.items()})
    copies = []
    for name, run in [*runs.items(), *reversed(runs.items())]:  # twice, because clocks drift
        copies.append(copy_ms(master, repetitions))
        print(f"| {rows} × {columns} | {name} | {median_ms(master, run, repetitions) / copies[-1]:.3f} |", flush=True)
    print(f"a copy takes {min(copies):.3f} to {max(copies):.3f} ms")


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="*", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--repetitions", type=int, default=10)
    args = parser.parse_args()
    os.environ["LIGER_SCALED_CE_SM90_VALIDATE_TARGETS"] = "0"  # the host would wait for the device
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| H | head | time, × bare | GiB | error of loss | hidden gradient | weight gradient |")
    for width in args.widths:
        bench_heads(width, args.repetitions)
        torch.cuda.empty_cache()
    for shape in LOGITS:
        bench_logits(*shape, 3 * args.repetitions)


if __name__ == "__main__":
    main()
