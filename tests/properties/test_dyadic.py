"""With numbers that float32 holds exactly, every partition gives the same sum to the last bit.

Losses are integers within ±64 and every denominator is a power of two, so that each partial sum is a multiple of one
power of two and below 2^24 of them. A wrong count, weight or slice then shows without any tolerance.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import step_oracle
import torch
from step_oracle import Document
from torch import Tensor

from megatron_pg.cp_utils import padded_length, zigzag_index
from megatron_pg.declarations.aggregations import AGGREGATIONS
from megatron_pg.plan.facts import COLUMNS
from megatron_pg.plan.plan import plan_from_table
from megatron_pg.plan.table import LocalTable, PlanRule

DIVISOR = 64.0
TRAINED = 256  # tokens of the step
PARTITIONS_PER_STEP = 50


@dataclass(frozen=True)
class DyadicStep:
    """One row per sample: trained tokens, rollout and prompt, as the ranks exchange them, and the sample's losses."""

    table: Tensor  # [S, 3] int64
    losses: list[Tensor]  # [length] float32 per sample, at the positions that predict; 0 where nothing is trained

    def exact(self, mode: str) -> float:
        """Σ w·ℓ by the oracle's denominators, in fractions."""
        nothing, rows = np.empty(0), self.table.tolist()
        documents = [Document(nothing, nothing, nothing, rollout_id=r, prompt_id=p) for _, r, p in rows]
        deltas = step_oracle.denominators(documents, [count for count, *_ in rows], mode, DIVISOR)
        sums = [sum(map(Fraction, losses.tolist())) for losses in self.losses]
        return float(sum(total / Fraction(delta) for total, delta in zip(sums, deltas, strict=True)))


def halve(total: int, parts: int, rng: random.Random) -> list[int]:
    """Powers of two that add up to `total`, itself one."""
    found = [total]
    while len(found) < parts:
        largest = rng.choice([i for i, value in enumerate(found) if value > 1])
        half = found.pop(largest) // 2
        found += [half, half]
    return found


def dyadic_step(rng: random.Random, *, gaussian: bool = False) -> DyadicStep:
    """Prompts and rollouts are powers of two in number and in size; samples of a rollout are cut anyhow."""
    rows, losses = [], []
    prompts = halve(TRAINED, rng.choice([1, 2, 4]), rng)
    shares = halve(rng.choice([4, 8]), len(prompts), rng)
    for prompt, (tokens, share) in enumerate(zip(prompts, shares, strict=True)):
        for rollout, count in enumerate(halve(tokens, share, rng)):
            cut = rng.randint(0, count)
            for trained in rng.choice([[count], [cut, count - cut], [count, 0]]):
                rows.append([trained, 100 * prompt + rollout, prompt])
                losses.append(loss_row(trained, rng, gaussian=gaussian))
    return DyadicStep(torch.tensor(rows), losses)


def loss_row(trained: int, rng: random.Random, *, gaussian: bool) -> Tensor:
    """A sample's row of losses with a prompt before and holes between its trained tokens."""
    draw = (lambda: rng.gauss(0, 20)) if gaussian else (lambda: float(rng.randint(-64, 64)))
    row = [0.0] * rng.randint(0, 5) + [draw() for _ in range(trained)] + [0.0] * rng.randint(1, 3)
    for _ in range(rng.randint(0, 3)):
        row.insert(rng.randint(0, len(row)), 0.0)
    return torch.tensor(row)


def partitioned_sum(step: DyadicStep, mode: str, rng: random.Random) -> Tensor:
    """[] float32 sum of the step cut at random into data ranks, micro-batches and context-parallel shards."""
    order = list(range(len(step.losses)))
    rng.shuffle(order)
    bounds = sorted(rng.randint(0, len(order)) for _ in range(rng.randint(0, 3)))
    cp_size, microbatches, pieces = rng.choice([1, 2, 3, 4]), rng.randint(1, 4), []
    rule = PlanRule(aggregation=mode, divisor=DIVISOR)
    keys, tokens = step.table[order][:, [1, 2]], step.table[order][:, [0, 0]]  # every trained token is kept
    facts = torch.zeros(len(order), COLUMNS, dtype=torch.int64)
    for first, last in zip([0, *bounds], [*bounds, len(order)], strict=True):
        whole = LocalTable(keys, tokens, facts, True, True, TRAINED, TRAINED, TRAINED, keys[first:last])
        weights = (1.0 / plan_from_table(whole, rule, error=None, group=None).denominators).float()
        mine = list(zip(order[first:last], weights, strict=True))
        cells = [mine[k::microbatches] for k in range(microbatches)]
        pieces += [piece for cell in cells for piece in shard_sums(step, cell, cp_size)]
    rng.shuffle(pieces)
    return torch.stack(pieces).cumsum(0)[-1]


def shard_sums(step: DyadicStep, cell: Sequence[tuple[int, Tensor]], cp_size: int) -> list[Tensor]:
    """The sum of every context-parallel rank over a micro-batch, packed document by document."""
    if not cell:
        return [torch.zeros(())]
    lengths = [padded_length(len(step.losses[i]), cp_size) for i, _ in cell]
    documents = [
        torch.nn.functional.pad(step.losses[i] * weight, (0, length - len(step.losses[i])))
        for (i, weight), length in zip(cell, lengths, strict=True)
    ]
    row = torch.cat(documents)
    return [row[zigzag_index(lengths, cp_rank=rank, cp_size=cp_size)].sum() for rank in range(cp_size)]


@pytest.mark.proof("dyadic partitions, bit-equal in float32")
@pytest.mark.parametrize("mode", sorted(AGGREGATIONS.keys() - {"turn_mean"}))
def test_every_partition_of_a_dyadic_step_has_the_same_bits(mode, full, evidence):
    rng = random.Random(mode)
    cuts = PARTITIONS_PER_STEP if full else 10
    for _ in range(100 if full else 2):
        step = dyadic_step(rng)
        expected = torch.tensor(step.exact(mode), dtype=torch.float32)
        assert float(expected) == step.exact(mode)
        sums = torch.stack([partitioned_sum(step, mode, rng) for _ in range(cuts)])
        assert torch.equal(sums, expected.expand(cuts))
        evidence(cases=cuts)


def test_gaussian_losses_do_not_stay_bit_equal():
    """Control: the comparison sees a last bit."""
    rng = random.Random(0)
    step = dyadic_step(rng, gaussian=True)
    sums = {float(partitioned_sum(step, "token_mean", rng)) for _ in range(20)}
    assert len(sums) > 3


@pytest.mark.parametrize("mode", sorted(AGGREGATIONS.keys() - {"turn_mean"}))
def test_the_sum_of_a_dyadic_step_is_not_zero_and_differs_between_steps(mode):
    rng = random.Random(1)
    assert len({dyadic_step(rng).exact(mode) for _ in range(5)} - {0.0}) == 5
