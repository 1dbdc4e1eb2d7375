"""The zigzag layout of context parallelism, as pure functions of (length, rank, size).

A sequence, padded to a multiple of 2C, is cut into 2C chunks of equal length. Rank r of C has chunks r and 2C-1-r, so
causal attention costs every rank the same. A packed row (thd) is cut by document, a padded row (bshd) by its width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Span = tuple[int, int]


def chunk_length(length: int, cp_size: int) -> int:
    """Length of one of the 2C equal chunks of a sequence of `length` tokens, padding included."""
    return -(-length // (2 * cp_size))


def padded_length(length: int, cp_size: int) -> int:
    """Length of a document in a packed row: itself at C = 1, else the next multiple of 2C."""
    return length if cp_size == 1 else 2 * cp_size * chunk_length(length, cp_size)


def zigzag_index(padded_lengths: Sequence[int], *, cp_rank: int, cp_size: int) -> Tensor:
    """Positions of a packed row on one rank: chunks r and 2C-1-r of each document, one after the other.

    Args:
        padded_lengths: lengths of the documents in the row; multiples of 2C when C > 1.
        cp_rank: rank r in the context-parallel group.
        cp_size: size C of that group.

    Returns:
        [sum(padded_lengths) / C] int64 indices into the whole row, on the CPU.

    Raises:
        ValueError: the rank lies outside the group, or a length does not divide into 2C chunks.
    """
    check_rank(cp_rank, cp_size)
    if cp_size == 1:
        return torch.arange(sum(padded_lengths))
    pieces, start = [], 0
    for i, length in enumerate(padded_lengths):
        if length % (2 * cp_size):
            raise ValueError(
                f"padded_lengths[{i}]={length} is not a multiple of {2 * cp_size} (2 * context-parallel size "
                f"{cp_size}). Pad it to {padded_length(length, cp_size)} before slicing."
            )
        chunk = length // (2 * cp_size)
        for k in (cp_rank, 2 * cp_size - 1 - cp_rank):
            pieces.append(torch.arange(start + k * chunk, start + (k + 1) * chunk))
        start += length
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)


def response_spans(
    total_length: int, response_length: int, length: int, *, cp_rank: int, cp_size: int
) -> tuple[int, tuple[Span, Span], tuple[Span, Span], tuple[Span, Span]]:
    """The result of `cp_utils.get_logits_and_tokens_offset_with_cp`; the layout cuts by `length`."""
    prompt_length, chunk = total_length - response_length, chunk_length(length, cp_size)
    first, second = ((k * chunk, (k + 1) * chunk) for k in (cp_rank, 2 * cp_size - 1 - cp_rank))
    limits = [(max(start, prompt_length - 1), min(end, total_length - 1)) for start, end in (first, second)]
    logits = [(start, end) if start < end else (0, 0) for start, end in limits]
    tokens = [(start + 1, end + 1) if start < end else (0, 0) for start, end in logits]
    return chunk, (first, second), (logits[0], logits[1]), (tokens[0], tokens[1])


def check_rank(cp_rank: int, cp_size: int) -> None:
    """Refuse a rank outside of its group."""
    if cp_size < 1 or not 0 <= cp_rank < cp_size:
        raise ValueError(
            f"cp_rank={cp_rank} is not a rank of a context-parallel group of {cp_size}, so it has no chunk. Ranks "
            "count from 0."
        )
