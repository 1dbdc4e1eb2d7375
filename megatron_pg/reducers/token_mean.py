"""Every trained token of the step weighs the same: what most code called DAPO does."""

import torch
from torch import Tensor

from megatron_pg.reducers.base import StepCounts


def token_mean(step: StepCounts) -> Tensor:
    """Denominator of each sample, [S] float64.

        d_i = T

    Source: Megatron-LM's `--calculate-per-token-loss`.
    """
    return torch.full(step.tokens_per_rollout.shape, step.num_tokens, dtype=torch.float64)
