"""The router's coefficients while a step runs, and refused experts. Gradients: tests/ranks/test_forward_step.py."""

import random
import types

import pytest
from samples import make_sample, plain_sample
from torch import nn

from megatron_pg import pack
from megatron_pg.plan.errors import ScheduleError
from megatron_pg.step import experts


@pytest.fixture(params=[(0, 18), (0, 19)], ids=str)
def release(request, monkeypatch):
    monkeypatch.setattr(experts, "core_version", lambda: request.param)
    return request.param


@pytest.fixture
def old(monkeypatch):
    monkeypatch.setattr(experts, "core_version", lambda: (0, 17))


def config_of(kinds="aux_loss", aux=0.5, z=None, **changed) -> types.SimpleNamespace:
    values = {"num_moe_experts": 4, "num_layers": 2, "moe_router_topk": 2, "calculate_per_token_loss": True}
    values |= {"moe_router_load_balancing_type": kinds, "moe_aux_loss_coeff": aux, "moe_z_loss_coeff": z}
    return types.SimpleNamespace(**values | changed)


def chunk(config) -> nn.Module:
    """A model whose parts share its config, as Megatron's do."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
    model.config = model[0].config = model[1].config = config
    return model


@pytest.mark.parametrize(
    ("kinds", "aux", "z", "scaled"),
    [
        ("aux_loss", 0.5, None, (3.0, None)),
        ("global_aux_loss", 0.5, 0.25, (3.0, 1.5)),
        ("seq_aux_loss", 0.5, 0.25, (15.0, 1.5)),
        (["seq_aux_loss", "aux_loss"], [0.5, 0.25], None, ([15.0, 1.5], None)),
        ("none", 0.0, 0.25, (0.0, 1.5)),
    ],
)
@pytest.mark.usefixtures("old")
def test_coefficients_are_multiplied_while_a_step_runs_and_only_then(kinds, aux, z, scaled):
    shared, other = config_of(kinds, aux, z), config_of(kinds, aux, z)
    before = dict(vars(shared))
    for error in (None, KeyError):
        try:
            with experts.router_losses_to_scale([chunk(shared), chunk(shared), chunk(other)], rows=5, ranks=6):
                for config in (shared, other):
                    assert (config.moe_aux_loss_coeff, config.moe_z_loss_coeff) == scaled
                if error is not None:
                    raise error
        except KeyError:
            pass
        assert vars(shared) == vars(other) == before


def packed(*rows: int) -> list:
    sample = make_sample(prompt_length=2, mask=[1, 1], rng=random.Random(0))
    return [pack([sample], qkv_format="bshd", max_seq_len=4, rows=count) for count in rows]


def test_unequal_rows_are_refused_where_one_coefficient_cannot_serve_them(release):
    uneven = config_of(["aux_loss", "seq_aux_loss"], [0.5, 0.5])
    experts.check_rows(packed(2, 2), uneven)
    experts.check_rows(packed(2, 3), config_of())
    experts.check_rows(packed(2, 3), config_of("seq_aux_loss", calculate_per_token_loss=False))
    experts.check_rows(packed(2, 3), config_of("seq_aux_loss", num_moe_experts=None))
    if release == (0, 19):
        experts.check_rows(packed(2, 3), uneven)
        return
    with pytest.raises(ScheduleError, match="micro-batches of 2 and of 3 rows in one step: this megatron-core"):
        experts.check_rows(packed(3, 2), uneven)


def routed(chosen) -> list:
    sample = plain_sample(2, sample_id="s", routed_experts=chosen)
    return [pack([sample], qkv_format="thd")]


GOOD = [[[0, 1], [2, 3]], [[3, 2], [1, 0]]]
REPLAY = types.SimpleNamespace()


@pytest.mark.parametrize(
    ("chosen", "changed", "replay", "message"),
    [
        (GOOD, {}, None, "sample s has routed_experts, and without routing_replay"),
        (None, {}, REPLAY, "sample s has no routed_experts, which routing_replay needs of every sample"),
        (GOOD, {"num_layers": 3}, REPLAY, "2 layers with 2 experts up to number 3, and the model has 3 layers"),
        (GOOD, {"moe_router_topk": 1}, REPLAY, "the model has 2 layers with 1 of 4 experts"),
        (GOOD, {"num_moe_experts": 3}, REPLAY, "the model has 2 layers with 2 of 3 experts"),
        (GOOD, {"num_moe_experts": None}, REPLAY, "num_moe_experts is None"),
        (GOOD, {"overlap_moe_expert_parallel_comm": True}, REPLAY, "overlap_moe_expert_parallel_comm True"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_name(chosen, changed, replay, message):
    with pytest.raises(ScheduleError, match=message):
        experts.check_experts(routed(chosen), config_of(**changed), replay)
    experts.check_experts(routed(GOOD), config_of(), REPLAY)
    experts.check_experts(routed(None), config_of(), None)
