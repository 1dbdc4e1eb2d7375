"""The Triton implementation of `grpo_loss`: a single pass where the whole row fits, else statistics and gradient."""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_pg.declarations.single_pass import Path, path_of
from megatron_pg.kernels.device import multiprocessors
from megatron_pg.kernels.losses import detail_of, loss_of, reader_of
from megatron_pg.kernels.policy_loss import PolicyGradientLoss, PolicyLoss
from megatron_pg.kernels.readers import read
from megatron_pg.kernels.triton.surrogate import loss_of_rows, surrogate_and_slopes
from megatron_pg.kernels.triton.tiles import FUSED
from megatron_pg.kernels.triton.vocab_parallel import OfRows, TritonPlainReader, write_gradient
from megatron_pg.kernels.vocabulary import Vocabulary

RESCALE_BLOCK = 8192
# The schedule multiplies in float32, so an upstream gradient of D * C may differ by a few roundings.
ROUNDING = tl.constexpr(2.0**-21)


def triton_loss(
    logits: Tensor, policy_loss: PolicyLoss, vocabulary: Vocabulary, *, grad_scale: float, entropy: bool, inplace: bool
) -> PolicyGradientLoss:
    """See `megatron_pg.kernels.policy_gradient_loss`."""
    trains = torch.is_grad_enabled() and logits.requires_grad
    call = _Call(policy_loss, vocabulary, inplace, grad_scale, entropy or policy_loss.terms.reads_entropy, [])
    if policy_loss.terms.reads_topk and logits.stride(0) < logits.shape[1]:
        logits = logits.contiguous()  # where ids are hidden in rows, each has its own
    if trains and fits_single_pass(logits, policy_loss, vocabulary, entropy=entropy):
        _SinglePass.apply(logits, call)
        return call.found[0]
    fields, detail = policy_loss.fields, detail_of(policy_loss, entropy=entropy)
    if detail is None and policy_loss.token_kernel:
        _TwoPasses.apply(logits, call)
        return call.found[0]
    reader = reader_of("triton", vocabulary, fields.targets, detail, fields.mask)
    outputs = read(logits, reader, inplace=inplace)[:-1]
    return loss_of(policy_loss, outputs, vocabulary, "triton")


class _Call(NamedTuple):
    """What an autograd function reads besides the logits, and its results: an argument or output costs 1 to 2 µs."""

    policy_loss: PolicyLoss
    vocabulary: Vocabulary
    inplace: bool
    grad_scale: float
    entropy: bool
    found: list[PolicyGradientLoss]  # whose loss the function returns, so that it is differentiable


def fits_single_pass(logits: Tensor, policy_loss: PolicyLoss, vocabulary: Vocabulary, *, entropy: bool) -> bool:
    """Whether the single-pass kernel applies: a loss by token, whole rows that fit, a tried chip or one that agrees."""
    if not policy_loss.is_by_token or vocabulary.ranks > 1 or not logits.is_cuda or not len(logits):
        return False
    path = path_on(logits.device)
    if not path.takes:
        return False
    from megatron_pg.kernels.triton import self_test, single_pass  # an earlier Triton has no such language

    if not single_pass.supports(logits, vocabulary):
        return False
    return path.is_tried or self_test.agrees(logits, policy_loss, vocabulary, entropy=entropy)


@lru_cache
def path_on(device: torch.device) -> Path:
    """How losses with a token kernel are computed on a GPU."""
    return path_of(torch.cuda.get_device_capability(device), triton.__version__)


class _SinglePass(torch.autograd.Function):
    """The gradient is made in the forward for the upstream gradient `grad_scale`, and corrected if another comes."""

    @staticmethod
    def forward(ctx, logits, call):
        from megatron_pg.kernels.triton import single_pass

        gradient = logits.detach() if call.inplace else torch.empty_like(logits)
        found, _ = single_pass.loss_and_gradient(
            logits, gradient, call.policy_loss, call.vocabulary, grad_scale=call.grad_scale, entropy=call.entropy
        )
        if call.inplace:  # whoever saved the logits gets an error, not a wrong gradient
            torch.autograd.graph.increment_version(logits)
        ctx.gradient, ctx.grad_scale = gradient, call.grad_scale
        call.found.append(found)
        return found.loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss):
        if ctx.gradient is None:
            raise RuntimeError(
                "backward ran a second time through one grpo_loss, whose gradient was made once and handed over. "
                "Call grpo_loss again, or use impl='torch'."
            )
        gradient, ctx.gradient = ctx.gradient, None
        sizes = *gradient.shape, gradient.stride(0)
        rescale_kernel[(4 * multiprocessors(gradient.device),)](
            gradient, grad_loss, ctx.grad_scale, *sizes, BLOCK=RESCALE_BLOCK, num_warps=8, **FUSED
        )
        return gradient, None


class _TwoPasses(torch.autograd.Function):
    """A loss with a token kernel: the forward reads the logits, the backward reads them and writes the gradient."""

    @staticmethod
    def forward(ctx, logits, call):
        policy_loss, vocabulary, ctx.inplace = call.policy_loss, call.vocabulary, call.inplace
        targets, mask = policy_loss.fields.targets.contiguous(), policy_loss.fields.mask.contiguous()
        if vocabulary.ranks == 1 and policy_loss.is_by_token:
            found, of_rows = loss_of_rows(logits, targets, policy_loss, vocabulary, entropy=call.entropy)
        else:
            rows = TritonPlainReader(vocabulary, targets, mask=mask).read(logits)
            found, slopes = surrogate_and_slopes(policy_loss, rows.logprobs, rows.entropy)
            found = found if call.entropy else replace(found, entropy=None)
            of_rows = OfRows.of(rows, slopes)
        ctx.save_for_backward(logits, targets, mask, *of_rows)
        ctx.vocabulary = vocabulary
        call.found.append(found)
        return found.loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss):
        logits, targets, mask, *of_rows = ctx.saved_tensors
        gradient = logits.detach() if ctx.inplace else torch.empty_like(logits)
        of_rows = OfRows(*of_rows[:5], grad_loss)
        write_gradient(logits, gradient, (targets, mask), of_rows, ctx.vocabulary)
        if ctx.inplace:
            torch.autograd.graph.increment_version(logits)
        return gradient, None


@triton.jit(do_not_specialize=["rows"])
def rescale_kernel(gradient, grad_loss, grad_scale, rows, columns, stride, BLOCK: tl.constexpr):
    """gradient *= grad_loss / grad_scale, decided on the device; nothing is read or written if they agree."""
    factor = tl.load(grad_loss).to(tl.float32) / grad_scale
    if (factor < 1.0 - ROUNDING) | (factor > 1.0 + ROUNDING) | (factor != factor):
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            for start in range(0, columns, BLOCK):
                column = start + tl.arange(0, BLOCK)
                at = gradient + tl.cast(row, tl.int64) * stride + column
                value = tl.load(at, mask=column < columns).to(tl.float32)
                tl.store(at, (value * factor).to(gradient.dtype.element_ty), mask=column < columns)
