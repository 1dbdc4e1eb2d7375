"""The policy-gradient loss from hidden states: its gradient made with it, chunk by chunk, or by `logprobs` in the backward."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.flags.head import HEAD_MODES
from megatron_pg.kernels import GRPOLoss, PolicyGradientLoss, PolicyLoss, check_factors, check_fields
from megatron_pg.kernels.policy_loss import plain_grpo
from megatron_pg.lm_head.chunks import Chunks
from megatron_pg.lm_head.gradients import Gradients
from megatron_pg.lm_head.inputs import check_choice, check_head, check_targets, enter
from megatron_pg.lm_head.logprobs import logprobs_of_rows
from megatron_pg.lm_head.products import logits_dtype
from megatron_pg.lm_head.readers import Vocabulary


def grpo_head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    mask: Tensor | None = None,
    clip_eps_low: float,
    clip_eps_high: float,
    grad_divisor: float = 1.0,
    **options: object,
) -> GRPOLoss:
    """Clipped policy-gradient loss of one micro-batch from hidden states, without ever holding its logits.

        loss = sum_t w_t * -min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t),   logits h W^T

    Args:
        hidden: [..., H] as in `fp32_logits`, T rows in all once gathered.
        weight: [V / tp, H].
        targets: [T] int64 global token ids, equal on all tensor-parallel ranks, like every [T] field.
        old_logprobs: [T] nats.
        advantages: [T].
        weights: [T].
        mask: [T] bool, trained tokens. Default: weights != 0.
        clip_eps_low: distance of the lower clip bound from 1.
        clip_eps_high: distance of the upper clip bound from 1.
        grad_divisor: the gradient, not the loss, is divided by it.
        options: further keywords of `policy_gradient_head_loss`.

    Raises:
        ValueError: shapes, dtypes or options cannot be.
    """
    mask = weights != 0 if mask is None else mask
    clip = {"clip_eps_low": clip_eps_low, "clip_eps_high": clip_eps_high}
    policy_loss = plain_grpo(old_logprobs, advantages, weights, mask=mask, grad_divisor=grad_divisor, **clip)
    return policy_gradient_head_loss(hidden, weight, targets, policy_loss, **options)


def policy_gradient_head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    policy_loss: PolicyLoss,
    *,
    rows: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    grad_scale: float = 1.0,
    tp_group: ProcessGroup | None = None,
    entropy: bool = False,
    sequence_parallel: bool = False,
    main_grad: Tensor | None = None,
    mode: str = "forward",
    backward: str = "bf16",
    impl: str = "triton",
) -> PolicyGradientLoss:
    """Any objective with any further terms, from hidden states; the general form of `grpo_head_loss`.

    Args:
        hidden: as in `grpo_head_loss`, like every argument that is not named here.
        weight: [V / tp, H].
        targets: [T] int64.
        policy_loss: the loss as a function of log-probabilities and entropies, with its [T] fields.
        rows: [n] int64, increasing: where its mask is True. Default: found there, for which the host waits for the device.
        temperature: tau.
        vocab_size: columns at or beyond it, counted over all ranks, are padding.
        grad_scale: the upstream gradient that the backward will bring. Mode "forward" adds the weight gradient, made for it,
            to `main_grad` in the forward; another upstream gradient is then an error in the backward.
        tp_group: tensor-parallel group.
        entropy: also return the entropies.
        sequence_parallel: as in `fp32_logits`.
        main_grad: as in `fp32_logits`.
        mode: "forward": the gradient is made in the forward, 6 N V H operations; "recompute": in the backward, from
            logits that are made again, 8 N V H, for any upstream gradient and for losses that read whole sequences.
        backward: as in `fp32_logits`.
        impl: "triton" or "torch".

    Raises:
        ValueError: shapes, dtypes or options cannot be, or a field that a term needs is missing.
    """
    check_choice("mode", mode, HEAD_MODES)
    check_head(hidden, weight, backward)
    _check_sequences(mode, policy_loss)
    check_fields(hidden, targets, policy_loss)
    check_factors(policy_loss.terms.grad_divisor, grad_scale)
    vocabulary = Vocabulary.of(weight, temperature, vocab_size, tp_group, impl)
    rows = policy_loss.mask.nonzero()[:, 0] if rows is None else rows
    trains = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    hidden = enter(hidden, tp_group, sequence_parallel).flatten(0, -2)
    check_targets(hidden, targets)
    targets, split = targets.index_select(0, rows), backward == "split"
    if mode == "forward" and trains and len(rows):
        job = _Job(targets, rows, vocabulary, policy_loss.at(rows), main_grad, split, grad_scale, entropy, [])
        loss = _GradientInForward.apply(hidden, weight, job)
        found = PolicyGradientLoss(loss, **_spread(job.found, rows, len(policy_loss.mask)))
    else:
        values = logprobs_of_rows(hidden, weight, targets, rows, vocabulary, main_grad, split=split)
        found = policy_loss(*(v.new_zeros(policy_loss.mask.shape).index_copy(0, rows, v) for v in values))
    return found if entropy or policy_loss.terms.entropy_coef else replace(found, entropy=None)


def _check_sequences(mode: str, policy_loss: PolicyLoss) -> None:
    if mode == "forward" and policy_loss.terms.reads_sequences:
        raise ValueError(
            "mode='forward' makes each chunk's gradient before the next chunk is read, and this loss reads whole sequences, so its "
            "gradient would be wrong. Use mode='recompute'."
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """What the gradient in the forward needs beside hidden states and weight, and what it finds beside the loss."""

    targets: Tensor  # [n]
    rows: Tensor
    vocabulary: Vocabulary
    policy_loss: PolicyLoss  # of the n rows
    main_grad: Tensor | None
    split: bool
    grad_scale: float
    entropy: bool
    found: list[PolicyGradientLoss]  # of every chunk


class _GradientInForward(torch.autograd.Function):
    """The gradient is made with the loss, for the upstream gradient `grad_scale`."""

    @staticmethod
    def forward(ctx, hidden, weight, job):
        rows, options = job.rows, (job.main_grad, job.split)
        chunks = Chunks(hidden, weight, job.targets, rows, job.vocabulary)
        gradients = Gradients(hidden, weight, rows, len(rows), chunks.rows, *options, ctx.needs_input_grad)
        losses = _in_one_launch if chunks.fit_one_launch(job.policy_loss) else _by_slopes
        job.found.extend(losses(job, chunks, gradients))
        ctx.gradients, ctx.grad_scale = gradients, job.grad_scale
        return sum((found.loss for found in job.found), start=hidden.new_zeros((), dtype=logits_dtype(hidden)))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss):
        if ctx.gradients is None:
            raise RuntimeError(
                "backward ran a second time through one fused head, whose gradient was made once and handed over. "
                'Call it again, or use mode="recompute".'
            )
        gradients, ctx.gradients = ctx.gradients, None
        return *gradients.finish(factor=grad_loss / ctx.grad_scale), None


def _in_one_launch(job: _Job, chunks: Chunks, gradients: Gradients) -> Iterator[PolicyGradientLoss]:
    """The loss of each chunk; the gradient of its logits comes with it."""
    options = {"grad_scale": job.grad_scale, "entropy": job.entropy}
    for chunk in chunks.slices():
        z = chunks.logits(chunk)
        out = gradients.buffer(chunk, z)
        yield chunks.reader.loss_and_gradient(z, out, chunk, job.policy_loss.at(chunk), **options)
        gradients.take(chunk, z)


def _by_slopes(job: _Job, chunks: Chunks, gradients: Gradients) -> Iterator[PolicyGradientLoss]:
    """The loss of each chunk; the gradient of its logits from the loss's derivatives by log-probabilities and entropies."""
    for chunk, z, rows in chunks.with_rows():
        found, *slopes = chunks.reader.loss_and_slopes(job.policy_loss.at(chunk), rows)
        yield found
        slopes = (slope * job.grad_scale for slope in slopes)
        chunks.reader.write_gradient(z, gradients.buffer(chunk, z), chunk, rows, *slopes)
        gradients.take(chunk, z)


def _spread(parts: list[PolicyGradientLoss], rows: Tensor, size: int) -> dict[str, Tensor | None]:
    """The per-token values of all chunks, [T] each, 0 where nothing is trained."""
    found = {}
    for name in (field.name for field in fields(PolicyGradientLoss) if field.name != "loss"):
        values = [getattr(part, name) for part in parts]
        known = None if values[0] is None else torch.cat(values)
        found[name] = None if known is None else known.new_zeros(size).index_copy_(0, rows, known)
    return found
