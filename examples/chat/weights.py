"""Weights of a Llama model between transformers and Megatron's GPTModel, under tensor and pipeline parallelism.

A row of `TABLE` is one tensor of Megatron. Tensor-parallel ranks hold slices of the tensors of transformers, each along
the same dimension; a rank's tensor is its slices, joined by group (`_join`). That makes one rule of all of them:

    linear_qkv  for each query group: its queries, its key, its value
    linear_fc1  one group: gate, then up
    others      one tensor
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor, nn

from megatron_pg.plan.collectives import all_gather_rows


class Row(NamedTuple):
    """One tensor of Megatron, and where transformers has it."""

    megatron: str
    transformers: tuple[str, ...]
    dim: int | None = None  # along which tensor-parallel ranks hold slices; None: all of it
    by_group: bool = False  # whether the slices are joined query group by query group


_LAYER, _THEIRS = "decoder.layers.{}.", "model.layers.{}."
TABLE = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), 0),
    Row(_LAYER + "input_layernorm.weight", (_THEIRS + "input_layernorm.weight",)),
    Row(
        _LAYER + "self_attention.linear_qkv.weight",
        tuple(_THEIRS + f"self_attn.{name}_proj.weight" for name in "qkv"),
        0,
        by_group=True,
    ),
    Row(_LAYER + "self_attention.linear_proj.weight", (_THEIRS + "self_attn.o_proj.weight",), 1),
    Row(_LAYER + "pre_mlp_layernorm.weight", (_THEIRS + "post_attention_layernorm.weight",)),
    Row(_LAYER + "mlp.linear_fc1.weight", tuple(_THEIRS + f"mlp.{name}_proj.weight" for name in ("gate", "up")), 0),
    Row(_LAYER + "mlp.linear_fc2.weight", (_THEIRS + "mlp.down_proj.weight",), 1),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Row("output_layer.weight", ("lm_head.weight",), 0),
)


@torch.no_grad()
def load(model: nn.Module, theirs: dict[str, Tensor]) -> None:
    """Copy this rank's part of a transformers state into a chunk of Megatron's model."""
    for row, names, parameter in _held(model):
        tensors = [theirs[name] for name in names]
        parameter.copy_(_join([_slices(x, row.dim)[_tp_rank()] for x in tensors], _groups(row, model.config)))


@torch.no_grad()
def export(chunks: list[nn.Module], theirs: dict[str, Tensor]) -> None:
    """Copy the whole model's weights from all ranks into a transformers state, which every rank has.

    Args:
        chunks: this rank's (virtual) pipeline stages.
        theirs: receives the weights, in its own dtype and on the device of the collectives.
    """
    config, group = chunks[0].config, mpu.get_pipeline_model_parallel_group()
    mine = {names: parameter for chunk in chunks for _, names, parameter in _held(chunk)}
    rows = list(_rows(range(config.num_layers), theirs))
    holds = all_gather_rows(torch.tensor([names in mine for _, names in rows]), group)  # [stages, tensors]
    sources = torch.distributed.get_process_group_ranks(group)
    for (row, names), owner in zip(rows, holds.int().argmax(dim=0).tolist(), strict=True):
        parts = [_slices(theirs[name], row.dim)[_tp_rank()] for name in names]
        whole = mine.get(names)
        if whole is None:
            whole = torch.empty_like(_join(parts, _groups(row, config)), dtype=config.params_dtype)
        whole = whole.detach().contiguous()
        if len(sources) > 1:
            torch.distributed.broadcast(whole, sources[owner], group=group)
        for name, of_name in zip(names, _split(whole, parts, _groups(row, config)), strict=True):
            theirs[name].copy_(_gathered(of_name, row.dim))


def _held(model: nn.Module) -> Iterator[tuple[Row, tuple[str, ...], nn.Parameter]]:
    """The rows that this chunk holds, with the names of transformers."""
    layers = {layer.layer_number - 1: layer for layer in model.decoder.layers}
    own = dict(model.named_parameters())
    number_here = {layer.layer_number - 1: i for i, layer in enumerate(model.decoder.layers)}
    for row in TABLE:
        for number in sorted(layers) if "{}" in row.megatron else [0]:
            parameter = own.get(row.megatron.format(number_here[number] if "{}" in row.megatron else 0))
            names = row.transformers
            if row.megatron == "output_layer.weight" and model.share_embeddings_and_output_weights:
                names = TABLE[0].transformers  # a last stage without the first one has a copy of the embedding
            if parameter is not None:
                yield row, tuple(name.format(number) for name in names), parameter


def _rows(layers: range, theirs: dict[str, Tensor]) -> Iterator[tuple[Row, tuple[str, ...]]]:
    """All rows of the model; with tied embeddings the head is not one."""
    for row in TABLE:
        for number in layers if "{}" in row.megatron else [0]:
            names = tuple(name.format(number) for name in row.transformers)
            if names[0] in theirs:
                yield row, names


def _groups(row: Row, config) -> int:
    return config.num_query_groups // mpu.get_tensor_model_parallel_world_size() if row.by_group else 1


def _join(parts: list[Tensor], groups: int) -> Tensor:
    """One tensor of several, group by group."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


def _split(whole: Tensor, like: list[Tensor], groups: int) -> list[Tensor]:
    """What `_join` has joined, of tensors with the shapes of `like`."""
    if len(like) == 1:
        return [whole]
    sizes = [len(part) // groups for part in like]
    return [part.flatten(0, 1) for part in whole.unflatten(0, (groups, -1)).split(sizes, dim=1)]


def _slices(whole: Tensor, dim: int | None) -> tuple[Tensor, ...]:
    size = mpu.get_tensor_model_parallel_world_size()
    return (whole,) * size if dim is None else whole.chunk(size, dim)


def _tp_rank() -> int:
    return mpu.get_tensor_model_parallel_rank()


def _gathered(part: Tensor, dim: int | None) -> Tensor:
    """The slices of all tensor-parallel ranks, joined."""
    if dim is None or mpu.get_tensor_model_parallel_world_size() == 1:
        return part
    part, group = part.contiguous(), mpu.get_tensor_model_parallel_group()
    gathered = [torch.empty_like(part) for _ in range(group.size())]
    torch.distributed.all_gather(gathered, part, group=group)
    return torch.cat(gathered, dim)
