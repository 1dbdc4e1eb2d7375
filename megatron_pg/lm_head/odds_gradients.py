"""Loss and gradients of mode "odds", a block of rows at a time, by the steps of `odds`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_pg.kernels import PolicyGradientLoss, PolicyLoss, Vocabulary
from megatron_pg.lm_head import products
from megatron_pg.lm_head.chunks import start_gather
from megatron_pg.lm_head.gradients import HeadGradients
from megatron_pg.lm_head.inputs import Head
from megatron_pg.lm_head.odds import LIMIT, EagerOdds, logprobs_of
from megatron_pg.lm_head.products import logits_dtype

HIDDEN_BYTES = 2**25  # of the hidden states' gradient in float32 at a time


class Odds(HeadGradients):
    """Loss and gradients of the wanted rows, a block at a time.

    Args:
        hidden: [T, H].
        weight: [V / tp, H].
        rows: [n] the rows of `hidden` that have a loss.
        vocabulary: what the logits are of.
        head: its `impl` and `main_grad`.
        needed: which of hidden states and weight need a gradient, as autograd has it.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, rows: Tensor, vocabulary: Vocabulary, head: Head, needed: tuple[bool, ...]
    ):
        super().__init__(hidden, weight, rows, head, needed)
        self._vocabulary, self._impl = vocabulary, head.impl
        self._steps = _steps(head.impl, weight, vocabulary)
        self._size = min(products.block_rows(weight, products.ROWS), len(rows))
        stride = -(-len(weight) // 8) * 8  # whole 16 bytes for bfloat16, as the copies of a tile need
        self._buffer = hidden.new_empty(self._size, stride)[:, : len(weight)]

    def losses(self, policy_loss: PolicyLoss, grad_scale: float) -> Iterator[PolicyGradientLoss]:
        """The loss of each part of the rows, in order; the gradients for the upstream gradient `grad_scale` grow with it."""
        targets = policy_loss.fields.targets.contiguous()  # kernels have no strides
        target_logits = self._steps.target_logits(self._hidden, self._rows, targets)
        if self._vocabulary.ranks > 1:
            torch.distributed.all_reduce(target_logits, group=self._vocabulary.tp_group)
        for block in products.slices(len(targets), self._size):
            states = self._hidden.index_select(0, self._rows[block])
            odds, v = self._buffer[: len(states)], torch.empty_like(target_logits[block])
            for part, sums in self._sums(states, odds, target_logits[block], targets[block]):
                chosen = policy_loss.at(slice(block.start + part.start, block.start + part.stop))
                found, slope = _loss_and_slope(chosen, sums, self._vocabulary, self._impl)
                yield found
                self._steps.weigh(states[part], odds[part], targets[block][part], sums, slope * grad_scale, v[part])
            self._multiply(odds, states, v, self._rows[block])

    def _sums(self, states: Tensor, odds: Tensor, target_logits: Tensor, targets: Tensor) -> list[tuple[slice, Tensor]]:
        """S of a block's rows in parts; ranks exchange those of one part under the product of the next."""
        parts, waiting = min(self._vocabulary.ranks, 2), []
        for part in products.slices(len(states), -(-len(states) // parts)):
            shares = self._steps.product(states[part], target_logits[part], targets[part], odds[part])
            waiting.append((part, *start_gather(shares, self._vocabulary)))
        return [(part, _summed(shares, work, targets[part], self._vocabulary)) for part, shares, work in waiting]

    def _multiply(self, odds: Tensor, weighed: Tensor, v: Tensor, rows: Tensor) -> None:
        if self._of_hidden is not None:
            size = max(HIDDEN_BYTES // (logits_dtype(weighed).itemsize * weighed.shape[1]), 1)
            for part in products.slices(len(odds), size):
                product = products.product(odds[part], self._weight, logits_dtype(weighed))
                self._steps.scatter(product, v[part], rows[part], self._of_hidden)
        if self._of_weight is not None:
            products.add_product(odds.t(), weighed, self._of_weight.total)


def _steps(impl: str, weight: Tensor, vocabulary: Vocabulary) -> EagerOdds:
    if impl == "torch":
        return EagerOdds(weight, vocabulary)
    from megatron_pg.lm_head.odds_triton import TritonOdds  # torch alone must not need Triton

    return TritonOdds(weight, vocabulary)


def _summed(shares: Tensor, work: Any, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
    """[c] of all ranks' shares [tp, c], in rank order; NaN where the target is no token of the vocabulary."""
    if work is not None:
        work.wait()
    return vocabulary.defined(shares.sum(dim=0), targets)


def _loss_and_slope(
    policy_loss: PolicyLoss, sums: Tensor, vocabulary: Vocabulary, impl: str
) -> tuple[PolicyGradientLoss, Tensor]:
    """The loss of a part of the rows, and its derivative by their log-probabilities; NaN where that needs what S does not tell."""
    logprobs = logprobs_of(sums)
    found, slope = (_by_torch if impl == "torch" or not policy_loss.row else _by_kernel)(policy_loss, logprobs)
    unknown = torch.where((sums >= 2.0**LIMIT) & (slope != 0), torch.nan, 0.0).to(logprobs.dtype)
    found = replace(
        found, loss=found.loss + unknown.sum(), logprobs=found.logprobs + unknown, log_ratios=found.log_ratios + unknown
    )
    return found, slope + unknown


def _by_torch(policy_loss: PolicyLoss, logprobs: Tensor) -> tuple[PolicyGradientLoss, Tensor]:
    with torch.enable_grad():
        leaf = logprobs.requires_grad_()
        found = policy_loss(leaf)
        slope = torch.autograd.grad(found.loss, leaf, materialize_grads=True, allow_unused=True)[0]
    return replace(found, loss=found.loss.detach()), slope


def _by_kernel(policy_loss: PolicyLoss, logprobs: Tensor) -> tuple[PolicyGradientLoss, Tensor]:
    from megatron_pg.kernels.surrogate import surrogate_and_slopes

    found, (slope, _) = surrogate_and_slopes(policy_loss, logprobs, logprobs)  # no term reads the entropy
    return replace(found, entropy=None), slope
