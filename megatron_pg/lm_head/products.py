"""Matrix products whose sums stay in float32, of bfloat16 numbers too, and how tokens are cut for them.

A chunk of tokens has its logits at one time; the gradients of a block of chunks are multiplied at once. On a CPU the
products are of float32 numbers.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

LOGITS_BYTES = 640 * 10**6  # of logits held at a time
# of their gradient; with less, the traffic of the weight's float32 total shows (docs/design.md)
GRADIENT_BYTES = 1280 * 10**6
ROWS = 128  # chunks are multiples of it, which is what tensor cores are fed


def logits_dtype(values: Tensor) -> torch.dtype:
    """The dtype that products of `values` are summed in: float32, or float64 for float64."""
    return torch.promote_types(values.dtype, torch.float32)


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right, rounded once, to `dtype`; what is cut into pieces goes through a buffer with aligned rows."""
    out = left.new_empty(len(left), right.shape[1], dtype=dtype)
    if len(pieces(right.shape[1], left)) == 1:
        product_into(left, right, out)
        return out
    size = chunk_rows(right.t(), 4)  # little memory, in addition to the result
    buffer = aligned(left, min(size, len(left)), right.shape[1], dtype)
    for part in slices(len(left), size):
        rows = buffer[: part.stop - part.start]
        product_into(left[part], right, rows)
        out[part].copy_(rows)
    return out


def aligned(like: Tensor, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
    """[rows, columns], every row at a multiple of 16 bytes, which fast products need."""
    return like.new_empty(rows, -(-columns // 8) * 8, dtype=dtype)[:, :columns]


def pieces(size: int, values: Tensor) -> list[slice]:
    """All, or of 16-bit numbers on a GPU the largest multiple of 8, for which cuBLAS has fast kernels, and the rest."""
    cut = size // 8 * 8 if values.is_cuda and values.dtype.itemsize == 2 else size
    return [piece for piece in (slice(0, cut), slice(cut, size)) if piece.start < piece.stop]


def product_into(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left @ right, summed in float32 and rounded once, to the dtype of `out`: float32 if there are pieces."""
    first, *others = pieces(left.shape[1], left)
    for columns in pieces(right.shape[1], left):
        _multiply(left[:, first], right[first, columns], out[:, columns])
    for inner in others:
        add_product(left[:, inner], right[inner], out)


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    if not left.is_cuda:
        out.copy_(_on_cpu(left, right))
    elif out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)


def add_product(left: Tensor, right: Tensor, total: Tensor) -> None:
    """total += left @ right, summed in float32."""
    is_transposed = left.stride(0) == 1
    for piece in pieces(left.shape[0 if is_transposed else 1], left):  # of the dimension that is contiguous
        if is_transposed:
            _add(left[piece], right, total[piece])
        else:
            _add(left[:, piece], right[piece], total)


def _add(left: Tensor, right: Tensor, total: Tensor) -> None:
    if not left.is_cuda:
        total.add_(_on_cpu(left, right))
    elif total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


def _on_cpu(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in float32, under autocast too, which would round it to bfloat16."""
    with torch.autocast("cpu", enabled=False):
        return left.to(logits_dtype(left)) @ right.to(logits_dtype(right))


def sum_of_products(parts: list[Tensor], right: Tensor) -> Tensor:
    """The sum of part @ right, rounded once, to their dtype."""
    is_whole = len(parts) == len(pieces(len(right), right)) == 1
    total = product(parts[0], right, right.dtype if is_whole else logits_dtype(right))
    for part in parts[1:]:
        add_product(part, right, total)
    return total.to(right.dtype)


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
