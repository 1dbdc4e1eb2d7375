"""A sigmoid in place of the clip: the gradient fades with the distance of the ratio from 1."""

import torch
from torch import Tensor

from megatron_pg.objectives.interface.tokens import Parameters, Tokens


def sapo(tokens: Tokens, parameters: Parameters) -> Tensor:
    """Loss of each token.

        loss = -(4 / tau) sigmoid(tau (r - 1)) A,   tau = tau_pos where A > 0, else tau_neg

    At r = 1 the gradient is that of grpo and the loss -2 A / tau: with two taus it does not vanish for advantages of
    average 0.

    Source: Soft Adaptive Policy Optimization, arXiv 2511.20347.
    """
    scalar = tokens.advantages.new_full  # a Python number in `where` would become float32
    positive, negative = scalar((), parameters.tau_pos), scalar((), parameters.tau_neg)
    tau = torch.where(tokens.advantages > 0, positive, negative)
    return -(4.0 / tau) * torch.sigmoid(tau * (tokens.ratios - 1.0)) * tokens.advantages
