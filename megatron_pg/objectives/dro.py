"""The policy gradient with a quadratic pull back to the sampling policy in place of a ratio."""

from torch import Tensor

from megatron_pg.objectives.interface.tokens import Parameters, Tokens


def dro(tokens: Tokens, parameters: Parameters) -> Tensor:
    """Loss of each token. It reads no ratio, so nothing is clamped: far from π_old the pull is strongest.

        loss = -A log π + (beta / 2) (log r)²,   gradient -A + beta log r

    It is the paper's regression (beta / 2) (log r - A / beta)², up to a constant, by token. Kimi k1.5 (arXiv
    2501.12599) squares the sum of log r over the sequence instead.

    Source: Offline Regularised Reinforcement Learning for LLMs Alignment (DRO), arXiv 2405.19107.
    """
    return -tokens.advantages * tokens.logprobs + 0.5 * parameters.beta * tokens.log_ratios.square()
