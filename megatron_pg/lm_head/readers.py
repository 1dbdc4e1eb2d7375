"""What reads a chunk's logits: its distributions in numbers per row, and then the gradient of the logits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_pg.kernels import PolicyGradientLoss, PolicyLoss, Vocabulary
from megatron_pg.kernels import logprobs as eager
from megatron_pg.kernels import support as eager_support
from megatron_pg.kernels import teacher as eager_teacher
from megatron_pg.kernels import topk as eager_topk
from megatron_pg.kernels.logprobs import Rows
from megatron_pg.kernels.support import Restriction, SupportRows
from megatron_pg.kernels.teacher import TeacherRows
from megatron_pg.kernels.topk import TopKRows, topk_logprobs
from megatron_pg.lm_head.teacher import Teacher, TeacherLogits

Slopes = tuple[
    Tensor, ...
]  # derivatives of the loss by what the rows of a chunk bring it, `outputs` of `Rows`, `SupportRows`, `TopKRows` or `TeacherRows`


def loss_of(policy_loss: PolicyLoss, outputs: Sequence[Tensor], vocabulary: Vocabulary) -> PolicyGradientLoss:
    """The loss as a function of what rows bring it: [T, …] `outputs` of `Rows`, `SupportRows`, `TopKRows` or `TeacherRows`."""
    logprobs, entropy, *named = outputs
    if not named:
        return policy_loss(logprobs, entropy)
    if len(named) == 1:
        return policy_loss(logprobs, entropy, divergence=named[0])
    head, tail = named
    return policy_loss(logprobs, entropy, topk_logprobs(head, tail, policy_loss.topk_ids, vocabulary))


class EagerReader:
    """Reads the logits `z` [c, V / tp] of chunks of [n] wanted rows in torch; a `chunk` is a slice of those rows."""

    rows: type = Rows  # what `combine` makes

    def __init__(self, vocabulary: Vocabulary, targets: Tensor):
        self._vocabulary, self._targets = vocabulary, targets

    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        """[c, 4] of this rank's columns."""
        return eager.statistics(self._vocabulary.hide_padding(z), self._targets[chunk], self._vocabulary)

    def combine(self, shares: Tensor, chunk: slice) -> Any:
        """The chunk's distributions from every rank's statistics [tp, c, 4]."""
        rows = eager.combine(shares)
        return rows._replace(logprobs=self._vocabulary.defined(rows.logprobs, self._targets[chunk]))

    def loss_and_slopes(self, policy_loss: PolicyLoss, rows: Any) -> tuple[PolicyGradientLoss, Slopes]:
        """The loss of a chunk, and its derivatives by the outputs of its rows."""
        with torch.enable_grad():
            outputs = [values.detach().requires_grad_() for values in rows.outputs]
            found = self._loss(policy_loss, outputs)
            slopes = torch.autograd.grad(found.loss, outputs, materialize_grads=True, allow_unused=True)
        return replace(found, loss=found.loss.detach()), slopes

    def _loss(self, policy_loss: PolicyLoss, outputs: Sequence[Tensor]) -> PolicyGradientLoss:
        return loss_of(policy_loss, outputs, self._vocabulary)

    def write_gradient(self, z: Tensor, out: Tensor, chunk: slice, rows: Any, slopes: Slopes) -> None:
        """The gradient of the logits from those derivatives; `out` may be `z`."""
        z = self._vocabulary.hide_padding(z)
        out.copy_(eager.gradient(z, self._targets[chunk], rows, slopes[0], slopes[1], self._vocabulary))

    def fits_single_pass(self, policy_loss: PolicyLoss, z: Tensor, *, entropy: bool) -> bool:
        """Whether `loss_and_gradient` makes loss and gradient of a chunk like `z`; torch has no such kernel."""
        return False

    def loss_and_gradient(
        self, z: Tensor, out: Tensor, policy_loss: PolicyLoss, *, grad_scale: float, entropy: bool
    ) -> PolicyGradientLoss:
        """The loss of a chunk, and in `out`, which may be `z`, its gradient by the logits, times `grad_scale`."""
        raise NotImplementedError


class EagerTopKReader(EagerReader):
    """`EagerReader` where the loss is over ids [n, K] of each row too."""

    rows = TopKRows

    def __init__(self, vocabulary: Vocabulary, targets: Tensor, ids: Tensor):
        super().__init__(vocabulary, targets)
        self._ids = ids

    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        """[c, 4 + K] of this rank's columns."""
        z = self._vocabulary.hide_padding(z)
        return eager_topk.statistics(z, self._targets[chunk], self._ids[chunk], self._vocabulary)

    def combine(self, shares: Tensor, chunk: slice) -> Any:
        """The chunk's distributions from every rank's statistics [tp, c, 4 + K]."""
        return eager_topk.combine(shares, self._targets[chunk], self._ids[chunk], self._vocabulary)

    def write_gradient(self, z: Tensor, out: Tensor, chunk: slice, rows: Any, slopes: Slopes) -> None:
        """As of `EagerReader`."""
        z = self._vocabulary.hide_padding(z)
        where = self._targets[chunk], self._ids[chunk]
        out.copy_(eager_topk.gradient(z, *where, rows, eager_topk.Slopes(*slopes), self._vocabulary))


class EagerSupportReader(EagerReader):
    """`EagerReader` where the distributions are over what could be sampled."""

    rows = SupportRows

    def __init__(self, vocabulary: Vocabulary, targets: Tensor, restriction: Restriction):
        super().__init__(vocabulary, targets)
        self._restriction = restriction

    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        """[c, 4] of this rank's columns, or [2 c, 4]."""
        return eager_support.statistics(self._vocabulary.hide_padding(z), *self._of(chunk), self._vocabulary)

    def combine(self, shares: Tensor, chunk: slice) -> Any:
        """The chunk's distributions from every rank's statistics."""
        return eager_support.combine(shares, *self._of(chunk), self._vocabulary)

    def write_gradient(self, z: Tensor, out: Tensor, chunk: slice, rows: Any, slopes: Slopes) -> None:
        """As of `EagerReader`."""
        z = self._vocabulary.hide_padding(z)
        out.copy_(eager_support.gradient(z, *self._of(chunk), rows, slopes, self._vocabulary))

    def _of(self, chunk: slice) -> tuple[Tensor, Restriction]:
        return self._targets[chunk], self._restriction.at(chunk)


class EagerTeacherReader(EagerReader):
    """`EagerReader` where the loss is a divergence from a teacher's distributions too, whose logits are made beside."""

    rows = TeacherRows
    by: Any = eager_teacher  # what does it

    def __init__(self, vocabulary: Vocabulary, targets: Tensor, teacher: Teacher):
        super().__init__(vocabulary, targets)
        self._form, self._teacher = teacher.form, TeacherLogits(teacher, vocabulary)
        self._students: dict[int, Tensor] = {}  # logits of chunks whose shares are under way, by their starts

    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        """[c, 7] of this rank's columns."""
        z = self._students[chunk.start] = self._vocabulary.hide_padding(z)
        pair = z, self._teacher.of(chunk, z)
        return self.by.statistics(*pair, self._targets[chunk], self._form, self._vocabulary)

    def combine(self, shares: Tensor, chunk: slice) -> Any:
        """The chunk's distributions from every rank's statistics [tp, c, 7]; a jsd takes another exchange."""
        z = self._students.pop(chunk.start)
        rows = self.by.combine(shares, self._targets[chunk], self._form, self._vocabulary)
        if self._form.share is None:
            return rows
        sums = self.by.mixture_sums(z, self._teacher.of(chunk, z), rows, self._form, self._vocabulary)
        return eager_teacher.with_mixture(rows, self._vocabulary.gather(sums))

    def write_gradient(self, z: Tensor, out: Tensor, chunk: slice, rows: Any, slopes: Slopes) -> None:
        """As of `EagerReader`."""
        z = self._vocabulary.hide_padding(z)
        pair = z, self._teacher.of(chunk, z)
        self.by.write_gradient(*pair, out, self._targets[chunk], rows, slopes, self._form, self._vocabulary)
