"""The Triton implementation of `grpo_loss`: one launch where the whole row is here, else statistics, exchange, gradient."""

import warnings

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.kernels.policy_loss import PolicyGradientLoss, PolicyLoss
from megatron_pg.kernels.surrogate import surrogate_loss
from megatron_pg.kernels.vocab_parallel import logprobs_and_entropy

ONE_LAUNCH_TRITON = ("3.6.",)  # releases whose Gluon, an experimental language, this was run with
RESCALE_BLOCK = 8192
# The schedule multiplies in float32, so an upstream gradient that should be D * C may come a few roundings beside it.
ROUNDING = tl.constexpr(2.0**-21)


def triton_loss(
    logits: Tensor,
    targets: Tensor,
    policy_loss: PolicyLoss,
    *,
    temperature: float,
    vocab_size: int,
    grad_scale: float,
    tp_group: ProcessGroup | None,
    entropy: bool,
    inplace: bool,
) -> PolicyGradientLoss:
    """See `megatron_pg.kernels.policy_gradient_loss`."""
    targets, mask = targets.contiguous(), policy_loss.mask.contiguous()  # kernels have no strides
    whole_row = tp_group is None or tp_group.size() == 1
    trains = torch.is_grad_enabled() and logits.requires_grad
    if policy_loss.terms.is_plain_grpo and whole_row and trains and fits_one_launch(logits, vocab_size):
        options = {"valid": vocab_size, "temperature": temperature, "grad_scale": grad_scale, "entropy": entropy}
        return PolicyGradientLoss(*_OneLaunch.apply(logits, targets, policy_loss, inplace, options))
    options = {"temperature": temperature, "vocab_size": vocab_size, "inplace": inplace, "tp_group": tp_group}
    logprobs, entropies = logprobs_and_entropy(logits, targets, mask, **options)
    if policy_loss.terms.is_plain_grpo and len(logits):
        return surrogate_loss(policy_loss, logprobs, entropies)
    return policy_loss(logprobs, entropies)


def fits_one_launch(logits: Tensor, vocab_size: int) -> bool:
    """Whether the one-launch kernel runs on this device, with these rows, and with this Triton, of which it warns."""
    if not logits.is_cuda or not len(logits):
        return False
    if not triton.__version__.startswith(ONE_LAUNCH_TRITON):
        warnings.warn(
            f"the one-launch kernel was run with Triton {', '.join(ONE_LAUNCH_TRITON)}x, not {triton.__version__}: three "
            "launches do its work, with the same results and about 1.4 times the time of the loss",
            stacklevel=2,
        )
        return False
    from megatron_pg.kernels import one_launch

    return one_launch.supports(logits, vocab_size)


class _OneLaunch(torch.autograd.Function):
    """The gradient is made in the forward for the upstream gradient `grad_scale`, and corrected if another comes."""

    @staticmethod
    def forward(ctx, logits, targets, policy_loss, inplace, options):
        from megatron_pg.kernels import one_launch

        gradient = logits.detach() if inplace else torch.empty_like(logits)
        found = one_launch.grpo_loss_and_gradient(logits, gradient, targets, policy_loss, **options)
        if inplace:  # whoever saved the logits gets an error, not a wrong gradient
            torch.autograd.graph.increment_version(logits)
        ctx.gradient, ctx.grad_scale = gradient, options["grad_scale"]
        per_token = found.token_losses, found.logprobs, found.log_ratios, found.entropy
        ctx.mark_non_differentiable(*per_token)
        return found.loss, *per_token

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, *_):
        if ctx.gradient is None:
            raise RuntimeError(
                "backward ran a second time through one grpo_loss, whose gradient was made once and handed over. "
                "Call grpo_loss again, or use impl='torch'."
            )
        gradient, ctx.gradient = ctx.gradient, None
        processors = torch.cuda.get_device_properties(gradient.device).multi_processor_count
        rescale_kernel[(4 * processors,)](
            gradient, grad_loss, ctx.grad_scale, *gradient.shape, gradient.stride(0), BLOCK=RESCALE_BLOCK, num_warps=8
        )
        return gradient, None, None, None, None


@triton.jit(do_not_specialize=["rows"])
def rescale_kernel(gradient, upstream, expected, rows, columns, stride, BLOCK: tl.constexpr):
    """gradient *= upstream / expected, decided on the device; nothing is read or written if they agree."""
    factor = tl.load(upstream).to(tl.float32) / expected
    if (factor < 1.0 - ROUNDING) | (factor > 1.0 + ROUNDING) | (factor != factor):
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            for start in range(0, columns, BLOCK):
                column = start + tl.arange(0, BLOCK)
                at = gradient + tl.cast(row, tl.int64) * stride + column
                value = tl.load(at, mask=column < columns).to(tl.float32)
                tl.store(at, (value * factor).to(gradient.dtype.element_ty), mask=column < columns)
