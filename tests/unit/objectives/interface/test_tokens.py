"""What an objective reads: fields of tokens, and averages over their sequences."""

import math
import random

import pytest
import torch
from objective_parts import SIZES, drawn, with_fields

from megatron_pg.batch.sequences import Sequences
from megatron_pg.kernels import Vocabulary, policy_gradient_loss
from megatron_pg.objectives.interface.tokens import ratio, unclamped


@pytest.mark.parametrize(
    ("terms", "missing"),
    [
        ({"kl_coef": 0.1, "kl_estimator": "k3"}, "ref_logprobs"),
        ({"opsm_anchor": "rollout_logprobs", "opsm_threshold": 0.0}, "rollout_logprobs"),
        ({"opsm_anchor": "rollout_logprobs", "opsm_threshold": 0.0}, "sequences"),
    ],
)
def test_a_missing_field_is_named(terms, missing):
    loss, _, _ = drawn("grpo", random.Random(1), **terms)
    loss = with_fields(loss, **{missing: None})
    logits = torch.randn(sum(SIZES), 5, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"{missing} is missing"):
        policy_gradient_loss(logits, loss, Vocabulary.of(5), impl="torch")


def test_averages_are_over_trained_tokens_and_padding_is_no_sequence():
    slots = torch.tensor([0, 0, 2, 2, 2, 1])  # the last but one slot is a sequence, 2 is padding; 1 has one token here
    sequences = Sequences(
        slots=slots,
        order=slots.argsort(stable=True),
        lengths=torch.bincount(slots, minlength=3),
        counts=torch.tensor([1.0, 4.0], dtype=torch.float64),
    )
    values = torch.tensor([[3.0, 0.0, 99.0, 99.0, 99.0, 8.0]], dtype=torch.float64)
    assert sequences.averages(values).tolist() == [[3.0, 3.0, 0.0, 0.0, 0.0, 2.0]]


def test_a_micro_batch_of_padding_alone_has_no_sequence():
    slots = torch.zeros(4, dtype=torch.int64)
    sequences = Sequences(slots=slots, order=torch.arange(4), lengths=torch.tensor([4]), counts=torch.zeros(0).double())
    assert sequences.averages(torch.full((2, 4), math.nan)).tolist() == [[0.0] * 4] * 2


@pytest.mark.parametrize("log_ratio", [0.0, 1.0, -19.0, 20.0, -20.0])
def test_a_ratio_is_the_exponential_and_its_own_gradient(log_ratio):
    d = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(ratio(d), d)
    assert ratio(d).item() == pytest.approx(math.exp(log_ratio), rel=1e-15) == gradient.item()


@pytest.mark.parametrize("log_ratio", [20.5, -20.5, 1e4, -1e4, math.inf, -math.inf])
def test_beyond_twenty_a_ratio_is_finite_and_neither_it_nor_what_it_multiplies_has_a_gradient(log_ratio):
    d = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    value = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    assert ratio(d).item() == pytest.approx(math.exp(math.copysign(20, log_ratio)), rel=1e-15)
    assert unclamped(value, d).item() == 3.0
    gradients = torch.autograd.grad(ratio(d) * unclamped(value, d), (d, value))
    assert [gradient.item() for gradient in gradients] == [0, 0]
    assert torch.autograd.grad(unclamped(value, torch.tensor(-20.0)), value)[0] == 1
