"""The model of the drivers' benchmark: Megatron's GPTModel with local layers, and attention by torch.

DRIVER_SIZES is a JSON object of `layers`, `hidden`, `heads`, `groups`, `ffn`, `columns` (of the vocabulary) and
`lengths` (of responses: the shortest, and one more than the longest).
"""

import json
import math
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

SIZES = json.loads(os.environ["DRIVER_SIZES"])
SHAPE = {  # TransformerConfig's
    "num_layers": SIZES["layers"],
    "hidden_size": SIZES["hidden"],
    "num_attention_heads": SIZES["heads"],
    "num_query_groups": SIZES["groups"],
    "ffn_hidden_size": SIZES["ffn"],
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "gated_linear_unit": True,
    "activation_func": nn.functional.silu,
    "attention_dropout": 0.0,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "bias_dropout_fusion": False,
}


class DocumentAttention(nn.Module):
    """Causal attention within every document of a packed row, by torch: Megatron's needs Transformer Engine for it."""

    def __init__(self, config: Any, *positional: object, **keywords: object):
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *rest: object, packed_seq_params: Any, **more: object
    ) -> Tensor:
        """[t, h·d] from [t, h, d] and, twice, [t, g, d]."""
        documents = (tensor.split(_lengths(packed_seq_params, len(query))) for tensor in (query, key, value))
        return torch.cat([self._attend(*document) for document in zip(*documents, strict=True)])

    def _attend(self, *document: Tensor) -> Tensor:
        query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in document)  # [1, h or g, t, d]
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended[0].transpose(0, 1).flatten(1)


def _lengths(packed: Any, tokens: int) -> list[int]:
    """Of the row's documents, and of what follows them; found once for all layers."""
    if not hasattr(packed, "lengths"):
        ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        ends = ends.tolist()
        packed.lengths = [end - begin for begin, end in zip(ends, [*ends[1:], tokens], strict=True) if end > begin]
    return packed.lengths


def build(config: Any, **stage: bool) -> nn.Module:
    """The model, with tied embeddings; weights depend on the host's seed only."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = DocumentAttention
    return GPTModel(
        config,
        spec,
        vocab_size=SIZES["columns"],
        max_sequence_length=2 * SIZES["lengths"][1],
        position_embedding_type="rope",
        rotary_base=1_000_000,
        share_embeddings_and_output_weights=True,
        **stage,
    )


def in_dtype(model: nn.Module, config: Any) -> nn.Module:
    """The model as Megatron-Bridge wraps it."""
    from megatron.core.transformer.module import Float16Module

    return Float16Module(config, model.cuda())


# --- rollouts, which cost nothing ---


def whole(chunks: Iterable[nn.Module]) -> dict[str, Tensor]:
    """The weights that go to the rollout."""
    return {name: weight for chunk in chunks for name, weight in chunk.named_parameters()}


def table_of(weights: dict[str, Tensor]) -> None:
    """Responses do not depend on the weights."""


def sample(table: None, last: int, seed: str) -> tuple[list[int], list[float]]:
    """A response of random tokens, and the log-probabilities that random weights come near to."""
    import random

    source = random.Random(seed)
    tokens = [source.randrange(SIZES["columns"] - 4) for _ in range(source.randrange(*SIZES["lengths"]))]
    return tokens, [-math.log(SIZES["columns"])] * len(tokens)
