"""What reads a chunk's logits: its distributions in numbers per row, and then the gradient of the logits."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.kernels import logprobs as eager
from megatron_pg.args import KERNELS
from megatron_pg.kernels import PolicyGradientLoss, PolicyLoss, check_for_triton, checked_vocab_size
from megatron_pg.lm_head.inputs import check_choice
from megatron_pg.kernels.logprobs import Rows


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The columns that logits are made of, and what reads them."""

    columns: int  # of this tensor-parallel rank
    temperature: float
    vocab_size: int  # columns of all ranks that are no padding
    tp_group: ProcessGroup | None
    impl: str

    @classmethod
    def of(
        cls, weight: Tensor, temperature: float, vocab_size: int | None, tp_group: ProcessGroup | None, impl: str
    ) -> "Vocabulary":
        """The vocabulary whose rows on this rank are `weight`; refuses options that cannot be."""
        check_choice("impl", impl, KERNELS)
        if impl == "triton":
            check_for_triton(weight)
        if not temperature > 0:
            raise ValueError(
                f"temperature={temperature} is not > 0, so the distribution is undefined. Use the rollouts'."
            )
        ranks = 1 if tp_group is None else tp_group.size()
        return cls(len(weight), temperature, checked_vocab_size(vocab_size, len(weight) * ranks), tp_group, impl)

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks that share the vocabulary."""
        return 1 if self.tp_group is None else self.tp_group.size()


class EagerReader:
    """Reads the logits of [n] wanted rows in torch; `TritonReader` does the same by kernels."""

    def __init__(self, vocabulary: Vocabulary, targets: Tensor):
        self._vocabulary, self._targets = vocabulary, targets
        self._shard = eager.Shard.of_rank(vocabulary.columns, vocabulary.tp_group)

    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        """[c, 4] of this rank's columns of a chunk's logits `z`."""
        return eager.statistics(
            self._without_padding(z), self._targets[chunk], self._shard, self._vocabulary.temperature
        )

    def combine(self, shares: Tensor, chunk: slice) -> Rows:
        """The chunk's distributions from every rank's statistics [tp, c, 4]."""
        rows, targets = eager.combine(shares), self._targets[chunk]
        exists = (targets >= 0) & (targets < self._vocabulary.vocab_size)
        return rows._replace(logprobs=torch.where(exists, rows.logprobs, torch.nan))

    def loss_and_slopes(self, policy_loss: PolicyLoss, rows: Rows) -> tuple[PolicyGradientLoss, Tensor, Tensor]:
        """See the function."""
        return loss_and_slopes(policy_loss, rows)

    def write_gradient(self, z: Tensor, out: Tensor, chunk: slice, rows: Rows, *slopes: Tensor) -> None:
        """The gradient of the logits from the derivatives by each log-probability and entropy; `out` may be `z`."""
        z, temperature = self._without_padding(z), self._vocabulary.temperature
        out.copy_(eager.gradient(z, self._targets[chunk], rows, *slopes, self._shard, temperature))

    def fits_one_launch(self, policy_loss: PolicyLoss, z: Tensor) -> bool:
        """There is no such kernel here."""
        return False

    def _without_padding(self, z: Tensor) -> Tensor:
        z[:, max(self._vocabulary.vocab_size - self._shard.first, 0) :] = -torch.inf
        return z


def loss_and_slopes(policy_loss: PolicyLoss, rows: Rows) -> tuple[PolicyGradientLoss, Tensor, Tensor]:
    """The loss of a chunk, and its derivatives by each log-probability and entropy."""
    with torch.enable_grad():
        logprobs, entropy = (values.detach().requires_grad_() for values in (rows.logprobs, rows.entropy))
        found = policy_loss(logprobs, entropy)
        slopes = torch.autograd.grad(found.loss, (logprobs, entropy), materialize_grads=True, allow_unused=True)
    return replace(found, loss=found.loss.detach()), *slopes
