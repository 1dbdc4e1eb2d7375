"""Steps whose samples say what could be sampled: loss, terms and gradients in every layout, against logits of -inf in
float64."""

import random

import pytest
import term_cases
from head_simulation import through_the_fused_head  # noqa: F401, a fixture
from simulation import Layout
from step_cases import random_masked_case, worst_of

OBJECTIVES = ("grpo", "gspo", "cispo", "dppo_kl", "reinforce", "topr", "gmpo")
LAYOUTS = [
    Layout(microbatches=3),
    Layout(microbatches=2, qkv_format="bshd"),
    Layout(data=2, microbatches=2),
    Layout(context=2, microbatches=2),
    Layout(context=4, qkv_format="bshd"),
    Layout(tensor=2, microbatches=2),
    Layout(tensor=4),
    Layout(data=2, context=2, tensor=2, microbatches=2),
]
BOUND = 2e-12


IN_THE_HEAD = [(layout, "through_the_fused_head") for layout in (LAYOUTS[0], LAYOUTS[3], LAYOUTS[5], LAYOUTS[7])]


@pytest.fixture(params=[*((layout, None) for layout in LAYOUTS), *IN_THE_HEAD], ids=str)
def layout(request):
    """By stored logits, and in some layouts by the fused head."""
    layout, head = request.param
    if head:
        request.getfixturevalue(head)
    return layout


@pytest.mark.proof(
    "sampling masks: losses, terms and gradients within 2e-12 in every layout, by stored logits and the fused head"
)
def test_loss_and_gradient_are_those_of_logits_that_are_minus_infinity_outside(layout, full, evidence):
    rng, first = random.Random(f"{layout}"), 2 * LAYOUTS.index(layout)
    numbers = range(140) if full else range(first, first + 2)  # in the default tier two objectives for each layout
    cases = [random_masked_case(rng, OBJECTIVES[number % len(OBJECTIVES)]) for number in numbers]
    evidence(cases=len(cases), worst=worst_of(cases, layout, rng, BOUND), tolerance=BOUND)


@pytest.mark.proof(
    "sampling masks: KL and entropy terms on any tokens, without the objective too, equal loops in every layout"
)
@pytest.mark.usefixtures("rank_zero")
def test_terms_read_the_sampling_mask_at_any_token(layout, full, evidence):
    rng, count = random.Random(f"loss terms {layout}"), 100 if full else 1
    cases = [term_cases.random_masked_case(rng) for _ in range(count)]
    evidence(cases=count, worst=worst_of(cases, layout, rng, BOUND), tolerance=BOUND)
