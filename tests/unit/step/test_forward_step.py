"""The step without a launch. On real ranks: tests/ranks/test_forward_step.py."""

import argparse
import types

import pytest
import torch

from megatron_pg.args import add_arguments
from megatron_pg.step.errors import ContractError
from megatron_pg.step.forward_step import PolicyGradientStep
from megatron_pg.step.settings import LossSettings


@pytest.mark.parametrize("words", [["--pg-fused-head"], ["--fp32-lm-head"], ["--fp32-lm-head", "--pg-fused-head"], []])
def test_logits_without_a_loss_have_the_precision_of_the_loss(words):
    """What a sampler reads: rounded, they would put the ratio of an on-policy step off 1."""
    layer = types.SimpleNamespace(_forward_impl=lambda *, input, weight, **_: input @ weight.t())
    model = types.SimpleNamespace(output_layer=layer, compute_language_model_loss=print)
    args = add_arguments(argparse.ArgumentParser()).parse_args(words)
    PolicyGradientStep(LossSettings.from_args(args)).attach(model)
    states, weight = (torch.randn(3, 1, 8, dtype=torch.bfloat16), torch.randn(5, 8, dtype=torch.bfloat16))
    options = dict.fromkeys(("bias", "grad_output_buffer", "sequence_parallel", "tp_group"), None)
    logits = layer._forward_impl(input=states, weight=weight, **options)
    exact = states.double() @ weight.double().t()
    assert logits.dtype == (torch.float32 if words else torch.bfloat16)
    assert ((logits.double() - exact).abs().max() < 1e-5) == bool(words)


def test_a_model_without_a_loss_of_its_own_is_refused_by_name():
    args = add_arguments(argparse.ArgumentParser()).parse_args([])
    with pytest.raises(ContractError, match="gave a Linear, which has no compute_language_model_loss"):
        PolicyGradientStep(LossSettings.from_args(args)).attach(torch.nn.Linear(1, 1))
