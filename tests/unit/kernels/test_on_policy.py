"""Without old log-probabilities the model being trained is the sampling policy: the ratio is 1 and has a gradient."""

from dataclasses import replace

import pytest
import torch
from loss_terms import kl_and_entropy

from megatron_pg.batch import Sequences, TokenFields
from megatron_pg.batch.fields import TermFields
from megatron_pg.declarations.corrections import PENALTY
from megatron_pg.declarations.loss_terms import LossTerm
from megatron_pg.kernels import LossTerms, PolicyLoss, Vocabulary, policy_gradient_loss
from megatron_pg.objectives import objective_of

pytestmark = pytest.mark.usefixtures("on_the_device", "small_tiles")
ROWS, COLUMNS = 6, 13
ONES = TermFields(mask=torch.ones(ROWS, dtype=torch.bool))
OBJECTIVES = {
    "grpo": {"clip_eps_low": 0.2, "clip_eps_high": 0.2},
    "gspo": {"clip_eps_low": 3e-4, "clip_eps_high": 4e-4},
    "reinforce": {},
}


def fields(old: torch.Tensor | None) -> TokenFields:
    mask = torch.tensor([True, True, False, True, True, True])
    slots = torch.tensor([0, 0, 0, 1, 1, 1])
    return TokenFields(
        targets=torch.tensor([3, 0, 10, 7, 7, 12]),
        old_logprobs=old,
        advantages=torch.tensor([1.0, 1.0, 5.0, -2.0, -2.0, -2.0]),
        weights=torch.tensor([0.2, 0.2, 0.0, 0.1, 0.1, 0.1]),
        mask=mask,
        sequences=Sequences(
            slots=slots,
            order=slots.argsort(stable=True),
            lengths=torch.tensor([3, 3, 0]),
            counts=torch.tensor([2.0, 3.0]),
        ),
    )


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_is_that_of_old_log_probabilities_that_are_the_models_own(name, impl):
    table = torch.randn(ROWS, COLUMNS)
    terms = LossTerms(objective=objective_of(name, **OBJECTIVES[name]))
    own = table.double().log_softmax(-1).gather(1, fields(None).targets[:, None])[:, 0].float()
    found = []
    for old in (None, own):
        logits = (table * 1.0).requires_grad_()
        result = policy_gradient_loss(logits * 1.0, PolicyLoss(terms, fields(old)), Vocabulary.of(COLUMNS), impl=impl)
        result.loss.backward()
        found.append((result, logits.grad))
    (on_policy, first), (given, second) = found
    assert torch.equal(on_policy.log_ratios, torch.zeros(ROWS))
    torch.testing.assert_close(on_policy.loss, given.loss, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(first, second, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_penalty_from_the_anchor_is_0_where_the_model_is_the_anchor(impl):
    penalty = LossTerm(name=PENALTY, kind=PENALTY, weight=0.5, on="rl", aggregation="policy", estimator="abs")
    table, terms, found = torch.randn(ROWS, COLUMNS), LossTerms(objective=objective_of("reinforce_is")), []
    for loss_terms in ((), (penalty,)):
        logits, loss = (table * 1.0).requires_grad_(), PolicyLoss(replace(terms, further=loss_terms), fields(None))
        result = policy_gradient_loss(logits * 1.0, loss, Vocabulary.of(COLUMNS), impl=impl)
        result.loss.backward()
        found.append((result.loss.detach(), logits.grad))
    (without, first), (with_penalty, second) = found
    assert torch.equal(without, with_penalty)
    torch.testing.assert_close(first, second, rtol=2e-5, atol=2e-6)


def test_the_kernels_of_whole_losses_are_left_out():
    """They read old log-probabilities, average over sequences once, and have one mask and one term of a kind."""
    terms, known, some = (
        LossTerms(objective=objective_of("grpo", **OBJECTIVES["grpo"])),
        fields(torch.zeros(ROWS)),
        ONES,
    )
    bonus, more = kl_and_entropy(entropy_coef=0.1), LossTerm(name="more", kind="entropy", on="rl")
    thinned = {"opsm_anchor": "old_logprobs", "opsm_threshold": 0.1}
    gspo = objective_of("gspo", **OBJECTIVES["gspo"])
    kernels = {
        "alone": (terms, known),
        "a bonus": (replace(terms, further=bonus), known),
        "opsm": (replace(terms, **thinned), known),
        "sequences": (replace(terms, objective=gspo), known),
    }
    torch_alone = {
        "on policy": (terms, fields(None)),
        "opsm and sequences": (replace(terms, objective=gspo, **thinned), known),
        "two of a kind": (replace(terms, further=(*bonus, more)), known),
        "supervised": (replace(terms, further=(LossTerm(name="sft", kind="ce"),)), known),
        "a bonus of its own tokens": (replace(terms, further=bonus), replace(known, terms={"entropy": some})),
        "an objective of some": (terms, replace(known, terms={"rl": some})),
    }
    assert PolicyLoss(terms, known).token_kernel.load().__name__ == "grpo"
    assert [what for what, loss in kernels.items() if PolicyLoss(*loss).token_kernel is None] == []
    assert [what for what, loss in torch_alone.items() if PolicyLoss(*loss).token_kernel is not None] == []
