"""Open steps: rollouts in any order, split and number of adds give the gradient and metrics of the closed step."""

import random
from dataclasses import replace

import open_oracle
import open_simulation
import pytest
import step_cases
import torch
from compare import gradient_error
from open_simulation import Arrivals, arrivals_of
from simulation import LAYOUTS, Layout
from step_cases import CONTRACTS, StepCase

from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.plan.errors import ScheduleError
from megatron_pg.plan.open_plan import OpenPlan

LIMIT = 1e-12
EVERY = [*LAYOUTS, Layout(data=3, microbatches=2), Layout(data=4, microbatches=3, qkv_format="bshd")]
FULL = {1: 160, 2: 110, 3: 80, 4: 70, 8: 50}  # cases of a layout, by the size of its world: about 1,000


def expected_of(case: StepCase, rng: random.Random) -> int:
    """A guess of N: right, too small or too large."""
    return rng.choice([open_oracle.number(case.documents, case.asked) or 1, 1, 64, rng.randint(1, 300)])


def errors_of(steps: list[Arrivals], layout: Layout) -> float:
    """Worst error of gradient, losses and metrics, against the oracle of the closed step and that of open steps."""
    worst = 0.0
    for number, (step, found) in enumerate(zip(steps, open_simulation.run_steps(steps, layout), strict=True)):
        errors = step.case.errors(found) | {"open": gradient_error(found.gradients, open_gradients(step))}
        assert all(error <= LIMIT for error in errors.values()), (layout, number, step.case.asked, errors)
        worst = max(worst, *errors.values())
    return worst


def open_gradients(step: Arrivals) -> list[torch.Tensor]:
    """[n, V] of every sample by `open_oracle`."""
    case = step.case
    adds = [[i for cell in cells for i in cell] for of_rank in step.adds for cells in of_rank]
    rest = [i for cells in step.rest for cell in cells for i in cell]
    documents = [[case.documents[i] for i in add] for add in adds], [case.documents[i] for i in rest]
    order = [i for add in adds for i in add] + rest
    found = dict(zip(order, open_oracle.gradients(*documents, case.asked, step.expected), strict=True))
    tables = []
    for i, (sample, table) in enumerate(zip(case.samples, case.logits, strict=True)):
        first = step_cases.first_row(sample)
        whole = torch.zeros_like(table, dtype=torch.float64)
        whole[first : first + len(found[i])] = torch.from_numpy(found[i])
        tables.append(whole)
    return tables


@pytest.mark.proof("Open steps over layouts, both loss scalings, float64: gradient and every metric within 1e-12")
@pytest.mark.parametrize("layout", EVERY, ids=lambda layout: layout.name)
def test_an_open_step_has_the_gradient_and_metrics_of_the_closed_one(layout, full, evidence):
    rng = random.Random(f"open {layout}")
    contracts = (
        CONTRACTS * (FULL[layout.world_size] // len(CONTRACTS)) if full else CONTRACTS[EVERY.index(layout) % 2 :: 2]
    )
    cases = [step_cases.random_case(rng, aggregation, per_token=flag) for aggregation, flag in contracts]
    steps = [arrivals_of(case, layout, rng, expected_of(case, rng)) for case in cases]
    evidence(cases=len(steps), worst=errors_of(steps, layout), tolerance=LIMIT)
