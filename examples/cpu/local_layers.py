"""Megatron's local layers with what they lack without Transformer Engine: packed rows, context and sequence
parallelism."""

import torch
from cpu import all_gather_attention
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build


class _MarkedForSequenceParallelism:
    """Megatron's torch norms refuse sequence parallelism; these mark their parameters for the extra reduction it
    needs."""

    def __init__(self, config, hidden_size, eps=1e-5, **rest):
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = True


class SequenceParallelLayerNorm(_MarkedForSequenceParallelism, torch.nn.LayerNorm):
    """torch's layer norm."""


class SequenceParallelRMSNorm(_MarkedForSequenceParallelism, torch.nn.RMSNorm):
    """torch's RMS norm."""


def layer(config, *, num_experts: int | None, packed: bool):
    """One layer of a GPT model for `config`, with an MLP or experts; `packed`: rows hold several documents."""
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    if packed or config.context_parallel_size > 1:
        spec = all_gather_attention.use_in(spec)
    if config.sequence_parallel:
        norm = SequenceParallelRMSNorm if config.normalization == "RMSNorm" else SequenceParallelLayerNorm
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
    return spec


def layer_spec(config, *, packed: bool, vp_stage: int | None = None):
    """The layers of a GPT model for `config`.

    Args:
        config: the model's TransformerConfig.
        packed: rows hold several documents.
        vp_stage: virtual pipeline stage.
    """
    spec = layer(config, num_experts=config.num_moe_experts, packed=packed)
    if not config.sequence_parallel:
        return spec
    count = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=spec.submodules.input_layernorm)


def prediction_spec(config, layers, *, local: bool = True, vp_stage: int | None = None):
    """The layers of multi-token prediction for a GPT model; None on a stage without them.

    Args:
        config: the model's TransformerConfig.
        layers: of `layer_spec`, or Transformer Engine's.
        local: whose.
        vp_stage: virtual pipeline stage.
    """
    if not config.mtp_num_layers:
        return None
    spec = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=not local, vp_stage=vp_stage)
    if local and spec is not None and config.sequence_parallel:
        norm = SequenceParallelRMSNorm if config.normalization == "RMSNorm" else SequenceParallelLayerNorm
        for layer in spec.layer_specs:
            layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = norm
    return spec
