"""Averages over whole sequences, whose tokens lie on several context-parallel ranks.

Sums of each sequence are made in a fixed order (atomic additions would not be reproducible), added over the
context-parallel group in one SUM all-reduce, and only then divided. They are values, not functions: no collective in
the backward.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequences:
    """The sequence, one of a micro-batch's S samples or turns, of each of this rank's T tokens.

    S is known on the host and equal on all context- and tensor-parallel ranks; slot S is for padding.
    """

    slots: Tensor  # [T] int64 in [0, S], S on padding
    order: Tensor  # [T] int64, the tokens sorted by slot
    lengths: Tensor  # [S + 1] int64, tokens of each slot on this rank
    counts: Tensor  # [S] float64, trained tokens of the whole sequence, at least 1
    group: ProcessGroup | None = None  # the context-parallel group; None: every sequence is whole

    def trained_tokens(self, dtype: torch.dtype) -> Tensor:
        """[T] trained tokens of the token's whole sequence, at least 1."""
        return torch.nn.functional.pad(self.counts, (0, 1), value=1.0)[self.slots].to(dtype)

    def averages(self, values: Tensor) -> Tensor:
        """[n, T] in the dtype of `values`: averages over the trained tokens of the token's whole sequence.

        Args:
            values: [n, T], 0 on tokens that are not trained. Not differentiated. Every rank of the group must call with
                the same n.
        """
        with torch.no_grad():
            # unsafe: the lengths are known to fit, and a check would wait for the device
            summed = partial(torch.segment_reduce, reduce="sum", lengths=self.lengths, unsafe=True, initial=0)
            sums = torch.stack([summed(row[self.order]) for row in values.double()])[:, :-1].contiguous()
            averages = torch.nn.functional.pad(self.over_ranks(sums) / self.counts, (0, 1))
            return averages[:, self.slots].to(values.dtype)

    def over_ranks(self, sums: Tensor) -> Tensor:
        """[n, S] float64: this rank's sums, contiguous, replaced in place by the sums over the group. A collective."""
        if self.group is not None and len(self.counts) > 0:
            torch.distributed.all_reduce(sums, group=self.group)
        return sums
