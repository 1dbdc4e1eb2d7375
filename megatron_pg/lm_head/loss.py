"""The policy-gradient loss from hidden states. Its gradient is made with it, or by `heads` in the backward."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.kernels import GRPOLoss, PolicyGradientLoss, PolicyLoss, Vocabulary
from megatron_pg.kernels.api import clipped_surrogate
from megatron_pg.kernels.checks import check_for_triton, check_loss
from megatron_pg.kernels.losses import detail_of, loss_and_slopes, loss_of
from megatron_pg.lm_head.chunks import Chunks, Detail
from megatron_pg.lm_head.gradients import Gradients
from megatron_pg.lm_head.heads import rows_of
from megatron_pg.lm_head.inputs import Head, check_for_scaled_exp, check_head, check_targets, enter
from megatron_pg.lm_head.products import logits_dtype
from megatron_pg.lm_head.scaled_exp.gradients import ScaledExpGradients
from megatron_pg.lm_head.teacher import teacher_of


def grpo_head_loss(  # noqa: D417
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
    clip_eps_low: float,
    clip_eps_high: float,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
    grad_divisor: float = 1.0,
    grad_scale: float = 1.0,
    tp_group: ProcessGroup | None = None,
    entropy: bool = False,
    **head: Any,
) -> GRPOLoss:
    """Clipped policy-gradient loss of one micro-batch from hidden states, without storing its logits.

        loss = sum_t w_t * -min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t),   logits h W^T

    As in `grpo_loss` there is no ignore index: a target such as -100 at a trained token is a ValueError on a CPU and
    NaN on a GPU.

    Args:
        hidden: [..., H] as in `fp32_logits`, T rows in all once gathered.
        weight: [V / tp, H].
        targets: [T] as in `grpo_loss`, like every argument that is not named here.
        rows: as in `policy_gradient_head_loss`.
        grad_scale: as in `policy_gradient_head_loss`.
        head: the arguments of `Head`: mode, backward, impl, sequence_parallel, main_grad.

    Raises:
        ValueError: shapes, dtypes or options are not valid, or on a CPU a target.
    """
    vocabulary = Vocabulary.of(
        len(weight), temperature=temperature, vocab_size=vocab_size, softcap=softcap, tp_group=tp_group
    )
    fields = (targets, old_logprobs, advantages, weights, mask)
    policy_loss = clipped_surrogate(fields, vocabulary, clip_eps_low, clip_eps_high, grad_divisor)
    return policy_gradient_head_loss(
        hidden, weight, policy_loss, vocabulary, Head(**head), rows=rows, grad_scale=grad_scale, entropy=entropy
    )


def policy_gradient_head_loss(  # noqa: D417
    hidden: Tensor,
    weight: Tensor,
    policy_loss: PolicyLoss,
    vocabulary: Vocabulary,
    head: Head,
    *,
    rows: Tensor | None = None,
    grad_scale: float = 1.0,
    entropy: bool = False,
    teacher_weight: Tensor | None = None,
) -> PolicyGradientLoss:
    """Any objective with any further terms, from hidden states; the general form of `grpo_head_loss`.

    Args:
        hidden: [..., H] as in `grpo_head_loss`, like `weight`; arguments not listed here as in `policy_gradient_loss`.
        head: how it is done.
        rows: [n] int64, increasing: where its mask is True. Default: computed, for which the host waits for the device.
        grad_scale: the upstream gradient of the coming backward. The modes "forward" and "scaled_exp" add the weight
            gradient, made for it, to `main_grad` in the forward; another upstream gradient is an error in the backward.
        teacher_weight: [V / tp, H_T] this rank's rows of the teacher's head, in the weight's dtype, without gradient;
            for loss terms over the whole vocabulary of a teacher.

    Raises:
        ValueError: invalid shapes, dtypes or options, or a field that a term needs is missing.
    """
    check_head(hidden, weight)
    vocabulary.check_columns("logits of the weight", len(weight))
    if head.impl == "triton":
        check_for_triton(weight)
    if head.mode != "recompute" and policy_loss.terms.reads_sequences:
        raise ValueError(
            f"mode={head.mode!r} makes each chunk's gradient before the next chunk is read, and this loss reads whole "
            "sequences. Use mode='recompute'."
        )
    if head.mode == "scaled_exp":
        check_for_scaled_exp(weight, policy_loss, head.impl, entropy=entropy)
    check_loss(hidden, policy_loss, grad_scale)
    mask = policy_loss.fields.mask
    rows = mask.nonzero()[:, 0] if rows is None else rows
    trains = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    hidden = enter(hidden, vocabulary.tp_group, head.sequence_parallel).flatten(0, -2)
    check_targets(hidden, policy_loss.fields.targets)
    detail = _detail_of(policy_loss, rows, entropy, weight, teacher_weight)
    if head.mode != "recompute" and trains and len(rows):
        options = {"grad_scale": grad_scale, "entropy": entropy}
        found: list[PolicyGradientLoss] = []
        _GradientInForward.apply(hidden, weight, rows, policy_loss, vocabulary, head, detail, options, found)
        loss = found[0]
    else:
        targets = policy_loss.fields.targets.index_select(0, rows)
        *outputs, _ = rows_of(hidden, weight, targets, rows, vocabulary, head, detail)
        whole = [v.new_zeros(len(mask), *v.shape[1:]).index_copy(0, rows, v) for v in outputs]
        loss = loss_of(policy_loss, whole, vocabulary, head.impl)
    return loss if entropy or policy_loss.terms.reads_entropy else replace(loss, entropy=None)


def _detail_of(
    policy_loss: PolicyLoss, rows: Tensor, entropy: bool, weight: Tensor, teacher_weight: Tensor | None
) -> Detail:
    """What `Chunks` needs of the wanted rows."""
    if policy_loss.terms.whole_form is not None:
        teacher = teacher_of(policy_loss, weight, teacher_weight)
        return None if teacher is None else teacher.at(rows)
    detail = detail_of(policy_loss, entropy=entropy)
    if isinstance(detail, Tensor):
        return detail.index_select(0, rows)
    return None if detail is None else detail.at(rows)


class _GradientInForward(torch.autograd.Function):
    """The gradient is made with the loss, for the upstream gradient `grad_scale`."""

    @staticmethod
    def forward(ctx, hidden, weight, rows, policy_loss, vocabulary, head, detail, options, found):
        chosen, needed = policy_loss.at(rows), ctx.needs_input_grad
        ctx.grad_scale = options["grad_scale"]
        if head.mode == "scaled_exp":
            ctx.gradients = ScaledExpGradients(hidden, weight, rows, vocabulary, head, needed)
            parts = list(ctx.gradients.losses(chosen, ctx.grad_scale))
        else:
            chunks = Chunks(hidden, weight, chosen.fields.targets, rows, vocabulary, head.impl, detail)
            ctx.gradients = Gradients(hidden, weight, rows, len(rows), chunks.rows, head, needed)
            parts = list(_losses(chosen, chunks, vocabulary, head.impl, ctx.gradients, **options))
        loss = sum((part.loss for part in parts), start=hidden.new_zeros((), dtype=logits_dtype(hidden)))
        found.append(PolicyGradientLoss(loss, *_spread(parts, rows, len(policy_loss.fields.mask))))
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss):
        if ctx.gradients is None:
            raise RuntimeError(
                "backward ran a second time through one fused head, whose gradient was made once and handed over. "
                'Call it again, or use mode="recompute".'
            )
        gradients, ctx.gradients = ctx.gradients, None
        return *gradients.finish(factor=grad_loss / ctx.grad_scale), *[None] * 7


def _losses(
    policy_loss: PolicyLoss,
    chunks: Chunks,
    vocabulary: Vocabulary,
    impl: str,
    gradients: Gradients,
    *,
    grad_scale: float,
    entropy: bool,
) -> Iterator[PolicyGradientLoss]:
    """The loss of each chunk; the gradient of its logits is made with it, or from its slopes."""
    if impl == "triton":
        from megatron_pg.kernels.triton import loss as triton_loss  # torch needs no Triton

        if triton_loss.fits_single_pass(chunks.buffer, policy_loss, vocabulary, entropy=entropy):
            from megatron_pg.kernels.triton import single_pass  # an earlier Triton has no such language

            for chunk in chunks.slices():
                z = chunks.logits(chunk)
                out, part = gradients.buffer(chunk, z), policy_loss.at(chunk)
                yield single_pass.loss_and_gradient(z, out, part, vocabulary, grad_scale=grad_scale, entropy=entropy)[0]
                gradients.take(chunk, z)
            return
    for chunk, z, rows in chunks.with_rows():
        loss, slopes = loss_and_slopes(policy_loss.at(chunk), rows.outputs, vocabulary, impl)
        yield loss
        scaled = tuple(None if slope is None else slope * grad_scale for slope in slopes)
        chunks.reader.write_gradient(z, gradients.buffer(chunk, z), chunk, rows, scaled)
        gradients.take(chunk, z)


def _spread(parts: list[PolicyGradientLoss], rows: Tensor, size: int) -> list[Tensor | None]:
    """The per-token values of all chunks, [T] each ([n, T] for loss terms), 0 where nothing is trained."""
    spread: list[Tensor | None] = []
    for values in zip(*(part.per_token for part in parts), strict=True):
        known = None if values[0] is None else torch.cat(values, dim=-1)
        spread.append(None if known is None else known.new_zeros(*known.shape[:-1], size).index_copy_(-1, rows, known))
    return spread
