"""The single-pass kernel behind a test at its first use, its own work done in torch; and where it is asked for one."""

import warnings

import pytest
import single_pass as in_torch
import torch
from loss_terms import kl_and_entropy
from objective_parts import build

from megatron_pg.batch.fields import TokenFields
from megatron_pg.declarations.single_pass import path_of
from megatron_pg.kernels.policy_loss import LossTerms, PolicyLoss
from megatron_pg.kernels.triton import self_test
from megatron_pg.kernels.vocabulary import Vocabulary

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()


@pytest.mark.parametrize(
    ("capability", "triton", "takes", "is_tried", "text"),
    [
        ((9, 0), "3.6.0", True, True, "a single pass where a row fits"),
        ((9, 0), "3.8.0", True, True, "a single pass where a row fits"),
        ((9, 0), "3.7.1", True, True, "a single pass where a row fits"),
        ((9, 0), "3.9.0", True, True, "a single pass where a row fits"),
        ((9, 0), "3.10.0", True, False, "tried with Triton 3.6 to 3.9 on compute capability 9, not 3.10.0 on 9.0"),
        ((10, 0), "3.6.1", True, False, "a test at its first use agrees"),
        ((8, 9), "3.7.1", True, False, "not 3.7.1 on 8.9"),
        ((9, 0), "3.5.1", False, False, "multi-pass kernels: the single-pass kernel needs Triton 3.6 or later, and"),
        ((7, 5), "3.6.0", False, False, "needs compute capability 8.0 or later, and this is 7.5"),
    ],
)
def test_the_path_says_why(capability, triton, takes, is_tried, text):
    path = path_of(capability, triton)
    assert (path.takes, path.is_tried) == (takes, is_tried)
    assert text in path.text


def loss_of(name: str, **terms) -> PolicyLoss:
    fields = TokenFields(**dict.fromkeys(("targets", "old_logprobs", "advantages", "weights", "mask"), torch.ones(2)))
    return PolicyLoss(LossTerms(objective=build(name), grad_divisor=2.0, further=kl_and_entropy(**terms)), fields)


BOTH = {"kl_coef": 0.1, "kl_estimator": "k3_weighted", "entropy_coef": 0.2}
VOCABULARY = Vocabulary.of(80, temperature=0.7, vocab_size=64)


@pytest.fixture
def launches(monkeypatch):
    monkeypatch.setattr(self_test, "_found", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a chip")
    return in_torch.in_torch(monkeypatch)


@pytest.mark.skipif(CUDA, reason="the kernel itself runs")
@pytest.mark.parametrize("terms", [{}, BOTH], ids=["alone", "with terms"])
@pytest.mark.parametrize("name", ["grpo", "cispo", "dppo_kl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_agrees_is_taken_and_asked_once(launches, name, terms, dtype):
    logits = torch.zeros(3, 80, dtype=dtype)
    for _ in range(2):
        assert self_test.agrees(logits, loss_of(name, **terms), VOCABULARY, entropy=True)
    assert [launch["gradients"].dtype for launch in launches] == list(dict.fromkeys([dtype, torch.bfloat16]))
    assert {launch["rows"] for launch in launches} == {7}
    assert self_test.agrees(logits, loss_of(name, **terms), VOCABULARY, entropy=False)
    assert len(launches) == 2 * len({dtype, torch.bfloat16})


@pytest.mark.skipif(CUDA, reason="the kernel itself runs")
@pytest.mark.parametrize("what", ["gradients", "results", "loss", "NaN", "spills"])
def test_a_kernel_that_does_not_is_left_out_with_a_warning(launches, monkeypatch, what):
    compute = in_torch._compute

    def wrongly(k):
        compute(k)
        if what == "gradients":
            k.gradients[5, 17] += 0.02 * k.gradients.abs().max()
        elif what == "results":
            k.results[2, 5] += 0.001 * k.results[2].abs().max()
        elif what == "loss":
            k.results[1] += 1e-4 * k.results[1].abs()
        elif what == "NaN":
            k.results[1, 2] = float("nan")

    monkeypatch.setattr(in_torch, "_compute", wrongly)
    if what == "spills":
        launch = self_test.single_pass.loss_and_gradient
        spilling = lambda *given, **named: (launch(*given, **named)[0], 8)  # noqa: E731
        monkeypatch.setattr(self_test.single_pass, "loss_and_gradient", spilling)
    told = {
        "gradients": "another gradient",
        "results": "another logprobs",
        "loss": "another loss",
        "NaN": "another loss",
        "spills": "keeps 8 values in memory",
    }
    with pytest.warns(UserWarning, match=f"{told[what]}.* on a chip: the multi-pass kernels do its work"):
        assert not self_test.agrees(torch.zeros(3, 80), loss_of("grpo"), VOCABULARY, entropy=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert not self_test.agrees(torch.zeros(3, 80), loss_of("grpo"), VOCABULARY, entropy=True)


@pytest.mark.skipif(CUDA, reason="the kernel itself runs")
def test_rounding_of_terms_that_cancel_is_no_flaw(launches, monkeypatch):
    compute = in_torch._compute

    def rounding(k):
        compute(k)
        k.results[1] += 1e-5 * k.results[1].abs()

    monkeypatch.setattr(in_torch, "_compute", rounding)
    for columns in range(64, 1024, 112):
        loss = loss_of("grpo", **(BOTH if columns % 32 else {}))
        assert self_test.agrees(torch.zeros(3, columns), loss, Vocabulary.of(columns), entropy=True), columns


@pytest.mark.skipif(not CUDA, reason="of the kernel on the chip")
@pytest.mark.parametrize("columns", [512, 19008, 37984, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_agrees_here(columns, dtype, monkeypatch):
    monkeypatch.setattr(self_test, "_found", {})
    logits = torch.zeros(3, columns, dtype=dtype, device="cuda")
    vocabulary = Vocabulary.of(columns, temperature=0.7)
    assert self_test.agrees(logits, loss_of("grpo", **BOTH), vocabulary, entropy=True)
