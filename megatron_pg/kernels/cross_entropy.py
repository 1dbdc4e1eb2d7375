"""Cross-entropy of some rows of (vocabulary-parallel) logits, and whether greedy decoding chooses the target."""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_pg.kernels.checks import check_impl
from megatron_pg.kernels.label_logprobs import read_stored
from megatron_pg.kernels.logprobs import check_logits
from megatron_pg.kernels.losses import reader_of
from megatron_pg.kernels.vocabulary import Vocabulary

TIE = 1e-5  # nats between the target and the top token that rounding may cause


class CrossEntropy(NamedTuple):
    """Of n rows."""

    losses: Tensor  # [n] -log p of the target, nats, differentiable
    is_likeliest: Tensor  # [n] bool: no token is likelier than the target

    @classmethod
    def of(cls, logprobs: Tensor, totals: Tensor) -> "CrossEntropy":
        """From log-probabilities and the totals S = sum e^(z/tau - max): the top token has log-probability -log S."""
        return cls(-logprobs, logprobs.detach() + totals.log() > -TIE)


def cross_entropy(
    logits: Tensor, targets: Tensor, rows: Tensor, vocabulary: Vocabulary, *, impl: str = "triton"
) -> CrossEntropy:
    """Cross-entropy of some rows.

        ce_t = -log softmax(z / tau)[target_t]

    Args:
        logits: [T, V / tp] this tensor-parallel rank's slice of the vocabulary. The Triton kernels may write the
            gradient over them, where nothing else has saved them.
        targets: [T] int64 global token ids, equal on every tensor-parallel rank; one outside the vocabulary gives NaN.
        rows: [n] int64, increasing: the wanted rows, equal on every tensor-parallel rank.
        vocabulary: the columns of the logits, their padding, tau, and the tensor-parallel group, every rank of which
            must call.
        impl: "triton" or "torch".

    Raises:
        ValueError: invalid shapes, dtypes or options.
    """
    check_impl(impl)
    check_logits(logits, targets, vocabulary)
    if impl == "torch":
        reader = reader_of(impl, vocabulary, targets.index_select(0, rows))
        logprobs, _, totals = read_stored(logits.index_select(0, rows), reader, vocabulary, impl)
        return CrossEntropy.of(logprobs, totals)
    mask = torch.zeros(len(logits), dtype=torch.bool, device=logits.device).index_fill_(0, rows, True)
    reader = reader_of(impl, vocabulary, targets, mask=mask)
    logprobs, _, totals = read_stored(logits, reader, vocabulary, impl)
    return CrossEntropy.of(logprobs.index_select(0, rows), totals.index_select(0, rows))
