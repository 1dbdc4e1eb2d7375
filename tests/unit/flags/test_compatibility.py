"""Megatron's settings that no exact loss goes with: each rule broken alone, and its near misses. `-k E55` finds one rule."""

import sys
import types
from importlib import metadata

import pytest
from namespaces import PER_TOKEN, CudaGraphScope, accepts, arguments, breaks, constant, docs, mode, refused, row

from megatron_pg.flags import compatibility
from megatron_pg.flags.megatron import core_version

# A router whose losses the step has to scale, captured before it can, in a release before 0.19.
GRAPHS = {
    "loss_aggregation": "token_mean",
    PER_TOKEN: True,
    "num_experts": 8,
    "moe_aux_loss_coeff": 0.01,
    "tensor_model_parallel_size": 2,
    "cuda_graph_impl": "transformer_engine",
}
ROWS = {"moe_router_load_balancing_type": "seq_aux_loss"}
SEVERAL = {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}

# Each breaks exactly one rule.
BROKEN = [
    row(
        "E12",
        "with the flag that Megatron asks for",
        {"hybrid_context_parallel": True, PER_TOKEN: True},
        "--hybrid-context-parallel takes samples from Megatron's own data loader (--dataloader-type single)",
    ),
    row("E12", "another loader", {"hybrid_context_parallel": True}, "packed micro-batches cannot reach it; remove it"),
    row("E12", "documents", docs(8, hybrid_context_parallel=True), "remove it (--context-parallel-size alone works,"),
    row(
        "E12",
        "the successor's name",
        {"dynamic_context_parallel": True},
        "--dynamic-context-parallel takes samples from Megatron's own data loader",
    ),
    row(
        "E18",
        "token_mean",
        mode("token_mean", ddp_average_in_collective=True),
        "--ddp-average-in-collective divides by ranks and cannot be combined with token_mean",
    ),
    row("E18", "flag", {PER_TOKEN: True, "ddp_average_in_collective": True}, "--ddp-average-in-collective"),
    row(
        "E19",
        "Megatron-FSDP with the fused head",
        {"use_megatron_fsdp": True, "pg_fused_head": "recompute"},
        "--use-megatron-fsdp loses gradients under --pg-fused-head in megatron-core before 0.19.2",
    ),
    row(
        "E19",
        "Megatron-FSDP that shards nothing",
        {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "no_shard"},
        "does not reduce gradients over ranks",
        "use --data-parallel-sharding-strategy optim_grads_params",
    ),
    row(
        "E19",
        "Megatron-FSDP by default",
        {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": None},
        "no_shard, the default of 0.16 and 0.17",
    ),
    row(
        "E19",
        "Megatron-FSDP and averages",
        {"use_megatron_fsdp": True, "ddp_average_in_collective": True},
        "--ddp-average-in-collective was not run with --use-megatron-fsdp; remove one",
    ),
    row(
        "E19",
        "Megatron-FSDP in several instances",
        {"use_megatron_fsdp": True, "num_distributed_optimizer_instances": 2},
        "--num-distributed-optimizer-instances 2 was not run with --use-megatron-fsdp",
    ),
    row(
        "E19",
        "Megatron-FSDP and tensor parallelism",
        {"use_megatron_fsdp": True, "tensor_model_parallel_size": 2},
        "--tensor-model-parallel-size 2 was not run with --use-megatron-fsdp",
    ),
    row(
        "E19",
        "Megatron-FSDP and pipeline stages",
        {"use_megatron_fsdp": True, "pipeline_model_parallel_size": 2},
        "--pipeline-model-parallel-size 2 ends in an error where --use-megatron-fsdp makes its groups",
    ),
    row(
        "E19",
        "Megatron-FSDP and expert parallelism",
        {"use_megatron_fsdp": True, "num_experts": 8, "expert_model_parallel_size": 2},
        "--expert-model-parallel-size 2 with --use-megatron-fsdp divides experts' gradients by the ranks once more",
    ),
    row(
        "E19",
        "torch FSDP2",
        {"use_torch_fsdp2": True},
        "--use-torch-fsdp2 ends in a TypeError in finalize_model_grads of megatron-core before 0.19.2",
    ),
    row(
        "E20",
        "implementation",
        {"cuda_graph_impl": "full_iteration"},
        "--cuda-graph-impl full_iteration freezes the step's normaliser",
    ),
    row("E20", "scope", {"cuda_graph_scope": ["attn", "full_iteration"]}, "full_iteration freezes"),
    row("E20", "scope member", {"cuda_graph_scope": [CudaGraphScope.full_iteration]}, "full_iteration freezes"),
    row("E20", "scope alone", {"cuda_graph_scope": "full_iteration"}, "full_iteration freezes"),
    row("E20", "scope with comma", {"cuda_graph_scope": "attn,full_iteration"}, "full_iteration freezes"),
    row("E20", "modules", {"cuda_graph_modules": ("full_iteration",)}, "full_iteration freezes"),
    row(
        "E28",
        "two shards",
        {"gtp_weight_remat_size": 2},
        "--tensor-parallel-num-weight-shards > 1 is not verified for --loss-aggregation",
    ),
    row("E29", "single", {"dataloader_type": "single"}, "--dataloader-type single", "use --dataloader-type external"),
    row("E29", "cyclic", {"dataloader_type": "cyclic"}, "--dataloader-type cyclic"),
    row("E29", "null", {"dataloader_type": None}, "--dataloader-type None"),
    row("E65", "whole layers", GRAPHS, "--cuda-graph-impl transformer_engine captures the router"),
    row("E65", "scope", {**GRAPHS, "cuda_graph_scope": ["attn", "moe_router"]}, "leave moe out of --cuda-graph-scope"),
    row(
        "E65",
        "context parallel",
        {**GRAPHS, "tensor_model_parallel_size": 1, "context_parallel_size": 2},
        "or take 0.19",
    ),
    row("E65", "z-loss", {**GRAPHS, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 1e-3}, "or take 0.19"),
    row("E65", "several", {**GRAPHS, "moe_aux_loss_coeff": [0.0, 0.01], **SEVERAL}, "or take 0.19"),
    row("E65", "rows", {**GRAPHS, "tensor_model_parallel_size": 1, **ROWS}, "or take 0.19"),
    row("E30", "rl", {"perform_rl_step": True}, "--perform-rl-step reads its own kind of batches"),
    row("E30", "sft", {"sft": True}, "--sft reads its own kind of batches"),
    row("E30", "skip", {"iterations_to_skip": [3]}, "--iterations-to-skip reads its own kind of batches"),
]

NEAR_MISSES = [
    row("E12", "plain context parallelism", {"context_parallel_size": 4}),
    row("E18", "flag off", {"ddp_average_in_collective": True}),
    row("E18", "constant", {**constant(4096), "ddp_average_in_collective": True}),
    row("E19", "off", {"use_megatron_fsdp": False, "use_torch_fsdp2": False, "pg_fused_head": "forward"}),
    row("E19", "Megatron-FSDP", {"use_megatron_fsdp": True}),
    row("E19", "Megatron-FSDP, per token", {"use_megatron_fsdp": True, "fp32_lm_head": True, **mode("token_mean")}),
    row(
        "E19",
        "Megatron-FSDP of gradients",
        {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"},
    ),
    row("E19", "experts per token", {"use_megatron_fsdp": True, "expert_model_parallel_size": 2, **mode("token_mean")}),
    row(
        "E19",
        "experts with whole gradients",
        {"use_megatron_fsdp": True, "expert_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim"},
    ),
    row("E19", "stages without it", {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}),
    row("E19", "unsharded without it", {"data_parallel_sharding_strategy": "no_shard"}),
    row("E19", "several instances without it", {"num_distributed_optimizer_instances": 2}),
    row("E20", "layers", {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]}),
    row("E20", "layer member", {"cuda_graph_impl": "local", "cuda_graph_scope": [CudaGraphScope.attn]}),
    row("E20", "inference", {"cuda_graph_scope": ["full_iteration_inference"]}),
    row("E20", "inference member", {"cuda_graph_scope": [CudaGraphScope.full_iteration_inference]}),
    row("E20", "whole layer", {"cuda_graph_scope": "full", "cuda_graph_modules": None}),
    row("E29", "external", {"dataloader_type": "external"}),
    row("E30", "nothing to skip", {"iterations_to_skip": []}),
    row("E30", "null", {"sft": None}),
    row("E65", "attention", {**GRAPHS, "cuda_graph_scope": ["attn"]}),
    row("E65", "attention as a module", {**GRAPHS, "cuda_graph_modules": ["attn"]}),
    row("E65", "captured in the step", {**GRAPHS, "cuda_graph_impl": "local"}),
    row("E65", "one rank", {**GRAPHS, "tensor_model_parallel_size": 1}),
    row("E65", "no coefficient", {**GRAPHS, "moe_aux_loss_coeff": 0}),
    row("E65", "no coefficients", {**GRAPHS, **SEVERAL, "moe_aux_loss_coeff": [0.0, 0.0], "moe_z_loss_coeff": 0.0}),
    row("E65", "no loss", {**GRAPHS, "moe_router_load_balancing_type": "none"}),
    row("E65", "no experts", {**GRAPHS, "num_experts": None}),
    row("E65", "another contract", {**GRAPHS, "loss_aggregation": "prompt_mean", PER_TOKEN: False}),
    row("E28", "one shard", {"gtp_weight_remat_size": 1}),
    row("E28", "null", {"gtp_weight_remat_size": None}),
]


pytestmark = pytest.mark.usefixtures("rank_zero", "user_code", "before_0_19")


@pytest.fixture
def before_0_19(monkeypatch):
    monkeypatch.setattr(compatibility, "core_version", lambda: (0, 17, 1))


@pytest.mark.parametrize(("overrides", "rule", "fragments"), BROKEN)
def test_a_broken_rule_is_named_alone_and_changes_nothing(overrides, rule, fragments):
    breaks(arguments(**overrides), rule, *fragments)


@pytest.mark.parametrize(("overrides", "rule", "fragments"), NEAR_MISSES)
def test_a_near_miss_passes(overrides, rule, fragments):
    accepts(arguments(**overrides))


@pytest.mark.parametrize("version", ["0.17.1", "0.18.0", "0.18.2", "0.19.1", "0.19.2", "0.20.0"])
def test_full_recompute_of_multi_token_prediction_is_refused_where_megatron_fails(version, monkeypatch):
    monkeypatch.setattr(compatibility, "core_version", lambda: tuple(map(int, version.split("."))))
    args = arguments(mtp_num_layers=1, recompute_granularity="full")
    if version in ("0.18.0", "0.18.2", "0.19.1"):
        breaks(args, "E21", "--recompute-granularity full with --mtp-num-layers ends in a TypeError")
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
        ({"pg_fused_head": "forward"}, "frees the output layer's weight behind its forward"),
        ({**mode("token_mean"), **EXPERTS}, "so under token_mean the router's losses would be too large"),
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
