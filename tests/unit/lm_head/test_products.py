"""Products of an odd vocabulary, which are cut on a GPU so that cuBLAS has a fast kernel for nearly all of them."""

import pytest
import torch

from megatron_pg.lm_head import products
from megatron_pg.lm_head.products import pieces


def cut(size: int, _: torch.Tensor) -> list[slice]:
    """`pieces` as for bfloat16 on a GPU."""
    return [piece for piece in (slice(0, size // 8 * 8), slice(size // 8 * 8, size)) if piece.start < piece.stop]


@pytest.fixture
def shapes(monkeypatch):
    """The products that are made, cut as on a GPU: (rows, inner, columns) of each."""
    found = []
    for name in ("_multiply", "_add"):
        made = getattr(products, name)
        note = lambda a, b, c, made=made: (found.append((*a.shape, b.shape[1])), made(a, b, c))[1]  # noqa: E731
        monkeypatch.setattr(products, name, note)
    monkeypatch.setattr(products, "pieces", cut)
    return found


def test_only_16_bit_numbers_on_a_gpu_are_cut():
    for dtype in (torch.float32, torch.bfloat16):
        assert pieces(33, torch.empty(0, dtype=dtype)) == [slice(0, 33)]
    if torch.cuda.is_available():
        assert pieces(33, torch.empty(0, dtype=torch.bfloat16, device="cuda")) == [slice(0, 32), slice(32, 33)]


@pytest.mark.parametrize("columns", [33, 40, 7])
def test_a_product_is_cut_along_the_vocabulary_alone(columns, shapes):
    """Tokens, of which there are 13, are not contiguous in memory."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(13, 16).bfloat16(), torch.randn(columns, 16).bfloat16()
    gradient = products.aligned(hidden, 13, columns)
    gradient.copy_(torch.randn(13, columns))
    assert gradient.stride() == (40 if columns > 8 else 8, 1)
    exact, whole = gradient.double(), [piece.stop - piece.start for piece in cut(columns, hidden)]
    logits = products.product(hidden, weight.t(), torch.float32)
    assert (logits - hidden.double() @ weight.double().t()).abs().max() <= 1e-5
    of_hidden = products.sum_of_products([gradient], weight)
    assert of_hidden.dtype == torch.bfloat16
    assert torch.equal(of_hidden, (exact @ weight.double()).float().bfloat16())
    of_weight = torch.ones(columns, 16)
    products.add_product(gradient.t(), hidden, of_weight)
    assert (of_weight - 1 - exact.t() @ hidden.double()).abs().max() <= 1e-5
    assert shapes == [(13, 16, n) for n in whole] + [(13, n, 16) for n in whole] + [(n, 13, 16) for n in whole]


def test_a_cut_product_has_aligned_rows_while_it_is_made_and_contiguous_ones_afterwards(shapes, monkeypatch):
    """As for --fp32-lm-head, in parts of 5 of 13 tokens."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(13, 16).bfloat16(), torch.randn(33, 16).bfloat16()
    strides, multiply = [], products._multiply
    monkeypatch.setattr(products, "chunk_rows", lambda *_: 5)
    monkeypatch.setattr(products, "_multiply", lambda a, b, out: (strides.append(out.stride()), multiply(a, b, out)))
    logits = products.product(hidden, weight.t(), torch.float32)
    assert logits.is_contiguous()
    assert (logits - hidden.double() @ weight.double().t()).abs().max() <= 1e-5
    assert strides == [(40, 1)] * 6
    assert shapes == [(rows, 16, columns) for rows in (5, 5, 3) for columns in (32, 1)]
