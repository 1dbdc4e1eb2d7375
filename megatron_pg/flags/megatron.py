"""The list of Megatron's arguments that this package reads.

A release may lack some of them; a missing argument is off. The rules of `megatron_pg.args` read most of them and
compare them between ranks; the others give `megatron-pg explain` the layout.
"""

import re
import sys
from importlib import metadata
from typing import Any

# Names of arguments that the rules read, with the keywords of their flags for argparse.
_OF_RULES: dict[str, dict[str, Any]] = {
    "calculate_per_token_loss cross_entropy_loss_fusion ddp_average_in_collective decrease_batch_size_if_needed "
    "defer_embedding_wgrad_compute dynamic_context_parallel fp16 fp8_output_proj hybrid_context_parallel "
    "multiple_validation_sets overlap_grad_reduce perform_rl_step sft use_megatron_fsdp use_mup "
    "use_torch_fsdp2": {"action": "store_true"},
    "context_parallel_size eval_interval eval_iters expert_model_parallel_size expert_tensor_parallel_size hidden_size "
    "mtp_num_layers num_distributed_optimizer_instances num_experts pipeline_model_parallel_size seed "
    "tensor_model_parallel_size train_samples": {"type": int},
    "loss_scale moe_expert_capacity_factor moe_z_loss_coeff mtp_loss_scaling_factor": {"type": float},
    "cuda_graph_impl data_parallel_sharding_strategy dataloader_type output_logit_dtype recompute_granularity": {},
    "cuda_graph_modules cuda_graph_scope moe_router_load_balancing_type": {"nargs": "+"},
    "iterations_to_skip": {"nargs": "+", "type": int},
    "moe_aux_loss_coeff": {"nargs": "+", "type": float},
    "rampup_batch_size": {"nargs": 3},
}
# Megatron derives these from other arguments, and they have no flag.
_DERIVED = (
    "data_parallel_size",
    "gtp_weight_remat_size",
    "padded_vocab_size",
    "params_dtype",
    "virtual_pipeline_model_parallel_size",
)
# Of the layout. A pattern's depths are mtp_num_layers; yaml_cfg, which replaces all flags, is refused.
_OF_LAYOUT: dict[str, dict[str, Any]] = {
    "global_batch_size micro_batch_size tensor_parallel_num_weight_shards": {"type": int},
    "hybrid_layer_pattern hybrid_override_pattern yaml_cfg": {},
}
_RULE_FLAGS = {name: keywords for names, keywords in _OF_RULES.items() for name in names.split()}
_LAYOUT_FLAGS = {name: keywords for names, keywords in _OF_LAYOUT.items() for name in names.split()}
RULE_ARGUMENTS = tuple(sorted((*_RULE_FLAGS, *_DERIVED)))
ARGUMENTS = (*RULE_ARGUMENTS, *sorted(_LAYOUT_FLAGS))
MEGATRON_FLAGS = {name: (_RULE_FLAGS | _LAYOUT_FLAGS)[name] for name in ARGUMENTS if name not in _DERIVED}

RUNS_FSDP2 = (0, 19, 2)  # the first release whose finalize takes torch's FSDP2
FUSES_UNDER_FSDP = (0, 19, 2)  # the first release whose Megatron-FSDP reduces every gradient of the fused head
REDUCES_UNSHARDED = (0, 18, 2)  # the first release whose Megatron-FSDP reduces gradients that it does not shard
SCALES_ROUTER_LOSSES = (0, 19)  # the first release whose per-token contract keeps the scale of the router's own losses


def core_version() -> tuple[int, ...]:
    """Megatron's release, (0, 17, 1): of the imported or else the installed package; without a version, the newest."""
    try:
        text = getattr(sys.modules.get("megatron.core"), "__version__", None) or metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        text = ""
    return tuple(map(int, re.findall(r"\d+", text)[:3])) or (99, 0, 0)
