"""The eager implementation: plain torch with autograd, on any device. It is what the others are compared with.

Beside the logits it keeps one [T, V / tp] table, in their dtype, from forward to backward, and holds at most six in the
compute dtype at once.
"""

import torch
from torch import Tensor

from megatron_pg.kernels.logprobs import logprobs_of
from megatron_pg.kernels.policy_loss import PolicyGradientLoss, PolicyLoss
from megatron_pg.kernels.support import support_rows_of
from megatron_pg.kernels.topk import topk_logprobs, topk_rows_of
from megatron_pg.kernels.vocabulary import Vocabulary


def reference_loss(
    logits: Tensor, policy_loss: PolicyLoss, vocabulary: Vocabulary, *, entropy: bool = True
) -> PolicyGradientLoss:
    """See `megatron_pg.kernels.policy_gradient_loss`."""
    fields = policy_loss.fields
    # Selected before exp: with the mask applied afterwards a NaN or inf would still reach the gradient.
    safe_logits = vocabulary.hide_padding(logits.masked_fill(~fields.mask[:, None], 0))
    safe_targets = torch.where(fields.mask, fields.targets, 0)
    if (restriction := policy_loss.restriction(entropy)) is not None:
        return policy_loss(*support_rows_of(safe_logits, safe_targets, restriction, vocabulary))
    if (ids := policy_loss.topk_ids) is None:
        return policy_loss(*logprobs_of(safe_logits, safe_targets, vocabulary)[:2])
    logprobs, entropies, head, tail = topk_rows_of(safe_logits, safe_targets, ids, vocabulary)
    return policy_loss(logprobs, entropies, topk_logprobs(head, tail, ids, vocabulary))
