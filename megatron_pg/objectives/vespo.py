"""REINFORCE with a smooth weight of the whole sequence, which fades on both sides of the sampling policy."""

import torch
from torch import Tensor

from megatron_pg.objectives.interface.tokens import MAX_LOG_RATIO, Parameters, Tokens, unclamped


def vespo(tokens: Tokens, parameters: Parameters) -> Tensor:
    """Loss of each token.

        loss = -sg[φ] A log π,   φ = W^k exp(lambda (1 - W)),   W = product of r over the whole sequence

    k and lambda are k_pos and lambda_pos where the token's A > 0, else k_neg and lambda_neg. φ
    is 1 at W = 1. W is not normalized by length; its logarithm is clamped to ±20, and beyond there is no gradient.

    Source: Variational Sequence-Level Soft Policy Optimization, arXiv 2602.10693.
    """
    log_weights = tokens.sequence_log_weights.detach()
    clamped = log_weights.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    scalar = tokens.advantages.new_full  # a Python number in `where` would become float32
    k, rate = (
        torch.where(tokens.advantages > 0, scalar((), positive), scalar((), negative))
        for positive, negative in ((parameters.k_pos, parameters.k_neg), (parameters.lambda_pos, parameters.lambda_neg))
    )
    shares = (k * clamped + rate * (1.0 - clamped.exp())).exp()
    return -shares * tokens.advantages * unclamped(tokens.logprobs, log_weights)
