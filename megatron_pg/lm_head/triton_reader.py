"""What reads a chunk's logits by the Triton kernels. Imported where they are asked for: torch alone must not need Triton."""

import torch
from torch import Tensor

from megatron_pg.kernels import PolicyGradientLoss, PolicyLoss, triton_loss, vocab_parallel
from megatron_pg.kernels.surrogate import surrogate_and_slope
from megatron_pg.lm_head.readers import Vocabulary, loss_and_slopes
from megatron_pg.kernels.logprobs import Rows


class TritonReader:
    """`EagerReader` by kernels; where one launch makes loss and gradient, `loss_and_gradient` does."""

    def __init__(self, vocabulary: Vocabulary, targets: Tensor):
        self._vocabulary, self._targets = vocabulary, targets.contiguous()  # kernels have no strides
        columns, vocab_size, tp_group = vocabulary.columns, vocabulary.vocab_size, vocabulary.tp_group
        self._shard = vocab_parallel.Shard.of_rank(columns, vocab_size, tp_group)
        self._trained = torch.ones_like(self._targets, dtype=torch.bool)  # rows that are not have no logits

    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        """As `EagerReader`."""
        return vocab_parallel.statistics(z, *self._rows(chunk), self._shard, self._vocabulary.temperature)

    def combine(self, shares: Tensor, chunk: slice) -> Rows:
        """As `EagerReader`."""
        return vocab_parallel.combine(shares, *self._rows(chunk), self._shard, self._vocabulary.temperature)

    def loss_and_slopes(self, policy_loss: PolicyLoss, rows: Rows) -> tuple[PolicyGradientLoss, Tensor, Tensor]:
        """As `EagerReader`; the plain clipped surrogate in one launch."""
        if not policy_loss.terms.is_plain_grpo:
            return loss_and_slopes(policy_loss, rows)
        found, slope = surrogate_and_slope(policy_loss, rows.logprobs, rows.entropy)
        return found, slope, torch.zeros_like(slope)

    def write_gradient(self, z: Tensor, out: Tensor, chunk: slice, rows: Rows, *slopes: Tensor) -> None:
        """As `EagerReader`."""
        temperature = self._vocabulary.temperature
        vocab_parallel.write_gradient(z, out, *self._rows(chunk), rows, *slopes, self._shard, temperature)

    def fits_one_launch(self, policy_loss: PolicyLoss, z: Tensor) -> bool:
        """Whether one launch makes loss and gradient of a chunk like `z`."""
        plain = self._vocabulary.ranks == 1 and policy_loss.terms.is_plain_grpo
        return plain and triton_loss.fits_one_launch(z, self._vocabulary.vocab_size)

    def loss_and_gradient(
        self, z: Tensor, out: Tensor, chunk: slice, policy_loss: PolicyLoss, *, grad_scale: float, entropy: bool
    ) -> PolicyGradientLoss:
        """The loss of a chunk, and in `out`, which may be `z`, its gradient by the logits, times `grad_scale`."""
        from megatron_pg.kernels import one_launch  # where `fits_one_launch` has looked for what it needs

        return one_launch.grpo_loss_and_gradient(
            z,
            out,
            self._targets[chunk],
            policy_loss,
            valid=self._vocabulary.vocab_size,
            temperature=self._vocabulary.temperature,
            grad_scale=grad_scale,
            entropy=entropy,
        )

    def _rows(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """Targets and mask, as kernels take them."""
        return self._targets[chunk], self._trained[chunk]
