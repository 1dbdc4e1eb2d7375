"""The clipped surrogate with a floor for bad tokens that the policy has made far more likely."""

import torch
from torch import Tensor

from megatron_pg.objectives.grpo import grpo, outside  # noqa: F401, found by name
from megatron_pg.objectives.interface.tokens import Parameters, Tokens, bounded


def dual_clip(tokens: Tokens, parameters: Parameters) -> Tensor:
    """Loss of each token; at r = c it keeps its gradient.

        A >= 0: loss = grpo,    A < 0: loss = min(grpo, -c A) = -clip(r, 1 - clip_eps_low, c) A

    Source: Mastering Complex Control in MOBA Games with Deep RL, arXiv 1912.09729.
    """
    capped = bounded(tokens.ratios, 1.0 - parameters.clip_eps_low, parameters.cap)
    return torch.where(tokens.advantages < 0, -(capped * tokens.advantages), grpo(tokens, parameters))
