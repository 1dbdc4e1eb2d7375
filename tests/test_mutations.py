"""The invariance check notices every seeded mistake, and nothing else."""

import contextlib
import random

import mutants
import oracle
import pytest
import simulation
import torch
from mutants import LAYOUT, MUTANTS
from simulation import EPS_HIGH, EPS_LOW
from support import divisor_of, relative_error
from test_partition_invariance import random_case

from megatron_pg.reducers import REDUCERS

CASES = 16  # two of each aggregation and contract: a mistake of one mode shows in one case of four
TEMPERATURE = 0.7


def is_noticed(seed: int) -> bool:
    """Whether loss, gradient or a metric of one random step differs from the oracle."""
    rng = random.Random(seed)
    aggregation, per_token = sorted(REDUCERS)[seed % 4], seed // 4 % 2 == 1
    divisor = divisor_of(aggregation, 37.0)
    samples, logits, expected = random_case(rng, TEMPERATURE)
    clip = {"eps_low": EPS_LOW, "eps_high": EPS_HIGH, "temperature": TEMPERATURE}
    objective, gradients = oracle.objective(expected, aggregation, divisor=divisor, **clip)
    scale = oracle.weighted_absolute(expected, aggregation, divisor=divisor, **clip)
    loss = simulation.settings(aggregation, per_token=per_token, divisor=divisor, temperature=TEMPERATURE)
    found = simulation.run_step(samples, logits, LAYOUT, loss, rng)
    wanted = torch.tensor([v for g in gradients for row in g for v in row], dtype=torch.float64)
    metrics = oracle.all_metrics(expected, aggregation, divisor=divisor, **clip)
    return (
        not abs(found.reported - objective) <= 1e-12 * scale
        or not relative_error(torch.cat([g.flatten() for g in found.gradients]), wanted) <= 1e-12
        or any(found.metrics.get(name) != pytest.approx(value, rel=1e-11, abs=1e-13) for name, value in metrics.items())
    )


@pytest.mark.parametrize("name", MUTANTS)
def test_a_seeded_mistake_is_noticed(name):
    for seed in range(CASES):
        with MUTANTS[name]():
            try:
                noticed = is_noticed(seed)
            except (RuntimeError, ValueError, AssertionError):
                noticed = True
        if noticed:
            return
    pytest.fail(f"{name} went unnoticed in {CASES} cases")


def test_without_a_mistake_nothing_is_noticed():
    assert [seed for seed in range(CASES) if is_noticed(seed)] == []


def test_every_mutant_leaves_the_package_as_it_was():
    for enter in MUTANTS.values():
        with contextlib.suppress(RuntimeError), enter():
            pass
    assert not is_noticed(0)
    assert len(mutants.MUTANTS) >= 18
