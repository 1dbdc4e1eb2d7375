"""Log-probabilities and entropies from hidden states, chunk by chunk; the backward makes each chunk's logits again."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.lm_head.chunks import Chunks
from megatron_pg.lm_head.gradients import Gradients
from megatron_pg.lm_head.inputs import check_head, check_targets, enter
from megatron_pg.lm_head.products import logits_dtype
from megatron_pg.lm_head.readers import Vocabulary
from megatron_pg.kernels.logprobs import Rows


def logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    rows: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    backward: str = "bf16",
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    main_grad: Tensor | None = None,
    impl: str = "triton",
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution from hidden states; differentiable.

        p = softmax(h W^T / tau),   logp_t = log p[target_t],   H_t = -sum_v p_v log p_v

    Without gradient it costs one product over the trained tokens; the backward makes the logits again.

    Args:
        hidden: [..., H] as in `fp32_logits`, T rows in all once gathered.
        weight: [V / tp, H].
        targets: [T] int64 global ids; one outside the vocabulary gives NaN.
        rows: [n] int64, increasing: the rows that are wanted. Default: all.
        temperature: tau > 0.
        vocab_size: columns at or beyond it, counted over all ranks, are padding. Default: there is no padding.
        backward: as in `fp32_logits`.
        tp_group: tensor-parallel group; every rank of it must call with the same rows.
        sequence_parallel: as in `fp32_logits`.
        main_grad: as in `fp32_logits`.
        impl: "triton" or "torch": what reads the logits of a chunk.

    Returns:
        [n] log-probabilities and [n] entropies in nats, float32, equal on every tensor-parallel rank.
    """
    check_head(hidden, weight, backward)
    vocabulary = Vocabulary.of(weight, temperature, vocab_size, tp_group, impl)
    hidden = enter(hidden, tp_group, sequence_parallel).flatten(0, -2)
    check_targets(hidden, targets)
    targets = targets if rows is None else targets.index_select(0, rows)
    return logprobs_of_rows(hidden, weight, targets, rows, vocabulary, main_grad, split=backward == "split")


def logprobs_of_rows(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: Tensor | None,
    vocabulary: Vocabulary,
    main_grad: Tensor | None,
    *,
    split: bool,
) -> tuple[Tensor, Tensor]:
    """The same of arguments that have been checked: hidden states [T, H] of all rows, targets [n] of the wanted ones."""
    return _LogprobsAndEntropy.apply(hidden, weight, targets, rows, vocabulary, main_grad, split)


class _LogprobsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, rows, vocabulary, main_grad, split):
        found = torch.empty(len(Rows._fields), len(targets), dtype=logits_dtype(hidden), device=hidden.device)
        for chunk, _, part in Chunks(hidden, weight, targets, rows, vocabulary).with_rows():
            for values, new in zip(found, part, strict=True):
                values[chunk] = new
        ctx.save_for_backward(hidden, weight, targets, rows, found)
        ctx.options = vocabulary, main_grad, split
        return found[0].clone(), found[1].clone()  # what is saved must not be an output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, targets, rows, found = ctx.saved_tensors
        vocabulary, *options = ctx.options
        chunks = Chunks(hidden, weight, targets, rows, vocabulary)
        gradients = Gradients(hidden, weight, rows, len(targets), chunks.rows, *options, ctx.needs_input_grad)
        for chunk in chunks.slices():
            z = chunks.logits(chunk)
            slopes = grad_logprobs[chunk], grad_entropy[chunk]
            chunks.reader.write_gradient(z, gradients.buffer(chunk, z), chunk, Rows(*found[:, chunk]), *slopes)
            gradients.take(chunk, z)
        return *gradients.finish(), None, None, None, None, None
