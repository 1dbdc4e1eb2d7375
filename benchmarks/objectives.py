"""Every objective from logits, with and without KL and entropy terms: its time relative to a copy and to `grpo`, in one
run.

    python benchmarks/objectives.py                             # one GPU: a table for each shape
    python benchmarks/objectives.py --accuracy-only             # the gradients of 64 rows against float64
    torchrun --nproc-per-node 2 benchmarks/objectives.py --cases grpo,bfloat16,entropy   # the vocabulary over the GPUs

The logits are random and every row is trained, as in `grpo_kernel.py`, whose clock this is. Sequences are 1,024 tokens
long.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
import triton
from grpo_kernel import copy_ms, fields_of, median_ms

from megatron_pg.batch.fields import TokenFields
from megatron_pg.batch.sequences import Sequences
from megatron_pg.declarations.corrections import KL_ESTIMATORS
from megatron_pg.declarations.loss_terms import LossTerm
from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.kernels import LossTerms, PolicyLoss, Vocabulary, policy_gradient_loss
from megatron_pg.objectives import objective_of

SHAPES = [
    (8192, 151936, torch.bfloat16),
    (8192, 128256, torch.bfloat16),
    (16384, 37984, torch.bfloat16),
    (32768, 19008, torch.bfloat16),
    (12289, 100277, torch.bfloat16),  # rows that are not aligned to 16 bytes
    (1000, 50304, torch.bfloat16),  # whose time is the host's
    (4096, 201088, torch.bfloat16),  # rows that two multiprocessors share, as the next two
    (2048, 262144, torch.bfloat16),
    (4096, 151936, torch.float32),
]
SEQUENCE = 1024
SHARDED = "grpo,bfloat16,entropy"
NUMBERS = {"clip_eps_low": 0.2, "clip_eps_high": 0.28, "cap": 3.0, "beta": 0.5, "tau": 0.1} | {
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "delta_low": 0.05,
    "delta_high": 0.1,
}


def variants() -> Iterator[tuple[str, LossTerms]]:
    """The objectives alone, then `grpo` with each KL estimator, with a bonus, with both; a KL term with another
    objective."""
    for name, declared in OBJECTIVES.items():
        yield name, LossTerms(objective=build(name, declared.numbers))
    entropy = LossTerm(name="entropy", kind="entropy", weight=0.01, aggregation="policy", on="rl")
    grpo = LossTerms(objective=build("grpo", OBJECTIVES["grpo"].numbers))
    for estimator in KL_ESTIMATORS:
        yield f"grpo + {estimator}", replace(grpo, further=(divergence(estimator),))
    yield "grpo + entropy bonus", replace(grpo, further=(entropy,))
    yield "grpo + k3 + entropy bonus", replace(grpo, further=(divergence("k3"), entropy))
    dppo = LossTerms(objective=build("dppo_kl", OBJECTIVES["dppo_kl"].numbers))
    yield "dppo_kl + k3_weighted", replace(dppo, further=(divergence("k3_weighted"),))


def build(name: str, reads) -> object:
    """The objective with the numbers that it reads."""
    given = {number.name: NUMBERS[number.name] for number in reads if number.name in NUMBERS}
    return objective_of(name, **given)


def divergence(estimator: str) -> LossTerm:
    """The KL term."""
    return LossTerm(name="kl", kind="kl", weight=0.05, estimator=estimator, aggregation="policy", on="rl")


def fields_for(logits: torch.Tensor) -> TokenFields:
    """Random fields with a reference, in sequences of 1,024 tokens."""
    fields, rows = fields_of(logits), len(logits)
    length = min(SEQUENCE, rows)
    slots = torch.arange(rows, device=logits.device) // length
    count = rows // length
    sequences = Sequences(
        slots=slots,
        order=torch.arange(rows, device=logits.device),
        lengths=torch.tensor([length] * count + [0], device=logits.device),
        counts=torch.full((count,), float(length), device=logits.device, dtype=torch.float64),
    )
    reference = fields["old_logprobs"] + 0.1 * torch.randn(rows, device=logits.device)
    return TokenFields(**fields, ref_logprobs=reference, sequences=sequences)


def ours(
    terms: LossTerms, fields: TokenFields, impl: str = "triton", *, entropy: bool = True, tp_group=None
) -> Callable:
    """Forward and backward."""

    def run(logits: torch.Tensor):
        leaf = logits.requires_grad_()
        vocabulary = Vocabulary.of(logits.shape[1], tp_group=tp_group)
        loss = PolicyLoss(terms, fields)
        out = policy_gradient_loss(leaf.view_as(leaf), loss, vocabulary, entropy=entropy, impl=impl)
        return out, torch.autograd.grad(out.loss, leaf)[0]

    return run


def gradient_error(columns: int, dtype: torch.dtype, terms: LossTerms) -> float:
    """Of 64 rows: norm of the error against torch in float64, over what rounding the exact gradient costs."""
    logits = torch.randn(64, columns, device="cuda", dtype=dtype)
    fields = fields_for(logits)
    found = ours(terms, fields)(logits.clone())[1]
    exact = ours(terms, fields, impl="torch")(logits.double())[1]
    rounding = (exact.to(dtype).double() - exact).norm()
    return float((found.double() - exact).norm() / rounding)


def bench_sharded(case: str, rows: int, columns: int, repetitions: int) -> dict:
    """An objective such as `gspo,float32,entropy`, the vocabulary over all ranks: time in copies of the shard's logits,
    with the exchange in it, and the gradient's error, the largest of any rank."""
    name, dtype_name, *entropy = case.split(",")
    dtype, group = getattr(torch, dtype_name), dist.group.WORLD
    terms = LossTerms(objective=build(name, OBJECTIVES[name].numbers))
    torch.manual_seed(1 + group.rank())
    master = torch.randn(rows, columns // group.size(), device="cuda", dtype=dtype)
    shares = torch.zeros(rows, 4, device="cuda")
    gathered = shares.new_empty(group.size() * rows, 4)
    run = ours(terms, shared_fields(rows, columns), entropy=bool(entropy), tp_group=group)
    copy = copy_ms(master, repetitions)
    found = {
        "copy, ms": copy,
        "copies": median_ms(master, run, repetitions) / copy,
        "all-gather, copies": median_ms(
            master, lambda _: dist.all_gather_into_tensor(gathered, shares, group=group), repetitions
        )
        / copy,
        "gradient error": sharded_gradient_error(terms, dtype, entropy=bool(entropy)),
    }
    worst = torch.tensor([*found.values()], device="cuda", dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return {"case": case} | dict(zip(found, worst.tolist(), strict=True))


def shared_fields(rows: int, columns: int) -> TokenFields:
    """The same on every rank, with targets in the whole vocabulary."""
    torch.manual_seed(0)
    return fields_for(torch.empty(1, device="cuda").expand(rows, columns))


def sharded_gradient_error(
    terms: LossTerms, dtype: torch.dtype, *, entropy: bool, rows: int = 256, columns: int = 8192
) -> float:
    """Norm of the error of this rank's gradient against torch in float64 over whole logits, relative to its norm."""
    group = dist.group.WORLD
    fields = shared_fields(rows, columns)  # seeds, so that the logits are the same on every rank too
    whole = torch.randn(rows, columns, device="cuda", dtype=dtype)
    mine = whole.chunk(group.size(), dim=1)[group.rank()].contiguous()
    found = ours(terms, fields, entropy=entropy, tp_group=group)(mine)[1]
    exact = ours(terms, fields, impl="torch", entropy=entropy)(whole.double())[1]
    part = exact.chunk(group.size(), dim=1)[group.rank()]
    return float((found.double() - part).norm() / part.norm())


def print_sharded(cases: list[str], repetitions: int) -> None:
    """A line of JSON per case, from the first rank."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(minutes=2))  # a lost rank is an error
    for case in cases:
        found = bench_sharded(case, 4096, 151936, repetitions)
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def print_times(shapes: list, named: dict[str, LossTerms], repetitions: int) -> None:
    """One line per variant: over a copy, over `grpo`, and milliseconds; each as it comes on stderr."""
    print("| over a copy (over grpo; ms) | " + " | ".join(f"{rows} × {columns}" for rows, columns, _ in shapes) + " |")
    print("|---|" + "---:|" * len(shapes))
    copies, found = [], {name: [] for name in named}
    for rows, columns, dtype in shapes:
        torch.manual_seed(0)
        master = torch.randn(rows, columns, device="cuda", dtype=dtype)
        fields = fields_for(master)
        copies.append(copy_ms(master, repetitions))
        for name, terms in named.items():
            found[name].append(median_ms(master, ours(terms, fields), repetitions))
            print(f"{rows} x {columns}, {name}: {found[name][-1] / copies[-1]:.2f}", file=sys.stderr, flush=True)
    for name, times in found.items():
        together = zip(times, copies, found["grpo"], strict=True)
        cells = (f"{time / copy:.2f} ({time / plain:.2f}; {time:.3f})" for time, copy, plain in together)
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def print_errors(shapes: list, named: dict[str, LossTerms]) -> None:
    """One line per variant."""
    print("| gradient error over rounding | " + " | ".join(str(columns) for _, columns, _ in shapes) + " |")
    for name, terms in named.items():
        errors = (gradient_error(columns, dtype, terms) for _, columns, dtype in shapes)
        print(f"| {name} | " + " | ".join(f"{error:.2f}" for error in errors) + " |", flush=True)


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--accuracy-only", action="store_true")
    parser.add_argument("--columns", type=int, help="of the one shape to run")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the variants to run, in addition to grpo")
    parser.add_argument("--cases", nargs="+", default=[SHARDED], help="under torchrun: objective,dtype[,entropy]")
    args = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        print_sharded(args.cases, args.repetitions)
        return
    named = {name: terms for name, terms in variants() if args.only is None or name in ("grpo", *args.only)}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    shapes = [shape for shape in SHAPES if args.columns in (None, shape[1])]
    if not args.accuracy_only:
        print_times(shapes, named, args.repetitions)
    print_errors(shapes, named)


if __name__ == "__main__":
    main()
