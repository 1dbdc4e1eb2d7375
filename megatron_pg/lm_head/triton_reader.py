"""What reads a chunk's logits by the Triton kernels. Imported where they are asked for: torch alone must not need Triton."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_pg.kernels import PolicyGradientLoss, PolicyLoss, Vocabulary
from megatron_pg.kernels.support import Restriction, SupportRows
from megatron_pg.kernels.topk import Slopes as TopKSlopes
from megatron_pg.kernels.topk import TopKRows
from megatron_pg.kernels.triton import loss as triton_loss
from megatron_pg.kernels.triton import support as support_triton
from megatron_pg.kernels.triton import teacher as teacher_triton
from megatron_pg.kernels.triton import topk as topk_triton
from megatron_pg.kernels.triton import vocab_parallel
from megatron_pg.kernels.triton.surrogate import surrogate_and_slopes
from megatron_pg.kernels.triton.topk_loss import topk_loss
from megatron_pg.lm_head.readers import EagerReader, EagerTeacherReader, Slopes


class TritonReader(EagerReader):
    """`EagerReader` by kernels; where one launch makes loss and gradient, `loss_and_gradient` does."""

    def __init__(self, vocabulary: Vocabulary, targets: Tensor):
        super().__init__(vocabulary, targets.contiguous())  # kernels have no strides
        self._trained = torch.ones_like(self._targets, dtype=torch.bool)  # rows that are not have no logits

    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        """By a kernel."""
        return vocab_parallel.statistics(z, *self._rows(chunk), self._vocabulary)

    def combine(self, shares: Tensor, chunk: slice) -> Any:
        """By a kernel."""
        return vocab_parallel.combine(shares, *self._rows(chunk), self._vocabulary)

    def loss_and_slopes(self, policy_loss: PolicyLoss, rows: Any) -> tuple[PolicyGradientLoss, Slopes]:
        """In one launch, where the objective has a row."""
        if not policy_loss.row:
            return super().loss_and_slopes(policy_loss, rows)
        return surrogate_and_slopes(policy_loss, rows.logprobs, rows.entropy)

    def write_gradient(self, z: Tensor, out: Tensor, chunk: slice, rows: Any, slopes: Slopes) -> None:
        """By a kernel."""
        vocab_parallel.write_gradient(z, out, *self._rows(chunk), rows, (slopes[0], slopes[1]), self._vocabulary)

    def fits_single_pass(self, policy_loss: PolicyLoss, z: Tensor, *, entropy: bool) -> bool:
        """By a kernel."""
        return policy_loss.is_by_token and triton_loss.fits_single_pass(
            z, policy_loss, self._vocabulary, entropy=entropy
        )

    def loss_and_gradient(
        self, z: Tensor, out: Tensor, policy_loss: PolicyLoss, *, grad_scale: float, entropy: bool
    ) -> PolicyGradientLoss:
        """By a kernel."""
        from megatron_pg.kernels.triton import single_pass  # where `fits_single_pass` has looked for what it needs

        return single_pass.loss_and_gradient(
            z, out, policy_loss, self._vocabulary, grad_scale=grad_scale, entropy=entropy
        )

    def _rows(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """Targets and mask, as kernels take them."""
        return self._targets[chunk], self._trained[chunk]


class TritonTopKReader(TritonReader):
    """`EagerTopKReader` by kernels. A chunk's logits are nobody else's, so the ids stay hidden in them."""

    rows = TopKRows

    def __init__(self, vocabulary: Vocabulary, targets: Tensor, ids: Tensor):
        super().__init__(vocabulary, targets)
        self._ids = ids.contiguous()

    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        """By kernels."""
        return topk_triton.statistics(z, *self._rows(chunk), self._ids[chunk], self._vocabulary)

    def combine(self, shares: Tensor, chunk: slice) -> Any:
        """By a kernel."""
        return topk_triton.combine(shares, *self._rows(chunk), self._ids[chunk], self._vocabulary)

    def write_gradient(self, z: Tensor, out: Tensor, chunk: slice, rows: Any, slopes: Slopes) -> None:
        """By kernels."""
        where = *self._rows(chunk), self._ids[chunk]
        topk_triton.write_gradient(z, out, *where, rows, TopKSlopes(*slopes), self._vocabulary)

    def _loss(self, policy_loss: PolicyLoss, outputs: Sequence[Tensor]) -> PolicyGradientLoss:
        return topk_loss(policy_loss, outputs, policy_loss.topk_ids, self._vocabulary)


class TritonSupportReader(TritonReader):
    """`EagerSupportReader` by kernels."""

    rows = SupportRows

    def __init__(self, vocabulary: Vocabulary, targets: Tensor, restriction: Restriction):
        super().__init__(vocabulary, targets)
        self._restriction = restriction

    def statistics(self, z: Tensor, chunk: slice) -> Tensor:
        """By kernels."""
        return support_triton.statistics(z, *self._rows(chunk), self._restriction.at(chunk), self._vocabulary)

    def combine(self, shares: Tensor, chunk: slice) -> Any:
        """By a kernel, or two."""
        return support_triton.combine(shares, *self._rows(chunk), self._restriction.at(chunk), self._vocabulary)

    def write_gradient(self, z: Tensor, out: Tensor, chunk: slice, rows: Any, slopes: Slopes) -> None:
        """By kernels."""
        where = *self._rows(chunk), self._restriction.at(chunk)
        support_triton.write_gradient(z, out, *where, rows, slopes, self._vocabulary)

    def fits_single_pass(self, policy_loss: PolicyLoss, z: Tensor, *, entropy: bool) -> bool:
        """That kernel reads whole rows."""
        return False


class TritonTeacherReader(EagerTeacherReader):
    """`EagerTeacherReader` by kernels."""

    by = teacher_triton

    def loss_and_slopes(self, policy_loss: PolicyLoss, rows: Any) -> tuple[PolicyGradientLoss, Slopes]:
        """What else there is in one launch, where the objective has a row."""
        rest = policy_loss.without_hidden
        if not rest.row:
            return super().loss_and_slopes(policy_loss, rows)
        found, slopes = surrogate_and_slopes(rest, rows.logprobs, rows.entropy)
        others = iter(() if found.stream_losses is None else found.stream_losses)
        terms, loss, weights, losses = policy_loss.terms, found.loss, [], []
        for stream in terms.streams:
            if not stream.reads_hidden:
                losses.append(next(others))
                continue
            own = policy_loss.fields.of_stream(stream.name)
            weights.append(torch.where(own.mask, stream.weight * own.weights, 0).to(found.loss.dtype))
            losses.append(torch.where(own.mask, rows.divergence, 0))
            loss = loss + (weights[-1] * losses[-1]).sum()  # NaN at a weight of 0, too
        weight = sum(weights[1:], start=weights[0])
        by_divergence = weight if terms.grad_divisor == 1.0 else weight / terms.grad_divisor
        return replace(found, loss=loss, stream_losses=torch.stack(losses)), (*slopes, by_divergence)
