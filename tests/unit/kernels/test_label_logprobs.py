"""Log-probabilities and entropies of all rows, by either implementation, against torch in float64."""

import pytest
import torch

from megatron_pg.kernels import Vocabulary
from megatron_pg.kernels.label_logprobs import label_logprobs

pytestmark = [pytest.mark.usefixtures("on_the_device")]


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("vocab_size", [None, 11])
def test_values_and_gradients_equal_torchs(impl, vocab_size):
    logits = torch.randn(5, 13, requires_grad=True)
    targets = torch.tensor([3, 0, 10, 7, 7])
    vocabulary = Vocabulary.of(13, temperature=0.7, vocab_size=vocab_size)
    found = label_logprobs(logits * 1.0, targets, vocabulary, impl=impl)
    exact = logits.detach().double().requires_grad_()
    rows = (exact[:, :vocab_size] / 0.7).log_softmax(-1)
    wanted = rows.gather(1, targets[:, None])[:, 0], -(rows.exp() * rows).sum(-1)
    slopes = torch.randn(2, 5)
    sum((slope * each).sum() for slope, each in zip(slopes, found, strict=True)).backward()
    sum((slope * each).sum() for slope, each in zip(slopes.double(), wanted, strict=True)).backward()
    for mine, theirs in zip((*found, logits.grad), (*wanted, exact.grad), strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=2e-6, rtol=2e-6)


def test_an_implementation_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="impl='cuda'"):
        label_logprobs(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), Vocabulary.of(2), impl="cuda")
