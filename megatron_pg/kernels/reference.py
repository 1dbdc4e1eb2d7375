"""The eager implementation: plain torch with autograd, on any device. It is what the others are compared with.

Beside the logits it keeps one [T, V / tp] table, in their dtype, from forward to backward, and holds at most six in the
compute dtype at once.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.kernels.policy_loss import PolicyGradientLoss, PolicyLoss
from megatron_pg.kernels.logprobs import logprobs_and_entropy


def reference_loss(
    logits: Tensor,
    targets: Tensor,
    policy_loss: PolicyLoss,
    *,
    temperature: float,
    vocab_size: int,
    tp_group: ProcessGroup | None,
) -> PolicyGradientLoss:
    """See `megatron_pg.kernels.policy_gradient_loss`."""
    mask = policy_loss.mask
    # Selected before exp: with the mask applied afterwards a NaN or inf would still reach the gradient.
    safe_logits = _without_padding(logits.masked_fill(~mask[:, None], 0), vocab_size, tp_group)
    safe_targets = torch.where(mask, targets, 0)
    logprobs, entropy = logprobs_and_entropy(safe_logits, safe_targets, temperature=temperature, tp_group=tp_group)
    logprobs = torch.where((safe_targets >= 0) & (safe_targets < vocab_size), logprobs, torch.nan)
    return policy_loss(logprobs, entropy)


def _without_padding(logits: Tensor, vocab_size: int, tp_group: ProcessGroup | None) -> Tensor:
    rank, size = (0, 1) if tp_group is None else (tp_group.rank(), tp_group.size())
    if vocab_size == logits.shape[1] * size:
        return logits
    columns = rank * logits.shape[1] + torch.arange(logits.shape[1], device=logits.device)
    return logits.masked_fill(columns >= vocab_size, -torch.inf)
