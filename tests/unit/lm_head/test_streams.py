"""The fused head with streams, against all their losses written out in float64."""

import pytest
import torch
from compare import tensor_error
from stream_parts import Parts

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
def test_the_gradients_of_streams_are_those_of_their_losses(dtype, impl, mode, monkeypatch):
    monkeypatch.setattr(products, "chunk_rows", lambda *_: 4)  # chunks of one stream, and without the objective's
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
