"""The inputs of every head: settings, checks, and the hidden states of all rows on every tensor-parallel rank."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.declarations.choices import HEAD_BACKWARDS, HEAD_MODES
from megatron_pg.kernels import PolicyLoss
from megatron_pg.kernels.checks import check_impl

TILED_ON = (9, 0)  # compute capability that products with an epilogue were tried on


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Head:
    """How a head works.

    Args:
        mode: "forward": the gradient is made in the forward, 6 N V H operations.
            "recompute": the backward makes the logits again, 8 N V H operations; for any upstream gradient and for
            losses that read whole sequences.
            "scaled_exp": as "forward", from bfloat16 exponentials of the logits that the first product ends in; for
            losses of log-probabilities alone.
        backward: of the float32 gradient of the logits: "bf16" rounds it, as Megatron does (relative error of the
            weight gradient 2e-3); "split" is the sum of two bfloat16 parts (3e-6), for twice the products.
        impl: "triton" or "torch": what reads the logits of a chunk.
        sequence_parallel: gather the hidden states first, and reduce-scatter their gradient.
        main_grad: [V / tp, H] float32 that the weight gradient is added to. Default: the weight's own with Megatron's
            protocol if it has one, else the weight gets its gradient from autograd.

    Raises:
        ValueError: unknown mode, backward or impl.
    """

    mode: str = "forward"
    backward: str = "bf16"
    impl: str = "triton"
    sequence_parallel: bool = False
    main_grad: Tensor | None = None

    def __post_init__(self):
        for name, value, choices in (("mode", self.mode, HEAD_MODES), ("backward", self.backward, HEAD_BACKWARDS)):
            if value not in choices:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}.")
        check_impl(self.impl)
        if self.mode == "scaled_exp" and self.backward == "split":
            raise ValueError(
                "mode='scaled_exp' has no float32 gradient of the logits that backward='split' could split. Use "
                "mode='forward' or backward='bf16'."
            )


def check_head(hidden: Tensor, weight: Tensor) -> None:
    """Raise ValueError for hidden states and a weight that have no product in float32."""
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden states have shape {tuple(hidden.shape)} and dtype {hidden.dtype}, the weight "
            f"{tuple(weight.shape)} and {weight.dtype}: not [..., H] and [V / tp, H] of one dtype, so there is no "
            "product. Cast one to the other's dtype."
        )
    if hidden.is_cuda and hidden.dtype.itemsize < 4 and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8):
        raise ValueError(
            f"torch {torch.__version__} has no product of {hidden.dtype} with float32 output (2.8 has), and rounded "
            "logits would be what this function avoids. Upgrade torch."
        )


def check_for_scaled_exp(weight: Tensor, policy_loss: PolicyLoss, impl: str, *, entropy: bool) -> None:
    """Raise ValueError for losses that mode "scaled_exp" cannot compute: it only has the target's log-probability.

    Raises:
        ValueError: the loss reads more of a row, or the kernels do not take this weight on this device.
    """
    reads = {
        "an entropy": entropy or policy_loss.terms.reads_entropy,
        "probabilities of the teacher's top-k tokens": policy_loss.topk_ids is not None,
        "the distribution of a teacher": policy_loss.terms.whole_form is not None,
        "log-probabilities over a sampling mask": policy_loss.fields.sampling_mask is not None,
    }
    for what, is_read in reads.items():
        if is_read:
            raise ValueError(
                f"mode='scaled_exp' keeps exponentials rounded to bfloat16, too coarse for {what}. Use mode='forward'."
            )
    if weight.dtype == torch.float16:
        raise ValueError(
            "mode='scaled_exp' stores exponentials from 2^-126 to 2^90, and float16 has 2^-24 to 2^16. Use bfloat16 or "
            "mode='forward'."
        )
    if impl == "torch":
        return
    if weight.is_cuda:
        check_scaled_exp_kernel(weight.dtype, weight.device)
    if not has_aligned_rows(weight):
        raise ValueError(
            f"mode='scaled_exp' needs a contiguous weight whose rows are aligned to 16 bytes, and this one has shape "
            f"{tuple(weight.shape)}, strides {weight.stride()} and byte offset {weight.data_ptr() % 16}. Use "
            "mode='forward'."
        )


def has_aligned_rows(weight: Tensor) -> bool:
    """Whether a kernel can copy tiles of [V / tp, H] 16-bit numbers: every row begins at a multiple of 16 bytes."""
    return weight.is_contiguous() and weight.shape[1] % 8 == 0 and weight.data_ptr() % 16 == 0


def check_scaled_exp_kernel(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError for weights and GPUs that the kernel of mode "scaled_exp" does not support."""
    capability = torch.cuda.get_device_capability(device)
    if dtype != torch.bfloat16 or capability != TILED_ON:
        raise ValueError(
            "--pg-fused-head scaled_exp (mode='scaled_exp') has a kernel for bfloat16 on compute capability "
            f"{TILED_ON}, not for {dtype} on {capability}. Use forward."
        )


def is_tried_gpu(device: torch.device) -> bool:
    """Whether products that end in an epilogue were run on such a GPU with this release of Triton."""
    from megatron_pg.kernels.triton.loss import path_on  # torch needs no Triton

    return torch.cuda.get_device_capability(device) == TILED_ON and path_on(device).is_tried


def check_targets(hidden: Tensor, targets: Tensor) -> None:
    """Raise ValueError for targets that do not align with the rows of `hidden` [T, H]."""
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets have shape {tuple(targets.shape)} and dtype {targets.dtype} for {len(hidden)} rows of hidden "
            f"states, not [{len(hidden)}] int64. Give one token id per row, of all sequence-parallel ranks."
        )


def enter(hidden: Tensor, tp_group: ProcessGroup | None, sequence_parallel: bool) -> Tensor:
    """The hidden states of all rows on every tensor-parallel rank; their gradient is summed over the ranks."""
    if tp_group is None or tp_group.size() == 1:
        return hidden
    return gather_sequence(hidden, tp_group) if sequence_parallel else _SumGradient.apply(hidden, tp_group)


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


def gather_sequence(part: Tensor, group: ProcessGroup, *, sums_gradient: bool = True) -> Tensor:
    """All positions of a row, from each tensor-parallel rank's part of them.

    The gradient is this rank's part of the sum over ranks. Without `sums_gradient` nothing is added: every rank has the
    same loss.
    """
    return _GatherSequence.apply(part, group, sums_gradient)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group, sums_gradient):
        ctx.group, ctx.sums_gradient = group, sums_gradient
        whole = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
        torch.distributed.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        if not ctx.sums_gradient:
            return grad.chunk(ctx.group.size())[ctx.group.rank()].contiguous(), None, None
        mine = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        torch.distributed.reduce_scatter_tensor(mine, grad.contiguous(), group=ctx.group)
        return mine, None, None
