"""Loss and gradients of mode "scaled_exp", a block of rows at a time, by the steps of `head`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from megatron_pg.kernels import PolicyGradientLoss, PolicyLoss, Vocabulary
from megatron_pg.kernels.losses import loss_and_slopes
from megatron_pg.lm_head import products
from megatron_pg.lm_head.gradients import HeadGradients
from megatron_pg.lm_head.inputs import Head
from megatron_pg.lm_head.products import logits_dtype
from megatron_pg.lm_head.scaled_exp.head import Part, ScaledExp, ScaledExpOutput

HIDDEN_BYTES = 2**25  # of the hidden states' gradient in float32 at a time


class ScaledExpGradients(HeadGradients):
    """Loss and gradients of the wanted rows, a block at a time.

    Args:
        hidden, weight, rows, head, needed: as in `HeadGradients`, and rows are given; of the head its `impl` too.
        vocabulary: what the logits are of.
    """

    _rows: Tensor

    def __init__(
        self, hidden: Tensor, weight: Tensor, rows: Tensor, vocabulary: Vocabulary, head: Head, needed: tuple[bool, ...]
    ):
        super().__init__(hidden.contiguous(), weight, rows.contiguous(), head, needed)  # kernels have no strides
        self._vocabulary, self._impl = vocabulary, head.impl
        self._steps = ScaledExp(weight, vocabulary)
        if head.impl == "triton":
            from megatron_pg.lm_head.scaled_exp.kernels import TritonScaledExp  # torch alone must not need Triton

            self._steps = TritonScaledExp(weight, vocabulary)

    def losses(self, policy_loss: PolicyLoss, grad_scale: float) -> Iterator[PolicyGradientLoss]:
        """The loss of each part of the rows, in order; its gradients are for the upstream gradient `grad_scale`."""
        targets = policy_loss.fields.targets.contiguous()
        target_logits = self._steps.target_logits(self._hidden, self._rows, targets)
        if self._vocabulary.ranks > 1:
            torch.distributed.all_reduce(target_logits, group=self._vocabulary.tp_group)
        size = min(products.block_rows(self._weight, products.ROWS), len(targets))
        buffer, v = products.aligned(self._hidden, size, len(self._weight)), torch.empty_like(target_logits)
        for block in products.slices(len(targets), size):
            states = self._hidden.index_select(0, self._rows[block])
            part = Part(states, buffer[: len(states)], targets[block], target_logits[block])
            shares = self._vocabulary.gather(self._steps.product(part))
            sums, logprobs = self._steps.logprobs(shares, part.targets)
            # no term reads the entropy; outputs are written over below
            outputs, chosen = (logprobs, logprobs), policy_loss.at(block)
            loss, slopes = loss_and_slopes(chosen, outputs, self._vocabulary, self._impl)
            by_logprob = cast(Tensor, slopes[0]) * grad_scale
            output = ScaledExpOutput(loss.loss, loss.logprobs, loss.log_ratios)
            self._steps.weigh(part, sums, by_logprob, v[block], output)
            yield replace(loss, entropy=None)
            self._multiply(part.scaled, states, v[block], self._rows[block])
        if self._of_weight is not None:
            self._steps.add_lost(self._hidden, self._rows, targets, v, target_logits, self._of_weight.total)

    def _multiply(self, scaled: Tensor, weighed: Tensor, v: Tensor, rows: Tensor) -> None:
        if self._of_hidden is not None:
            size = max(HIDDEN_BYTES // (logits_dtype(weighed).itemsize * weighed.shape[1]), 1)
            for part in products.slices(len(scaled), size):
                product = products.product(scaled[part], self._weight, logits_dtype(weighed))
                self._steps.scatter(product, v[part], rows[part], self._of_hidden)
        if self._of_weight is not None:
            products.add_product(scaled.t(), weighed, self._of_weight.total)
