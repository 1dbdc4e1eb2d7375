"""The list of Megatron's arguments that this package reads.

A release may lack some of them; a missing argument is off. The rules of `megatron_pg.args` read most of them and
compare them between ranks; the others give `megatron-pg explain` the layout.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any


@dataclass(frozen=True, slots=True)
class MegatronArgument:
    """One of Megatron's arguments, under its attribute's name."""

    keywords: Mapping[str, Any] | None  # for argparse; None where Megatron derives it and has no flag
    is_read_by_rules: bool = True


_SWITCH = {"action": "store_true"}
_LAYOUT = {"is_read_by_rules": False}

ARGUMENTS: dict[str, MegatronArgument] = {
    "calculate_per_token_loss": MegatronArgument(_SWITCH),
    "context_parallel_size": MegatronArgument({"type": int}),
    "cross_entropy_loss_fusion": MegatronArgument(_SWITCH),
    "cuda_graph_impl": MegatronArgument({}),
    "cuda_graph_modules": MegatronArgument({"nargs": "+"}),
    "cuda_graph_scope": MegatronArgument({"nargs": "+"}),
    "data_parallel_sharding_strategy": MegatronArgument({}),
    "data_parallel_size": MegatronArgument(None),  # from the other sizes and the number of ranks
    "dataloader_type": MegatronArgument({}),
    "ddp_average_in_collective": MegatronArgument(_SWITCH),
    "decrease_batch_size_if_needed": MegatronArgument(_SWITCH),
    "defer_embedding_wgrad_compute": MegatronArgument(_SWITCH),
    "dynamic_context_parallel": MegatronArgument(_SWITCH),
    "eval_interval": MegatronArgument({"type": int}),
    "eval_iters": MegatronArgument({"type": int}),
    "expert_model_parallel_size": MegatronArgument({"type": int}),
    "fp16": MegatronArgument(_SWITCH),
    "fp8_output_proj": MegatronArgument(_SWITCH),
    "gtp_weight_remat_size": MegatronArgument(None),  # from tensor_parallel_num_weight_shards
    "hybrid_context_parallel": MegatronArgument(_SWITCH),
    "iterations_to_skip": MegatronArgument({"nargs": "+", "type": int}),
    "loss_scale": MegatronArgument({"type": float}),
    "moe_aux_loss_coeff": MegatronArgument({"nargs": "+", "type": float}),
    "moe_router_load_balancing_type": MegatronArgument({"nargs": "+"}),
    "moe_z_loss_coeff": MegatronArgument({"type": float}),
    "mtp_loss_scaling_factor": MegatronArgument({"type": float}),
    "mtp_num_layers": MegatronArgument({"type": int}),
    "num_distributed_optimizer_instances": MegatronArgument({"type": int}),
    "num_experts": MegatronArgument({"type": int}),
    "output_logit_dtype": MegatronArgument({}),
    "padded_vocab_size": MegatronArgument(None),  # from the tokenizer
    "params_dtype": MegatronArgument(None),  # from fp16 and bf16
    "perform_rl_step": MegatronArgument(_SWITCH),
    "pipeline_model_parallel_size": MegatronArgument({"type": int}),
    "rampup_batch_size": MegatronArgument({"nargs": 3}),
    "recompute_granularity": MegatronArgument({}),
    "seed": MegatronArgument({"type": int}),
    "sft": MegatronArgument(_SWITCH),
    "tensor_model_parallel_size": MegatronArgument({"type": int}),
    "train_samples": MegatronArgument({"type": int}),
    "use_megatron_fsdp": MegatronArgument(_SWITCH),
    "use_mup": MegatronArgument(_SWITCH),
    "use_torch_fsdp2": MegatronArgument(_SWITCH),
    "global_batch_size": MegatronArgument({"type": int}, **_LAYOUT),
    "hybrid_layer_pattern": MegatronArgument({}, **_LAYOUT),  # its depths are mtp_num_layers
    "hybrid_override_pattern": MegatronArgument({}, **_LAYOUT),  # its older name
    "micro_batch_size": MegatronArgument({"type": int}, **_LAYOUT),
    "tensor_parallel_num_weight_shards": MegatronArgument({"type": int}, **_LAYOUT),
    "yaml_cfg": MegatronArgument({}, **_LAYOUT),  # refused: it replaces all flags
}
RULE_ARGUMENTS = tuple(name for name, argument in ARGUMENTS.items() if argument.is_read_by_rules)
MEGATRON_FLAGS = {name: argument.keywords for name, argument in ARGUMENTS.items() if argument.keywords is not None}

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
