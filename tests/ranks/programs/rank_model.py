"""A tiny model whose values depend on parameters' global names alone, so that every layout starts from the same one.

It is a GPTModel or, with the option hybrid, the HybridModel of the same layers: a layer of the one is two of the other.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from cpu.hybrid_layers import HybridModel, hybrid_model
from cpu.local_layers import layer_spec, prediction_spec
from fsdp_ranks import OPTIONS as FSDP
from fsdp_ranks import whole_gradients, wrap_fsdp
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model

from megatron_pg import add_value_head

WIDTH, VOCABULARY, LAYERS = 24, 16, 4
EXPERTS = 4
MTP_FACTOR = 0.3
# of the router's own losses: which of them, and their coefficients
LOSSES = {
    "balance": {
        "moe_router_load_balancing_type": ["seq_aux_loss", "aux_loss"],
        "moe_aux_loss_coeff": [0.03, 0.02],
        "moe_z_loss_coeff": 0.01,
    },
    "auxloss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.02},
    "seqauxloss": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.03},
    "zloss": {"moe_z_loss_coeff": 0.01},
}
ACTIVATIONS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
words = str.split
OPTIONS = (
    *words("tied dist overlap fp32 fused scaled_exp recompute experts hybrid mtp mtp2 own policy apart capped gemma"),
    *words("pieces terms kept whole critic turns activations replay choice rope dynamic"),
    *LOSSES,
    *FSDP,
)


@dataclass(frozen=True)
class Layout:
    """`tp2pp2s` and the like: sizes, then t (packed rows, thd), s (sequence parallel), v (two virtual stages); and
    options.

    Options: tied (embeddings shared with the head), capped (the loss caps the logits), gemma (the output layer does),
    dist (distributed optimizer), overlap (overlapped gradient reduction), fp32 (float32 logits), fused, scaled_exp and
    recompute (the fused head, in its three modes), experts (a mixture of experts, which ep distributes over data-
    parallel ranks), losses of its router (auxloss, seqauxloss, zloss, or balance for all at once), activations (every
    layer is computed again in the backward), replay (the experts are the samples'), choice (they are the model's own),
    hybrid (a HybridModel), mtp and mtp2 (one and two depths of multi-token prediction; own: with the weights of the
    aggregation; policy: against the policy's distribution; apart: they train their own layers only, from 0.19.2),
    critic (a value head), rope (rotary embeddings), dynamic (every micro-batch is cut over its own ranks), pieces (the
    model runs by a schedule plan, together with another backward), turns (of tokens with weights, each of which is a
    sequence of gspo), loss terms and whole (further losses, over a teacher's top-k tokens or its whole vocabulary).
    """

    name: str
    options: frozenset[str] = frozenset()

    @property
    def sizes(self) -> dict[str, int]:
        given = dict(re.findall(r"(tp|pp|cp|ep)(\d)", self.name))
        return {name: int(given.get(name, 1)) for name in ("tp", "pp", "cp", "ep")}

    @property
    def qkv_format(self) -> str:
        return "thd" if "t" in self._letters else "bshd"

    @property
    def sequence_parallel(self) -> bool:
        return "s" in self._letters

    @property
    def virtual_stages(self) -> int:
        return 2 if "v" in self._letters else 1

    @property
    def is_sharded(self) -> bool:
        return bool(self.options.intersection(FSDP))

    @property
    def depths(self) -> int:
        return 2 if "mtp2" in self.options else int("mtp" in self.options)

    @property
    def hybrid_pattern(self) -> str | None:
        """One segment for every pipeline stage; None for a GPTModel."""
        if "hybrid" not in self.options:
            return None
        stages = self.sizes["pp"] * self.virtual_stages
        layer = "*E" if "experts" in self.options else "*-"
        return "|".join([layer * (LAYERS // stages)] * stages) + f"/{layer}" * self.depths

    @property
    def _letters(self) -> str:
        return re.fullmatch(r"(?:(?:dp|tp|pp|cp|ep)\d)+([tsv]*)", self.name)[1]


def initialize(layout: Layout, timeout_minutes: float = 30) -> None:
    """Megatron's parallel state for the layout."""
    sizes = layout.sizes
    parallel_state.initialize_model_parallel(
        sizes["tp"],
        sizes["pp"],
        layout.virtual_stages if layout.virtual_stages > 1 else None,
        context_parallel_size=sizes["cp"],
        expert_model_parallel_size=sizes["ep"],
        distributed_timeout_minutes=timeout_minutes,
    )


def use_pieces(config: TransformerConfig) -> None:
    """Megatron's overlap of expert communication, on a CPU: its streams do nothing there, and its check wants
    bfloat16."""
    torch.Tensor.record_stream = lambda self, stream: None
    torch.cuda.Stream.priority_range = staticmethod(lambda: (0, -1))
    config.overlap_moe_expert_parallel_comm = True


def count_plans(chunks: list[GPTModel], counted: list) -> None:
    """Append to `counted` whenever a chunk's schedule plan is made."""
    for chunk in chunks:
        make = chunk.build_schedule_plan
        chunk.build_schedule_plan = lambda *rest, make=make, **more: counted.append(1) or make(*rest, **more)


def build(layout: Layout, *, per_token: bool) -> list[GPTModel | HybridModel]:
    """This rank's chunks, one per virtual pipeline stage."""
    config = _config(layout, per_token=per_token)
    if "pieces" in layout.options:
        use_pieces(config)
    chunks = []
    for stage in range(layout.virtual_stages):
        model = _chunk(layout, config, stage if layout.virtual_stages > 1 else None)
        model = add_value_head(model) if "critic" in layout.options else model
        for name, parameter in model.named_parameters():
            _fill(global_name(model, name), parameter)
        chunks.append(model)
    return chunks


def _chunk(layout: Layout, config: TransformerConfig, vp_stage: int | None) -> GPTModel | HybridModel:
    packed = layout.qkv_format == "thd"
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    arguments = {
        "vocab_size": VOCABULARY,
        "max_sequence_length": WIDTH,
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        "post_process": is_last,
        "share_embeddings_and_output_weights": "tied" in layout.options,
        "position_embedding_type": "rope" if layout.depths or "rope" in layout.options else "learned_absolute",
        "vp_stage": vp_stage,
    }
    if layout.hybrid_pattern:
        return hybrid_model(config, layout.hybrid_pattern, local=True, packed=packed, **arguments)
    layers = layer_spec(config, packed=packed, vp_stage=vp_stage)
    prediction = prediction_spec(config, layers, vp_stage=vp_stage)
    return GPTModel(config, layers, mtp_block_spec=prediction, **arguments)


def _config(layout: Layout, *, per_token: bool) -> TransformerConfig:
    virtual = layout.virtual_stages > 1
    experts = {
        "num_moe_experts": EXPERTS,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
    }
    if layout.options & {"replay", "choice"}:
        experts["moe_enable_routing_replay"] = True
    for name in layout.options & LOSSES.keys():
        experts |= LOSSES[name]
    return TransformerConfig(
        num_layers=LAYERS * (2 if "hybrid" in layout.options else 1),
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=layout.sizes["tp"],
        pipeline_model_parallel_size=layout.sizes["pp"],
        virtual_pipeline_model_parallel_size=layout.virtual_stages if virtual else None,
        context_parallel_size=layout.sizes["cp"],
        expert_model_parallel_size=layout.sizes["ep"],
        sequence_parallel=layout.sequence_parallel,
        overlap_p2p_comm=virtual,  # batched transfers over gloo give virtual stages wrong gradients
        batch_p2p_comm=not virtual,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        calculate_per_token_loss=per_token,
        **(experts if "experts" in layout.options else {}),
        **(ACTIVATIONS if "activations" in layout.options else {}),
        **({"mtp_num_layers": layout.depths, "mtp_loss_scaling_factor": MTP_FACTOR} if layout.depths else {}),
        **({"mtp_detach_heads": True} if "apart" in layout.options else {}),
    )


def global_name(model: GPTModel | HybridModel, name: str) -> str:
    """The parameter's name in a GPTModel, with layer and expert counted over all ranks; a tied head is the
    embedding."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        number = model.decoder.layers[int(parts[2])].layer_number
        parts[2] = str((number + 1) // 2 if isinstance(model, HybridModel) else number)
    if parts[:2] == ["decoder", "final_norm"]:
        parts[1] = "final_layernorm"
    if "local_experts" in parts:
        place = parts.index("local_experts") + 1
        first = parallel_state.get_expert_model_parallel_rank() * model.config.num_moe_experts
        first //= parallel_state.get_expert_model_parallel_world_size()
        parts[place] = str(first + int(parts[place]))
    if model.share_embeddings_and_output_weights and parts[0] == "output_layer":
        parts = ["embedding", "word_embeddings", "weight"]
    return ".".join(parts)


def _fill(name: str, parameter: torch.nn.Parameter) -> None:
    """Values that depend on the global name alone; a tensor-parallel rank takes its part."""
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    axis, shape = partition_axis(parameter), list(parameter.shape)
    if axis >= 0:
        shape[axis] *= size
    generator = torch.Generator().manual_seed(int(hashlib.blake2b(name.encode(), digest_size=4).hexdigest(), 16))
    is_norm = "layernorm.weight" in name
    whole = torch.randn(shape, generator=generator) * 0.2 + (1.0 if is_norm else 0.0)
    parameter.data.copy_(whole if axis < 0 else whole.chunk(size, dim=axis)[rank])


def partition_axis(parameter: torch.nn.Parameter) -> int:
    """The axis that tensor parallelism cuts, or -1."""
    return getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1


def wrap(layout: Layout, chunks: list[GPTModel]) -> list[DistributedDataParallel]:
    """The chunks under Megatron's DDP, wired like its training loop does it."""
    config = chunks[0].config
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer="dist" in layout.options,
        overlap_grad_reduce="overlap" in layout.options,
        bucket_size=4000 if "overlap" in layout.options else None,  # several buckets, or nothing overlaps
    )
    if layout.is_sharded:
        wrapped = [wrap_fsdp(config, layout.options, chunk) for chunk in chunks]
    else:
        wrapped = [
            DistributedDataParallel(config, settings, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)
        ]
    config.finalize_model_grads_func = finalize_model_grads
    if "overlap" in layout.options:
        functions = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = functions if len(functions) > 1 else functions[0]
    return wrapped


def save_gradients(path: Path, layout: Layout, wrapped: list[DistributedDataParallel]) -> None:
    """This rank's parts of the gradients after finalize, under global names."""
    if "dist" in layout.options:
        gather_shards(wrapped)
    tp_rank, pp_rank = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    arrays = {}
    for chunk in wrapped:
        sharded = whole_gradients(chunk) if layout.is_sharded else {}
        model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        for name, parameter in model.named_parameters():
            if (
                name == "output_layer.weight"
                and model.share_embeddings_and_output_weights
                and hasattr(model, "embedding")
            ):
                continue  # the stage's output layer uses its embedding, and Megatron allocates this one all the same
            key = f"{global_name(model, name)}|{partition_axis(parameter)}|{tp_rank}|{pp_rank}"
            arrays[key] = (sharded[name] if layout.is_sharded else parameter.main_grad).numpy()
    np.savez(path, **arrays)


def gather_shards(wrapped: list[DistributedDataParallel]) -> None:
    """Under the distributed optimizer a rank holds the sum of only its shard of every bucket."""
    dense, expert = (
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_expert_data_parallel_group(),
    )
    for chunk in wrapped:
        for buffers, group in ((chunk.buffers, dense), (chunk.expert_parallel_buffers, expert)):
            for bucket in [bucket for buffer in buffers for bucket in buffer.buckets]:
                shards = bucket.grad_data.chunk(group.size())
                whole = [torch.empty_like(shard) for shard in shards]
                torch.distributed.all_gather(whole, shards[group.rank()].clone(), group=group)
                bucket.grad_data.copy_(torch.cat(whole))
