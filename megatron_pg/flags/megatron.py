"""Megatron's arguments that this package reads: the one list of them.

A release may lack some; what is missing counts as off. The rules of `megatron_pg.args` read most of them and compare
them between ranks; the rest gives `megatron-pg explain` the layout.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MegatronArgument:
    """One of Megatron's arguments, under its attribute's name."""

    keywords: Mapping[str, Any] | None  # what argparse is told; None where Megatron derives it and has no flag
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
    "dataloader_type": MegatronArgument({}),
    "ddp_average_in_collective": MegatronArgument(_SWITCH),
    "decrease_batch_size_if_needed": MegatronArgument(_SWITCH),
    "defer_embedding_wgrad_compute": MegatronArgument(_SWITCH),
    "eval_interval": MegatronArgument({"type": int}),
    "eval_iters": MegatronArgument({"type": int}),
    "fp16": MegatronArgument(_SWITCH),
    "fp8_output_proj": MegatronArgument(_SWITCH),
    "gtp_weight_remat_size": MegatronArgument(None),  # from tensor_parallel_num_weight_shards
    "hybrid_context_parallel": MegatronArgument(_SWITCH),
    "iterations_to_skip": MegatronArgument({"nargs": "+", "type": int}),
    "loss_scale": MegatronArgument({"type": float}),
    "moe_aux_loss_coeff": MegatronArgument({"nargs": "+", "type": float}),
    "moe_z_loss_coeff": MegatronArgument({"type": float}),
    "mtp_num_layers": MegatronArgument({"type": int}),
    "num_experts": MegatronArgument({"type": int}),
    "output_logit_dtype": MegatronArgument({}),
    "overlap_moe_expert_parallel_comm": MegatronArgument(_SWITCH),
    "padded_vocab_size": MegatronArgument(None),  # from the tokenizer
    "params_dtype": MegatronArgument(None),  # from fp16 and bf16
    "perform_rl_step": MegatronArgument(_SWITCH),
    "rampup_batch_size": MegatronArgument({"nargs": 3}),
    "sft": MegatronArgument(_SWITCH),
    "tensor_model_parallel_size": MegatronArgument({"type": int}),
    "train_samples": MegatronArgument({"type": int}),
    "use_megatron_fsdp": MegatronArgument(_SWITCH),
    "use_mup": MegatronArgument(_SWITCH),
    "use_torch_fsdp2": MegatronArgument(_SWITCH),
    "global_batch_size": MegatronArgument({"type": int}, **_LAYOUT),
    "micro_batch_size": MegatronArgument({"type": int}, **_LAYOUT),
    "pipeline_model_parallel_size": MegatronArgument({"type": int}, **_LAYOUT),
    "tensor_parallel_num_weight_shards": MegatronArgument({"type": int}, **_LAYOUT),
    "yaml_cfg": MegatronArgument({}, **_LAYOUT),  # refused: it replaces all flags
}
RULE_ARGUMENTS = tuple(name for name, argument in ARGUMENTS.items() if argument.is_read_by_rules)
MEGATRON_FLAGS = {name: argument.keywords for name, argument in ARGUMENTS.items() if argument.keywords is not None}
