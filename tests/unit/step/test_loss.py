"""What the step's check is told of a micro-batch's loss."""

import dataclasses
import math
import random

import pytest
import simulation
import torch
from loss_terms import kl_and_entropy
from samples import make_sample, plain_sample

from megatron_pg.batch import pack, slice_batch
from megatron_pg.declarations.choices import HEAD_MODES
from megatron_pg.lm_head.output_layer import HeadCall
from megatron_pg.plan.settings import LossSettings, metrics_of
from megatron_pg.step.loss import microbatch_head_loss, microbatch_loss

OPTIONAL = ("ref_logprobs",)


@pytest.mark.parametrize("name", [None, "old_logprobs", "advantages", "ref_logprobs"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_trained_token_with_a_term_that_is_not_finite_is_counted_and_found(name, bad):
    """Whichever term it is: the policy's, or the KL term alone, whose reference nothing else reads."""
    sample = make_sample(prompt_length=2, mask=[1, 0, 1, 1], rng=random.Random(0), optional=OPTIONAL)
    if name:
        getattr(sample, name)[1:3] = bad  # response tokens 1, which is masked, and 2
    batch = pack([sample], qkv_format="thd")
    local = slice_batch(batch, {"weights": batch.loss_mask.double()}, cp_rank=0, cp_size=1)
    terms = dataclasses.replace(simulation.GRPO, further=kl_and_entropy(kl_coef=0.1, kl_estimator="k1"))
    logits = torch.randn(local.num_positions, 12, dtype=torch.float64)
    _, found = microbatch_loss(
        logits, local.fields, simulation.settings("sample_mean", per_token=False, terms=terms), None
    )
    assert found.nonfinite.tolist() == (
        [1.0, 3.0, 0.0] if name else [0.0, math.inf, 0.0]
    )  # position 3 predicts response token 2


SETS = [[3, 7], [], [1, 2], [9, 0, 4]]  # what could be sampled, of each response token


def gradients(settings: LossSettings, sets: list[list[int]] | None) -> tuple[torch.Tensor, ...]:
    """Loss and gradients of hidden states and weight, in float64."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(5, 1, 8, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(12, 8, generator=generator, dtype=torch.float64))
    sample = plain_sample(4, tokens=[5, 3, 6, 2, 9], sampling_mask=sets, old_logprobs=[-0.5] * 4)
    batch = pack([sample], qkv_format="thd")
    masks = {"sampling_mask": batch.loss_mask} if sets else {}
    local = slice_batch(batch, {"weights": batch.loss_mask.double(), **masks}, cp_rank=0, cp_size=1)
    assert (local.fields.sampling_mask is None) == (sets is None)
    total, _ = microbatch_head_loss(HeadCall(hidden, weight, None, False), local.fields, local.trained, settings)
    return total.detach(), *torch.autograd.grad(total, [hidden, weight])


@pytest.mark.parametrize("mode", HEAD_MODES)
@pytest.mark.parametrize("sets", [None, SETS], ids=["plain", "sampling masks"])
def test_a_mode_that_was_chosen_computes_what_it_computes_where_it_is_given(mode, sets):
    """With sampling masks forward takes the place of scaled_exp, which a user's own choice of it does not allow."""
    plain = simulation.settings("sample_mean", per_token=False)
    plain = dataclasses.replace(plain, metrics=metrics_of("basic", plain.terms, plain.correction))
    chosen = dataclasses.replace(plain, head_mode=mode, head_choice="auto: …")
    in_force = "forward" if sets and mode == "scaled_exp" else mode
    given = dataclasses.replace(plain, head_mode=in_force)
    assert all(map(torch.equal, gradients(chosen, sets), gradients(given, sets)))
    others = {name: gradients(dataclasses.replace(plain, head_mode=name), sets) for name in ("forward", "recompute")}
    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(*others.values(), strict=True))
    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(gradients(chosen, sets), others["forward"], strict=True))
    if sets and mode == "scaled_exp":
        with pytest.raises(ValueError, match="too coarse for log-probabilities over a sampling mask"):
            gradients(dataclasses.replace(plain, head_mode="scaled_exp"), sets)
