"""Every trained token weighs the same, at a scale that does not depend on the data."""

from typing import cast

import torch
from torch import Tensor

from megatron_pg.reducers.base import StepCounts


def constant(step: StepCounts) -> Tensor:
    """Denominator of each sample, [S] float64.

        d_i = N_r · L

    Source: Dr. GRPO, arXiv 2503.20783; L is `--loss-aggregation-divisor`, one length for the whole run.
    """
    divisor = cast(float, step.divisor)  # a rule of the flags requires it
    return torch.full(step.tokens_per_rollout.shape, step.num_rollouts * divisor, dtype=torch.float64)
