"""Divergences over a teacher's top-k tokens: launches, extremes and errors. Values and gradients: `test_readers`."""

import math
from dataclasses import replace

import pytest
import torch
from compare import scalar_error, tensor_error
from launch_count import counted
from reader_cases import TOPK as NAMES
from reader_cases import ReaderCase

from megatron_pg.kernels import LossTerms, PolicyLoss, Vocabulary, policy_gradient_loss
from megatron_pg.lm_head import Head, policy_gradient_head_loss
from megatron_pg.objectives import objective_of

pytestmark = pytest.mark.usefixtures("small_tiles")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TABLE = r"for \(6,\) targets. Give \[T, K\] with K of 1 or more"
LIMITS = {"torch": 1e-12, "triton": 4e-6}  # of float64 and float32


def run(case: ReaderCase, logits: torch.Tensor, impl: str, *, inplace: bool = False, temperature: float = 0.8):
    """Loss and gradient; the logits have a column of padding."""
    leaf = logits.clone().requires_grad_()
    vocabulary = Vocabulary.of(logits.shape[1], temperature=temperature, vocab_size=case.size)
    rows = leaf * 1
    out = policy_gradient_loss(rows, case.policy_loss, vocabulary, impl=impl, inplace=inplace)
    if not inplace:
        assert torch.equal(rows.detach().nan_to_num(7.0), logits.nan_to_num(7.0)), "the ids are left hidden"
    out.loss.backward()
    return out, leaf.grad


@pytest.mark.usefixtures("on_the_device")
@pytest.mark.parametrize("inplace", [False, True])
def test_whoever_saved_the_logits_gets_an_error_where_the_forward_leaves_ids_hidden(inplace):
    """Between forward and backward the logits hold -inf at the ids, where the gradient may overwrite them."""
    torch.manual_seed(3)
    case = ReaderCase.draw(NAMES[0], 9, NAMES[1], rows=6, width=3)
    leaf = torch.randn(6, 10, requires_grad=True)
    rows = leaf * 1
    other = rows.square().sum()
    policy_gradient_loss(rows, case.policy_loss, Vocabulary.of(10, vocab_size=9), impl="triton", inplace=inplace)
    if inplace:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.backward()
    else:
        other.backward()
        assert torch.equal(leaf.grad, 2 * leaf.detach())


@pytest.mark.usefixtures("on_the_device")
def test_what_is_launched_with_one_divergence_beside_the_objective(monkeypatch):
    """22, where torch on [T, K] would make 200."""
    case = ReaderCase.draw("topk_jsd", 32, rows=4)
    objective = objective_of("grpo", clip_eps_low=0.2, clip_eps_high=0.28)
    term = replace(case.policy_loss.terms.further[0], on="rl")
    fields = replace(case.policy_loss.fields, mask=case.policy_loss.fields.objective_mask, terms={})
    policy_loss = PolicyLoss(LossTerms(objective=objective, further=(term,)), fields)
    leaf = torch.randn(4, 33, device=DEVICE, requires_grad=True)
    with counted(monkeypatch) as found:
        rows = leaf.view_as(leaf)
        out = policy_gradient_loss(rows, policy_loss, Vocabulary.of(33, vocab_size=32), entropy=True)
        torch.autograd.grad(out.loss, leaf)
    kernels = {name: n for name, n in found.items() if name.endswith("_kernel")}
    before = {"take_and_hide_kernel": 1, "statistics_kernel": 1, "put_kernel": 2, "combine_kernel": 1}
    behind = {"surrogate_kernel": 1, "divergence_kernel": 1, "coefficients_kernel": 1, "gradient_kernel": 1}
    assert kernels == before | behind
    assert sum(found.values()) == 22


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.usefixtures("on_the_device")
@pytest.mark.parametrize("gap", [12.0, 25.0, 60.0])
def test_a_small_tail_keeps_its_digits(impl, gap):
    """1 - Q would have none of them: in float32 from a tail of 1e-7 on."""
    torch.manual_seed(1)
    case = ReaderCase.draw("topk_forward_kl", 20, "topk_reverse_kl", rows=4, width=3)
    terms = replace(case.policy_loss.terms, objective=objective_of("reinforce"))
    case = replace(case, policy_loss=replace(case.policy_loss, terms=terms))
    logits = torch.randn(4, 21, dtype=torch.float64 if impl == "torch" else torch.float32)
    for t in range(4):
        logits[t, [int(token) for token in case.policy_loss.fields.teacher_topk.ids[t] if token >= 0]] += gap
    logits[~case.policy_loss.fields.mask] = math.nan
    out, gradient = run(case, logits, impl, temperature=1.0)
    wanted = logits.double().requires_grad_()
    loss = case.expected(wanted, 1.0)
    loss.backward()
    assert scalar_error(float(out.loss.detach()), float(loss.detach()), 100.0) <= LIMITS[impl]
    for t in case.policy_loss.fields.mask.nonzero()[:, 0].tolist():
        assert tensor_error(2 * gradient[t], wanted.grad[t]) <= LIMITS[impl]  # 2: of `ReaderCase`


def test_a_logit_of_minus_infinity_in_the_set_costs_the_reverse_divergence_nothing():
    case = ReaderCase.draw("topk_reverse_kl", 8, rows=4, width=3)
    logits = torch.randn(4, 9, dtype=torch.float64)
    token = int(case.policy_loss.fields.teacher_topk.ids[0, 1])
    logits[0, token] = -math.inf
    fields = case.policy_loss.fields
    targets = fields.targets.clamp(min=0).masked_fill(fields.targets == token, 0)
    loss = PolicyLoss(case.policy_loss.terms, replace(fields, targets=targets))
    _, gradient = run(replace(case, policy_loss=loss), logits, "torch")
    assert torch.isfinite(gradient[0]).all()
    assert gradient[0, token] == 0


@pytest.mark.usefixtures("on_the_device")
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_an_id_beyond_the_vocabulary_is_seen(impl):
    """In its own row: no other one's logits or gradient are where such a column would lie."""
    case = ReaderCase.draw("topk_forward_kl", 48, rows=6, is_shared=True)
    logits, found = torch.randn(6, 64, dtype=torch.float64 if impl == "torch" else torch.float32), []
    for tokens in ((), (48, 64 + 10)):  # the first column of padding, and one of the next row
        for row, token in zip((0, 1), tokens, strict=False):
            case.policy_loss.fields.teacher_topk.ids[row, 0] = token
        fresh = replace(case, policy_loss=replace(case.policy_loss))  # nothing known of the ids before
        out, gradient = run(fresh, logits, impl)
        found.append((out.term_losses[0].isnan(), gradient))
    (_, wanted), (bad, gradient) = found
    assert bad.nonzero()[:, 0].tolist() == [0, 1]
    assert torch.equal(gradient[~bad], wanted[~bad])
    assert not gradient[:, 48:].any()


@pytest.mark.usefixtures("on_the_device")
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_ids_may_lie_column_by_column(impl):
    case, logits = ReaderCase.draw("topk_jsd", 9, rows=6, width=4), torch.randn(6, 10)
    teacher = case.policy_loss.fields.teacher_topk
    turned = {name: getattr(teacher, name).t().contiguous().t() for name in ("ids", "logprobs")}
    fields = replace(case.policy_loss.fields, teacher_topk=replace(teacher, **turned))
    other = replace(case, policy_loss=replace(case.policy_loss, fields=fields))
    (wanted, of_wanted), (found, of_found) = (run(each, logits, impl) for each in (case, other))
    assert torch.equal(found.loss, wanted.loss)
    assert torch.equal(of_found, of_wanted)


@pytest.mark.usefixtures("on_the_device")
def test_without_gradient_the_logits_stay_as_they_are():
    case = ReaderCase.draw("topk_jsd", 9, rows=6, width=4)
    logits = torch.randn(6, 10)
    before = logits.clone()
    with torch.no_grad():
        policy_gradient_loss(logits, case.policy_loss, Vocabulary.of(10, vocab_size=9), impl="triton", inplace=True)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros(6, 4, dtype=torch.int64)}, "teacher_topk.ids has dtype torch.int64, which kernels would"),
        ({"tails": torch.zeros(5)}, r"teacher_topk.tails has shape \(5,\) for \(6,\) targets"),
        ({"logprobs": torch.zeros(6, 5)}, r"teacher_topk.logprobs has shape \(6, 5\) for ids \(6, 4\)"),
        ({"ids": torch.zeros(6, 0, dtype=torch.int32)}, rf"teacher_topk.ids has shape \(6, 0\) {TABLE}"),
        ({"ids": torch.zeros(6, dtype=torch.int32)}, rf"teacher_topk.ids has shape \(6,\) {TABLE}"),
        ({"logprobs": torch.zeros(6)}, rf"teacher_topk.logprobs has shape \(6,\) {TABLE}"),
        (None, "teacher_topk is missing, and a term of the loss needs it"),
    ],
)
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_teacher_is_missing_misshapen_or_of_another_type(change, message, impl):
    loss = ReaderCase.draw("topk_jsd", 9, rows=6, width=4).policy_loss
    teacher = None if change is None else replace(loss.fields.teacher_topk, **change)
    loss = PolicyLoss(loss.terms, replace(loss.fields, teacher_topk=teacher))
    with pytest.raises(ValueError, match=message):
        policy_gradient_loss(torch.randn(6, 10), loss, Vocabulary.of(10), impl=impl)
    with pytest.raises(ValueError, match=message):
        policy_gradient_head_loss(torch.randn(6, 4), torch.randn(10, 4), loss, Vocabulary.of(10), Head(impl=impl))
