"""Loss and gradients of mode "scaled_exp", a block of rows at a time, by the steps of `head`."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from megatron_pg.kernels import PolicyGradientLoss, PolicyLoss, Vocabulary
from megatron_pg.lm_head import products
from megatron_pg.lm_head.chunks import start_gather
from megatron_pg.lm_head.gradients import HeadGradients
from megatron_pg.lm_head.inputs import Head
from megatron_pg.lm_head.products import logits_dtype
from megatron_pg.lm_head.scaled_exp.head import ScaledExp, ScaledExpOutput

HIDDEN_BYTES = 2**25  # of the hidden states' gradient in float32 at a time


class ScaledExpGradients(HeadGradients):
    """Loss and gradients of the wanted rows, a block at a time.

    Args:
        hidden: [T, H].
        weight: [V / tp, H].
        rows: [n] the rows of `hidden` that have a loss.
        vocabulary: what the logits are of.
        head: its `impl` and `main_grad`.
        needed: which of hidden states and weight need a gradient, as autograd has it.
    """

    _rows: Tensor  # this head is told which

    def __init__(
        self, hidden: Tensor, weight: Tensor, rows: Tensor, vocabulary: Vocabulary, head: Head, needed: tuple[bool, ...]
    ):
        super().__init__(hidden.contiguous(), weight, rows.contiguous(), head, needed)  # kernels have no strides
        self._vocabulary, self._impl = vocabulary, head.impl
        self._steps = _steps(head.impl, weight, vocabulary)

    def losses(self, policy_loss: PolicyLoss, grad_scale: float) -> Iterator[PolicyGradientLoss]:
        """The loss of each part of the rows, in order; its gradients are for the upstream gradient `grad_scale`."""
        targets = policy_loss.fields.targets.contiguous()
        target_logits = self._steps.target_logits(self._hidden, self._rows, targets)
        if self._vocabulary.ranks > 1:
            torch.distributed.all_reduce(target_logits, group=self._vocabulary.tp_group)
        size, columns = min(products.block_rows(self._weight, products.ROWS), len(targets)), len(self._weight)
        stride = -(-columns // 8) * 8  # whole 16 bytes for bfloat16, as the copies of a tile need
        buffer = self._hidden.new_empty(size, stride)[:, :columns]
        for block in products.slices(len(targets), size):
            states = self._hidden.index_select(0, self._rows[block])
            scaled, v = buffer[: len(states)], torch.empty_like(target_logits[block])
            for part, shares in self._shares(states, scaled, target_logits[block], targets[block]):
                chosen = policy_loss.at(slice(block.start + part.start, block.start + part.stop))
                sums, logprobs = self._steps.logprobs(shares, targets[block][part])
                loss, slopes = _loss_and_slopes(chosen, logprobs, self._impl)
                of_rows = ScaledExpOutput(loss.loss, loss.logprobs, loss.log_ratios)
                of_targets = targets[block][part], target_logits[block][part]
                self._steps.weigh(states[part], scaled[part], *of_targets, sums, slopes * grad_scale, v[part], of_rows)
                yield loss
            self._multiply(scaled, states, v, self._rows[block])

    def _shares(
        self, states: Tensor, scaled: Tensor, target_logits: Tensor, targets: Tensor
    ) -> Iterator[tuple[slice, Tensor]]:
        """Every rank's S [tp, c] of each part of a block, exchanged during the product of the next part."""
        parts, waiting = min(self._vocabulary.ranks, 2), []
        for part in products.slices(len(states), -(-len(states) // parts)):
            sums = self._steps.product(states[part], target_logits[part], targets[part], scaled[part])
            waiting.append((part, *start_gather(sums, self._vocabulary)))
        for part, shares, work in waiting:
            if work is not None:
                work.wait()
            yield part, shares

    def _multiply(self, scaled: Tensor, weighed: Tensor, v: Tensor, rows: Tensor) -> None:
        if self._of_hidden is not None:
            size = max(HIDDEN_BYTES // (logits_dtype(weighed).itemsize * weighed.shape[1]), 1)
            for part in products.slices(len(scaled), size):
                product = products.product(scaled[part], self._weight, logits_dtype(weighed))
                self._steps.scatter(product, v[part], rows[part], self._of_hidden)
        if self._of_weight is not None:
            products.add_product(scaled.t(), weighed, self._of_weight.total)


def _steps(impl: str, weight: Tensor, vocabulary: Vocabulary) -> ScaledExp:
    if impl == "torch":
        return ScaledExp(weight, vocabulary)
    from megatron_pg.lm_head.scaled_exp.kernels import TritonScaledExp  # torch alone must not need Triton

    return TritonScaledExp(weight, vocabulary)


def _loss_and_slopes(policy_loss: PolicyLoss, logprobs: Tensor, impl: str) -> tuple[PolicyGradientLoss, Tensor]:
    """The loss of a part of the rows, and its derivatives by their log-probabilities, as fresh tensors."""
    if impl == "torch" or not policy_loss.token_kernel:
        return _by_torch(policy_loss, logprobs)
    from megatron_pg.kernels.triton.surrogate import surrogate_and_slopes  # torch alone must not need Triton

    loss, (slopes, _) = surrogate_and_slopes(policy_loss, logprobs, logprobs)  # no term reads the entropy
    return replace(loss, entropy=None), slopes


def _by_torch(policy_loss: PolicyLoss, logprobs: Tensor) -> tuple[PolicyGradientLoss, Tensor]:
    with torch.enable_grad():
        leaf = logprobs.requires_grad_()
        loss = policy_loss(leaf)
        slopes = torch.autograd.grad(loss.loss, leaf, materialize_grads=True, allow_unused=True)[0]
    return replace(loss, loss=loss.loss.detach(), logprobs=leaf.detach()), slopes
