"""Context parallelism under the names that slime and miles users know, over `megatron_pg.batch.zigzag`.

Response values are aligned to the response: entry k belongs to response token k, whose logits are one position before
it. `cp_rank` and `cp_size` default to Megatron's parallel state if it is initialized, else to 0 and 1. Arguments are
described in `get_logits_and_tokens_offset_with_cp` unless a function describes them itself.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from megatron_pg.batch.zigzag import Span, check_rank, padded_length, response_spans, zigzag_index
from megatron_pg.rollouts.sample import check_lengths

__all__ = [
    "all_gather_with_cp",
    "get_logits_and_tokens_offset_with_cp",
    "get_sum_of_sample_mean",
    "padded_length",
    "response_index",
    "slice_loss_masks_for_local_cp",
    "slice_with_cp",
    "whole_sequences",
    "zigzag_index",
]

_WHOLE_SEQUENCES: ContextVar[bool] = ContextVar("whole_sequences", default=False)


@contextmanager
def whole_sequences() -> Iterator[None]:
    """A context in which `cp_rank` and `cp_size` default to 0 and 1, as for whole sequences."""
    token = _WHOLE_SEQUENCES.set(True)
    try:
        yield
    finally:
        _WHOLE_SEQUENCES.reset(token)


def get_logits_and_tokens_offset_with_cp(
    total_length: int,
    response_length: int,
    qkv_format: str = "thd",
    max_seq_len: int | None = None,
    *,
    cp_rank: int | None = None,
    cp_size: int | None = None,
) -> tuple[int, tuple[Span, Span], tuple[Span, Span], tuple[Span, Span]]:
    """Spans of one sample on this rank, counted from the start of its prompt.

    Args:
        total_length: prompt and response, in tokens; at least one of each.
        response_length: response tokens.
        qkv_format: "thd" (cut by the sample's own length) or "bshd" (cut by `max_seq_len`).
        max_seq_len: padded width of the row, for bshd only.
        cp_rank: this rank; default Megatron's.
        cp_size: size of the context-parallel group; default Megatron's.

    Returns:
        The chunk length, and for each of the rank's two chunks its span, the span of the positions whose logits
        predict a response token, and the span of those response tokens. An empty span is (0, 0).

    Raises:
        ValueError: a length, the format or the rank cannot be.
    """
    cp_rank, cp_size = _rank_and_size(cp_rank, cp_size)
    check_lengths(total_length, response_length)
    length = _layout_length(total_length, qkv_format, max_seq_len)
    return response_spans(total_length, response_length, length, cp_rank=cp_rank, cp_size=cp_size)


def response_index(
    total_length: int,
    response_length: int,
    qkv_format: str = "thd",
    max_seq_len: int | None = None,
    *,
    cp_rank: int | None = None,
    cp_size: int | None = None,
) -> Tensor:
    """[local response length] int64: the response tokens of this rank, in its order."""
    *_, tokens = get_logits_and_tokens_offset_with_cp(
        total_length, response_length, qkv_format, max_seq_len, cp_rank=cp_rank, cp_size=cp_size
    )
    prompt_length = total_length - response_length
    return torch.cat([torch.arange(start, end) - prompt_length for start, end in tokens])


def slice_with_cp(
    tokens: Tensor,
    pad_value: int | float | Callable[[Tensor, int], Tensor],
    qkv_format: str = "thd",
    max_seq_len: int | None = None,
    *,
    cp_rank: int | None = None,
    cp_size: int | None = None,
) -> Tensor:
    """[padded length / C, ...] this rank's zigzag slice of one sample, padded to the layout (thd: not at C = 1).

    `tokens` is [length, ...], the whole sample's values; `pad_value` is a number, or `fn(tokens, count)` that returns
    `tokens` with `count` entries appended.
    """
    cp_rank, cp_size = _rank_and_size(cp_rank, cp_size)
    width = padded_length(_layout_length(len(tokens), qkv_format, max_seq_len), cp_size)
    missing = width - len(tokens)
    if missing and callable(pad_value):
        tokens = pad_value(tokens, missing)
    elif missing and not callable(pad_value):
        tokens = torch.cat([tokens, tokens.new_full((missing, *tokens.shape[1:]), pad_value)])
    if cp_size == 1:
        return tokens
    return tokens[zigzag_index([width], cp_rank=cp_rank, cp_size=cp_size).to(tokens.device)]


def slice_loss_masks_for_local_cp(
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    qkv_format: str = "thd",
    max_seq_lens: Sequence[int] | None = None,
    *,
    cp_rank: int | None = None,
    cp_size: int | None = None,
) -> list[Tensor]:
    """The part of each response-aligned loss mask that belongs to this rank, in zigzag order."""
    widths = [None] * len(loss_masks) if max_seq_lens is None else max_seq_lens
    fields = {"total_lengths": total_lengths, "response_lengths": response_lengths, "max_seq_lens": widths}
    for name, values in fields.items():
        if len(values) != len(loss_masks):
            raise ValueError(f"{name} has {len(values)} entries for {len(loss_masks)} samples. Give one per sample.")
    masks = []
    for i, (mask, total, response, width) in enumerate(zip(loss_masks, *fields.values(), strict=True)):
        if mask.shape != (response,):
            raise ValueError(
                f"loss_masks[{i}] has shape {tuple(mask.shape)}, the response has {response} tokens. Give one entry "
                "per response token."
            )
        index = response_index(total, response, qkv_format, width, cp_rank=cp_rank, cp_size=cp_size)
        masks.append(mask[index.to(mask.device)])
    return masks


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool = False,
    qkv_format: str = "thd",
    max_seq_lens: Sequence[int] | None = None,
    *,
    sample_denoms: Sequence[float | Tensor] | Tensor | None = None,
    denominators: Sequence[float | Tensor] | Tensor | None = None,
    constant_divisor: float | None = None,
    cp_rank: int | None = None,
    cp_size: int | None = None,
) -> Callable[[Tensor], Tensor]:
    """Reducer of this rank's response values to one scalar; the scalars of the C ranks add up to that of C = 1.

        x -> sum_i sum_t m_it x_it / d_i

    d_i is max(trained tokens of the whole sample i, 1) by default, 1 with `calculate_per_token_loss`, else
    `sample_denoms[i]` (slime's name; `denominators[i]` in miles) or `constant_divisor`. Masked slots are selected away:
    NaN there changes nothing.

    Lists have one entry per sample: `loss_masks` whole [response_length] masks of 0 and 1, denominators positive
    numbers. The fourth argument is the flag, as in miles; slime has denominators there, so a list is refused.

    Returns:
        A function of x, this rank's response values, samples one after the other, each in zigzag order.

    Raises:
        ValueError: more than one normalizer, a denominator that is not finite and positive, a flag that is not a bool,
            or lengths that do not agree.
    """
    if not isinstance(calculate_per_token_loss, bool):
        raise ValueError(
            f"calculate_per_token_loss={calculate_per_token_loss!r} is neither True nor False. The fourth argument is "
            "miles' flag; slime's denominators go by name: sample_denoms=."
        )
    given = {
        "calculate_per_token_loss": calculate_per_token_loss or None,
        "sample_denoms": sample_denoms,
        "denominators": denominators,
        "constant_divisor": constant_divisor,
    }
    divisors = _denominators(loss_masks, {name: value for name, value in given.items() if value is not None})
    masks = slice_loss_masks_for_local_cp(
        loss_masks, total_lengths, response_lengths, qkv_format, max_seq_lens, cp_rank=cp_rank, cp_size=cp_size
    )
    lengths = [len(mask) for mask in masks]

    def reduce(x: Tensor) -> Tensor:
        if x.shape != (sum(lengths),):
            raise ValueError(
                f"x has shape {tuple(x.shape)}, this rank has {sum(lengths)} response tokens, so values and masks "
                "do not align. Give this context-parallel rank's values, samples one after the other."
            )
        parts: Any = zip(x.split(lengths), masks, divisors, strict=True)
        sums = (torch.where(mask.to(x.device).bool(), values, 0).sum() / d for values, mask, d in parts)
        return sum(sums, start=torch.zeros((), dtype=x.dtype, device=x.device))

    return reduce


def all_gather_with_cp(
    tensor: Tensor,
    total_length: int,
    response_length: int,
    qkv_format: str = "thd",
    max_seq_len: int | None = None,
    *,
    group: torch.distributed.ProcessGroup | None = None,
    cp_rank: int | None = None,
    cp_size: int | None = None,
) -> Tensor:
    """The whole sample's response values on every rank, from each rank's zigzag part: the inverse of the slice.

    `tensor` is [local response length, ...]; the result is [response_length, ...], the same on every rank. If C > 1,
    every rank of `group`, the context-parallel group, must call.

    The backward is the adjoint: gradients are summed over the ranks, then sliced. A loss that every rank computes
    from the gathered values therefore counts C times; let each rank sum its own tokens only.
    """
    cp_rank, cp_size = _rank_and_size(cp_rank, cp_size)
    index = response_index(total_length, response_length, qkv_format, max_seq_len, cp_rank=cp_rank, cp_size=cp_size)
    if len(tensor) != len(index):
        raise ValueError(
            f"tensor has {len(tensor)} response values, rank {cp_rank} of {cp_size} has {len(index)} of this sample. "
            "Slice it with the same lengths and format."
        )
    return _GatherResponse.apply(tensor, index.to(tensor.device), response_length, group if cp_size > 1 else None)


class _GatherResponse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, index, response_length, group):
        ctx.group = group
        ctx.save_for_backward(index)
        whole = tensor.new_zeros((response_length, *tensor.shape[1:]))
        whole[index] = tensor
        if group is not None:
            torch.distributed.all_reduce(whole, group=group)  # every position has one owner, the rest add 0
        return whole

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        if ctx.group is not None:
            grad = grad.clone()
            torch.distributed.all_reduce(grad, group=ctx.group)
        return grad[index], None, None, None


def _layout_length(length: int, qkv_format: str, max_seq_len: int | None) -> int:
    if qkv_format == "thd":
        return length
    if qkv_format != "bshd":
        raise ValueError(
            f"qkv_format={qkv_format!r} is neither thd nor bshd, so the layout is unknown. Use one of them."
        )
    if max_seq_len is None or max_seq_len < length:
        raise ValueError(
            f"max_seq_len={max_seq_len} with a bshd sample of {length} tokens, so the row's padded width is unknown "
            "or too small. Give the width that the whole batch is padded to."
        )
    return max_seq_len


def _denominators(loss_masks: Sequence[Tensor], given: dict[str, Any]) -> list[float] | list[Tensor]:
    """One denominator per sample, by the given normalizer."""
    if len(given) > 1:
        raise ValueError(f"choose one normalizer, got {', '.join(given)}")
    if not given:
        return [mask.bool().sum().clamp(min=1) for mask in loss_masks]  # tensors: no host sync
    ((name, value),) = given.items()
    if name == "constant_divisor":
        value = [value] * len(loss_masks)
    elif name == "calculate_per_token_loss":
        value = [1.0] * len(loss_masks)
    denominators = [float(d) for d in value]
    if len(denominators) != len(loss_masks):
        raise ValueError(f"{len(denominators)} denominators for {len(loss_masks)} samples")
    for i, d in enumerate(denominators):
        if not 0.0 < d < float("inf"):
            raise ValueError(f"denominator {i} is {d}. Every one must be finite and > 0.")
    return denominators


def _rank_and_size(cp_rank: int | None, cp_size: int | None) -> tuple[int, int]:
    if (cp_rank is None) != (cp_size is None):
        raise ValueError(
            f"cp_rank={cp_rank} and cp_size={cp_size}: one without the other names no layout. Give both or neither."
        )
    state = sys.modules.get("megatron.core.parallel_state")  # never imported from here
    rank_and_size = 0, 1
    if cp_rank is not None and cp_size is not None:
        rank_and_size = cp_rank, cp_size
    elif not _WHOLE_SEQUENCES.get() and state is not None and state.model_parallel_is_initialized():
        rank_and_size = state.get_context_parallel_rank(), state.get_context_parallel_world_size()
    check_rank(*rank_and_size)
    return rank_and_size
