"""The value loss: worked by hand, its bounds, and its gradient."""

import math

import pytest
import torch

from megatron_pg.objectives import objective_of
from megatron_pg.objectives.interface.tokens import Tokens

CASES = [  # v, v_old, R, clip, loss, gradient
    (1.0, 0.0, 3.0, math.inf, 2.0, -2.0),
    (1.0, 0.0, 3.0, 0.5, 3.125, 0.0),  # has risen towards R beyond the clip: ½·(0.5 - 3)²
    (1.0, 0.0, -3.0, 0.5, 8.0, 4.0),  # has risen away from R: the unclipped square is larger
    (0.5, 0.0, 3.0, 0.5, 3.125, -2.5),  # on the bound the gradient is kept
    (-1.0, 0.0, -3.0, 0.5, 3.125, 0.0),
    (2.0, 2.0, 2.0, 0.1, 0.0, 0.0),
]


@pytest.mark.parametrize(("value", "old", "target", "clip", "loss", "slope"), CASES)
def test_values_worked_by_hand(value, old, target, clip, loss, slope):
    objective = objective_of("value_loss", clip=clip)
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    old, target = (torch.tensor([x], dtype=torch.float64) for x in (old, target))
    tokens = Tokens(logprobs=values, old_logprobs=old, advantages=target, log_ratios=values - old)
    found = objective.loss(tokens, objective.parameters)
    assert found.tolist() == [loss]
    assert torch.autograd.grad(found.sum(), values)[0].tolist() == [slope]
    above, below = objective.outside(tokens, objective.parameters)
    is_clipped = slope == 0 and loss > 0
    assert (above | below).tolist() == [is_clipped]
    assert not (above & below).any()
    assert (objective.role, objective.reads) == ("critic", ("values", "returns"))


def test_without_a_clip_it_is_half_the_square():
    objective = objective_of("value_loss")
    assert objective.parameters.clip == math.inf
