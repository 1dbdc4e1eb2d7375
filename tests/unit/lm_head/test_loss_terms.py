"""The fused head with loss terms, against all their losses written out in float64."""

from dataclasses import replace

import pytest
import torch
from compare import tensor_error
from term_parts import Parts
from topk_parts import NAMES, one_term

from megatron_pg.kernels import Vocabulary
from megatron_pg.lm_head import Head, policy_gradient_head_loss, products

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ROWS, HIDDEN, COLUMNS, PADDING = 23, 16, 48, 5
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}  # as tests/unit/lm_head/test_lm_head.py

pytestmark = [  # of Triton's interpreter, which computes in NumPy
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


@pytest.mark.parametrize("mode", ["forward", "recompute"])
@pytest.mark.parametrize(
    ("dtype", "impl"), [(torch.float64, "torch"), (torch.float32, "torch"), (torch.float32, "triton")]
)
def test_the_gradients_of_terms_are_those_of_their_losses(dtype, impl, mode, monkeypatch):
    monkeypatch.setattr(products, "chunk_rows", lambda *_: 4)  # chunks of one loss term, and without the objective's
    monkeypatch.setattr(products, "block_rows", lambda *_: 8)
    parts = Parts.draw(ROWS, COLUMNS - PADDING, grad_divisor=2.0).on(DEVICE)
    hidden = torch.randn(ROWS, HIDDEN, dtype=dtype)
    hidden[~parts.fields.mask.cpu()] = torch.nan
    weight = torch.randn(COLUMNS, HIDDEN, dtype=dtype) * HIDDEN**-0.5
    found = [each.to(DEVICE, copy=True).requires_grad_() for each in (hidden, weight)]
    vocabulary = Vocabulary.of(COLUMNS, temperature=0.7, vocab_size=COLUMNS - PADDING)
    out = policy_gradient_head_loss(*found, parts.policy_loss, vocabulary, Head(mode=mode, impl=impl), grad_scale=3.0)
    (out.loss * 3).backward()
    wanted = [each.to(DEVICE, torch.float64, copy=True).requires_grad_() for each in (hidden, weight)]
    kept = torch.where(parts.fields.mask[:, None], wanted[0], 0)
    loss = parts.expected((kept @ wanted[1].t())[:, : COLUMNS - PADDING], temperature=0.7)
    (loss * 3 / 2).backward()
    assert tensor_error(out.loss.detach(), loss.detach()) <= LIMITS[dtype]
    for ours, theirs in zip(found, wanted, strict=True):
        assert tensor_error(ours.grad, theirs.grad) <= LIMITS[dtype]


@pytest.mark.parametrize("mode", ["forward", "recompute"])
@pytest.mark.parametrize("kind", NAMES)
def test_a_divergence_over_likeliest_tokens_beside_the_objective(kind, mode, monkeypatch):
    """With KL and bonus, in float32 by kernels, against torch in float64."""
    monkeypatch.setattr(products, "chunk_rows", lambda *_: 4)
    with torch.device(DEVICE):
        torch.manual_seed(0)
        policy_loss, _ = one_term(kind, 5, kl_coef=0.1, kl_estimator="k3", entropy_coef=0.2)
        fields, drawn = policy_loss.fields, [torch.randn(20, HIDDEN), torch.randn(64, HIDDEN) * HIDDEN**-0.5]
        near = torch.where(fields.mask, -4 + 0.3 * fields.advantages, torch.nan)
        policy_loss = replace(policy_loss, fields=replace(fields, old_logprobs=near, ref_logprobs=near - 0.1))
    vocabulary, found = Vocabulary.of(64, temperature=0.7, vocab_size=48), []
    for impl, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        leaves = [each.to(dtype, copy=True).requires_grad_() for each in drawn]
        head = Head(mode=mode, impl=impl)
        out = policy_gradient_head_loss(*leaves, policy_loss, vocabulary, head, grad_scale=3.0, entropy=True)
        (3 * out.loss).backward()
        found.append([out.loss.detach(), out.term_losses, out.student_mass, out.entropy, *(v.grad for v in leaves)])
    for ours, theirs in zip(*found, strict=True):
        assert tensor_error(ours, theirs) <= LIMITS[torch.float32]
