"""All logits in float32 by one product, or log-probabilities and entropies from chunks of logits."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.kernels.checks import check_for_triton
from megatron_pg.kernels.cross_entropy import CrossEntropy
from megatron_pg.kernels.sampling_masks import Restriction, check_restriction
from megatron_pg.kernels.vocabulary import Vocabulary
from megatron_pg.lm_head import products
from megatron_pg.lm_head.chunks import Chunks, Detail, TiledChunks, supports_tiles
from megatron_pg.lm_head.gradients import Gradients
from megatron_pg.lm_head.inputs import Head, check_head, check_targets, enter
from megatron_pg.lm_head.products import logits_dtype, product


def fp32_logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    backward: str = "bf16",
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    main_grad: Tensor | None = None,
) -> Tensor:
    """Logits in float32 from hidden states and weight in bfloat16.

        z = h W^T,   products of bfloat16 numbers, sums in float32

    Args:
        hidden: [..., H], equal on tensor-parallel ranks, or with `sequence_parallel` this rank's part of the first
            dimension.
        weight: [V / tp, H] this tensor-parallel rank's rows, same dtype.
        backward: as in `Head`, "bf16" or "split".
        tp_group: tensor-parallel group; the gradient of the hidden states is summed over it.
        sequence_parallel: gather the hidden states first, and reduce-scatter their gradient.
        main_grad: as in `Head`.

    Returns:
        [..., V / tp] float32 (float64 for float64 inputs).

    Raises:
        ValueError: invalid shapes, dtypes or options.
    """
    head = Head(backward=backward, sequence_parallel=sequence_parallel, main_grad=main_grad)
    check_head(hidden, weight)
    hidden = enter(hidden, tp_group, sequence_parallel)
    logits = _Logits.apply(hidden.flatten(0, -2), weight, head)
    return logits.view(*hidden.shape[:-1], len(weight))


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, head):
        ctx.save_for_backward(hidden, weight)
        ctx.head, ctx.parameter = head, weight  # what is saved may come back as a copy, without Megatron's attributes
        return product(hidden, weight.t(), logits_dtype(hidden))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        chunk = products.chunk_rows(weight, 1)
        known = hidden, weight, None, len(hidden), chunk, ctx.head, ctx.needs_input_grad
        gradients = Gradients(*known, parameter=ctx.parameter)
        for part in products.slices(len(hidden), chunk):
            z = grad[part]
            if (out := gradients.buffer(part, z)) is not z:
                out.copy_(z)
            gradients.take(part, z)
        return *gradients.finish(), None


def logprobs_and_entropy(  # noqa: D417
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    rows: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
    backward: str = "bf16",
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    main_grad: Tensor | None = None,
    impl: str = "triton",
    restriction: Restriction | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution from hidden states; differentiable.

        p = softmax(h W^T / tau),   logp_t = log p[target_t],   H_t = -sum_v p_v log p_v

    Without gradient it costs one product over the trained tokens; the backward makes the logits again.

    Args:
        hidden: [..., H] as in `fp32_logits`, T rows in all once gathered, like every argument that is not named here.
        targets: [T] int64 global ids; one outside the vocabulary gives NaN.
        rows: [n] int64, increasing: the rows that are wanted. Default: all.
        temperature: as in `kernels.grpo_loss`, like `vocab_size` and `softcap`.
        tp_group: tensor-parallel group; every rank of it must call with the same rows.
        impl: as in `Head`.
        restriction: of the T rows, to what could be sampled; None: the distributions are over the whole vocabulary.

    Returns:
        [n] log-probabilities and [n] entropies in nats, float32, equal on every tensor-parallel rank.
    """
    head = Head(backward=backward, impl=impl, sequence_parallel=sequence_parallel, main_grad=main_grad)
    check_head(hidden, weight)
    if impl == "triton":
        check_for_triton(weight)
    vocabulary = Vocabulary.of(
        len(weight), temperature=temperature, vocab_size=vocab_size, softcap=softcap, tp_group=tp_group
    )
    hidden = enter(hidden, tp_group, sequence_parallel).flatten(0, -2)
    check_targets(hidden, targets)
    check_restriction(restriction, targets)
    if rows is not None:
        targets = targets.index_select(0, rows)
        restriction = None if restriction is None else restriction.at(rows)
    logprobs, entropy, _ = rows_of(hidden, weight, targets, rows, vocabulary, head, restriction)
    return logprobs, entropy


def head_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, rows: Tensor, vocabulary: Vocabulary, head: Head
) -> CrossEntropy:
    """`kernels.cross_entropy` from hidden states [..., H], for the targets [T] of some `rows` [n].

    The backward makes the logits again.
    """
    hidden = enter(hidden, vocabulary.tp_group, head.sequence_parallel).flatten(0, -2)
    check_targets(hidden, targets)
    logprobs, _, totals = rows_of(hidden, weight, targets.index_select(0, rows), rows, vocabulary, head)
    return CrossEntropy.of(logprobs, totals)


def rows_of(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: Tensor | None,
    vocabulary: Vocabulary,
    head: Head,
    detail: Detail = None,
) -> tuple[Tensor, ...]:
    """`outputs` of the reader's statistics, differentiable, then their `totals`, from checked arguments.

    Hidden states are [T, H] of all rows; targets [n] and `detail` are of the wanted rows.
    """
    return _Outputs.apply(hidden, weight, targets, rows, vocabulary, head, detail)


def _chunks_of(tensors: Any, vocabulary: Vocabulary, head: Head, detail: Detail) -> Chunks:
    """Of hidden states, weight, targets and rows."""
    hidden, weight, targets, rows = tensors
    if supports_tiles(hidden, weight, head, detail):
        return TiledChunks(hidden, weight, targets, rows, vocabulary)
    return Chunks(hidden, weight, targets, rows, vocabulary, head.impl, detail)


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, rows, vocabulary, head, detail):
        chunks = _chunks_of((hidden, weight, targets, rows), vocabulary, head, detail)
        statistics = chunks.reader.empty(hidden, logits_dtype(hidden))
        for chunk, _, part in chunks.with_rows():
            for values, new in zip(statistics, part, strict=True):
                values[chunk] = new
        ctx.save_for_backward(hidden, weight, targets, rows, *statistics)
        ctx.vocabulary, ctx.head, ctx.detail, ctx.parameter = vocabulary, head, detail, weight
        ctx.set_materialize_grads(False)  # a loss without an entropy needs no products with zeros
        # what is saved must not be an output
        outputs = [values.clone() for values in (*statistics.outputs, statistics.totals)]
        ctx.mark_non_differentiable(outputs[-1])
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *slopes):
        hidden, weight, targets, rows, *saved = ctx.saved_tensors
        chunks = _chunks_of((hidden, weight, targets, rows), ctx.vocabulary, ctx.head, ctx.detail)
        known = hidden, weight, rows, len(targets), chunks.rows, ctx.head, ctx.needs_input_grad
        gradients = Gradients(*known, parameter=ctx.parameter)
        for chunk in chunks.slices():
            z = chunks.logits(chunk)
            of_chunk = chunks.reader.record(*(values[chunk] for values in saved))
            out = gradients.buffer(chunk, z)
            of_loss = tuple(None if slope is None else slope[chunk] for slope in slopes[:-1])
            chunks.reader.write_gradient(z, out, chunk, of_chunk, of_loss)
            gradients.take(chunk, z)
        return *gradients.finish(), None, None, None, None, None
