"""How the tokens are cut: chunks, whose logits exist at one time, and blocks of chunks, whose gradients are multiplied at once."""

from collections.abc import Iterator

from torch import Tensor

from megatron_pg.lm_head.products import logits_dtype

LOGITS_BYTES = 640 * 10**6  # of logits held at a time
# of their gradient; with less, the traffic of the weight's float32 total shows (docs/kernels.md)
GRADIENT_BYTES = 1280 * 10**6
ROWS = 128  # chunks are multiples of it, which is what tensor cores are fed


def chunk_rows(weight: Tensor, buffers: int) -> int:
    """Rows of logits that are made at a time."""
    row = len(weight) * logits_dtype(weight).itemsize * buffers
    return max(LOGITS_BYTES // row // ROWS, 1) * ROWS


def block_rows(weight: Tensor, chunk: int) -> int:
    """Rows of a weight-gradient product: a multiple of a chunk's."""
    return max(GRADIENT_BYTES // (len(weight) * weight.itemsize) // chunk, 1) * chunk


def slices(count: int, size: int) -> Iterator[slice]:
    """`count` rows, `size` at a time."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def states(hidden: Tensor, rows: Tensor | None, part: slice) -> Tensor:
    """The hidden states of a part of the wanted rows; `rows` None: all are wanted."""
    return hidden[part] if rows is None else hidden.index_select(0, rows[part])
