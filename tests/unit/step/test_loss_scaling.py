"""What is returned to Megatron; that its divisions then leave ∇S, tests/ranks/test_releases.py."""

import torch

from megatron_pg.step.loss_scaling import LossScaling

SIZES = {"num_microbatches": 3, "data_parallel_size": 4, "context_parallel_size": 2}


def test_a_forward_counts_one_unless_a_router_counts_positions():
    total = torch.ones((), dtype=torch.float64)
    plain = LossScaling(per_token=True, **SIZES)
    loss, count, _ = plain.outputs(total, num_positions=50)
    assert (float(loss), int(count), plain.count, plain.grad_scale) == (24, 1, 24, 24)
    routed = LossScaling(per_token=True, **SIZES, num_positions=1000)
    loss, count, _ = routed.outputs(total, num_positions=50)
    assert (float(loss), int(count), routed.count, routed.grad_scale) == (1000, 50, 1000, 1000)
    loss, _ = LossScaling(per_token=False, **SIZES, num_positions=1000).outputs(total, num_positions=50)
    assert float(loss) == 12


def test_what_averages_anyway_is_given_its_ranks_and_not_the_counts():
    scaling = LossScaling(per_token=True, **SIZES, averages=True)
    loss, count, _ = scaling.outputs(torch.ones((), dtype=torch.float64), num_positions=50)
    assert (float(loss), int(count), scaling.count, scaling.grad_scale) == (8, 1, 24, 8)
    off, averaged = (LossScaling(per_token=False, **SIZES, averages=averages) for averages in (False, True))
    assert off.outputs(torch.ones(()))[0] == averaged.outputs(torch.ones(()))[0]
    assert off.grad_scale == averaged.grad_scale == 8
