"""REINFORCE whose bad samples fade as the policy leaves them, while good ones keep their whole gradient."""

import torch
from torch import Tensor

from megatron_pg.objectives.interface.tokens import Parameters, Tokens


def topr(tokens: Tokens, parameters: Parameters) -> Tensor:
    """Loss of each token, with the ratio of its whole sequence.

        loss = -sg[c] A log π,   c = 1 where A >= 0,   else min(W, 1),   W = product of r over the whole sequence

    c is at most 1, so no ratio needs a clamp. The sign is that of the token's own A.

    Source: Tapered Off-Policy REINFORCE, arXiv 2503.14286, whose sum over tokens is `constant` with divisor 1.
    """
    return _tapered(tokens, tokens.sequence_log_weights)


def topr_token(tokens: Tokens, parameters: Parameters) -> Tensor:
    """Loss of each token, with its own ratio: c = 1 where A >= 0, else min(r, 1).

    Source: as `topr`; by token it is another objective, which is not in the paper.
    """
    return _tapered(tokens, tokens.log_ratios)


def _tapered(tokens: Tokens, log_weights: Tensor) -> Tensor:
    tapered = log_weights.detach().clamp(max=0).exp()
    return -torch.where(tokens.advantages < 0, tapered, 1) * tokens.advantages * tokens.logprobs
