"""Megatron's settings that no exact loss goes with: each rule broken alone, and its near misses. `-k E55` finds one rule."""

import pytest
from namespaces import PER_TOKEN, CudaGraphScope, accepts, arguments, breaks, constant, docs, mode, row

# Each breaks exactly one rule.
BROKEN = [
    row(
        "E12",
        "with the flag that Megatron asks for",
        {"hybrid_context_parallel": True, PER_TOKEN: True},
        "--hybrid-context-parallel takes samples from Megatron's own data loader (--dataloader-type single)",
    ),
    row("E12", "another loader", {"hybrid_context_parallel": True}, "packed micro-batches cannot reach it; remove it"),
    row("E12", "documents", docs(8, hybrid_context_parallel=True), "remove it (--context-parallel-size alone works)"),
    row(
        "E18",
        "token_mean",
        mode("token_mean", ddp_average_in_collective=True),
        "--ddp-average-in-collective divides by ranks and cannot be combined with token_mean",
    ),
    row("E18", "flag", {PER_TOKEN: True, "ddp_average_in_collective": True}, "--ddp-average-in-collective"),
    row(
        "E19",
        "Megatron-FSDP",
        {"use_megatron_fsdp": True},
        "gradient scaling under --use-megatron-fsdp is not verified for --loss-aggregation",
    ),
    row(
        "E19",
        "torch FSDP2",
        {"use_torch_fsdp2": True},
        "gradient scaling under --use-torch-fsdp2 is not verified for --loss-aggregation",
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
        "E21",
        "token_mean",
        mode("token_mean", mtp_num_layers=1),
        "--mtp-num-layers cannot be combined with token_mean: the MTP loss would be divided by a count that is not its own",
    ),
    row("E21", "flag", {PER_TOKEN: True, "mtp_num_layers": 2}, "--mtp-num-layers cannot be combined with token_mean"),
    row(
        "E27",
        "overlap",
        {"overlap_moe_expert_parallel_comm": True},
        "--overlap-moe-expert-parallel-comm builds its own schedule plan",
    ),
    row(
        "E28",
        "two shards",
        {"gtp_weight_remat_size": 2},
        "--tensor-parallel-num-weight-shards > 1 is not verified for --loss-aggregation",
    ),
    row("E29", "single", {"dataloader_type": "single"}, "--dataloader-type single", "use --dataloader-type external"),
    row("E29", "cyclic", {"dataloader_type": "cyclic"}, "--dataloader-type cyclic"),
    row("E29", "null", {"dataloader_type": None}, "--dataloader-type None"),
    row("E30", "rl", {"perform_rl_step": True}, "--perform-rl-step reads its own kind of batches"),
    row("E30", "sft", {"sft": True}, "--sft reads its own kind of batches"),
    row("E30", "skip", {"iterations_to_skip": [3]}, "--iterations-to-skip reads its own kind of batches"),
]

NEAR_MISSES = [
    row("E12", "plain context parallelism", {"context_parallel_size": 4}),
    row("E18", "flag off", {"ddp_average_in_collective": True}),
    row("E18", "constant", {**constant(4096), "ddp_average_in_collective": True}),
    row("E19", "off", {"use_megatron_fsdp": False, "use_torch_fsdp2": False}),
    row("E20", "layers", {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]}),
    row("E20", "layer member", {"cuda_graph_impl": "local", "cuda_graph_scope": [CudaGraphScope.attn]}),
    row("E20", "inference", {"cuda_graph_scope": ["full_iteration_inference"]}),
    row("E20", "inference member", {"cuda_graph_scope": [CudaGraphScope.full_iteration_inference]}),
    row("E20", "whole layer", {"cuda_graph_scope": "full", "cuda_graph_modules": None}),
    row("E21", "flag off", {"mtp_num_layers": 1}),
    row("E21", "no layers", mode("token_mean", mtp_num_layers=0)),
    row("E27", "off", {"overlap_moe_expert_parallel_comm": False}),
    row("E29", "external", {"dataloader_type": "external"}),
    row("E30", "nothing to skip", {"iterations_to_skip": []}),
    row("E30", "null", {"sft": None}),
    row("E28", "one shard", {"gtp_weight_remat_size": 1}),
    row("E28", "null", {"gtp_weight_remat_size": None}),
]


pytestmark = pytest.mark.usefixtures("rank_zero", "user_code")


@pytest.mark.parametrize(("overrides", "rule", "fragments"), BROKEN)
def test_a_broken_rule_is_named_alone_and_changes_nothing(overrides, rule, fragments):
    breaks(arguments(**overrides), rule, *fragments)


@pytest.mark.parametrize(("overrides", "rule", "fragments"), NEAR_MISSES)
def test_a_near_miss_passes(overrides, rule, fragments):
    accepts(arguments(**overrides))
