"""The fused head with a teacher's hidden states: properties and errors. Values and gradients:
`kernels/test_readers`."""

from dataclasses import dataclass, replace

import pytest
import torch
from compare import tensor_error
from reader_cases import FULL as KINDS
from reader_cases import SHARE, ReaderCase

from megatron_pg.batch.fields import TeacherStates, TermFields, TopK
from megatron_pg.declarations.loss_terms import LossTerm
from megatron_pg.kernels import PolicyLoss, Vocabulary, policy_gradient_loss
from megatron_pg.lm_head import Head, policy_gradient_head_loss, products

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
IMPLS = [("torch", torch.float64), ("torch", torch.float32), ("triton", torch.float32)]
ROWS = 7


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, small_tiles):
    torch.manual_seed(0)
    monkeypatch.setattr(products, "chunk_rows", lambda *_: 4)
    monkeypatch.setattr(products, "block_rows", lambda *_: 8)


@dataclass(frozen=True)
class Parts:
    """Hidden states of a student, heads of both, and the loss; the teacher's states are in its fields."""

    hidden: torch.Tensor
    weight: torch.Tensor
    teacher_weight: torch.Tensor
    policy_loss: PolicyLoss
    size: int

    @classmethod
    def draw(cls, kind: str, dtype: torch.dtype, *, is_shared: bool = False) -> "Parts":
        """Rows of 43 columns and padding; rows 0 and 1 are trained."""
        case = ReaderCase.draw(kind, 43, rows=ROWS, is_shared=is_shared).on("cpu", dtype)
        hidden, weight = torch.randn(ROWS, 16, dtype=dtype), torch.randn(48, 16, dtype=dtype) / 4
        hidden[~case.policy_loss.fields.mask] = torch.nan
        return cls(hidden, weight, torch.randn(48, 12, dtype=dtype) * 12**-0.5, case.policy_loss, case.size)


def moved(parts: Parts, device: str) -> Parts:
    """On the device."""
    policy_loss = ReaderCase(parts.policy_loss, parts.size).on(device).policy_loss
    tables = {name: getattr(parts, name).to(device) for name in ("hidden", "weight", "teacher_weight")}
    return replace(parts, policy_loss=policy_loss, **tables)


def run(parts: Parts, head: Head, *, temperature: float = 0.7, **options) -> tuple:
    """The result, and the gradients by hidden states and weight, at an upstream gradient of 3."""
    leaves = [each.detach().clone().requires_grad_() for each in (parts.hidden, parts.weight)]
    vocabulary = Vocabulary.of(len(parts.weight), temperature=temperature, vocab_size=parts.size)
    given = {"grad_scale": 3.0, "teacher_weight": parts.teacher_weight} | options
    out = policy_gradient_head_loss(*leaves, parts.policy_loss, vocabulary, head, **given)
    (3 * out.loss).backward()
    return out, *(leaf.grad for leaf in leaves)


@pytest.mark.parametrize(("impl", "dtype"), IMPLS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_that_is_the_student_teaches_nothing(kind, impl, dtype):
    parts = Parts.draw(kind, dtype)
    fields, term = parts.policy_loss.fields, parts.policy_loss.terms.further[0]
    states = TeacherStates(slots=torch.arange(len(parts.hidden)), states=parts.hidden)
    fields = replace(fields, teacher_hidden=states, weights=torch.zeros_like(fields.weights))
    terms = replace(parts.policy_loss.terms, further=(term,))
    parts = replace(parts, policy_loss=PolicyLoss(terms, fields), teacher_weight=parts.weight)
    out, *found = run(moved(parts, DEVICE), Head(impl=impl))
    least = 0.0 if kind != "full_jsd" and not CUDA else 100 * torch.finfo(dtype).eps
    assert float(out.term_losses.abs().max()) <= least
    assert all(float(each.abs().max()) <= 100 * least for each in found)


@pytest.mark.parametrize(("impl", "dtype"), IMPLS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whose", ["student", "teacher"])
def test_a_number_that_is_none_stays_visible(whose, kind, impl, dtype):
    """In the row that has it, of the loss and of the gradient; the other rows are as they were."""
    parts = Parts.draw(kind, dtype, is_shared=True)
    wanted = run(moved(parts, DEVICE), Head(impl=impl))
    states = parts.hidden if whose == "student" else parts.policy_loss.fields.teacher_hidden.states
    states[1, 3] = torch.nan
    found = run(moved(parts, DEVICE), Head(impl=impl))
    others = torch.arange(len(parts.hidden)) != 1
    assert found[0].loss.isnan()
    assert found[0].term_losses[0, 1].isnan()
    assert found[1][1].isnan().all()
    assert torch.equal(found[1][others], wanted[1][others])


@pytest.mark.parametrize(("impl", "dtype"), IMPLS)
def test_far_apart_they_are_as_far_as_they_are(impl, dtype):
    """Each gives nearly everything to a token to which the other gives e^-400: no clamp hides it, and its gradient is
    there."""
    parts = Parts.draw("full_forward_kl", dtype)
    term = parts.policy_loss.terms.further[0]
    logits, theirs = torch.tensor([[0.0, 400.0, 3.0]] * 2), torch.tensor([[400.0, 0.0, 3.0]] * 2)
    states = TeacherStates(slots=torch.arange(2), states=theirs.to(dtype))
    both = torch.ones(2, dtype=torch.bool)
    zeros = torch.zeros(2, dtype=torch.float64)
    nothing = dict.fromkeys(("weights", "old_logprobs", "advantages"), zeros)
    fields = replace(parts.policy_loss.fields, teacher_hidden=states, mask=both, **nothing)
    own = TermFields(mask=both, weights=torch.tensor([1.0, 2.0]))
    fields = replace(fields, targets=torch.zeros(2, dtype=torch.int64), terms={"rl": TermFields(mask=~both), "t0": own})
    eye = torch.eye(3, dtype=dtype)
    for kind, value, sign in (("full_forward_kl", 400.0, 1.0), ("full_reverse_kl", 400.0, 0.0)):
        terms = replace(parts.policy_loss.terms, further=(replace(term, kind=kind, weight=1.0),), grad_divisor=1.0)
        policy_loss = PolicyLoss(terms, fields)
        near = Parts(logits.to(dtype), eye, eye, policy_loss, 3)
        out, of_hidden, _ = run(moved(near, DEVICE), Head(impl=impl), temperature=1.0)
        assert (out.term_losses.cpu() - value).abs().max() <= 1e-4
        wanted = 3 * sign * torch.tensor([[-1.0, 1.0, 0.0], [-2.0, 2.0, 0.0]], dtype=dtype)
        rounding = 1e-6 if sign else 1e-6 * value  # of the reverse, 400 - 400
        assert (of_hidden.cpu() - wanted).abs().max() <= rounding


@pytest.mark.parametrize(("impl", "dtype"), IMPLS)
def test_a_micro_batch_without_a_token_of_the_term_is_one_of_the_rest(impl, dtype):
    parts = Parts.draw("full_jsd", dtype)
    fields = parts.policy_loss.fields
    nobody = replace(fields.terms["t0"], mask=torch.zeros_like(fields.mask), weights=torch.zeros_like(fields.weights))
    empty = TeacherStates(slots=torch.zeros_like(fields.teacher_hidden.slots), states=torch.zeros(0, 1, dtype=dtype))
    fields = replace(fields, terms={**fields.terms, "t": nobody}, teacher_hidden=empty)
    without = replace(parts.policy_loss.terms, further=parts.policy_loss.terms.further[1:])
    found, wanted = (
        run(moved(replace(parts, policy_loss=PolicyLoss(terms, fields)), DEVICE), Head(impl=impl))
        for terms in (parts.policy_loss.terms, without)
    )
    assert torch.equal(found[0].loss, wanted[0].loss)
    assert all(torch.equal(*pair) for pair in zip(found[1:], wanted[1:], strict=True))
    assert not found[0].term_losses[0].any()


def test_without_gradient_the_loss_is_the_same():
    parts = Parts.draw("full_reverse_kl", torch.float64)
    vocabulary = Vocabulary.of(len(parts.weight), temperature=0.7, vocab_size=parts.size)
    tables, options = (parts.hidden, parts.weight), {"teacher_weight": parts.teacher_weight}
    found = policy_gradient_head_loss(*tables, parts.policy_loss, vocabulary, Head(impl="torch"), **options)
    wanted, *_ = run(parts, Head(impl="torch"))
    assert tensor_error(found.loss, wanted.loss.detach()) <= 1e-13


def test_the_teachers_logits_take_half_of_the_memory(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(products, "LOGITS_BYTES", 4 * 48 * 256 * 8)
    asked = []
    chunk_rows = products.chunk_rows
    monkeypatch.setattr(products, "chunk_rows", lambda *given: asked.append(chunk_rows(*given)) or asked[-1])
    parts = Parts.draw("full_jsd", torch.float32)
    run(parts, Head(impl="torch"))
    plain = replace(parts.policy_loss, terms=replace(parts.policy_loss.terms, further=()))
    run(replace(parts, policy_loss=plain), Head(impl="torch"))
    assert asked == [1024, 2048]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher_weight": None}, "teacher_weight is missing"),
        ({"teacher_weight": torch.zeros(48, 11, dtype=torch.float64)}, r"has shape \(48, 11\)"),
        ({"teacher_weight": torch.zeros(47, 12, dtype=torch.float64)}, r"not \[48, 12\] torch.float64"),
        ({"teacher_weight": torch.zeros(48, 12)}, r"dtype torch.float32"),
    ],
)
def test_another_head_is_refused(change, message):
    parts = Parts.draw("full_forward_kl", torch.float64)
    with pytest.raises(ValueError, match=message):
        run(parts, Head(impl="torch"), **change)


def test_what_cannot_be_is_refused():
    parts = Parts.draw("full_jsd", torch.float64)
    terms = parts.policy_loss.terms
    other = LossTerm(name="h", kind="full_jsd", weight=1.0, mixture=SHARE / 2, on="rl")
    two = PolicyLoss(replace(terms, further=(terms.further[0], other)), parts.policy_loss.fields)
    with pytest.raises(ValueError, match="two divergences from a teacher's hidden states"):
        run(replace(parts, policy_loss=two), Head(impl="torch"))
    named = LossTerm(name="k", kind="topk_reverse_kl", weight=1.0, on="rl")
    ids, row = torch.zeros(ROWS, 2, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.float64)
    fields = replace(parts.policy_loss.fields, teacher_topk=TopK(ids=ids, logprobs=ids.float(), tails=row))
    both = PolicyLoss(replace(terms, further=(terms.further[0], named)), fields)
    with pytest.raises(ValueError, match=r"^a loss over a teacher's whole vocabulary and one over its top-k tokens"):
        run(replace(parts, policy_loss=both), Head(impl="torch"))
    flat = replace(parts.policy_loss.fields.teacher_hidden, states=torch.zeros(ROWS, dtype=torch.float64))
    one = PolicyLoss(terms, replace(parts.policy_loss.fields, teacher_hidden=flat))
    with pytest.raises(ValueError, match=r"have shape \(7,\), not \[m, H_T\]"):
        run(replace(parts, policy_loss=one), Head(impl="torch"))
    with pytest.raises(ValueError, match="only the fused head computes"):
        policy_gradient_loss(torch.zeros(ROWS, 48), parts.policy_loss, Vocabulary.of(48), impl="torch")
    plain = PolicyLoss(replace(terms, further=terms.further[:1]), parts.policy_loss.fields)
    with pytest.raises(ValueError, match="the distribution of a teacher"):
        run(replace(parts, policy_loss=plain), Head(mode="scaled_exp", impl="torch"))
    states = parts.policy_loss.fields.teacher_hidden
    longer = replace(parts.policy_loss.fields, teacher_hidden=replace(states, slots=states.slots.repeat(2)))
    with pytest.raises(ValueError, match=r"teacher_hidden.slots has shape \(14,\) for \(7,\) targets"):
        run(replace(parts, policy_loss=PolicyLoss(terms, longer)), Head(impl="torch"))
    missing = replace(parts.policy_loss.fields, teacher_hidden=None)
    with pytest.raises(ValueError, match="teacher_hidden is missing"):
        run(replace(parts, policy_loss=PolicyLoss(terms, missing)), Head(impl="torch"))


@pytest.mark.parametrize(
    ("kind", "mixture"), [("full_jsd", None), ("full_jsd", 1.0), ("full_forward_kl", 0.3), ("topk_jsd", None)]
)
def test_a_mixture_that_the_kind_does_not_have_is_refused(kind, mixture):
    """What says that there is a mixture and what says which divergence it is would not agree."""
    parts = Parts.draw("full_jsd", torch.float64)
    first, *rest = parts.policy_loss.terms.further
    terms = replace(parts.policy_loss.terms, further=(replace(first, kind=kind, mixture=mixture), *rest))
    other = replace(parts, policy_loss=PolicyLoss(terms, parts.policy_loss.fields))
    with pytest.raises(ValueError, match=f"mixture={mixture} of a loss term {kind} cannot be"):
        run(other, Head(impl="torch"))


@pytest.mark.parametrize(("impl", "dtype"), IMPLS)
def test_a_number_that_is_none_stays_visible_at_a_weight_of_zero(impl, dtype):
    parts = Parts.draw("full_reverse_kl", dtype, is_shared=True)
    fields = parts.policy_loss.fields
    own = replace(fields.terms["t0"], weights=fields.terms["t0"].weights.clone())
    own.weights[1], fields.teacher_hidden.states[1, 3] = 0.0, torch.nan
    fields = replace(fields, terms={"t0": own})
    moved_parts = moved(replace(parts, policy_loss=replace(parts.policy_loss, fields=fields)), DEVICE)
    out, of_hidden, _ = run(moved_parts, Head(impl=impl))
    assert out.loss.isnan()
    assert of_hidden[1].isnan().all()


def test_beside_an_objective_with_a_row_the_rest_is_one_launch(monkeypatch):
    """Of every chunk: the surrogate kernel has been asked, and torch has not."""
    from megatron_pg.kernels.triton import surrogate as triton_surrogate

    parts, calls = Parts.draw("full_reverse_kl", torch.float32, is_shared=True), []
    surrogate = triton_surrogate.surrogate_and_slopes
    monkeypatch.setattr(triton_surrogate, "surrogate_and_slopes", lambda *given: calls.append(1) or surrogate(*given))
    run(moved(parts, DEVICE), Head(impl="triton"))
    assert len(calls) == -(-int(parts.policy_loss.fields.mask.sum()) // 4)
