"""Attention over packed rows without Transformer Engine, with rotary position embeddings.

Megatron's own local attention refuses packed rows, and its rotary embedding of them waits for the device in every
layer. Here the documents of the row are laid out one per line, padded on the right. The column is then the position,
torch's causal attention needs no mask, and a padded query still sees the first token: no row of the attention is empty,
so no gradient is NaN. All other layers only compute the packed tokens.
"""

import torch
from cpu import local_layers
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class PackedAttention(nn.Module):
    """A `core_attention` for Megatron's layer specs: rotates, then attends causally within each document.

    Args:
        config: the model's TransformerConfig.
        rotary_base: of the rotary position embeddings, over whole heads.
        rest: what Megatron gives in addition.
    """

    def __init__(self, config, layer_number=1, attn_mask_type=None, attention_type="self", rotary_base=10000, **rest):
        super().__init__()
        channels = torch.arange(0, config.kv_channels, 2, dtype=torch.float32)
        self._frequencies = (1.0 / rotary_base ** (channels / config.kv_channels)).tolist()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, packed_seq_params=None, **rest):
        """[T, heads * channels] from query [T, heads, channels] and key, value [T, groups, channels] of a packed row;
        [s, b, heads * channels] from b rows of s positions, each a document."""
        if packed_seq_params is None:
            lines = [x.transpose(0, 1) for x in (query, key, value)]
            return self._attend(*lines).transpose(0, 1)
        starts, longest = packed_seq_params.cu_seqlens_q_padded.long(), packed_seq_params.max_seqlen_q
        count, size = len(starts) - 1, len(query)
        documents = torch.repeat_interleave(starts.diff(), output_size=size)
        places = documents * longest + torch.arange(size, device=starts.device) - starts[documents]
        lines = [
            x.new_zeros(count * longest, *x.shape[1:]).index_copy(0, places, x).unflatten(0, (count, longest))
            for x in (query, key, value)
        ]
        return self._attend(*lines).flatten(0, 1).index_select(0, places)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[b, s, heads * channels] from [b, s, heads or groups, channels]."""
        lines = [x.transpose(1, 2) for x in (self._rotated(query), self._rotated(key), value)]
        return scaled_dot_product_attention(*lines, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)

    def _rotated(self, x: Tensor) -> Tensor:
        """Each half of the channels turned with the other one by position times frequency, in float32."""
        frequencies = torch.tensor(self._frequencies, device=x.device)
        angles = torch.outer(torch.arange(x.shape[1], device=x.device).float(), frequencies)[:, None]
        first, second = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def layer_spec(config, rotary_base: int, vp_stage: int | None = None):
    """Megatron's local layers for `config` with this attention."""
    spec = local_layers.layer_spec(config, packed=False, vp_stage=vp_stage)
    layers = getattr(spec, "layer_specs", [spec])  # a block under sequence parallelism, which repeats one layer
    core = ModuleSpec(module=PackedAttention, params={"rotary_base": rotary_base})
    layers[0].submodules.self_attention.submodules.core_attention = core
    return spec
