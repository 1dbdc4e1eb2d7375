"""Every rollout weighs the same: the mean over rollouts of each rollout's token mean."""

from torch import Tensor

from megatron_pg.reducers.base import StepCounts, at_least


def sample_mean(step: StepCounts) -> Tensor:
    """Denominator of each sample, [S] float64.

        d_i = N_r · max(M_rollout(i), 1)

    Source: GRPO, arXiv 2402.03300, eq. 3, with a rollout in place of an output (it may span several samples).
    """
    return step.num_rollouts * at_least(step.tokens_per_rollout)
