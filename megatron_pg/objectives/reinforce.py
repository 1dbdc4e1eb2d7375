"""The plain policy gradient, without and with the importance weight of the sampling policy."""

from torch import Tensor

from megatron_pg.objectives.interface.tokens import Parameters, Tokens


def reinforce(tokens: Tokens, parameters: Parameters) -> Tensor:
    """Loss of each token: -A log π. With leave-one-out advantages and `constant`, L = 1, this is RLOO.

    Source: Back to Basics (RLOO), arXiv 2402.14740.
    """
    return -tokens.advantages * tokens.logprobs


def reinforce_is(tokens: Tokens, parameters: Parameters) -> Tensor:
    """Loss of each token: -r A, not clipped.

    Source: Back to Basics (RLOO), arXiv 2402.14740.
    """
    return -tokens.ratios * tokens.advantages
