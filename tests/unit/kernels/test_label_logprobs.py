"""Log-probabilities and entropies of all rows, by either implementation, against torch in float64."""

import math

import pytest
import threads
import torch

from megatron_pg.kernels import Vocabulary
from megatron_pg.kernels.label_logprobs import label_logprobs


def logprobs_and_entropy(logits, targets, **options):
    return label_logprobs(logits, targets, Vocabulary.of(logits.shape[1], **options), impl="torch")


def reference(logits, targets, temperature):
    """log_softmax in float64."""
    table = torch.log_softmax(logits.double() / temperature, dim=-1)
    terms = torch.where(table == -math.inf, 0.0, table.exp() * table)
    return table.gather(1, targets[:, None])[:, 0], -terms.sum(dim=-1)


def sharded(logits, targets, temperature, size):
    """Values and gradient of every tensor-parallel rank, each from its slice of the vocabulary."""
    shard = logits.shape[1] // size

    def work(rank: int):
        group = threads.subgroup(lambda r: 0, size, rank)
        mine = logits[:, rank * shard : (rank + 1) * shard].clone().requires_grad_()
        logprobs, entropy = logprobs_and_entropy(mine, targets, temperature=temperature, tp_group=group)
        (logprobs.sum() + 0.5 * entropy.sum()).backward()
        return logprobs.detach(), entropy.detach(), mine.grad

    return threads.run(size, work)


@pytest.mark.usefixtures("on_the_device", "small_tiles")
@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
@pytest.mark.parametrize("vocab_size", [None, 11])
def test_values_and_gradients_equal_torchs(impl, vocab_size, temperature):
    logits = torch.randn(5, 13, requires_grad=True)
    targets = torch.tensor([3, 0, 10, 7, 7])
    vocabulary = Vocabulary.of(13, temperature=temperature, vocab_size=vocab_size)
    found = label_logprobs(logits * 1.0, targets, vocabulary, impl=impl)
    exact = logits.detach().double().requires_grad_()
    rows = (exact[:, :vocab_size] / temperature).log_softmax(-1)
    wanted = rows.gather(1, targets[:, None])[:, 0], -(rows.exp() * rows).sum(-1)
    slopes = torch.randn(2, 5)
    sum((slope * each).sum() for slope, each in zip(slopes, found, strict=True)).backward()
    sum((slope * each).sum() for slope, each in zip(slopes.double(), wanted, strict=True)).backward()
    for mine, theirs in zip((*found, logits.grad), (*wanted, exact.grad), strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=2e-6, rtol=2e-6)


def test_an_implementation_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="impl='cuda'"):
        label_logprobs(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), Vocabulary.of(2), impl="cuda")


@pytest.mark.parametrize("offset", [0.0, 100.0, 1000.0, 10000.0, -120.0])
def test_entropy_and_logprob_survive_a_common_offset_in_float32(offset):
    logits, targets = torch.randn(5, 40), torch.randint(0, 40, (5,))
    shifted = logits + offset
    expected = reference(shifted, targets, 1.0)
    logprobs, entropy = logprobs_and_entropy(shifted, targets)
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=0, atol=4e-6)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_minus_infinity_even_over_a_whole_shard_gives_finite_values_and_gradients(size):
    logits = torch.randn(4, 8, dtype=torch.float64)
    logits[0, :2], logits[1, :4], logits[2, 4:] = -math.inf, -math.inf, -math.inf
    targets = torch.tensor([5, 6, 1, 7])
    results = sharded(logits, targets, 1.0, size)
    expected = reference(logits, targets, 1.0)
    gradient = torch.cat([r[2] for r in results], dim=1)
    torch.testing.assert_close(results[0][0], expected[0], rtol=0, atol=1e-13)
    torch.testing.assert_close(results[0][1], expected[1], rtol=0, atol=1e-13)
    assert torch.isfinite(gradient).all()
    assert not gradient[logits == -math.inf].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_logit_is_not_hidden(bad):
    logits = torch.zeros(2, 4)
    logits[1, 3] = bad
    logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([0, 0]))
    assert torch.isfinite(logprobs).tolist() == [True, False]
    assert torch.isfinite(entropy).tolist() == [True, False]


def test_logits_are_left_unchanged_and_empty_input_works():
    logits = torch.randn(3, 5)
    before = logits.clone()
    logprobs_and_entropy(logits, torch.tensor([1, 2, 3]))
    assert torch.equal(logits, before)
    empty = torch.zeros(0, 5, requires_grad=True)
    values, _ = logprobs_and_entropy(empty, torch.zeros(0, dtype=torch.int64))
    values.sum().backward()
    assert values.shape == (0,)


@pytest.mark.parametrize(
    ("logits", "targets", "temperature", "message"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.int64), 1.0, "shape (2, 3, 4)"),
        (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), 1.0, "dtype torch.int64"),
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), 1.0, "targets have shape (3,)"),
        (torch.zeros(2, 3), torch.zeros(2), 1.0, "dtype torch.float32"),
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), 0.0, "temperature=0.0 is not > 0"),
    ],
)
def test_wrong_input_is_a_named_error(logits, targets, temperature, message):
    with pytest.raises(ValueError) as error:
        logprobs_and_entropy(logits, targets, temperature=temperature)
    assert message in str(error.value)
