"""What every head takes in: its checks, and the hidden states of all rows on every tensor-parallel rank."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.flags.head import HEAD_BACKWARDS


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse an option that has no such value."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}, so nothing would be computed.")


def check_head(hidden: Tensor, weight: Tensor, backward: str) -> None:
    """Refuse hidden states and a weight that have no product in float32, and an unknown backward."""
    check_choice("backward", backward, HEAD_BACKWARDS)
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden states have shape {tuple(hidden.shape)} and dtype {hidden.dtype}, the weight {tuple(weight.shape)} and "
            f"{weight.dtype}: not [..., H] and [V / tp, H] of one dtype, so there is no product. Cast one to the other's dtype."
        )
    if hidden.is_cuda and hidden.dtype.itemsize < 4 and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8):
        raise ValueError(
            f"torch {torch.__version__} has no product of {hidden.dtype} with float32 output (2.8 has), and rounded logits would "
            "be what this function avoids. Upgrade torch."
        )


def check_targets(hidden: Tensor, targets: Tensor) -> None:
    """Refuse targets that do not align with the rows of `hidden` [T, H]."""
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets have shape {tuple(targets.shape)} and dtype {targets.dtype} for {len(hidden)} rows of hidden states, not "
            f"[{len(hidden)}] int64, so tokens and rows would not align. Give one token id per row, of all sequence-parallel ranks."
        )


def enter(hidden: Tensor, tp_group: ProcessGroup | None, sequence_parallel: bool) -> Tensor:
    """The hidden states of all rows on every tensor-parallel rank; their gradient is summed over the ranks."""
    if tp_group is None or tp_group.size() == 1:
        return hidden
    return (_GatherSequence if sequence_parallel else _SumGradient).apply(hidden, tp_group)


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, group):
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, group):
        ctx.group = group
        whole = hidden.new_empty(hidden.shape[0] * group.size(), *hidden.shape[1:])
        torch.distributed.all_gather_into_tensor(whole, hidden.contiguous(), group=group)
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        mine = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        torch.distributed.reduce_scatter_tensor(mine, grad.contiguous(), group=ctx.group)
        return mine, None
