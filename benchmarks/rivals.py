"""The fastest heads and cross-entropies of Liger and QuACK for Hopper, and ours, interleaved in one process.

    pip install liger-kernel quack-kernels "nvidia-cutlass-dsl[cu13]"
    python benchmarks/rivals.py                              # heads at four widths, then cross-entropies from logits
    python benchmarks/rivals.py --parts heads --widths 4096  # one of them

Theirs are cross-entropies without a policy loss, which needs the same products. Forward and backward are timed: heads
relative to their three bare bfloat16 products, losses from logits relative to one copy of the logits. Errors are those
of the mean cross-entropy and of the weight gradient, against our head with the backward `split`.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from grpo_kernel import copy_ms, fields_of, median_ms
from grpo_kernel import ours as loss_from_logits
from lm_head import GIB, Problem, bare, medians_ms, ours, peak_bytes

from megatron_pg import lm_head

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

    # 0.6.5 cannot infer an operand's axis where a chunk has as many tokens as the hidden size
    return lambda hidden, *given: chunked_linear_cross_entropy(
        hidden, *given, chunk_size=8192 if hidden.shape[1] == 4096 else 4096, use_scaled_exp=True
    )


def quack_chunked() -> Loss:
    """QuACK's head by chunks of bfloat16 logits, without a search for the fastest tiles."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda *given: chunked_linear_cross_entropy(*given, tuned=False, use_scaled_exp=False)


MODES = "forward", "scaled_exp"  # of ours
HEADS = {
    "Liger fused linear, SM90": liger_fused_linear,
    "Liger fused scaled, SM90": liger_fused_scaled,
    "QuACK scaled_exp": quack_scaled_exp,
    "QuACK chunked": quack_chunked,
}


def by_theirs(problem: Problem, loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean cross-entropy and its weight gradient."""
    found = loss(problem.hidden, problem.weight, problem.targets)
    found.backward()
    gradient, problem.hidden.grad, problem.weight.grad = problem.weight.grad, None, None
    return found.detach(), gradient


def by_ours(problem: Problem, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by the policy loss, which at a ratio of 1 has this gradient."""
    given = problem.hidden, problem.weight, problem.targets
    with torch.no_grad():
        logprobs = lm_head.logprobs_and_entropy(*given)[0]
    fields = problem.fields() | {"old_logprobs": logprobs, "advantages": torch.ones_like(logprobs)}
    options |= {"rows": problem.rows, "main_grad": torch.zeros_like(problem.main_grad)}
    out = lm_head.grpo_head_loss(*given[:2], **fields, clip_eps_low=0.9, clip_eps_high=9.0, **options)
    out.loss.backward()
    problem.hidden.grad = None
    return -out.logprobs.mean(), options["main_grad"]


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
        print(f"{name}: {time.perf_counter() - start:.1f} s to its first result", file=sys.stderr, flush=True)
    return found


def bench_heads(width: int, repetitions: int) -> None:
    """A line per head."""
    problem = Problem(ROWS, VOCABULARY, width=width)
    exact, exact_gradient = by_ours(problem, backward="split")

    def tried(make: Callable) -> tuple[Callable, str]:
        run = make()
        found, gradient = run()
        error = (gradient - exact_gradient).norm() / exact_gradient.norm()
        return run, f"{float((found - exact).abs()):.1e} | {float(error):.1e}"

    heads = {f"ours, {mode}": lambda mode=mode: partial(by_ours, problem, mode=mode) for mode in MODES}
    heads |= {name: lambda make=make: partial(by_theirs, problem, make()) for name, make in HEADS.items()}
    found = that_run({name: lambda make=make: tried(make) for name, make in heads.items()})
    runs = {"three bare products": bare(problem)} | {name: run for name, (run, _) in found.items()}
    runs |= {f"ours, {mode}": ours(problem, mode=mode) for mode in MODES}  # of a policy loss
    peaks = {name: peak_bytes(run) / GIB for name, run in runs.items()}
    times = dict(zip(runs, medians_ms([*runs.values()], repetitions), strict=True))
    for name, milliseconds in times.items():
        ratio, errors = milliseconds / times["three bare products"], found[name][1] if name in found else "– | –"
        print(f"| {width} | {name} | {ratio:.3f} ({milliseconds:.2f} ms) | {peaks[name]:.2f} | {errors} |", flush=True)


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
    parser.add_argument("--parts", nargs="*", default=["heads", "logits"], choices=["heads", "logits"])
    parser.add_argument("--widths", type=int, nargs="*", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--repetitions", type=int, default=10)
    args = parser.parse_args()
    os.environ["LIGER_SCALED_CE_SM90_VALIDATE_TARGETS"] = "0"  # the host would wait for the device
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| H | head | time, × bare | GiB | error of loss | weight gradient |")
    for width in args.widths if "heads" in args.parts else ():
        bench_heads(width, args.repetitions)
        torch.cuda.empty_cache()
    for shape in LOGITS if "logits" in args.parts else ():
        bench_logits(*shape, 3 * args.repetitions)


if __name__ == "__main__":
    main()
