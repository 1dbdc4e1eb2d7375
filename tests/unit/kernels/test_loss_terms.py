"""Loss terms from stored logits, by every implementation, against all their losses written out in float64."""

import math

import pytest
import torch
from compare import tensor_error
from term_parts import Parts

from megatron_pg.kernels import Vocabulary, policy_gradient_loss

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LIMITS = {"torch": 1e-12, "triton": 2e-6}  # of float64 and float32, as tests/unit/kernels/triton/test_loss.py

pytestmark = [  # of Triton's interpreter, which computes in NumPy
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


@pytest.mark.parametrize("columns", [33, 1024])  # 1024: the single-pass kernel's, if the objective were alone
@pytest.mark.parametrize(("impl", "inplace"), [("torch", False), ("triton", False), ("triton", True)])
def test_the_gradient_of_terms_is_that_of_their_losses(impl, inplace, columns):
    parts = Parts.draw(17, columns - 1, grad_divisor=4.0).on(DEVICE)
    dtype = torch.float64 if impl == "torch" else torch.float32
    logits = 2 * torch.randn(17, columns, dtype=dtype, device=DEVICE)
    logits[~parts.fields.mask] = math.nan
    logits[:, -1] = 50.0  # padding
    leaf = logits.clone().requires_grad_()
    vocabulary = Vocabulary.of(columns, temperature=0.8, vocab_size=columns - 1)
    out = policy_gradient_loss(leaf * 1, parts.policy_loss, vocabulary, impl=impl, inplace=inplace)
    (3 * out.loss).backward()
    wanted = logits.double().requires_grad_()
    loss = parts.expected(wanted[:, :-1], temperature=0.8)
    (loss * 3 / 4).backward()
    assert tensor_error(out.loss.detach(), loss.detach()) <= LIMITS[impl]
    assert tensor_error(leaf.grad, wanted.grad) <= LIMITS[impl]


def test_a_token_of_a_term_alone_reads_nothing_of_the_objective():
    """Rows 1 and 2 are of cross-entropy and of distillation alone; what the objective would read there is NaN."""
    parts = Parts.draw(5, 9)
    assert parts.fields.advantages[1:3].isnan().all()
    assert parts.fields.old_logprobs[1].isnan()
    leaf = torch.randn(5, 9, dtype=torch.float64, requires_grad=True)
    out = policy_gradient_loss(leaf, parts.policy_loss, Vocabulary.of(9), impl="torch")
    out.loss.backward()
    log_p = torch.log_softmax(leaf.detach(), dim=1)
    one = torch.nn.functional.one_hot(parts.fields.targets.clamp(min=0), 9)
    p, w = log_p.exp(), parts.weights
    entropy = -(p * log_p).sum(dim=1, keepdim=True)
    of_ce, of_entropy = 0.7 * w["sft"][1] * (p - one)[1], 0.05 * w["h"][1] * (p * (log_p + entropy))[1]
    assert tensor_error(leaf.grad[1], of_ce + of_entropy) <= 1e-12
    assert not leaf.grad[4].any()
    assert out.term_losses.shape == (4, 5)
    assert out.token_losses[1] == 0
