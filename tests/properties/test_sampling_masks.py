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


def worst(layout: Layout, count: int) -> float:
    rng = random.Random(f"{layout}")
    cases = [random_masked_case(rng, OBJECTIVES[number % len(OBJECTIVES)]) for number in range(count)]
    return worst_of(cases, layout, rng, BOUND)


@pytest.mark.proof(
    "sampling masks: losses, terms and gradients within 2e-12 in every layout, by stored logits and the fused head"
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_loss_and_gradient_are_those_of_logits_that_are_minus_infinity_outside(layout, full, evidence):
    count = 140 if full else 7
    evidence(cases=count, worst=worst(layout, count), tolerance=BOUND)


@pytest.mark.proof(
    "sampling masks: losses, terms and gradients within 2e-12 in every layout, by stored logits and the fused head"
)
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[3], LAYOUTS[5], LAYOUTS[7]], ids=str)
@pytest.mark.usefixtures("through_the_fused_head")
def test_the_fused_head_too(layout, full, evidence):
    count = 140 if full else 7
    evidence(cases=count, worst=worst(layout, count), tolerance=BOUND)


def worst_of_terms(layout: Layout, count: int) -> float:
    rng = random.Random(f"loss terms {layout}")
    return worst_of([term_cases.random_masked_case(rng) for _ in range(count)], layout, rng, BOUND)


@pytest.mark.proof(
    "sampling masks: KL and entropy terms on any tokens, without the objective too, equal loops in every layout"
)
@pytest.mark.usefixtures("rank_zero")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_terms_read_the_sampling_mask_at_any_token(layout, full, evidence):
    count = 100 if full else 10
    evidence(cases=count, worst=worst_of_terms(layout, count), tolerance=BOUND)


@pytest.mark.proof(
    "sampling masks: KL and entropy terms on any tokens, without the objective too, equal loops in every layout"
)
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[3], LAYOUTS[5], LAYOUTS[7]], ids=str)
@pytest.mark.usefixtures("rank_zero", "through_the_fused_head")
def test_terms_read_the_sampling_mask_at_any_token_in_the_fused_head(layout, full, evidence):
    count = 100 if full else 10
    evidence(cases=count, worst=worst_of_terms(layout, count), tolerance=BOUND)
