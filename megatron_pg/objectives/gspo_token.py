"""GSPO with an advantage per token."""

from torch import Tensor

from megatron_pg.objectives.grpo import clipped_surrogate
from megatron_pg.objectives.gspo import outside  # noqa: F401, found by name
from megatron_pg.objectives.interface.tokens import Parameters, Tokens


def gspo_token(tokens: Tokens, parameters: Parameters) -> Tensor:
    """Loss of each token; equal to gspo, value and gradient, where A is the same for the whole sequence.

        s = sg[R] π / sg[π],   loss = -min(s A, clip(s, 1 - clip_eps_low, 1 + clip_eps_high) A)

    sg[·] has no gradient; R is the sequence's ratio, as in gspo.

    Source: Group Sequence Policy Optimization, arXiv 2507.18071, section 4.3.
    """
    return clipped_surrogate(tokens.sequence_ratios, tokens.advantages, parameters)
