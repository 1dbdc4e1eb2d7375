"""The unclipped surrogate inside a band of probability, with a quadratic pull back to the sampling policy."""

import torch
from torch import Tensor

from megatron_pg.objectives.dppo_tv import outside
from megatron_pg.objectives.interface.tokens import Parameters, Tokens


def ipo(tokens: Tokens, parameters: Parameters) -> Tensor:
    """Loss of each token; the band has no regard to the sign of A, and the pull acts outside of it too.

        loss = -r A + tau (log r)²   where -delta_low <= π - π_old <= delta_high,   else tau (log r)²

    Source: INTELLECT Policy Optimization, the loss of prime-rl. Its later releases drop a token by the sign of A, as
    dppo_tv.
    """
    above, below = outside(tokens, parameters)
    nothing = 0 * tokens.advantages  # but of one that is not finite, which stays visible
    surrogate = torch.where(above | below, nothing, -tokens.ratios * tokens.advantages)
    return surrogate + parameters.tau * tokens.log_ratios.square()
