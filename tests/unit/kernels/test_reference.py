"""The torch implementation of `grpo_loss` and the objective inside it."""

import math

import pytest
import torch

from megatron_pg.kernels import grpo_loss, may_be_overwritten
from megatron_pg.objectives import Parameters
from megatron_pg.objectives.grpo import clipped_surrogate
from megatron_pg.objectives.interface.tokens import ratio

CLIP = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}


def token(log_ratio: float, advantage: float) -> tuple[float, float]:
    """Loss and its derivative with respect to the log-probability."""
    d = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    loss = clipped_surrogate(ratio(d), torch.tensor([advantage], dtype=torch.float64), Parameters(**CLIP))
    loss.sum().backward()
    return float(loss.detach()), float(d.grad)


@pytest.mark.parametrize(
    ("r", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.1, 1.0, -1.1, -1.1),
        (1.5, 1.0, -1.28, 0.0),  # clipped high, A > 0: dead
        (1.5, -1.0, 1.5, 1.5),  # above the band, A < 0: live
        (0.5, -1.0, 0.8, 0.0),  # clipped low, A < 0: dead
        (0.5, 1.0, -0.5, -0.5),  # below the band, A > 0: live
        (3.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_clipped_surrogate(r, advantage, loss, gradient):
    found = token(math.log(r), advantage)
    assert found == pytest.approx((loss, gradient), abs=1e-14)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_exactly_on_a_bound_keeps_its_gradient(advantage):
    d = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    parameters = Parameters(clip_eps_low=0.0, clip_eps_high=0.0)
    loss = clipped_surrogate(ratio(d), torch.tensor([advantage], dtype=torch.float64), parameters)
    loss.sum().backward()
    assert d.grad.item() == -advantage


@pytest.mark.parametrize("log_ratio", [25.0, 88.0, 200.0, 1e4, -25.0, -1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_huge_log_ratios_give_finite_values_and_no_gradient(log_ratio, advantage):
    loss, gradient = token(log_ratio, advantage)
    assert math.isfinite(loss)
    assert gradient == 0.0


def example(tokens: int = 6, vocabulary: int = 9, dtype=torch.float64):
    logits = torch.randn(tokens, vocabulary, dtype=dtype)
    return {
        "logits": logits.requires_grad_(),
        "targets": torch.randint(0, vocabulary, (tokens,)),
        "old_logprobs": -torch.rand(tokens, dtype=torch.float64) - 1.5,
        "advantages": torch.randn(tokens, dtype=torch.float64),
        "weights": torch.rand(tokens, dtype=torch.float64),
    }


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_what_stands_at_masked_tokens_changes_no_bit(bad):
    mask = torch.tensor([True, False, True, True, False, True])
    clean = example()
    poisoned = {k: v.detach().clone() for k, v in clean.items()}
    poisoned["logits"][~mask] = bad
    for name in ("old_logprobs", "advantages", "weights"):
        poisoned[name][~mask] = bad
    poisoned["targets"][~mask] = -100
    poisoned["logits"].requires_grad_()
    results = []
    for fields in (clean, poisoned):
        out = grpo_loss(**fields, mask=mask, **CLIP, entropy=True, impl="torch")
        out.loss.backward()
        results.append((out.loss.detach(), out.token_losses, out.logprobs, out.log_ratios, out.entropy))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(clean["logits"].grad, poisoned["logits"].grad)
    assert not poisoned["logits"].grad[~mask].any()


def test_the_default_mask_is_where_the_weight_is_not_zero():
    fields = example()
    fields["weights"][2] = 0.0
    fields["logits"].data[2] = float("nan")
    assert torch.isfinite(grpo_loss(**fields, **CLIP, impl="torch").loss)


def test_a_fully_masked_batch_has_a_zero_loss_that_stays_on_the_graph():
    fields = example()
    out = grpo_loss(**fields, mask=torch.zeros(6, dtype=torch.bool), **CLIP, impl="torch")
    assert out.loss.item() == 0.0
    out.loss.backward()
    assert not fields["logits"].grad.any()


def test_bad_values_at_a_trained_token_stay_visible():
    fields = example()
    fields["logits"].data[1, 0] = float("nan")
    out = grpo_loss(**fields, **CLIP, impl="torch")
    assert torch.isnan(out.loss)
    assert torch.isnan(out.token_losses).tolist() == [False, True, False, False, False, False]


def test_grad_divisor_divides_the_gradient_and_not_the_loss():
    fields = example()
    plain = grpo_loss(**fields, **CLIP, impl="torch")
    plain.loss.backward()
    expected, fields["logits"].grad = fields["logits"].grad, None
    divided = grpo_loss(**fields, **CLIP, grad_divisor=8.0, impl="torch")
    divided.loss.backward()
    assert torch.equal(plain.loss, divided.loss)
    assert torch.equal(fields["logits"].grad * 8, expected)


def test_the_gradient_passes_gradcheck_away_from_the_bounds():
    fields = example()
    logits = fields.pop("logits")
    assert torch.autograd.gradcheck(lambda z: grpo_loss(z, **fields, **CLIP, impl="torch").loss, logits)


def test_bfloat16_logits_are_computed_in_float32():
    fields = example(dtype=torch.bfloat16)
    out = grpo_loss(**fields, **CLIP, impl="torch")
    out.loss.backward()
    assert out.logprobs.dtype == torch.float32
    assert fields["logits"].grad.dtype == torch.bfloat16


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
        ({"weights": torch.ones(5)}, "weights has shape (5,)"),
        ({"mask": torch.ones(6)}, "mask has dtype torch.float32, not bool"),
        ({"temperature": -1.0}, "temperature=-1.0 is not > 0"),
    ],
)
def test_wrong_input_is_a_named_error(change, message):
    with pytest.raises(ValueError) as error:
        grpo_loss(**(example() | CLIP | {"impl": "torch"} | change))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("logits", "options", "message"),
    [
        (torch.zeros(9, 6).t(), {}, "logits have stride 6 along the vocabulary"),
        (torch.zeros(6, 9, requires_grad=True), {"inplace": True}, "would overwrite a leaf tensor"),
        (torch.zeros(54, requires_grad=True).view(6, 9), {"inplace": True}, "would overwrite a leaf tensor"),
        (torch.zeros(1, 9).expand(6, 9), {"inplace": True}, "row stride 0 is below their 9 columns"),
        (torch.zeros(54).as_strided((6, 9), (4, 1)), {"inplace": True}, "row stride 4 is below their 9 columns"),
    ],
)
def test_what_the_kernels_cannot_read_is_a_named_error(logits, options, message):
    with pytest.raises(ValueError) as error:
        grpo_loss(**(example() | CLIP | {"impl": "triton", "logits": logits} | options))
    assert message in str(error.value)


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


def test_padding_columns_take_no_probability_and_no_gradient():
    fields = example(vocabulary=9)
    fields["targets"] %= 7
    narrow = fields | {"logits": fields["logits"].detach()[:, :7].clone().requires_grad_()}
    with torch.no_grad():
        fields["logits"][:, 7:] = 50.0
    wide_out = grpo_loss(**fields, **CLIP, vocab_size=7, entropy=True, impl="torch")
    narrow_out = grpo_loss(**narrow, **CLIP, entropy=True, impl="torch")
    wide_out.loss.backward()
    narrow_out.loss.backward()
    assert wide_out.logprobs.tolist() == pytest.approx(narrow_out.logprobs.tolist(), abs=1e-15)
    assert wide_out.entropy.tolist() == pytest.approx(narrow_out.entropy.tolist(), abs=1e-15)
    assert not fields["logits"].grad[:, 7:].any()
    assert torch.allclose(fields["logits"].grad[:, :7], narrow["logits"].grad, rtol=0, atol=1e-16)
