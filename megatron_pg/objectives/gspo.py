"""The clipped surrogate of a whole sequence: one ratio, one advantage, one decision to clip."""

from typing import cast

from torch import Tensor

from megatron_pg.objectives.grpo import clipped_surrogate
from megatron_pg.objectives.interface.tokens import Parameters, Tokens


def gspo(tokens: Tokens, parameters: Parameters) -> Tensor:
    """Loss of each token, the same for all tokens of a sequence.

        R = exp(average of log r),   A' = average of A,   both over the trained tokens of the whole sequence
        loss = -min(R A', clip(R, 1 - clip_eps_low, 1 + clip_eps_high) A')

    The sequence weighs the sum of its tokens' weights, corrections included. Each token's gradient is -R A' times the
    average of these weights where it is not clipped: the 1/N of the average of log r and the sum over the N tokens that
    share R cancel.

    Source: Group Sequence Policy Optimization, arXiv 2507.18071.
    """
    return clipped_surrogate(tokens.sequence_ratios, cast(Tensor, tokens.sequence_advantages), parameters)


def outside(tokens: Tokens, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """[T] bool each: R of the token's sequence above and below the clip interval."""
    return tokens.sequence_ratios > 1 + parameters.clip_eps_high, tokens.sequence_ratios < 1 - parameters.clip_eps_low
