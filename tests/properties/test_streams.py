"""Steps with streams: every further loss has its own tokens and denominators, in every layout.

Loss, the gradient of every logit and what every stream reports equal an independent oracle in float64.
"""

import random

import pytest
import simulation
import stream_cases
from simulation import Layout

LAYOUTS = [
    Layout(),
    Layout(microbatches=3, qkv_format="bshd"),
    Layout(data=2, microbatches=2),
    Layout(context=2, microbatches=2),
    Layout(context=2, microbatches=2, qkv_format="bshd"),
    Layout(context=4, padding=1),
    Layout(tensor=2, microbatches=2),
    Layout(data=2, context=2, tensor=2, microbatches=2),
]
LIMIT = 1e-12

pytestmark = pytest.mark.usefixtures("rank_zero")


def worst_of(found: list[stream_cases.Case], layout: Layout, rng: random.Random) -> float:
    """Worst error of the cases in a layout; what misses the limit is named."""
    outcomes = simulation.run_steps([case.step(layout, rng) for case in found], layout)
    errors = [case.errors(outcome) for case, outcome in zip(found, outcomes, strict=True)]
    bad = {
        f"{layout} case {i}, {subject}": (error, found[i].flags)
        for i, own in enumerate(errors)
        for subject, error in own.items()
        if not error <= LIMIT
    }
    assert not bad, bad
    return max(max(own.values()) for own in errors)


@pytest.mark.proof("streams over layouts, float64: loss, gradient and every stream's sums within 1e-12 of the oracle")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_loss_gradients_and_sums_of_every_stream_equal_the_oracle(layout, full, evidence):
    rng, count = random.Random(f"streams {layout}"), 750 if full else 20
    for begin in range(0, count, 50):
        found = [stream_cases.random_case(rng) for _ in range(min(50, count - begin))]
        evidence(cases=len(found), worst=worst_of(found, layout, rng))
