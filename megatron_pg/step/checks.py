"""What is looked at before a step runs, so that a mistake on one rank stops every rank, and stops it here."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.utils import get_attr_wrapped_model
from torch.distributed import ProcessGroup

from megatron_pg.batch import PackedBatch
from megatron_pg.batch.zigzag import zigzag_index
from megatron_pg.flags.megatron import FUSES_UNDER_FSDP, core_version
from megatron_pg.plan.collectives import all_gather_rows, broadcast_text
from megatron_pg.plan.errors import ContractError, StepPlanError
from megatron_pg.plan.plan import StepPlan
from megatron_pg.plan.settings import LossSettings
from megatron_pg.plan.support import members
from megatron_pg.step.context_groups import ContextGroups

_WITH_STATE = {"MambaMixer", "GatedDeltaNet"}  # named, because their modules lie elsewhere in every release


def check_model(chunks: list[Any], settings: LossSettings, *, forward_only: bool, is_attached: bool) -> None:
    """Refuse a model that was not built for the contract, or has no policy-gradient loss in it."""
    config = chunks[0].config
    if config.calculate_per_token_loss != settings.per_token:
        raise ContractError(
            f"the model was built with calculate_per_token_loss={config.calculate_per_token_loss}, the arguments say "
            f"{settings.per_token}; call validate_args before the model config is made"
        )
    if config.finalize_model_grads_func is None and not forward_only:
        raise ContractError(
            "config.finalize_model_grads_func is None, so gradients would be neither reduced over ranks nor divided; set it to "
            "megatron.core.distributed.finalize_model_grads"
        )
    _check_prediction(chunks[0], settings)
    if not forward_only:
        _check_wrapper(chunks[0], settings)
    if getattr(config, "overlap_moe_expert_parallel_comm", False) and not _has(chunks[0], "build_schedule_plan"):
        raise ContractError(
            "--overlap-moe-expert-parallel-comm runs a model by its build_schedule_plan, which the model provider's model does not "
            "have; return a GPTModel, or remove the flag"
        )
    vocabulary, columns = settings.vocab_size, get_attr_wrapped_model(chunks[0], "vocab_size")
    if vocabulary is not None and vocabulary > columns:
        raise ContractError(
            f"--pg-vocab-size {vocabulary} is more than the {columns} columns of the model's logits; give the rollout engine's"
        )
    is_last_stage = any(get_attr_wrapped_model(chunk, "post_process") for chunk in chunks)
    if is_last_stage and not is_attached:
        raise ContractError(
            "the model has no policy-gradient loss; call PolicyGradientStep.attach before it is wrapped"
        )


def _check_prediction(model: Any, settings: LossSettings) -> None:
    """Refuse multi-token prediction that would escape the step's weights, or that Megatron itself gets wrong."""
    depths, config = getattr(model.config, "mtp_num_layers", None) or 0, model.config
    if depths != settings.mtp_depths:
        raise ContractError(
            f"the model has mtp_num_layers={depths}, the arguments say {settings.mtp_depths}, so predictions would have no weight; call "
            "validate_args after mtp_num_layers is final"
        )
    if not depths:
        return
    if getattr(config, "mtp_grad_scale_func", None) is not None:
        raise ContractError(
            "config.mtp_grad_scale_func is set, and the loss of multi-token prediction is part of the policy's own here, so it would "
            "have no effect; set mtp_loss_scaling_factor"
        )
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if stages > 1 and get_attr_wrapped_model(model, "position_embedding_type") == "learned_absolute":
        raise ContractError(
            "multi-token prediction with learned positions and pipeline parallelism has a second copy of the position embedding, whose "
            "gradient Megatron does not add to the first; use rope or one pipeline stage"
        )


def always_averages(model: Any) -> bool:
    """Whether the wrapper is torch's FSDP2, which inherits a `scale_gradients` that does nothing."""
    scale = getattr(getattr(model, "scale_gradients", None), "__func__", None)
    return scale is _BaseDataParallel.scale_gradients


def _is_megatron_fsdp(model: Any) -> bool:
    return hasattr(model, "param_and_grad_buffer")  # by what it has: its class lies elsewhere in every release


def _check_wrapper(model: Any, settings: LossSettings) -> None:
    """Refuse under FSDP what would leave wrong gradients without a word (rule E19 for models that no flag has wrapped)."""
    if always_averages(model):
        if settings.per_token and getattr(model.config, "num_moe_experts", None):
            raise ContractError(
                "torch FSDP2 averages gradients whatever calculate_per_token_loss says, so the router's losses of a mixture of experts "
                "would count every position; use Megatron-FSDP, or an aggregation other than token_mean"
            )
        if settings.head_mode:
            raise ContractError(
                "torch FSDP2 frees the output layer's weight behind its forward, and the fused head reads it later; use float32_logits "
                "or Megatron-FSDP"
            )
    elif _is_megatron_fsdp(model) and settings.head_mode and core_version() < FUSES_UNDER_FSDP:
        raise ContractError(
            "Megatron-FSDP before megatron-core 0.19.2 loses gradients where the output layer returns none of its own, as under the "
            "fused head; use float32_logits or 0.19.2"
        )


def _has(model: Any, name: str) -> bool:
    try:
        return bool(get_attr_wrapped_model(model, name))
    except RuntimeError:  # how Megatron says no
        return False


def source_of(data_iterator: Any) -> Iterator:
    """The data iterator that serves every virtual stage."""
    source = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
    if source is None:
        raise ContractError(
            "this rank has no data iterator, so it cannot know the step; every rank needs one: set is_distributed = True on "
            "the dataset provider"
        )
    return source


def take(source: Iterator, num_microbatches: int) -> list[PackedBatch]:
    """The step's micro-batches."""
    batches: list[PackedBatch] = []
    for _ in range(num_microbatches):
        batch = next(source, None)
        if batch is None:
            raise ContractError(
                f"the data ended after {len(batches)} of the {num_microbatches} micro-batches of this step, so it cannot be run; lower "
                "--train-iters, or fill up with empty micro-batches"
            )
        if not isinstance(batch, PackedBatch):
            raise ContractError(
                f"the data iterator gave a {type(batch).__name__}, not a PackedBatch; use megatron_pg.pack"
            )
        batches.append(batch)
    return batches


def check_batches(batches: Sequence[PackedBatch], model: Any, arguments: dict, vocab_size: int | None = None) -> None:
    """What would otherwise fail, or pass unseen, on one rank in the middle of the step."""
    vocabulary = vocab_size or get_attr_wrapped_model(model, "vocab_size")
    learned = get_attr_wrapped_model(model, "position_embedding_type") == "learned_absolute"
    positions = get_attr_wrapped_model(model, "max_sequence_length") if learned else float("inf")
    cp_size = parallel_state.get_context_parallel_world_size()
    static = parallel_state.get_pipeline_model_parallel_world_size() > 1 and not model.config.variable_seq_lengths
    shape = (arguments["micro_batch_size"], arguments["seq_length"])
    _check_recompute(batches, model.config)
    for k, batch in enumerate(batches):
        size = cp_size if batch.cp_ranks is None else batch.cp_ranks.size
        zigzag_index(batch.padded_lengths, cp_rank=0, cp_size=size)  # raises when they do not divide
        if int(batch.tokens.max()) >= vocabulary:
            raise ContractError(
                f"micro-batch {k} holds token id {int(batch.tokens.max())}, the vocabulary has {vocabulary}, so a token would have no "
                "logit. Check the tokenizer."
            )
        if int(batch.position_ids.max()) >= positions:
            raise ContractError(
                f"micro-batch {k} holds a document of {int(batch.position_ids.max()) + 1} positions, the model has {positions}, so a "
                "position would have no embedding; raise --max-position-embeddings or drop the sample"
            )
        if static and tuple(batch.tokens.shape) != shape:
            raise ContractError(
                f"micro-batch {k} has shape {tuple(batch.tokens.shape)}, pipeline parallelism sends {shape} (--micro-batch-size, "
                "--seq-length), so the stages would not fit; pack with max_seq_len and rows of that size"
            )


def check_teachers(batches: Sequence[PackedBatch], model: Any, settings: LossSettings) -> None:
    """Refuse a teacher's tokens that the model has no logit for, where a loss term reads them, and hidden states of another width than its head."""
    _check_widths(batches, settings)
    terms = [term.tokens for term in settings.terms.further if term.reads_topk]
    vocabulary = settings.vocab_size or get_attr_wrapped_model(model, "vocab_size")
    for sample in (sample for batch in batches for sample in batch.samples):
        for mask in (mask for name in terms if (mask := sample.mask_of(name)) is not None):
            ids = None if sample.teacher_topk is None else sample.teacher_topk.ids
            if ids is not None and (bad := mask & (ids >= vocabulary).any(dim=1)).any():
                raise ContractError(
                    f"teacher_topk of sample {sample.sample_id} holds token id {int(ids[bad].max())} at response token "
                    f"{int(bad.nonzero()[0])}, the vocabulary has {vocabulary}, so the token would have no logit. Has the teacher another "
                    "tokenizer, or padding columns?"
                )


def _check_widths(batches: Sequence[PackedBatch], settings: LossSettings) -> None:
    head, readers = settings.teacher_head, [s.tokens for s in settings.terms.further if s.reads_hidden]
    for sample in (sample for batch in batches for sample in batch.samples if readers):
        states, is_read = sample.teacher_hidden, any(sample.mask_of(name) is not None for name in readers)
        if is_read and states is not None and states.shape[1] != head.width:
            raise ContractError(
                f"teacher_hidden of sample {sample.sample_id} have width {states.shape[1]}, and the rows of --pg-teacher-head have "
                f"{head.width}, so there would be no logits. Record the last hidden states of the model whose head it is."
            )


def check_vocabulary_of_supports(batches: Sequence[PackedBatch], model: Any, settings: LossSettings) -> None:
    """Refuse ids of a support that the model has no logit for, where a term reads the token's support."""
    vocabulary = settings.vocab_size or get_attr_wrapped_model(model, "vocab_size")
    for sample, support, mask in members((s for batch in batches for s in batch.samples), settings):
        if (bad := mask & support.any_of(support.ids >= vocabulary)).any():
            k = int(bad.nonzero()[0])
            raise ContractError(
                f"support of sample {sample.sample_id} holds token id {int(support.ids[support.positions == k].max())} at response token {k}, "
                f"the vocabulary has {vocabulary}, so the token would have no logit. Does the engine sample padding columns, or was it given "
                "another tokenizer?"
            )


def _check_recompute(batches: Sequence[PackedBatch], config: Any) -> None:
    recomputes = getattr(config, "mtp_num_layers", None) and config.recompute_granularity == "full"
    is_packed = any(batch.qkv_format == "thd" for batch in batches)
    if recomputes and is_packed and core_version() < (0, 18):
        raise ContractError(
            "multi-token prediction under --recompute-granularity full ends in a TypeError for packed rows inside megatron-core before "
            '0.18; pack with qkv_format="bshd", recompute selectively, or use 0.19.2'
        )


def check_packing(batches: Sequence[PackedBatch], chunks: list[Any]) -> None:
    """Refuse packed rows for Megatron's layers whose state could run on from one document into the next."""
    if all(batch.qkv_format != "thd" for batch in batches):
        return
    modules = [module for chunk in chunks for module in chunk.modules()]
    names = {base.__name__ for kind in set(map(type, modules)) for base in kind.__mro__}
    if with_state := sorted(names & _WITH_STATE):
        pattern = next((m.hybrid_layer_pattern for m in modules if hasattr(m, "hybrid_layer_pattern")), None)
        shown = f" (--hybrid-layer-pattern {pattern})" if pattern else ""
        raise ContractError(
            f"the rows are packed (thd) and the model has {' and '.join(with_state)} layers{shown}, whose state must begin anew with "
            "every document; that it does was never verified on a GPU, so give padded rows (qkv_format bshd)"
        )


def check_cuts(batches: Sequence[PackedBatch], groups: ContextGroups | None) -> None:
    """Refuse micro-batches with ranks of their own that nothing goes by, and others where all have them."""
    if groups is not None:
        groups.check(batches)
    elif given := [k for k, batch in enumerate(batches) if batch.cp_ranks is not None]:
        raise ContractError(
            f"micro-batch {given[0]} has cp_ranks={batches[given[0]].cp_ranks}, and the step goes by Megatron's context-parallel group; "
            "give dynamic_cp=True to PolicyGradientStep or pretrain, or pack with cp_size"
        )


def check_dynamic_cp(chunks: list[Any], settings: LossSettings, *, takes_documents: bool) -> None:
    """Refuse what would go by Megatron's context-parallel group, or was not run with a micro-batch's own."""
    config = chunks[0].config
    cores = [m.core_attention for chunk in chunks for m in chunk.modules() if hasattr(m, "core_attention")]
    refused = {
        "multi-token prediction, which shifts tokens over Megatron's own group": settings.mtp_depths,
        "a DocumentAccumulator, whose documents are a rank's own (SharedDocumentAccumulator is for it)": takes_documents,
        "pipeline parallelism, which was not run": parallel_state.get_pipeline_model_parallel_world_size() > 1,
        "a wrapper that shards weights (FSDP), which was not run": always_averages(chunks[0])
        or _is_megatron_fsdp(chunks[0]),
        "a mixture of experts, whose router sums over Megatron's own group": config.num_moe_experts,
        "multi-latent attention, which Megatron refuses": getattr(config, "multi_latent_attention", False),
        "captured layers (--cuda-graph-impl), which keep one group": getattr(config, "cuda_graph_impl", None)
        not in (None, "none"),
        "Transformer Engine with --context-parallel-size 1, where Megatron makes no stream for it (2 or more has one)": any(
            getattr(core, "cp_stream", ...) is None for core in cores
        ),
    }
    if found := [name for name, is_on in refused.items() if is_on]:
        raise ContractError(
            f"dynamic_cp cuts every micro-batch over ranks of its own and cannot be combined with {found[0]}; leave one out"
        )


def agree(
    batches: Sequence[PackedBatch], plan: StepPlan | None, failure: StepPlanError | None, group: ProcessGroup
) -> None:
    """Stop every rank when one could not plan, or when peers of a rank of `group` hold different micro-batches (rule P9)."""
    if torch.distributed.get_world_size() == group.size():
        if failure is not None:  # every rank has it
            raise failure
        return
    digest = 0.0 if plan is None else _digest(batches, plan)
    mine = [float(group.rank()), digest, float(failure is not None)]
    ranks = all_gather_rows(torch.tensor(mine, dtype=torch.float64), error=failure).tolist()
    if failed := [rank for rank, (_, _, has_failed) in enumerate(ranks) if has_failed]:
        text = broadcast_text(str(failure or ""), failed[0])
        is_named = group.size() > 1 or len(failed) == len(ranks)
        raise StepPlanError(text if is_named else f"rank {failed[0]}: {text}") from failure
    seen: dict[float, tuple[int, float]] = {}
    for rank, (dp_rank, value, _) in enumerate(ranks):
        first, expected = seen.setdefault(dp_rank, (rank, value))
        if value != expected:
            raise ContractError(
                f"step plan differs between ranks {first} and {rank}: they are peers of one data-parallel rank and must be given "
                "the same micro-batches"
            )


def _digest(batches: Sequence[PackedBatch], plan: StepPlan) -> float:
    """48 bits of everything that the loss and the metrics read, exact in float64."""
    content = hashlib.blake2b(plan.denominators.numpy().tobytes(), digest_size=6)
    for batch in batches:
        content.update(batch.digest)
    return float(int.from_bytes(content.digest(), "big"))
