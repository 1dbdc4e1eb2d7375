"""All logits in float32, by one product."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.lm_head import chunking
from megatron_pg.lm_head.gradients import Gradients
from megatron_pg.lm_head.inputs import check_head, enter
from megatron_pg.lm_head.products import logits_dtype, product


def fp32_logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    backward: str = "bf16",
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    main_grad: Tensor | None = None,
) -> Tensor:
    """Logits in float32 from hidden states and weight in bfloat16.

        z = h W^T,   products of bfloat16 numbers, sums in float32

    Args:
        hidden: [..., H] on tensor-parallel ranks equal, or with `sequence_parallel` this rank's part of the first dimension.
        weight: [V / tp, H] this tensor-parallel rank's rows, same dtype.
        backward: of the float32 gradient of the logits: "bf16" rounds it, as Megatron does (relative error of the weight
            gradient 2e-3); "split" is the sum of two bfloat16 parts (3e-6), at twice the products.
        tp_group: tensor-parallel group; the gradient of the hidden states is summed over it.
        sequence_parallel: gather the hidden states first, and reduce-scatter their gradient.
        main_grad: [V / tp, H] float32 that the weight gradient is added to. Default: the weight's own with Megatron's
            protocol if it has one, else the weight gets its gradient from autograd.

    Returns:
        [..., V / tp] float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes, dtypes or options cannot be.
    """
    check_head(hidden, weight, backward)
    hidden = enter(hidden, tp_group, sequence_parallel)
    logits = _Logits.apply(hidden.flatten(0, -2), weight, main_grad, backward == "split")
    return logits.view(*hidden.shape[:-1], len(weight))


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, main_grad, split):
        ctx.save_for_backward(hidden, weight)
        ctx.main_grad, ctx.split = main_grad, split
        return product(hidden, weight.t(), logits_dtype(hidden))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        chunk = chunking.chunk_rows(weight, 1)
        gradients = Gradients(hidden, weight, None, len(hidden), chunk, ctx.main_grad, ctx.split, ctx.needs_input_grad)
        for part in chunking.slices(len(hidden), chunk):
            z = grad[part]
            if (out := gradients.buffer(part, z)) is not z:
                out.copy_(z)
            gradients.take(part, z)
        return *gradients.finish(), None, None
