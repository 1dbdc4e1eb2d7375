"""Every objective, with random corrections, KL and entropy terms, denominators and aggregations, over random layouts.

Loss, its terms and the gradient of every logit equal an independent oracle in float64, however the step is cut: that is
correctness and partition invariance in one.
"""

import random

import pytest
import simulation
from head_simulation import through_the_fused_head  # noqa: F401, a fixture
from simulation import Layout
from step_cases import random_objective_case, worst_of

from megatron_pg.declarations.objectives import OBJECTIVES

LAYOUTS = [*simulation.LAYOUTS, Layout(context=4, qkv_format="bshd")]
LIMIT = 1e-12


def worst_over_layouts(objective: str, counts: dict[Layout, int], seed: str = "") -> float:
    """Worst error of as many random cases in each layout."""
    errors = []
    for layout, count in counts.items():
        rng = random.Random(f"{objective}{layout}{seed}")
        cases = [random_objective_case(rng, objective) for _ in range(count)]
        errors.append(worst_of(cases, layout, rng, LIMIT))
    return max(errors)


@pytest.mark.proof(
    "objectives × aggregation × correction × KL × entropy over layouts, float64: within 1e-12 of the oracle"
)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_terms_and_gradients_equal_the_oracle_in_every_layout(objective, full, evidence):
    """In the default tier an objective has two cases in each layout, one on four and on eight ranks."""
    counts = {layout: 62 if full else 2 if layout.world_size < 4 else 1 for layout in LAYOUTS}
    evidence(cases=sum(counts.values()), worst=worst_over_layouts(objective, counts), tolerance=LIMIT)


@pytest.mark.proof("Fused head: every objective and term over layouts, float64: within 1e-12 of the oracle")
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.usefixtures("through_the_fused_head")
def test_the_fused_head_equals_the_oracle_in_every_layout(objective, full, evidence):
    """In the default tier an objective has one case in each third layout."""
    layouts = LAYOUTS if full else LAYOUTS[list(OBJECTIVES).index(objective) % 3 :: 3]
    counts = dict.fromkeys(layouts, 30 if full else 1)
    worst = worst_over_layouts(objective, counts, "fused")
    evidence(cases=sum(counts.values()), worst=worst, tolerance=LIMIT)
