"""The eager implementation: plain torch with autograd, on any device. The others are compared with it.

In addition to the logits it keeps one [T, V / tp] table, in their dtype, from forward to backward, and holds at most
six in the compute dtype at once.
"""

import torch
from torch import Tensor

from megatron_pg.kernels.losses import detail_of, loss_of, reader_of
from megatron_pg.kernels.policy_loss import PolicyGradientLoss, PolicyLoss
from megatron_pg.kernels.readers import read
from megatron_pg.kernels.vocabulary import Vocabulary


def reference_loss(
    logits: Tensor, policy_loss: PolicyLoss, vocabulary: Vocabulary, *, entropy: bool = True
) -> PolicyGradientLoss:
    """See `megatron_pg.kernels.policy_gradient_loss`."""
    fields = policy_loss.fields
    # Selected before exp: with the mask applied afterwards a NaN or inf would still reach the gradient.
    safe_logits = vocabulary.hide_padding(logits.masked_fill(~fields.mask[:, None], 0))
    safe_targets = torch.where(fields.mask, fields.targets, 0)
    reader = reader_of("torch", vocabulary, safe_targets, detail_of(policy_loss, entropy=entropy))
    *outputs, _ = read(safe_logits, reader)
    return loss_of(policy_loss, outputs, vocabulary, "torch")
