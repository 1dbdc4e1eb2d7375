"""Every objective, with random corrections, KL and entropy terms, denominators and aggregations, over random layouts.

Loss, its terms and the gradient of every logit equal an independent oracle in float64, however the step is cut: that is
correctness and partition invariance in one.
"""

import random

import objective_cases
import pytest
import simulation
from simulation import Layout

from megatron_pg.objectives import OBJECTIVES

LAYOUTS = [
    Layout(),
    Layout(microbatches=3, qkv_format="bshd"),
    Layout(data=2, microbatches=2),
    Layout(context=2, microbatches=2),
    Layout(context=2, microbatches=2, qkv_format="bshd"),
    Layout(context=4, padding=1),
    Layout(context=4, qkv_format="bshd"),
    Layout(tensor=2, microbatches=2),
    Layout(data=2, context=2, tensor=2, microbatches=2),
]
LIMIT = 1e-12


@pytest.mark.proof(
    "objectives × aggregation × correction × KL × entropy over layouts, float64: within 1e-12 of the oracle"
)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_terms_and_gradients_equal_the_oracle_in_every_layout(objective, full, evidence):
    worst, count = 0.0, 62 if full else 5
    for layout in LAYOUTS:
        rng = random.Random(f"{objective}{layout}")
        found = [objective_cases.random_case(rng, objective) for _ in range(count)]
        outcomes = simulation.run_steps([case.step(layout, rng) for case in found], layout)
        errors = [case.error(outcome) for case, outcome in zip(found, outcomes, strict=True)]
        bad = {f"{layout} case {i}: {found[i].expected}": e for i, e in enumerate(errors) if not e <= LIMIT}
        assert not bad, bad
        worst = max(worst, *errors)
    evidence(cases=count * len(LAYOUTS), worst=worst)
