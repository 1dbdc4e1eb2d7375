"""The clipped surrogate whose unclipped side is capped too."""

import torch
from torch import Tensor

from megatron_pg.objectives.interface.tokens import Parameters, Tokens, bounded


def two_sided(tokens: Tokens, parameters: Parameters) -> Tensor:
    """Loss of each token; for delta > 1 + clip_eps_high it is dual_clip with c = delta.

        loss = -min(min(r, delta) A, clip(r, 1 - clip_eps_low, 1 + clip_eps_high) A)

    Source: INTELLECT-2, arXiv 2505.07291.
    """
    ratios = tokens.ratios
    clipped = bounded(ratios, 1.0 - parameters.clip_eps_low, 1.0 + parameters.clip_eps_high)
    return -torch.minimum(bounded(ratios, high=parameters.delta) * tokens.advantages, clipped * tokens.advantages)
