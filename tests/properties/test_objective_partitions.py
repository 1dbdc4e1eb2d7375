"""Every objective, with random corrections, KL and entropy terms, denominators and aggregations, over random layouts.

Loss, its terms and the gradient of every logit equal an independent oracle in float64, however the step is cut: that is
correctness and partition invariance in one.
"""

import dataclasses
import random

import pytest
import simulation
import torch
from compare import gradient_error
from head_simulation import through_the_fused_head  # noqa: F401, a fixture
from simulation import Layout
from step_cases import StepCase, random_objective_case, root_length_reducer, worst_of

from megatron_pg.declarations.objectives import OBJECTIVES

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


def worst_over_layouts(objective: str, count: int, seed: str = "") -> float:
    """Worst error of `count` random cases in every layout."""
    errors = []
    for layout in LAYOUTS:
        rng = random.Random(f"{objective}{layout}{seed}")
        cases = [random_objective_case(rng, objective) for _ in range(count)]
        errors.append(worst_of(cases, layout, rng, LIMIT))
    return max(errors)


@pytest.mark.proof(
    "objectives × aggregation × correction × KL × entropy over layouts, float64: within 1e-12 of the oracle"
)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_terms_and_gradients_equal_the_oracle_in_every_layout(objective, full, evidence):
    count = 62 if full else 2
    evidence(cases=count * len(LAYOUTS), worst=worst_over_layouts(objective, count), tolerance=LIMIT)


@pytest.mark.proof("Fused head: every objective and term over layouts, float64: within 1e-12 of the oracle")
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.usefixtures("through_the_fused_head")
def test_the_fused_head_equals_the_oracle_in_every_layout(objective, full, evidence):
    count = 30 if full else 1
    evidence(cases=count * len(LAYOUTS), worst=worst_over_layouts(objective, count, "fused"), tolerance=LIMIT)


@pytest.mark.parametrize(
    ("correction", "low", "high"),
    [("tis", 0.9, 1.1), ("icepop", 0.9, 1.1), ("seq_mask_tis", 0.5, 2.0), ("opsm", None, -10.0)],
)
@pytest.mark.parametrize("head", [None, "through_the_fused_head"])
def test_gspo_has_the_gradient_of_its_corrected_loss_in_every_layout(correction, low, high, head, request):
    rng = random.Random(3)  # sequences of 9, 2 and 2 trained tokens among others
    case = random_objective_case(rng, "gspo")
    asked = dataclasses.replace(
        case.asked, correction=correction, correction_low=low, correction_high=high, denominator="scheduled"
    )
    both_signs = [torch.linspace(-1, 1.1, len(s.advantages)).double() for s in case.samples]  # opsm rejects by token
    samples = [dataclasses.replace(s, advantages=a) for s, a in zip(case.samples, both_signs, strict=True)]
    case = StepCase.of(samples, case.logits, asked)
    assert any(len({*factors}) > 1 for factors in case.wanted.terms["rl"].factors if factors is not None)
    if head:
        request.getfixturevalue(head)
    for layout in LAYOUTS[4::4]:  # CP2 in padded rows, DP2 x CP2 x TP2
        worst_of([case], layout, rng, LIMIT)


@pytest.mark.parametrize("objective", ["grpo", "gspo", "reinforce"])
@pytest.mark.parametrize("per_token", [False, True])
def test_a_custom_reducer_and_the_terms_beside_it_do_not_depend_on_the_layout(objective, per_token):
    rng = random.Random(f"{objective}{per_token}")
    case = random_objective_case(rng, objective)
    asked = dataclasses.replace(
        case.asked,
        aggregation="sample_mean",
        divisor=None,
        correction="tis",
        correction_low=0.5,
        correction_high=1.2,
        denominator="scheduled",
        kl_coef=0.3,
        entropy_coef=0.2,
        aux_aggregation="default",
        per_token=per_token,
    )
    case = StepCase.of(case.samples, case.logits, asked)
    loss = dataclasses.replace(case.loss, reducer=root_length_reducer)
    whole, *cut = (
        simulation.run_step(case.samples, case.logits, layout, loss, rng)
        for layout in (Layout(), Layout(context=4, qkv_format="bshd"), Layout(data=2, context=2, microbatches=2))
    )
    assert whole.metrics["kl_loss"] == pytest.approx(case.wanted.kl_loss, rel=1e-12)  # no reducer weighs it
    assert whole.metrics["entropy_loss"] == pytest.approx(case.wanted.entropy_loss, rel=1e-12)
    for found in cut:
        assert gradient_error(found.gradients, whole.gradients) <= LIMIT
        assert found.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-12)
