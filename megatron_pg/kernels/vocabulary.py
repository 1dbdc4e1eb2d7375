"""The columns of the logits: which of them this tensor-parallel rank holds, and which are padding."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """Turns rows of logits [T, columns] into distributions: softmax(z / tau) over the columns that are not padding.

    With a softcap c, z = c tanh(x / c) of the logits x. A logit of -inf stays one, because it has no probability.
    Source: Gemma 2, arXiv 2408.00118.
    """

    columns: int  # of this rank, the same on every rank
    size: int  # columns of all ranks that are not padding
    temperature: float = 1.0  # tau
    tp_group: ProcessGroup | None = None  # whose ranks share the columns, in rank order; None: they are whole
    softcap: float | None = None  # c; None: z = x

    @classmethod
    def of(
        cls,
        columns: int,
        *,
        temperature: float = 1.0,
        vocab_size: int | None = None,
        tp_group: ProcessGroup | None = None,
        softcap: float | None = None,
    ) -> "Vocabulary":
        """The vocabulary of rows of `columns` on this rank; `vocab_size` None: there is no padding.

        Raises:
            ValueError: there is no column, temperature or softcap is not > 0 and finite, or the size is not among the
                columns.
        """
        if not 0 < temperature < math.inf:
            raise ValueError(
                f"temperature={temperature} is not > 0 and finite, so the distribution is undefined. Use the rollouts'."
            )
        if softcap is not None and not 0 < softcap < math.inf:
            raise ValueError(
                f"softcap={softcap} is not finite and > 0, so no logits can be capped. Use None for logits without one."
            )
        if columns < 1:
            raise ValueError(
                "the vocabulary has 0 columns on this rank, so there is no distribution. Give logits [T, V / tp], or a "
                "head's weight [V / tp, H], with V / tp >= 1."
            )
        whole = columns * (1 if tp_group is None else tp_group.size())
        if vocab_size is not None and not 0 < vocab_size <= whole:
            raise ValueError(
                f"vocab_size={vocab_size} is not in 1 .. {whole}, the columns of all tensor-parallel ranks. Give the "
                "tokenizer's size."
            )
        return cls(columns, whole if vocab_size is None else vocab_size, temperature, tp_group, softcap)

    def check_columns(self, what: str, columns: int) -> None:
        """Raise ValueError for logits, or a weight that makes logits, of another number of columns."""
        if columns != self.columns:
            raise ValueError(
                f"{what} have {columns} columns on this rank, and the vocabulary {self.columns}. Use "
                f"Vocabulary.of({columns}, …)."
            )

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks that share the columns."""
        return 1 if self.tp_group is None else self.tp_group.size()

    @property
    def first(self) -> int:
        """Global id of this rank's first column."""
        return 0 if self.tp_group is None else self.tp_group.rank() * self.columns

    @property
    def valid(self) -> int:
        """Columns of this rank that are not padding."""
        return min(max(self.size - self.first, 0), self.columns)

    def owned(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each target here, 0 where this rank does not own it, and whether it does."""
        local = targets - self.first
        owned = (local >= 0) & (local < self.valid)
        return torch.where(owned, local, 0), owned

    def defined(self, values: Tensor, targets: Tensor) -> Tensor:
        """The values [T], NaN where the target is not in the vocabulary."""
        return torch.where((targets >= 0) & (targets < self.size), values, torch.nan)

    def hide_padding(self, logits: Tensor) -> Tensor:
        """The logits themselves, with -inf written into the columns that are padding."""
        if self.valid < self.columns:
            logits[:, self.valid :] = -torch.inf
        return logits

    def capped(self, logits: Tensor) -> Tensor:
        """z of logits x in the compute dtype."""
        if self.softcap is None:
            return logits
        return torch.where(logits == -torch.inf, logits, self.softcap * torch.tanh(logits / self.softcap))

    def through_cap(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """The gradient by x from the gradient by z: times dz/dx = 1 - (z / c)² = 1 / cosh²(x / c)."""
        if self.softcap is None:
            return gradient
        return gradient * torch.cosh(logits.to(gradient.dtype) / self.softcap).pow(-2)

    def gather(self, shares: Tensor) -> Tensor:
        """[tp, …] from every rank's contiguous tensor of one shape, in rank order."""
        if self.ranks == 1:
            return shares[None]
        gathered = shares.new_empty(self.ranks, *shares.shape)
        torch.distributed.all_gather_into_tensor(gathered.flatten(0, 1), shares, group=self.tp_group)
        return gathered
