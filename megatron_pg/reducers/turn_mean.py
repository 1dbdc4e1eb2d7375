"""Every trained turn weighs the same: the mean over the step's turns of each turn's token mean."""

from typing import cast

import torch
from torch import Tensor

from megatron_pg.reducers.base import StepCounts


def turn_mean(step: StepCounts) -> Tensor:
    """Denominator of each sample, [S] float64; the plan multiplies it by M of each token's turn.

        d_t = N_turn · M_turn(t)

    N_turn counts the turns of the step with a trained token. A turn lies in one sample, so no exchange counts M_turn.
    """
    return torch.full(step.tokens_per_rollout.shape, cast(int, step.num_turns), dtype=torch.float64)
