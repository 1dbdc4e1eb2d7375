"""Megatron's local layers with what they lack without Transformer Engine: packed rows, context and sequence parallelism."""

import all_gather_attention
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build


class _MarkedForSequenceParallelism:
    """Megatron's torch norms refuse sequence parallelism; these mark their parameters for the extra reduction it needs."""

    def __init__(self, config, hidden_size, eps=1e-5, **rest):
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = True


class SequenceParallelLayerNorm(_MarkedForSequenceParallelism, torch.nn.LayerNorm):
    """torch's layer norm."""


class SequenceParallelRMSNorm(_MarkedForSequenceParallelism, torch.nn.RMSNorm):
    """torch's RMS norm."""


def layer_spec(config, *, packed: bool, vp_stage: int | None = None):
    """The layers of a GPT model for `config`.

    Args:
        config: the model's TransformerConfig.
        packed: rows hold several documents.
        vp_stage: virtual pipeline stage.
    """
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    if packed or config.context_parallel_size > 1:
        spec = all_gather_attention.use_in(spec)
    if not config.sequence_parallel:
        return spec
    norm = SequenceParallelRMSNorm if config.normalization == "RMSNorm" else SequenceParallelLayerNorm
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
    count = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=norm)
