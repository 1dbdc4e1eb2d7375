"""Megatron's HybridModel of a layer pattern, of Transformer Engine's layers or of Megatron's own.

Megatron brings layers of Transformer Engine for it. Of Megatron's own layers, attention (`*`) and MLP (`-`) or experts
(`E`) are the two halves of a GPTModel's.
"""

import inspect

import megatron.core
from cpu import local_layers
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

try:
    from megatron.core.models.hybrid import hybrid_block as block
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
except ImportError:  # before 0.18 under other names
    from megatron.core.models.mamba.mamba_model import MambaModel as HybridModel
    from megatron.core.ssm import mamba_block as block
    from megatron.core.ssm.mamba_block import MambaStack as HybridStack
    from megatron.core.ssm.mamba_block import MambaStackSubmodules as HybridStackSubmodules

LOCAL = "*-E|/"  # symbols that Megatron's own layers serve


def hybrid_model(config, pattern: str, *, local: bool, packed: bool = False, **arguments) -> HybridModel:
    """The model of a pattern.

    Args:
        config: its TransformerConfig, whose layers are the pattern's.
        pattern: as of `--hybrid-layer-pattern`.
        local: of Megatron's own layers.
        packed: rows hold several documents.
        arguments: all others of the model.

    Raises:
        ValueError: the release has no such model, Megatron's own layers lack a symbol of the pattern, or it has experts
            and their number is not given.
    """
    if "hybrid_layer_pattern" not in inspect.signature(HybridModel).parameters:
        raise ValueError(
            f"--hybrid-layer-pattern {pattern} needs megatron-core 0.17 or later, this is {megatron.core.__version__}, "
            "whose hybrid model takes no such pattern. Leave it out: a GPTModel has the same attention and MLP layers."
        )
    spec = _local_stack(config, pattern, packed) if local else _transformer_engine_stack()
    return HybridModel(config, spec, hybrid_layer_pattern=pattern, **arguments)


def _local_stack(config, pattern: str, packed: bool) -> ModuleSpec:
    if unknown := sorted(set(pattern) - set(LOCAL)):
        raise ValueError(
            f"--hybrid-layer-pattern {pattern} has {' '.join(unknown)}, which --transformer-impl local cannot build. "
            f"Write it with {' '.join(LOCAL)} only, or use Transformer Engine."
        )
    if "E" in pattern and not config.num_moe_experts:
        raise ValueError(
            f"--hybrid-layer-pattern {pattern} has layers of experts, and their number is not given. Add --num-experts."
        )
    dense, sparse = (
        local_layers.layer(config, num_experts=count, packed=packed).submodules
        for count in (None, config.num_moe_experts)
    )
    block.TENorm = dense.input_layernorm  # the stack's last norm, which no argument replaces
    attention = TransformerLayerSubmodules(
        input_layernorm=dense.input_layernorm, self_attention=dense.self_attention, self_attn_bda=dense.self_attn_bda
    )
    layers = {"attention_layer": ModuleSpec(module=TransformerLayer, submodules=attention)}
    for name, whole in (("mlp_layer", dense), ("moe_layer", sparse)):
        half = TransformerLayerSubmodules(
            pre_mlp_layernorm=whole.pre_mlp_layernorm, mlp=whole.mlp, mlp_bda=whole.mlp_bda
        )
        layers[name] = ModuleSpec(module=MLPLayer, submodules=half)
    layers["mtp_block_spec"] = _prediction(dense.input_layernorm)
    return ModuleSpec(module=HybridStack, submodules=HybridStackSubmodules(**layers))


def _prediction(norm) -> ModuleSpec:
    """What lies around the layers of a depth of multi-token prediction, which its part of the pattern names."""
    around = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, eh_proj=ColumnParallelLinear, mtp_model_layer=None, layer_norm=norm
    )
    layer = ModuleSpec(module=MultiTokenPredictionLayer, submodules=around)
    block = MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
    return ModuleSpec(module=MultiTokenPredictionBlock, submodules=block)


def _transformer_engine_stack() -> ModuleSpec:
    """Megatron's own; its modules need Transformer Engine when they are imported."""
    if HybridModel.__name__ == "MambaModel":
        from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec as spec
    else:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as spec
    return spec
