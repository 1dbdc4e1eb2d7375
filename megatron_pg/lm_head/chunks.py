"""The logits of the wanted rows, a chunk at a time."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_pg.kernels import Vocabulary
from megatron_pg.kernels.support import Restriction
from megatron_pg.lm_head import products
from megatron_pg.lm_head.products import logits_dtype, product_into
from megatron_pg.lm_head.readers import EagerReader, EagerSupportReader, EagerTeacherReader, EagerTopKReader
from megatron_pg.lm_head.teacher import Teacher

Named = Tensor | Restriction | Teacher | None  # what a reader knows beside the targets


class Chunks:
    """The logits of the wanted rows, `rows` at a time, in buffers that are used again, and the `reader` of them.

    Args:
        hidden: [T, H].
        weight: [V / tp, H].
        targets: [n] of the wanted rows.
        rows: [n] which rows of `hidden` they are; None: all.
        vocabulary: what the logits are of.
        impl: what reads them.
        named: ids [n, K] of the wanted rows, whose log-probabilities are wanted too, or what those rows are restricted to, or their
            teacher, whose logits take half of the memory; None: nothing.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        rows: Tensor | None,
        vocabulary: Vocabulary,
        impl: str,
        named: Named = None,
    ):
        self._hidden, self._weight, self._rows, self._count = hidden, weight, rows, len(targets)
        self._vocabulary = vocabulary
        self.reader = _reader(impl, vocabulary, targets, named)
        buffers = min(vocabulary.ranks, 2)
        self.rows = products.chunk_rows(weight, 2 * buffers if isinstance(named, Teacher) else buffers)
        size = min(self.rows, self._count), len(weight)
        self.buffers = [hidden.new_empty(size, dtype=logits_dtype(hidden)) for _ in range(buffers)]

    def slices(self) -> Iterator[slice]:
        """The chunks of the wanted rows."""
        return products.slices(self._count, self.rows)

    def logits(self, chunk: slice, buffer: int = 0) -> Tensor:
        """[c, V / tp] of a chunk of the wanted rows."""
        out = self.buffers[buffer][: chunk.stop - chunk.start]
        product_into(products.states(self._hidden, self._rows, chunk), self._weight.t(), out)
        return out

    def with_rows(self) -> Iterator[tuple[slice, Tensor, Any]]:
        """Each chunk, its logits, and its distributions, the reader's `rows`; ranks exchange those of a chunk under the product of the next."""
        waiting: deque[tuple] = deque()
        for number, chunk in enumerate(self.slices()):
            z = self.logits(chunk, number % len(self.buffers))
            waiting.append((chunk, z, *start_gather(self.reader.statistics(z, chunk), self._vocabulary)))
            if len(waiting) == len(self.buffers):
                yield self._combined(*waiting.popleft())
        while waiting:
            yield self._combined(*waiting.popleft())

    def _combined(self, chunk: slice, z: Tensor, shares: Tensor, work: Any) -> tuple[slice, Tensor, Any]:
        if work is not None:
            work.wait()
        return chunk, z, self.reader.combine(shares, chunk)


def start_gather(shares: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Any]:
    """[tp, c, …] that will hold every rank's shares [c, …], and what to wait for first."""
    if vocabulary.ranks == 1:
        return shares[None], None
    gathered = shares.new_empty(vocabulary.ranks, *shares.shape)
    into = gathered.flatten(0, 1)
    return gathered, torch.distributed.all_gather_into_tensor(into, shares, group=vocabulary.tp_group, async_op=True)


def _reader(impl: str, vocabulary: Vocabulary, targets: Tensor, named: Named) -> EagerReader:
    kinds: tuple[Any, ...] = EagerReader, EagerTopKReader, EagerSupportReader, EagerTeacherReader
    if impl == "triton":  # torch alone must not need Triton
        from megatron_pg.lm_head import triton_reader as by

        kinds = by.TritonReader, by.TritonTopKReader, by.TritonSupportReader, by.TritonTeacherReader
    plain, of_ids, of_support, of_teacher = kinds
    if named is None:
        return plain(vocabulary, targets)
    kind = {Restriction: of_support, Teacher: of_teacher}.get(type(named), of_ids)
    return kind(vocabulary, targets, named)
