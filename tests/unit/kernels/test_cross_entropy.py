"""The cross-entropy of some rows, from logits and from hidden states, against log_softmax in float64."""

import pytest
import threads
import torch

from megatron_pg.kernels import Vocabulary, cross_entropy
from megatron_pg.lm_head import Head, head_cross_entropy

ROWS = torch.tensor([0, 2, 3, 6])
SIZE = 11  # of 12 columns; the last one is padding


def case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with a most probable target, a tie, one that is a hair below it, and a large padding column."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(7, 12, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, SIZE, (7,), generator=generator)
    logits[0, targets[0]] = 5.0
    logits[2] = 0.5
    logits[3, targets[3]] = logits[3, :SIZE].max()
    logits[3, (targets[3] + 1) % SIZE] += 2e-2 + logits[3, targets[3]] - logits[3, (targets[3] + 1) % SIZE]
    logits[:, SIZE:] = 9.0
    return logits.to(dtype), targets


def expected(logits, targets):
    wanted = logits.detach().double().requires_grad_()
    table = wanted[ROWS, :SIZE].log_softmax(-1)
    losses = -table.gather(1, targets[ROWS][:, None])[:, 0]
    (losses * torch.arange(1.0, 5.0)).sum().backward()
    return losses.detach(), wanted.grad


@pytest.mark.parametrize(
    ("impl", "dtype", "tp_size"),  # Triton's interpreter runs in the main thread only
    [
        ("torch", torch.float64, 1),
        ("torch", torch.float64, 2),
        ("torch", torch.float32, 2),
        ("triton", torch.float32, 1),
    ],
)
def test_losses_and_gradients_equal_log_softmax_and_only_a_likeliest_target_is_accepted(impl, dtype, tp_size):
    logits, targets = case(dtype)
    losses, gradient = expected(logits, targets)
    device = "cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"
    shard = 12 // tp_size

    def work(rank: int):
        group = None if tp_size == 1 else threads.subgroup(lambda r: 0, tp_size, rank)
        mine = logits[:, rank * shard : (rank + 1) * shard].clone().requires_grad_()
        vocabulary = Vocabulary.of(shard, vocab_size=SIZE, tp_group=group)
        found = cross_entropy((mine * 1.0).to(device), targets.to(device), ROWS.to(device), vocabulary, impl=impl)
        (found.losses * torch.arange(1.0, 5.0, dtype=dtype, device=device)).sum().backward()
        return found, mine.grad

    results = threads.run(tp_size, work) if tp_size > 1 else [work(0)]
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    for found, _ in results:
        torch.testing.assert_close(found.losses.double().cpu(), losses, rtol=0, atol=tolerance)
        assert found.is_likeliest.tolist() == [True, True, False, bool(logits[6, :SIZE].argmax() == targets[6])]
    torch.testing.assert_close(torch.cat([g for _, g in results], dim=1).double(), gradient, rtol=0, atol=4 * tolerance)


@pytest.mark.parametrize("mode", ["forward", "recompute"])
def test_the_head_finds_the_same_from_hidden_states(mode):
    logits, targets = case(torch.float64)
    hidden = torch.randn(7, 1, 12, dtype=torch.float64)
    weight = torch.linalg.lstsq(hidden[:, 0], logits).solution.t().contiguous()  # so that h W^T are those logits
    losses, by_logit = expected(logits, targets)
    leaves = [hidden.clone().requires_grad_(), weight.requires_grad_()]
    vocabulary = Vocabulary.of(12, vocab_size=SIZE)
    found = head_cross_entropy(*leaves, targets, ROWS, vocabulary, Head(mode=mode, impl="torch"))
    (found.losses * torch.arange(1.0, 5.0)).sum().backward()
    torch.testing.assert_close(found.losses.detach(), losses, rtol=0, atol=1e-10)
    torch.testing.assert_close(leaves[0].grad[:, 0], by_logit @ weight.detach(), rtol=0, atol=1e-9)
    torch.testing.assert_close(leaves[1].grad, by_logit.t() @ hidden[:, 0], rtol=0, atol=1e-9)


def test_no_row_is_no_loss():
    logits, targets = case(torch.float32)
    found = cross_entropy(logits.requires_grad_(), targets, ROWS[:0], Vocabulary.of(12), impl="torch")
    found.losses.sum().backward()
    assert found.losses.numel() == 0
    assert not logits.grad.any()
