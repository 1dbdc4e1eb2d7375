"""The gradients of hidden states and weight from the gradient of the logits; the weight's is summed in float32."""

import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from megatron_pg.lm_head import products
from megatron_pg.lm_head.inputs import Head
from megatron_pg.lm_head.products import add_product, logits_dtype, sum_of_products

UPSTREAM_TOLERANCE = 1e-5  # the schedule multiplies in float32


class HeadGradients:
    """The gradients of hidden states and weight, which grow block by block.

    Args:
        hidden: [T, H].
        weight: [V / tp, H].
        rows: [n] the rows of `hidden` that have logits; None: all.
        head: its `main_grad`.
        needed: which of hidden states and weight need a gradient, as autograd has it.
        parameter: the weight with Megatron's attributes, if a saved-tensor hook made `weight` a copy of it.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        rows: Tensor | None,
        head: Head,
        needed: tuple[bool, ...],
        parameter: Tensor | None = None,
    ):
        self._hidden, self._weight, self._rows = hidden, weight, rows
        self._of_hidden = torch.zeros_like(hidden) if needed[0] else None
        holder = weight if parameter is None else parameter
        self._of_weight = _WeightGradient(holder, head.main_grad) if needed[1] else None
        self._is_finished = False

    def __del__(self) -> None:
        """A forward that added to `main_grad` and had no backward must not pass unnoticed."""
        weight = getattr(self, "_of_weight", None)
        if weight is not None and weight.is_elsewhere and not self._is_finished and not sys.is_finalizing():
            warnings.warn(
                "main_grad holds the weight gradient of a fused head whose backward never ran: the modes forward and "
                "scaled_exp add it in the forward. Set main_grad to zero before the next step; call the head under "
                "torch.no_grad() where no backward follows.",
                stacklevel=1,
            )

    def finish(self, factor: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Gradients for autograd, times `factor` (a 0-d tensor) if it is given."""
        self._is_finished = True
        if factor is not None and self._of_weight is not None and self._of_weight.is_elsewhere:
            torch._assert_async(
                (factor - 1).abs() < UPSTREAM_TOLERANCE,
                "the loss of the fused head was given another upstream gradient than its grad_scale, for which the "
                "weight gradient is already in main_grad. Pass that scale, or use recompute",
            )
            factor = None
        if factor is not None and self._of_hidden is not None:
            self._of_hidden.mul_(factor)
        return self._of_hidden, None if self._of_weight is None else self._of_weight.for_autograd(factor)


class Gradients(HeadGradients):
    """Makes the gradients of hidden states and weight from the gradient of the logits, chunk by chunk.

    Args:
        hidden, weight, rows, head, needed, parameter: as in `HeadGradients`; of the head its `backward` too.
        count: rows that have logits.
        chunk: rows of logits at a time.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        rows: Tensor | None,
        count: int,
        chunk: int,
        head: Head,
        needed: tuple[bool, ...],
        parameter: Tensor | None = None,
    ):
        super().__init__(hidden, weight, rows, head, needed, parameter)
        self._count = count
        self._split = head.backward == "split" and hidden.dtype.itemsize < 4
        size = min(products.block_rows(weight, chunk), count), len(weight)
        self._parts = [products.aligned(hidden, *size) for _ in range(2 if self._split else 1)]
        self._start = 0  # of the block that is being filled

    def buffer(self, chunk: slice, z: Tensor) -> Tensor:
        """The tensor for the gradient of a chunk's logits: `z` itself if the gradient is split afterwards."""
        return z if self._split else self._parts[0][self._in_block(chunk)]

    def take(self, chunk: slice, z: Tensor) -> None:
        """Take the gradient that was written for the chunk, and multiply a full block."""
        if self._split:
            high, low = (part[self._in_block(chunk)] for part in self._parts)
            high.copy_(z)
            low.copy_(z - high)
        if chunk.stop - self._start == len(self._parts[0]) or chunk.stop == self._count:
            self._multiply(slice(self._start, chunk.stop))
            self._start = chunk.stop

    def _in_block(self, chunk: slice) -> slice:
        return slice(chunk.start - self._start, chunk.stop - self._start)

    def _multiply(self, block: slice) -> None:
        parts = [part[: block.stop - block.start] for part in self._parts]
        if self._of_hidden is not None:
            if self._rows is None:
                self._of_hidden[block] = sum_of_products(parts, self._weight)
            else:
                self._of_hidden.index_copy_(0, self._rows[block], sum_of_products(parts, self._weight))
        if self._of_weight is not None:
            states = products.states(self._hidden, self._rows, block)
            for part in parts:
                add_product(part.t(), states, self._of_weight.total)


class _WeightGradient:
    """Adds up the weight gradient: in `main_grad` where there is one, with Megatron's protocol if it is Megatron's.

    Megatron-FSDP has `get_main_grad` instead, a buffer for one micro-batch. There the gradient goes through autograd.
    """

    def __init__(self, weight: Any, main_grad: Tensor | None):  # Any: Megatron's parameters have more attributes
        self._weight = weight
        has_protocol = hasattr(weight, "grad_added_to_main_grad") and not hasattr(weight, "get_main_grad")
        self._is_megatrons = main_grad is None and has_protocol
        given: Tensor | None = weight.main_grad if self._is_megatrons else main_grad
        self.is_elsewhere = given is not None  # not for autograd to add
        self.total = torch.zeros_like(weight, dtype=logits_dtype(weight)) if given is None else given

    def for_autograd(self, factor: Tensor | None) -> Tensor | None:
        """The weight's gradient that the backward returns."""
        if not self.is_elsewhere:
            return (self.total if factor is None else self.total * factor).to(self._weight.dtype)
        if not self._is_megatrons:
            return None
        self._weight.grad_added_to_main_grad = True  # for Megatron's backward hook, which wants to see a gradient
        if getattr(self._weight, "zero_out_wgrad", False):  # shared with the embedding, whose gradient comes on top
            return torch.zeros_like(self._weight)
        _before_accumulation(self._weight)
        return None


def _before_accumulation(weight: Any) -> None:
    """Give Megatron's hook the gradient to add, once all of this backward are known, or one without memory to drop."""
    with torch.enable_grad():
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]

    def decide(gradients: tuple[Tensor | None, ...]) -> None:
        handle.remove()
        if gradients[0] is not None:  # of another use of the weight, which the hook must add
            weight.grad_added_to_main_grad = False
        elif weight.grad is None:
            weight.grad = weight.new_zeros(()).expand(weight.shape)

    handle = node.register_prehook(decide)
