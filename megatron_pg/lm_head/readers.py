"""What reads a chunk's logits: its distributions in numbers per row, and then the gradient of the logits."""

from dataclasses import replace

import torch
from torch import Tensor

from megatron_pg.kernels import PolicyGradientLoss, PolicyLoss, Vocabulary
from megatron_pg.kernels import logprobs as eager
from megatron_pg.kernels.logprobs import Rows

Slopes = tuple[Tensor, Tensor]  # derivatives of the loss by each log-probability and entropy


class EagerReader:
    """Reads the logits `z` [c, V / tp] of chunks of [n] wanted rows in torch; a `chunk` is a slice of those rows."""

    def __init__(self, vocabulary: Vocabulary, targets: Tensor):
        self._vocabulary, self._targets = vocabulary, targets

    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        """[c, 4] of this rank's columns."""
        return eager.statistics(self._vocabulary.hide_padding(z), self._targets[chunk], self._vocabulary)

    def combine(self, shares: Tensor, chunk: slice) -> Rows:
        """The chunk's distributions from every rank's statistics [tp, c, 4]."""
        rows = eager.combine(shares)
        return rows._replace(logprobs=self._vocabulary.defined(rows.logprobs, self._targets[chunk]))

    def loss_and_slopes(self, policy_loss: PolicyLoss, rows: Rows) -> tuple[PolicyGradientLoss, Slopes]:
        """The loss of a chunk, and its derivatives by each log-probability and entropy."""
        with torch.enable_grad():
            logprobs, entropy = (values.detach().requires_grad_() for values in (rows.logprobs, rows.entropy))
            found = policy_loss(logprobs, entropy)
            by_logprob, by_entropy = torch.autograd.grad(
                found.loss, (logprobs, entropy), materialize_grads=True, allow_unused=True
            )
        return replace(found, loss=found.loss.detach()), (by_logprob, by_entropy)

    def write_gradient(self, z: Tensor, out: Tensor, chunk: slice, rows: Rows, slopes: Slopes) -> None:
        """The gradient of the logits from those derivatives; `out` may be `z`."""
        z = self._vocabulary.hide_padding(z)
        out.copy_(eager.gradient(z, self._targets[chunk], rows, *slopes, self._vocabulary))

    def fits_one_launch(self, policy_loss: PolicyLoss, z: Tensor) -> bool:
        """Whether `loss_and_gradient` makes loss and gradient of a chunk like `z`; torch has no such kernel."""
        return False

    def loss_and_gradient(
        self, z: Tensor, out: Tensor, policy_loss: PolicyLoss, *, grad_scale: float, entropy: bool
    ) -> PolicyGradientLoss:
        """The loss of a chunk, and in `out`, which may be `z`, its gradient by the logits, times `grad_scale`."""
        raise NotImplementedError
