"""KL estimators and the entropy bonus, by enumeration of a small vocabulary."""

import math

import pytest
import torch
from loss_terms import kl_and_entropy
from objective_parts import ESTIMATORS, build

from megatron_pg.batch import TokenFields
from megatron_pg.declarations.corrections import KL_ESTIMATORS
from megatron_pg.kernels import LossTerms, PolicyLoss, Vocabulary, policy_gradient_loss


@pytest.mark.parametrize(
    ("name", "distance"),
    [("k1", 0.3080), ("k2", 0.0), ("k3", 0.0947), ("abs", 0.0869), ("k1_weighted", 0.0), ("k3_weighted", 0.0)],
)
def test_expected_gradient_of_kl_estimators_by_enumeration(name, distance):
    logits = torch.tensor([1, 0, -1, 0.5], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0, 0.5, 0, -0.5], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    divergence = (logprobs.exp() * (logprobs - ref)).sum()
    reverse = (ref.exp() * (ref - logprobs)).sum()
    p = logprobs.detach().exp()
    estimate = (p * ESTIMATORS[name](logprobs - ref, logprobs - logprobs.detach())).sum()
    right, found, other = (
        torch.autograd.grad(v, logits, retain_graph=True)[0] for v in (divergence, estimate, reverse)
    )
    assert float((found - right).norm()) == pytest.approx(distance, abs=5e-5)
    flawed = KL_ESTIMATORS[name].flaw is not None
    assert flawed == (distance > 0)
    if name == "k3":
        assert torch.allclose(found, other, atol=1e-15)


def test_the_weighted_estimators_are_right_off_policy_too():
    logits = torch.tensor([1, 0, -1, 0.5], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0, 0.5, 0, -0.5], dtype=torch.float64).log_softmax(0)
    old = torch.tensor([0.6, 0.2, -0.6, 0.4], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    divergence = (logprobs.exp() * (logprobs - ref)).sum()
    (right,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    for name, distance in (("k1_weighted", 0.0), ("k3_weighted", 0.0), ("k2", 0.0762)):
        estimate = (old.exp() * ESTIMATORS[name](logprobs - ref, logprobs - old)).sum()
        (found,) = torch.autograd.grad(estimate, logits, retain_graph=True)
        assert float((found - right).norm()) == pytest.approx(distance, abs=5e-5)


def test_the_penalty_acts_where_the_policy_is_far_below_the_reference():
    for name, gradient in (("k3", 1 - math.exp(20)), ("k3_weighted", -25.0), ("k2", -25.0)):
        x = torch.tensor([-25.0], dtype=torch.float64, requires_grad=True)
        value = ESTIMATORS[name](x, x - x.detach())
        value.sum().backward()
        assert math.isfinite(value.item())
        assert float(x.grad) == pytest.approx(gradient)


def test_the_entropy_bonus_moves_towards_uniform_along_the_exact_gradient():
    logits = torch.tensor([[2.0, 0.0, -1.0, 0.5]], dtype=torch.float64, requires_grad=True)
    token = torch.ones(1, dtype=torch.float64)
    terms = LossTerms(objective=build("reinforce"), further=kl_and_entropy(entropy_coef=0.25))
    fields = TokenFields(
        targets=torch.tensor([1]), mask=token.bool(), old_logprobs=-token, advantages=0 * token, weights=token
    )
    out = policy_gradient_loss(logits, PolicyLoss(terms, fields), Vocabulary.of(4), impl="torch")
    p = logits.detach().softmax(1)
    entropy = -(p * p.log()).sum()
    out.loss.backward()
    assert float(out.loss.detach()) == pytest.approx(-0.25 * float(entropy), rel=1e-14)
    assert torch.allclose(logits.grad, 0.25 * p * (p.log() + entropy), rtol=1e-13)
