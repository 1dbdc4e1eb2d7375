"""From logits to the policy-gradient loss. `impl` picks the implementation; none falls back to another.

`torch` is the eager reference and the specification; `triton` needs a CUDA device, or TRITON_INTERPRET=1.
"""

import os
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.args import KERNELS as IMPLEMENTATIONS
from megatron_pg.kernels.policy_loss import LossTerms, PolicyGradientLoss, PolicyLoss, plain_grpo
from megatron_pg.kernels.reference import reference_loss
from megatron_pg.kernels.logprobs import check_logits

__all__ = ["GRPOLoss", "LossTerms", "PolicyGradientLoss", "PolicyLoss", "grpo_loss", "policy_gradient_loss"]

GRPOLoss = PolicyGradientLoss  # what `grpo_loss` returns


def grpo_loss(
    logits: Tensor,
    targets: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    mask: Tensor | None = None,
    clip_eps_low: float,
    clip_eps_high: float,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    grad_divisor: float = 1.0,
    grad_scale: float = 1.0,
    tp_group: ProcessGroup | None = None,
    entropy: bool = False,
    inplace: bool = False,
    impl: str = "triton",
) -> GRPOLoss:
    """Clipped policy-gradient loss of one micro-batch from (vocabulary-parallel) logits.

        loss = sum_t w_t * -min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t)

    Computed in float32 (float64 for float64 logits). Masked tokens are selected away before any exp: whatever their
    fields hold reaches neither loss nor gradient. A value that is not finite at a trained token stays visible.

    Args:
        logits: [T, V / tp] this tensor-parallel rank's slice of the vocabulary.
        targets: [T] int64 global token ids; one outside the vocabulary at a trained token gives NaN. Equal on all
            tensor-parallel ranks, like every [T] field.
        old_logprobs: [T] nats, of the sampling policy at `temperature`.
        advantages: [T].
        weights: [T] the aggregation's weight of each token.
        mask: [T] bool, trained tokens. Default: weights != 0.
        clip_eps_low: distance of the lower clip bound from 1.
        clip_eps_high: distance of the upper clip bound from 1.
        temperature: tau of softmax(z / tau).
        vocab_size: columns at or beyond it, counted over all tensor-parallel ranks, are padding: no probability and no
            gradient. Default: there is no padding.
        grad_divisor: the gradient, not the loss, is divided by it.
        grad_scale: the upstream gradient that the backward will bring, as far as known. It changes no result: where the
            gradient is made in the forward, another upstream gradient costs one more pass over it.
        tp_group: tensor-parallel group; every rank of it must call with the same T.
        entropy: also return the entropy of each trained token's distribution.
        inplace: the gradient may overwrite the logits, which nothing else may read then (the torch implementation
            refuses).
        impl: "triton" or "torch".

    Raises:
        ValueError: shapes, dtypes or options cannot be.
    """
    policy_loss = plain_grpo(
        old_logprobs,
        advantages,
        weights,
        mask=weights != 0 if mask is None else mask,
        clip_eps_low=clip_eps_low,
        clip_eps_high=clip_eps_high,
        grad_divisor=grad_divisor,
    )
    return policy_gradient_loss(
        logits,
        targets,
        policy_loss,
        temperature=temperature,
        vocab_size=vocab_size,
        grad_scale=grad_scale,
        tp_group=tp_group,
        entropy=entropy,
        inplace=inplace,
        impl=impl,
    )


def policy_gradient_loss(
    logits: Tensor,
    targets: Tensor,
    policy_loss: PolicyLoss,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    grad_scale: float = 1.0,
    tp_group: ProcessGroup | None = None,
    entropy: bool = False,
    inplace: bool = False,
    impl: str = "triton",
) -> PolicyGradientLoss:
    """Any objective with any further terms, from (vocabulary-parallel) logits; the general form of `grpo_loss`.

        loss = policy_loss(log softmax(z / tau)[target], entropy of softmax(z / tau))

    Args:
        logits: as in `grpo_loss`, like every argument that is not named here.
        targets: [T] int64 global token ids.
        policy_loss: the loss as a function of log-probabilities and entropies, with its [T] fields.
        temperature: tau.
        vocab_size: columns at or beyond it are padding.
        grad_scale: the upstream gradient to expect.
        tp_group: tensor-parallel group.
        entropy: also return the entropies.
        inplace: the gradient may overwrite the logits.
        impl: "triton" or "torch".

    Raises:
        ValueError: shapes, dtypes or options cannot be, or a field that a term needs is missing.
    """
    check_logits(logits, targets, temperature)
    check_fields(logits, targets, policy_loss)
    check_factors(policy_loss.terms.grad_divisor, grad_scale)
    ranks = 1 if tp_group is None else tp_group.size()
    options = {
        "temperature": temperature,
        "vocab_size": checked_vocab_size(vocab_size, logits.shape[1] * ranks),
        "tp_group": tp_group,
    }
    if impl == "torch":
        if inplace:
            raise ValueError("inplace=True cannot be done by impl='torch', which keeps the logits. Leave it off.")
        found = reference_loss(logits, targets, policy_loss, **options)
    elif impl == "triton":
        check_for_triton(logits)
        _check_layout(logits, inplace)
        from megatron_pg.kernels.triton_loss import triton_loss  # torch alone must not need Triton

        options |= {"grad_scale": grad_scale, "entropy": entropy, "inplace": inplace}
        with torch.cuda.device_of(logits):
            found = triton_loss(logits, targets, policy_loss, **options)
    else:
        raise ValueError(f"impl={impl!r} is not one of {', '.join(IMPLEMENTATIONS)}, so nothing would be computed.")
    return found if entropy or policy_loss.terms.entropy_coef else replace(found, entropy=None)


_NEEDED = ("old_logprobs", "advantages", "weights", "mask")
_OPTIONAL = ("auxiliary_weights", "ref_logprobs", "rollout_logprobs")


def check_fields(logits: Tensor, targets: Tensor, policy_loss: PolicyLoss) -> None:
    """Refuse fields that are missing, misshapen or elsewhere."""
    terms, mask = policy_loss.terms, policy_loss.mask
    needed = [
        *_NEEDED,
        *(["ref_logprobs"] if terms.kl_coef else []),
        *([terms.opsm_anchor] if terms.opsm_anchor else []),
    ]
    for name in [*needed, *(["sequences"] if terms.reads_sequences else [])]:
        if getattr(policy_loss, name) is None:
            raise ValueError(f"{name} is missing, and a term of the loss needs it. Give one value per token.")
    found = {name: getattr(policy_loss, name) for name in (*_NEEDED, *_OPTIONAL)} | {"targets": targets}
    for name, values in found.items():
        if values is None:
            continue
        if values.shape != targets.shape:
            raise ValueError(
                f"{name} has shape {tuple(values.shape)} for {tuple(targets.shape)} targets, so tokens would not align. Give one value "
                "per token."
            )
        if values.device != logits.device:
            raise ValueError(f"{name} is on {values.device} and the logits on {logits.device}. Move it there.")
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}, not bool: it says which tokens are trained. Use mask.bool().")


def check_factors(grad_divisor: float, grad_scale: float) -> None:
    """Refuse factors of the gradient that are not > 0."""
    for name, value in (("grad_divisor", grad_divisor), ("grad_scale", grad_scale)):
        if not value > 0:
            raise ValueError(f"{name}={value} is not > 0, so the gradient would be lost or turned round. Use 1.")


def checked_vocab_size(vocab_size: int | None, columns: int) -> int:
    """The columns of all ranks that are no padding."""
    if vocab_size is None:
        return columns
    if not 0 < vocab_size <= columns:
        raise ValueError(
            f"vocab_size={vocab_size} is not in 1 .. {columns}, the columns of all tensor-parallel ranks, so real tokens "
            "would be taken for padding. Give the tokenizer's size."
        )
    return vocab_size


def check_for_triton(values: Tensor) -> None:
    """Refuse a device and a dtype that the Triton kernels cannot do."""
    if values.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"impl='triton' cannot run on {values.device}: Triton kernels need a CUDA device (or TRITON_INTERPRET=1, to "
            "test). Use impl='torch'."
        )
    if values.dtype == torch.float64:
        raise ValueError("impl='triton' computes in float32 and would lose float64's digits. Use impl='torch'.")


def _check_layout(logits: Tensor, inplace: bool) -> None:
    if logits.shape[1] > 0 and logits.stride(1) != 1:
        raise ValueError(
            f"logits have stride {logits.stride(1)} along the vocabulary, which the kernels read in order. Use logits.contiguous()."
        )
    if inplace and not may_be_overwritten(logits):
        raise ValueError(
            "inplace=True would overwrite a leaf tensor that requires grad. Pass the model's output, not a leaf."
        )


def may_be_overwritten(logits: Tensor) -> bool:
    """Whether the memory is no leaf's that requires grad; that of a view is its base's."""
    owner = logits if logits._base is None else logits._base
    return not (owner.is_leaf and owner.requires_grad)
