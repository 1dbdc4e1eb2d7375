"""Attention that lets context parallelism run without Transformer Engine. For demonstrations and tests only.

Megatron's own local attention refuses context parallelism. This core gathers keys and values over the group, puts them
into natural order, and attends causally within each document from the positions that this rank holds. It keeps a mask,
and where torch has no better kernel a score, of every pair of positions: fine for tests, not for long sequences.
"""

import torch
from megatron.core import parallel_state
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from megatron_pg.cp_utils import zigzag_index


class AllGatherAttention(nn.Module):
    """A `core_attention` for Megatron's layer specs: exact attention under zigzag context parallelism, bshd and thd."""

    def __init__(self, config, layer_number=1, attn_mask_type=None, attention_type="self", softmax_scale=None, **rest):
        super().__init__()
        self._scale = softmax_scale or config.kv_channels**-0.5
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.reach = config.window_size[0] if has_window else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params=None,
        **rest: object,
    ) -> Tensor:
        """[s/C, b, heads * channels] from query [s/C, b, heads, channels] and key, value [s/C, b, groups, channels]."""
        if query.dim() == 3:  # packed rows come without their batch dimension
            query, key, value = (x[:, None] for x in (query, key, value))
        group = getattr(packed_seq_params, "cp_group", None)  # of the micro-batch
        group = group or parallel_state.get_context_parallel_group()
        documents = _documents(packed_seq_params, len(query) * group.size())
        order = torch.cat([zigzag_index(documents, cp_rank=r, cp_size=group.size()) for r in range(group.size())])
        natural = torch.argsort(order).to(query.device)
        keys, values = (_GatherSequence.apply(x, group)[natural] for x in (key, value))
        mine = zigzag_index(documents, cp_rank=group.rank(), cp_size=group.size()).to(query.device)
        attended = scaled_dot_product_attention(
            *(x.permute(1, 2, 0, 3) for x in (query, keys, values)),  # [b, heads, s, channels]
            attn_mask=allowed(documents, self.reach, query.device)[mine],
            scale=self._scale,
            enable_gqa=True,
        )
        return attended.permute(2, 0, 1, 3).flatten(2)


def use_in(spec):
    """The layer spec with this core attention."""
    spec.submodules.self_attention.submodules.core_attention = AllGatherAttention
    return spec


def _documents(packed_seq_params, length: int) -> list[int]:
    if packed_seq_params is None:
        return [length]
    return packed_seq_params.cu_seqlens_q_padded.diff().tolist()


def allowed(documents: list[int], reach: int | None, device: torch.device) -> Tensor:
    """[s, s] bool: a position sees itself and earlier positions of its document, `reach` of them in a sliding
    window."""
    lengths = torch.tensor(documents, device=device)
    document = torch.repeat_interleave(torch.arange(len(documents), device=device), lengths)
    causal = torch.ones(len(document), len(document), device=device).tril()
    if reach is not None:
        causal = causal.triu(-reach)
    return (document[:, None] == document) & causal.bool()


class _GatherSequence(torch.autograd.Function):
    """Concatenate along the sequence over the group; the backward sums over the group and keeps its own part."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.length = group, len(x)
        gathered = [torch.empty_like(x) for _ in range(group.size())]
        torch.distributed.all_gather(gathered, x.contiguous(), group=group)
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad, group=ctx.group)
        first = ctx.group.rank() * ctx.length
        return grad[first : first + ctx.length], None
