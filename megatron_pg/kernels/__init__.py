"""From logits to the policy-gradient loss. `impl` picks the implementation; none falls back to another.

`torch` is the eager reference and the specification.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.args import KERNELS as IMPLEMENTATIONS
from megatron_pg.kernels.reference import reference_grpo_loss


@dataclass(frozen=True, slots=True, eq=False)
class GRPOLoss:
    """Loss of one micro-batch on one rank, and the per-token values behind it, all [T] detached, 0 where masked."""

    loss: Tensor  # [] sum of w * loss_t, differentiable
    token_losses: Tensor
    logprobs: Tensor  # nats, of the model being trained
    log_ratios: Tensor  # nats, new minus old, not clamped
    entropy: Tensor | None  # nats; None unless asked for


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
    grad_divisor: float = 1.0,
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
        targets: [T] int64 global token ids. Equal on all tensor-parallel ranks, like every [T] field.
        old_logprobs: [T] nats, of the sampling policy at `temperature`.
        advantages: [T].
        weights: [T] the aggregation's weight of each token.
        mask: [T] bool, trained tokens. Default: weights != 0.
        clip_eps_low: distance of the lower clip bound from 1.
        clip_eps_high: distance of the upper clip bound from 1.
        temperature: tau of softmax(z / tau).
        grad_divisor: the gradient, not the loss, is divided by it.
        tp_group: tensor-parallel group; every rank of it must call with the same T.
        entropy: also return the entropy of each trained token's distribution.
        inplace: the gradient may overwrite the logits (the torch implementation refuses).
        impl: "triton" or "torch".

    Raises:
        ValueError: shapes, dtypes or options cannot be.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r} is not one of {', '.join(IMPLEMENTATIONS)}, so nothing would be computed.")
    if impl == "triton":
        raise ValueError("impl='triton' is not there yet, and nothing falls back in silence; use impl='torch'.")
    if inplace:
        raise ValueError("inplace=True cannot be done by impl='torch', which keeps the logits. Leave it off.")
    if not grad_divisor > 0:
        raise ValueError(
            f"grad_divisor={grad_divisor} is not > 0, so the gradient would be lost or turned round. Use 1."
        )
    fields = {"old_logprobs": old_logprobs, "advantages": advantages, "weights": weights}
    for name, values in (fields if mask is None else fields | {"mask": mask}).items():
        if values.shape != targets.shape:
            raise ValueError(
                f"{name} has shape {tuple(values.shape)} for {tuple(targets.shape)} targets, so tokens would not align. Give one value "
                "per token."
            )
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}, not bool: it says which tokens are trained. Use mask.bool().")
    loss, token_losses, logprobs, log_ratios, entropies = reference_grpo_loss(
        logits,
        targets,
        old_logprobs,
        advantages,
        weights,
        mask=weights != 0 if mask is None else mask,
        clip_eps_low=clip_eps_low,
        clip_eps_high=clip_eps_high,
        temperature=temperature,
        tp_group=tp_group,
    )
    if grad_divisor != 1.0:
        loss = loss.detach() + (loss - loss.detach()) / grad_divisor
    return GRPOLoss(loss, token_losses, logprobs, log_ratios, entropies if entropy else None)
