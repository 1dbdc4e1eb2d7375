"""The logits of the wanted rows, a chunk at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from megatron_pg.kernels import Vocabulary
from megatron_pg.kernels.losses import reader_of
from megatron_pg.kernels.readers import Statistics
from megatron_pg.kernels.sampling_masks import Restriction
from megatron_pg.lm_head import products
from megatron_pg.lm_head.inputs import Head, has_aligned_rows, is_tried_gpu
from megatron_pg.lm_head.products import logits_dtype, product_into
from megatron_pg.lm_head.teacher import Teacher, TeacherLogits

Detail = Tensor | Restriction | Teacher | None  # what a reader needs in addition to the targets


class Chunks:
    """The logits of the wanted rows, `rows` at a time, in a buffer that is used again, and the `reader` of them.

    Args:
        hidden: [T, H].
        weight: [V / tp, H].
        targets: [n] of the wanted rows.
        rows: [n] which rows of `hidden` they are; None: all.
        vocabulary: what the logits are of.
        impl: "triton" or "torch".
        detail: of the wanted rows: ids [n, K] whose log-probabilities are wanted too, or the restriction, or the
            teacher, whose logits take half of the memory.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        rows: Tensor | None,
        vocabulary: Vocabulary,
        impl: str,
        detail: Detail = None,
    ):
        self._hidden, self._weight, self._rows, self._count = hidden, weight, rows, len(targets)
        self._vocabulary = vocabulary
        is_taught = isinstance(detail, Teacher)
        self.reader = reader_of(
            impl, vocabulary, targets, TeacherLogits(detail, vocabulary) if isinstance(detail, Teacher) else detail
        )
        self.rows = products.chunk_rows(weight, 2 if is_taught else 1)
        size = min(self.rows, self._count), len(weight)
        self.buffer = products.aligned(hidden, *size, logits_dtype(hidden))

    def slices(self) -> Iterator[slice]:
        """The chunks of the wanted rows."""
        return products.slices(self._count, self.rows)

    def logits(self, chunk: slice) -> Tensor:
        """[c, V / tp] of a chunk of the wanted rows."""
        out = self.buffer[: chunk.stop - chunk.start]
        product_into(products.states(self._hidden, self._rows, chunk), self._weight.t(), out)
        return out

    def with_rows(self) -> Iterator[tuple[slice, Tensor, Statistics]]:
        """Each chunk, its logits and its statistics.

        The ranks exchange these between two products. During a product they can wait for each other: the collective and
        a product that fills the GPU then take multiprocessors from one another, in another order on every rank.
        """
        for chunk in self.slices():
            z = self.logits(chunk)
            shares = self._vocabulary.gather(self.reader.statistics(z, chunk))
            yield chunk, z, self.reader.combine(shares, z, chunk)


class TiledChunks(Chunks):
    """`Chunks` without logits: the reader receives the hidden states of a block of rows and makes the logits."""

    def __init__(self, hidden: Tensor, weight: Tensor, targets: Tensor, rows: Tensor | None, vocabulary: Vocabulary):
        from megatron_pg.lm_head.tiled_reader import TiledReader  # an earlier Triton has no such language

        self._hidden, self._rows, self._count = hidden.contiguous(), rows, len(targets)
        self._vocabulary, self.reader = vocabulary, TiledReader(vocabulary, targets, weight)
        self.rows = products.block_rows(weight, products.ROWS)

    @override
    def logits(self, chunk: slice) -> Tensor:
        """[c, H] hidden states of a chunk of the wanted rows."""
        return products.states(self._hidden, self._rows, chunk)


def supports_tiles(hidden: Tensor, weight: Tensor, head: Head, detail: Detail) -> bool:
    """Whether `TiledChunks` apply: the reader is the plain one, and a tried chip can copy the tiles.

    Rows of hidden states, weight and gradient start at multiples of 16 bytes. The interpreter multiplies float32.
    """
    if detail is not None or head.impl != "triton" or head.backward == "split":
        return False
    if not has_aligned_rows(weight) or len(weight) % 8 or hidden.data_ptr() % 16:
        return False
    if not weight.is_cuda:
        return weight.dtype == torch.float32
    return weight.dtype.itemsize == 2 and is_tried_gpu(weight.device)
