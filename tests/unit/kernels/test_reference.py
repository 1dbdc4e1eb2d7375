"""What `grpo_loss` takes and refuses. Values and gradients: `triton/test_loss` and `test_readers`."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_pg.batch import TokenFields
from megatron_pg.batch.sequences import Sequences
from megatron_pg.kernels import (
    LossTerms,
    PolicyLoss,
    Vocabulary,
    checks,
    cross_entropy,
    grpo_loss,
    may_be_overwritten,
    policy_gradient_loss,
)
from megatron_pg.kernels.label_logprobs import label_logprobs
from megatron_pg.lm_head import Head, policy_gradient_head_loss
from megatron_pg.objectives import objective_of

CLIP = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}
KERNELS = {"impl": "triton"}
INPLACE = KERNELS | {"inplace": True}


def example(tokens: int = 6, vocabulary: int = 9, dtype=torch.float64):
    logits = torch.randn(tokens, vocabulary, dtype=dtype)
    return {
        "logits": logits.requires_grad_(),
        "targets": torch.randint(0, vocabulary, (tokens,)),
        "old_logprobs": -torch.rand(tokens, dtype=torch.float64) - 1.5,
        "advantages": torch.randn(tokens, dtype=torch.float64),
        "weights": torch.rand(tokens, dtype=torch.float64),
    }


def test_the_default_mask_is_where_the_weight_is_not_zero():
    fields = example()
    fields["weights"][2] = 0.0
    fields["logits"].data[2] = float("nan")
    assert torch.isfinite(grpo_loss(**fields, **CLIP, impl="torch").loss)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"impl": "triton"}, "impl='triton' computes in float32 and would lose float64's digits"),
        ({"vocab_size": 10}, "vocab_size=10 is not in 1 .. 9"),
        ({"grad_scale": -1.0}, "grad_scale=-1.0 is not > 0"),
        ({"logits": torch.zeros(9)}, "logits have shape (9,)"),
        ({"targets": torch.zeros(6)}, "targets have shape (6,) and dtype torch.float32"),
        ({"logits": torch.zeros(6, 0)}, "the vocabulary has 0 columns on this rank, so there is no distribution"),
        ({"logits": torch.zeros(6, 0), "impl": "triton"}, "the vocabulary has 0 columns on this rank"),
        ({"impl": "cuda"}, "impl='cuda' is not one of triton, torch"),
        ({"inplace": True}, "inplace=True cannot be done"),
        ({"grad_divisor": 0.0}, "grad_divisor=0.0 is not > 0"),
        ({"grad_divisor": float("inf")}, "grad_divisor=inf is not > 0 and finite"),
        ({"grad_scale": float("nan")}, "grad_scale=nan is not > 0 and finite"),
        ({"weights": torch.ones(5)}, "weights has shape (5,)"),
        ({"mask": torch.ones(6)}, "mask has dtype torch.float32, not bool"),
        ({"temperature": -1.0}, "temperature=-1.0 is not > 0"),
        ({"temperature": float("inf")}, "temperature=inf is not > 0 and finite"),
        ({"logits": torch.tensor(0.0)}, "the vocabulary has 0 columns on this rank"),
        (KERNELS | {"logits": torch.zeros(9, 6).t()}, "logits have stride 6 along the vocabulary"),
        (INPLACE | {"logits": torch.zeros(6, 9, requires_grad=True)}, "would overwrite a leaf tensor"),
        (INPLACE | {"logits": torch.zeros(54, requires_grad=True).view(6, 9)}, "would overwrite a leaf tensor"),
        (INPLACE | {"logits": torch.zeros(1, 9).expand(6, 9)}, "row stride 0 is below their 9 columns"),
        (INPLACE | {"logits": torch.zeros(54).as_strided((6, 9), (4, 1))}, "row stride 4 is below their 9 columns"),
    ],
)
def test_wrong_input_is_a_named_error(change, message):
    with pytest.raises(ValueError) as error:
        grpo_loss(**(example() | CLIP | {"impl": "torch"} | change))
    assert message in str(error.value)


def loss_of(objective: str, **fields) -> PolicyLoss:
    known = example(dtype=torch.float32)
    mask = torch.ones(6, dtype=torch.bool)
    given = {name: values for name, values in known.items() if name != "logits"} | {"mask": mask} | fields
    return PolicyLoss(LossTerms(objective=objective_of(objective, **CLIP)), TokenFields(**given))


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("columns", [8, 10])
def test_a_vocabulary_of_another_width_is_refused(impl, columns):
    """Kernels would read the next row, or leave columns out."""
    logits, loss, vocabulary = torch.randn(6, 9), loss_of("grpo"), Vocabulary.of(columns)
    targets, message = loss.fields.targets, f"have 9 columns on this rank, and the vocabulary {columns}"
    with pytest.raises(ValueError, match=f"^logits {message}"):
        policy_gradient_loss(logits, loss, vocabulary, impl=impl)
    with pytest.raises(ValueError, match=f"^logits {message}"):
        label_logprobs(logits, targets, vocabulary, impl=impl)
    with pytest.raises(ValueError, match=f"^logits {message}"):
        cross_entropy(logits, targets, torch.tensor([0]), vocabulary, impl=impl)
    with pytest.raises(ValueError, match=f"^logits of the weight {message}"):
        policy_gradient_head_loss(torch.randn(6, 4), torch.randn(9, 4), loss, vocabulary, Head(impl=impl))


def test_an_unknown_implementation_of_the_cross_entropy_is_refused():
    with pytest.raises(ValueError, match=r"^impl='tritn' is not one of triton, torch"):
        cross_entropy(torch.randn(6, 9), torch.zeros(6).long(), torch.tensor([0]), Vocabulary.of(9), impl="tritn")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_gradient_divisor_leaves_an_infinite_loss_as_it_is(impl, value):
    """With a divisor it was NaN in torch."""
    policy_loss = loss_of("grpo", advantages=torch.full((6,), -value))
    for divisor in (1.0, 8.0):
        divided = replace(policy_loss, terms=replace(policy_loss.terms, grad_divisor=divisor))
        for logits in (torch.randn(6, 9), torch.randn(6, 9).requires_grad_()):
            loss = policy_gradient_loss(logits, divided, Vocabulary.of(9), impl=impl).loss.detach()
            torch.testing.assert_close(loss, torch.tensor(value), equal_nan=True)


@pytest.mark.parametrize("name", ["slots", "order"])
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_sequences_of_other_tokens_are_refused(impl, name):
    known = {"slots": torch.zeros(6).long(), "order": torch.arange(6)} | {name: torch.zeros(5).long()}
    sequences = Sequences(**known, lengths=torch.tensor([6, 0]), counts=torch.tensor([6.0]).double())
    with pytest.raises(ValueError, match=rf"^sequences.{name} has shape \(5,\) for \(6,\) targets"):
        policy_gradient_loss(torch.randn(6, 9), loss_of("gspo", sequences=sequences), Vocabulary.of(9), impl=impl)


def test_the_stride_of_a_single_column_is_arbitrary():
    """`contiguous` leaves it as it is."""
    fields = example(vocabulary=1, dtype=torch.float32)
    fields["logits"] = torch.randn(1, 6).t().requires_grad_()
    assert fields["logits"].contiguous().stride() == (1, 6)
    found = grpo_loss(**fields, **CLIP, impl="triton")
    found.loss.backward()
    assert not found.logprobs.any()
    assert not fields["logits"].grad.any()


def test_settings_are_checked_once_and_refused_every_time(monkeypatch):
    asked, check = [], checks._check_factor
    monkeypatch.setattr(checks, "_check_factor", lambda name, value: (asked.append(name), check(name, value)))
    options = CLIP | {"clip_eps_high": 0.123, "impl": "torch"}  # settings of this test alone
    for _ in range(3):
        grpo_loss(**example(), **options)
    assert asked == ["grad_divisor", "grad_scale", "grad_scale", "grad_scale"]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^grad_divisor=-2.0 is not > 0"):
            grpo_loss(**example(), **options, grad_divisor=-2.0)


def test_a_gradient_may_take_the_place_of_logits_whose_rows_have_memory_of_their_own():
    logits = torch.zeros(6, 9)
    for yes in (logits, logits[:, :5], logits[::2], logits.as_strided((1, 9), (0, 1)), logits[:0]):
        assert may_be_overwritten(yes)
    for no in (logits[:1].expand(6, 9), logits.view(54).as_strided((6, 9), (8, 1)), logits.requires_grad_()):
        assert not may_be_overwritten(no)


def test_triton_without_a_gpu_is_refused_and_nothing_falls_back(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="impl='triton' cannot run on cpu"):
        grpo_loss(**(example(dtype=torch.float32) | CLIP | {"impl": "triton"}))
