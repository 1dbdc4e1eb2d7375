"""Megatron's settings by release, which rules.txt does not cover."""

import sys
import types
from importlib import metadata

import pytest
from namespaces import GRAPHS, accepts, arguments, breaks, mode, refused

from megatron_pg.flags import compatibility
from megatron_pg.flags.megatron import core_version

pytestmark = pytest.mark.usefixtures("rank_zero", "user_code")


@pytest.mark.parametrize("version", ["0.17.1", "0.18.0", "0.18.2", "0.19.1", "0.19.2", "0.20.0"])
def test_full_recompute_of_multi_token_prediction_is_refused_where_megatron_fails(version, monkeypatch):
    monkeypatch.setattr(compatibility, "core_version", lambda: tuple(map(int, version.split("."))))
    args = arguments(mtp_num_layers=1, recompute_granularity="full")
    if version in ("0.18.0", "0.18.2", "0.19.1"):
        breaks(args, "E21", "--recompute-granularity full with --mtp-num-layers raises a TypeError")
    else:
        accepts(args)


EXPERTS = {"num_experts": 8}


@pytest.mark.parametrize("release", [(0, 16, 1), (0, 18, 2), (0, 19, 1), (0, 19, 2), (0, 20)])
@pytest.mark.parametrize(
    ("overrides", "fragment"),
    [
        ({}, None),
        ({"fp32_lm_head": True}, None),
        (mode("token_mean"), None),
        (EXPERTS, None),
        ({"pg_fused_head": "forward"}, "frees the output layer's weight after its forward"),
        ({**mode("token_mean"), **EXPERTS}, "without dividing by the number of positions. Use --use-megatron-fsdp"),
    ],
)
def test_torch_fsdp2_is_refused_before_0_19_2_and_where_it_is_not_exact(overrides, fragment, release, monkeypatch):
    monkeypatch.setattr(compatibility, "core_version", lambda: release)
    args = arguments(use_torch_fsdp2=True, **overrides)
    if release < (0, 19, 2):
        assert {rule for rule, _ in refused(args)} == {"E19"}
    elif fragment:
        breaks(args, "E19", "--use-torch-fsdp2", fragment)
    else:
        accepts(args)


@pytest.mark.parametrize(
    ("release", "fused", "unsharded", "by_default"),
    [
        ((0, 16, 1), False, False, False),
        ((0, 17, 1), False, False, False),
        ((0, 18, 1), False, False, True),
        ((0, 18, 2), False, True, True),
        ((0, 19, 1), False, True, True),
        ((0, 19, 2), True, True, True),
    ],
)
def test_what_goes_with_megatron_fsdp_in_a_release(release, fused, unsharded, by_default, monkeypatch):
    monkeypatch.setattr(compatibility, "core_version", lambda: release)
    for is_allowed, overrides in (
        (fused, {"pg_fused_head": "forward"}),
        (unsharded, {"data_parallel_sharding_strategy": "no_shard"}),
        (by_default, {"data_parallel_sharding_strategy": None}),
    ):
        args = arguments(use_megatron_fsdp=True, **overrides)
        accepts(args) if is_allowed else breaks(args, "E19", "--use-megatron-fsdp")


@pytest.mark.parametrize("release", [(0, 19), (0, 20), (1, 0), (99, 0)])
def test_a_release_that_scales_the_routers_losses_may_be_captured(release, monkeypatch):
    monkeypatch.setattr(compatibility, "core_version", lambda: release)
    accepts(arguments(**GRAPHS))


@pytest.mark.parametrize(
    ("imported", "installed", "version"),
    [
        ("0.18.0rc2", "0.19.2", (0, 18, 0)),  # a source tree goes before what is installed
        (None, "0.17.1", (0, 17, 1)),
        (None, "1.0", (1, 0)),
        (None, None, (99, 0, 0)),
        ("unknown", "0.17.1", (99, 0, 0)),
    ],
)
def test_the_release_is_the_imported_one_or_else_the_installed_one(imported, installed, version, monkeypatch):
    def installed_version(name: str) -> str:
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return {"megatron-core": installed}[name]

    monkeypatch.setitem(sys.modules, "megatron.core", types.SimpleNamespace(__version__=imported))
    monkeypatch.setattr(metadata, "version", installed_version)
    assert core_version() == version
