"""Weights of tokens and turns of responses: loss, gradient and every term equal the oracle in every layout."""

import random

import pytest
import weight_cases
from simulation import LAYOUTS, Layout
from step_cases import worst_of

from megatron_pg.declarations.objectives import OBJECTIVES

FULL = {1: 10, 2: 7, 4: 5, 8: 4}  # blocks of 20 cases of a layout, by the size of its world: 1,160
LIMIT = 1e-12
pytestmark = pytest.mark.usefixtures("rank_zero")


@pytest.mark.proof("Weights and turns: loss terms over layouts, float64: within 1e-12 of the oracle")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_weighted_terms_equal_the_oracle(layout: Layout, full, evidence):
    for block in range(FULL[layout.world_size] if full else 1):
        rng = random.Random(f"weighted terms {layout} {block}")
        found = [weight_cases.random_term_case(rng) for _ in range(20 if full else 4)]
        evidence(cases=len(found), worst=worst_of(found, layout, rng, LIMIT), tolerance=LIMIT)


@pytest.mark.proof(
    "Weights and turns: every objective and correction over layouts, float64: within 1e-12 of the oracle"
)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_weighted_objectives_equal_the_oracle(objective, full, evidence):
    layouts = LAYOUTS if full else LAYOUTS[list(OBJECTIVES).index(objective) % 4 :: 4]
    for layout in layouts:
        rng = random.Random(f"weighted {objective} {layout}")
        found = [weight_cases.random_objective_case(rng, objective) for _ in range(8 if full else 2)]
        evidence(cases=len(found), worst=worst_of(found, layout, rng, LIMIT), tolerance=LIMIT)
