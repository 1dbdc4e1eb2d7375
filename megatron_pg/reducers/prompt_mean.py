"""Every prompt weighs the same: the mean over prompts of the token mean over the prompt's group."""

from typing import cast

from torch import Tensor

from megatron_pg.reducers.base import StepCounts, at_least


def prompt_mean(step: StepCounts) -> Tensor:
    """Denominator of each sample, [S] float64.

        d_i = P · max(M_group(i), 1)

    Source: DAPO as printed, arXiv 2503.14476, eq. 8; the prompt average of ScaleRL, arXiv 2510.13786, section 3.2.
    """
    num_prompts, tokens = cast(int, step.num_prompts), cast(Tensor, step.tokens_per_prompt)  # the plan requires ids
    return num_prompts * at_least(tokens)
