"""Log-probabilities and entropies of all rows of (vocabulary-parallel) logits, by either implementation."""

import torch
from torch import Tensor

from megatron_pg.kernels.checks import check_for_triton, check_impl, check_layout, may_be_overwritten
from megatron_pg.kernels.logprobs import check_logits
from megatron_pg.kernels.losses import reader_of
from megatron_pg.kernels.readers import Reader, read
from megatron_pg.kernels.sampling_masks import Restriction, check_restriction
from megatron_pg.kernels.vocabulary import Vocabulary


def label_logprobs(
    logits: Tensor, targets: Tensor, vocabulary: Vocabulary, *, impl: str, restriction: Restriction | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets and entropies, [T] each in nats, differentiable.

    Both are equal on every tensor-parallel rank.

    Args:
        logits: [T, V / tp]. The Triton kernels write the gradient over them, where nothing else has saved them.
        targets: [T] int64 global token ids; one outside the vocabulary gives NaN.
        vocabulary: the columns of the logits, their padding, tau, and the tensor-parallel group; every rank of it must
            call.
        impl: "triton" or "torch".
        restriction: of the rows, to what could be sampled; None: the distributions are over the whole vocabulary.

    Raises:
        ValueError: invalid shapes, dtypes or options.
    """
    check_impl(impl)
    check_logits(logits, targets, vocabulary)
    check_restriction(restriction, targets)
    logprobs, entropy, _ = read_stored(logits, reader_of(impl, vocabulary, targets, restriction), vocabulary, impl)
    return logprobs, entropy


def read_stored(logits: Tensor, reader: Reader, vocabulary: Vocabulary, impl: str) -> tuple[Tensor, ...]:
    """`readers.read`. The Triton kernels write the gradient over the logits, where nothing else has saved them."""
    if impl == "torch":
        return read(
            vocabulary.hide_padding(logits.clone() if vocabulary.valid < vocabulary.columns else logits), reader
        )
    inplace = may_be_overwritten(logits)
    check_for_triton(logits)
    check_layout(logits, inplace)
    with torch.cuda.device_of(logits):
        return read(logits, reader, inplace=inplace)
