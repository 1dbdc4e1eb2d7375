"""A record of results, bit for bit: what a change that moves code and no number is compared with.

    python tests/helpers/record.py write BEFORE.json
    python tests/helpers/record.py compare BEFORE.json AFTER.json

Losses, gradients and metrics of random steps over layouts (four aggregations and a custom reducer, both contracts), of
every objective with random corrections, KL and entropy terms, of documents per step, of the kernels and heads in every
implementation, of real ranks through Megatron's schedules, and the files of short runs of the example: each result is
one hash of its bits.
"""

import dataclasses
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")
warnings.filterwarnings("ignore")
ROOT = next(parent for parent in Path(__file__).parents if (parent / "setup.py").exists())
sys.path[:0] = [str(path) for path in (ROOT, ROOT / "examples", *sorted((ROOT / "tests").rglob(""))) if path.is_dir()]

import numpy as np
import processes
import simulation
import step_cases
import torch
from simulation import LAYOUTS, Layout

from megatron_pg.kernels import grpo_loss
from megatron_pg.lm_head import fp32_logits, grpo_head_loss, logprobs_and_entropy

words = str.split
OBJECTIVES = words("grpo dual_clip gspo gspo_token cispo sapo dppo_tv dppo_kl reinforce reinforce_is dro topr")
OBJECTIVES += words("topr_token ipo vespo gmpo")
RANKS = words(
    """
    dp2-constant dp2-token_mean-overlap tp2s-token_mean-tied pp2v-sample_mean-tied cp2t-prompt_mean cp2t-token_mean-gspo
    tp2s-constant-fused tp2s-token_mean-recompute-tied tp2-constant-fp32-dist-overlap pp2-prompt_mean-fused-tied
    dp2-constant-fused-dist-overlap ep2-token_mean-experts dp2t-token_mean-docs pp2v-constant-docs
    cp2t-sample_mean-gspo-recompute-docs
    """
)
RUNS = {
    "constant": "--loss-aggregation constant --loss-aggregation-divisor 6",
    "token_mean": "--loss-aggregation token_mean --pg-metrics with_entropy",
    "prompt_mean": "--loss-aggregation prompt_mean --pg-kl-coef 0 --pg-entropy-coef 0.01 --pg-denominator live",
    "fused": "--loss-aggregation constant --loss-aggregation-divisor 6 --pg-fused-head forward",
    "recompute": "--loss-aggregation token_mean --pg-fused-head recompute --pg-entropy-coef 0.02 --pg-grad-divisor 4",
    "fp32": "--fp32-lm-head --loss-aggregation prompt_mean --bf16",
    "documents": "--docs-per-step 100 --docs-per-step-policy at_least --loss-aggregation constant "
    "--loss-aggregation-divisor 6",
    "documents per token": "--docs-per-step 96 --loss-aggregation token_mean --micro-batch-size 8",
}


def bits(*values: object) -> str:
    """A hash of tensors, arrays, numbers and structures of them."""
    content = hashlib.blake2b(digest_size=12)
    _update(content, values)
    return content.hexdigest()


def _update(content, value: object) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous()
        content.update(f"{value.dtype}{tuple(value.shape)}".encode())
        content.update(value.reshape(value.shape or 1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        content.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, dict):
        for name in sorted(value):
            content.update(name.encode())
            _update(content, value[name])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _update(content, item)
    else:
        content.update(repr(value).encode())


def outcome(found) -> str:
    return bits(found.gradients, found.reported, found.metrics, found.num_nonfinite)


def layouts() -> Iterator[tuple[str, str]]:
    for layout, dtype in product(LAYOUTS, (torch.float64, torch.float32)):
        rng = random.Random(f"{layout}{dtype}")
        for _ in range(2):
            found = [
                step_cases.random_case(rng, mode, per_token=flag, dtype=dtype) for mode, flag in step_cases.CONTRACTS
            ]
            for number, each in enumerate(simulation.run_steps([c.step(layout, rng) for c in found], layout)):
                yield (
                    f"{layout} {dtype} {found[number].asked.aggregation} {found[number].asked.per_token}",
                    outcome(each),
                )


def objectives() -> Iterator[tuple[str, str]]:
    for layout, objective in product(LAYOUTS, OBJECTIVES):
        rng = random.Random(f"{objective}{layout}")
        found = [step_cases.random_objective_case(rng, objective) for _ in range(4)]
        for each in simulation.run_steps([c.step(layout, rng) for c in found], layout):
            yield f"{layout} {objective}", outcome(each)


def interpreted() -> Iterator[tuple[str, str]]:
    """Every objective by the Triton kernels, in the interpreter."""
    for layout, objective in product((Layout(), Layout(qkv_format="bshd")), OBJECTIVES):
        rng = random.Random(f"{objective}{layout}")
        case = step_cases.random_objective_case(rng, objective)
        name = next(f.name for f in dataclasses.fields(case.loss) if f.name in ("kernel", "impl"))
        case = dataclasses.replace(
            case,
            logits=[table.float() for table in case.logits],
            loss=dataclasses.replace(case.loss, **{name: "triton"}),
        )
        yield f"{layout} {objective}", outcome(simulation.run_steps([case.step(layout, rng)], layout)[0])


def _fields(rows: int, columns: int, seed: int) -> dict:
    torch.manual_seed(seed)
    mask = torch.rand(rows) > 0.4
    fields = {
        "targets": torch.randint(0, columns - 3, (rows,)),
        "old_logprobs": -torch.rand(rows, dtype=torch.float64) - 3,
        "advantages": torch.randn(rows, dtype=torch.float64),
        "weights": torch.rand(rows, dtype=torch.float64),
    }
    bad = {
        name: values if name == "targets" else values.masked_fill(~mask, torch.nan) for name, values in fields.items()
    }
    return bad | {"mask": mask, "clip_eps_low": 0.2, "clip_eps_high": 0.28}


def kernels() -> Iterator[tuple[str, str]]:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for number, (dtype, impl, vocab, tau) in enumerate(product(dtypes, ("torch", "triton"), (None, 45), (1.0, 0.7))):
        if dtype == torch.float64 and impl == "triton":
            continue
        options = _fields(33, 48, number) | {"vocab_size": vocab, "temperature": tau, "impl": impl}
        for trial in ({}, {"entropy": True, "grad_divisor": 4.0, "grad_scale": 2.0}):
            logits = (2 * torch.randn(33, 48)).to(dtype).requires_grad_()
            found = grpo_loss(logits, **options, **trial)
            (3 * found.loss).backward()
            values = found.loss, found.token_losses, found.logprobs, found.log_ratios, found.entropy, logits.grad
            yield f"{dtype} {impl} {vocab} {tau} {bool(trial)}", bits(*values)


def heads() -> Iterator[tuple[str, str]]:
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    for number, (dtype, impl, mode, backward) in enumerate(
        product(dtypes, ("torch", "triton"), ("forward", "recompute"), ("bf16", "split"))
    ):
        if dtype == torch.float64 and impl == "triton":
            continue
        for own in (False, True):
            options = _fields(12, 48, number) | {"mode": mode, "backward": backward, "impl": impl, "vocab_size": 45}
            hidden, weight = torch.randn(12, 16).to(dtype), torch.randn(48, 16).to(dtype)
            total = torch.zeros(48, 16, dtype=torch.promote_types(dtype, torch.float32)) if own else None
            leaves = hidden.requires_grad_(), weight.requires_grad_()
            found = grpo_head_loss(*leaves, **options, entropy=own, grad_scale=2.0, main_grad=total)
            (2 * found.loss).backward()
            yield (
                f"{dtype} {impl} {mode} {backward} {own}",
                bits(found.loss, found.logprobs, found.entropy, hidden.grad, weight.grad, total),
            )
            logits = fp32_logits(*leaves, backward=backward)
            logits.square().mean().backward()
            logprobs = logprobs_and_entropy(*leaves, options["targets"], backward=backward, impl=impl)
            sum(values.sum() for values in logprobs).backward()
            yield f"{dtype} {impl} {mode} {backward} {own} parts", bits(logits, *logprobs, hidden.grad, weight.grad)


def ranks() -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with processes.finished([processes.start(2, folder, RANKS)], timeout=900):
            pass
        for case, rank in product(RANKS, range(2)):
            for path in sorted(folder.glob(f"{case}.*{rank}.npz")):
                yield f"{path.name}", bits(dict(np.load(path)))
            yield f"{case} {rank}", bits(processes.report(folder, case, rank))


def runs() -> Iterator[tuple[str, str]]:
    short = "--warm-up-iters 2 --train-iters 6 --exact-match-interval 3 --lr-warmup-iters 1 --progress-interval 3"
    for name, flags in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"RUN_DIR": folder, "PYTHON": sys.executable}
            command = ["bash", str(ROOT / "examples/launch_cpu.sh"), *short.split(), *flags.split()]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, (name, (done.stdout + done.stderr)[-3000:])
            for number, line in enumerate((Path(folder) / "metrics.jsonl").read_text().splitlines()):
                yield f"{name} step {number + 1}", bits(line)
            rollouts = Path(folder) / "rollouts.jsonl"
            yield f"{name} rollouts", bits(rollouts.read_text() if rollouts.exists() else "none")


PARTS = (kernels, heads, interpreted, ranks, runs, objectives, layouts)


def main() -> None:
    command, *words = sys.argv[1:]
    if command == "write":
        write(Path(words[0]), words[1:])
        return
    before, after = (json.loads(Path(path).read_text()) for path in words)
    differing = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    print(
        f"{sum(map(len, before.values()))} results, {len(differing)} names differ", *sorted(differing)[:40], sep="\n  "
    )
    sys.exit(bool(differing))


def write(path: Path, names: list[str]) -> None:
    """Add the parts of these names, or all, to the record."""
    torch.set_num_threads(1)
    record = json.loads(path.read_text()) if path.exists() else {}
    for part in PARTS:
        if names and part.__name__ not in names:
            continue
        record = {name: found for name, found in record.items() if not name.startswith(f"{part.__name__}: ")}
        for name, value in part():
            record.setdefault(f"{part.__name__}: {name}", []).append(value)
        path.write_text(json.dumps(record, indent=0))
        print(part.__name__, sum(map(len, record.values())), flush=True)


if __name__ == "__main__":
    main()
