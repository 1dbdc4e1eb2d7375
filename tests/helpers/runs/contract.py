"""Megatron's own scaling of a returned loss, over random layouts: every form of the contract must come out exact.

    python tests/helpers/runs/contract.py CASES

runs on the megatron-core that is importable and prints the figures as JSON. The schedule's part is Megatron's real
`forward_step_calc_loss`; DDP's factor (1/(D·C) with the flag off; FSDP2's with the flag on too) and finalize's division
by Σn are applied here.
"""

import json
import math
import random
import sys
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace

from cpu import cpu_megatron

cpu_megatron.enable()

import megatron.core
import torch
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from torch import Tensor

from megatron_pg.step.loss_scaling import LossScaling

SIZE = 3  # parameters of the toy model: the loss of a micro-batch is linear in them


@dataclass
class Cut:
    """A step cut over D data-parallel ranks, C context-parallel ranks and K micro-batches."""

    data: int
    context: int
    microbatches: int
    weights: list[Tensor]  # ∇S of every micro-batch on every rank
    counts: list[int]  # its positions; 0 where it is empty

    @classmethod
    def draw(cls, rng: random.Random) -> "Cut":
        data, context, microbatches = rng.randint(1, 4), rng.choice([1, 1, 2, 4]), rng.randint(1, 4)
        counts = [rng.choice([0, 1, rng.randint(1, 5000)]) for _ in range(data * context * microbatches)]
        counts[rng.randrange(len(counts))] += 1  # a step with no trained token is refused before it gets here
        weights = [torch.tensor([rng.gauss(0, 1) for _ in range(SIZE)], dtype=torch.float64) * (n > 0) for n in counts]
        return cls(data, context, microbatches, weights, counts)


def gradient(cut: Cut, returned, *, per_token: bool, averages: bool = False) -> tuple[Tensor, Tensor]:
    """Gradient after schedule, wrapper and finalize, and the summed reports; `returned(S, n)` is the loss function's
    tuple."""
    parameters = torch.linspace(0.5, 1.5, SIZE, dtype=torch.float64, requires_grad=True)
    config = SimpleNamespace(
        timers=None, calculate_per_token_loss=per_token, num_moe_experts=None, mtp_num_layers=None, grad_scale_func=None
    )
    reports, total_count = [], 0
    for weight, count in zip(cut.weights, cut.counts, strict=True):
        loss, counted = forward_step_calc_loss(
            None,
            weight @ parameters,
            lambda value, count=count: returned(value, count),
            config,
            None,
            False,
            cut.microbatches,
            reports,
            cp_group_size=cut.context,
            is_last_stage=True,
        )
        loss.backward()
        total_count += int(counted)
    scale = max(total_count, 1) if per_token and not averages else cut.data * cut.context
    return parameters.grad / scale, torch.stack([report["pg_loss"] for report in reports]).sum(dim=0)


def error_of(cut: Cut, *, per_token: bool, num_positions: int | None, averages: bool = False) -> float:
    """Worst error of gradient and reported objective, relative to the sum of magnitudes."""
    scaling = LossScaling(
        per_token=per_token,
        num_microbatches=cut.microbatches,
        data_parallel_size=cut.data,
        context_parallel_size=cut.context,
        num_positions=num_positions,
        averages=averages,
    )
    returned = partial(_outputs, scaling)
    found, report = gradient(cut, returned, per_token=per_token, averages=averages)
    table = torch.stack(cut.weights)
    expected, scale = table.sum(dim=0), table.abs().sum()
    objective = table @ torch.linspace(0.5, 1.5, SIZE, dtype=torch.float64)
    reported = (report[0] / report[1] - objective.sum()).abs() / objective.abs().sum()
    error = float(torch.stack([(found - expected).abs().max() / scale, reported]).max())
    return error if math.isfinite(error) else float("inf")


def _outputs(scaling: LossScaling, total: Tensor, count: int) -> tuple:
    return scaling.outputs(total, num_positions=count)


def is_exact(cut: Cut, returned, *, per_token: bool) -> bool:
    found, _ = gradient(cut, returned, per_token=per_token)
    table = torch.stack(cut.weights)
    return bool(((found - table.sum(dim=0)).abs().max() / table.abs().sum()) <= 1e-14)


def wrong_pairs(cut: Cut) -> list[bool]:
    """Whether the two refused combinations happen to be exact for this cut: a 3-tuple without the flag, a 2-tuple with
    it."""
    report = {"pg_loss": torch.ones(2, dtype=torch.float64)}
    total = cut.microbatches * cut.data * cut.context
    return [
        is_exact(cut, lambda s, n: (s * total, torch.tensor(n, dtype=torch.int32), report), per_token=False),
        is_exact(cut, lambda s, n: (s * sum(cut.counts), report), per_token=True),
    ]


def check(cases: int, seed: int = 5) -> dict[str, object]:
    """Figures over random cuts, each under both contracts, with every forward counted as 1 and by its positions, and
    averaged."""
    rng = random.Random(seed)
    worst, exact_by_luck = 0.0, [0, 0]
    for _ in range(cases):
        cut = Cut.draw(rng)
        for per_token, num_positions in product((True, False), (None, sum(cut.counts))):
            worst = max(worst, error_of(cut, per_token=per_token, num_positions=num_positions))
        for per_token in (True, False):
            worst = max(worst, error_of(cut, per_token=per_token, num_positions=None, averages=True))
        exact_by_luck = [a + b for a, b in zip(exact_by_luck, wrong_pairs(cut), strict=True)]
    return {
        "release": megatron.core.__shortversion__,
        "cases": 6 * cases,
        "worst": worst,
        "lucky": exact_by_luck,
        "seeded": seeded_errors(),
    }


def seeded_errors() -> list[float]:
    """Errors of a step whose factors are wrong by one rank, and of one whose loss is NaN: none may pass."""
    rng = random.Random(1)
    bad = Cut.draw(rng)
    weights = [torch.ones(SIZE, dtype=torch.float64)] * 2
    wrong = Cut(data=1, context=1, microbatches=1, weights=weights, counts=[1, 1])  # two micro-batches, said to be one
    bad.weights[0] = bad.weights[0] * float("nan")
    return [error_of(cut, per_token=False, num_positions=None) for cut in (wrong, bad)]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(check(int(sys.argv[1]))) + "\n")
