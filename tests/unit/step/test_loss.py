"""What the step's check is told of a micro-batch's loss."""

import dataclasses
import math
import random

import pytest
import simulation
import torch
from loss_terms import kl_and_entropy
from samples import make_sample

from megatron_pg.batch import pack, slice_batch
from megatron_pg.step.loss import microbatch_loss

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
