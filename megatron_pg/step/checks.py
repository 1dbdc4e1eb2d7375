"""Checks before a step runs; an error on one rank is raised on every rank."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.utils import get_attr_wrapped_model
from torch.distributed import ProcessGroup

from megatron_pg.batch import PackedBatch, samples_of
from megatron_pg.batch.zigzag import zigzag_index
from megatron_pg.flags.megatron import FUSES_UNDER_FSDP, core_version
from megatron_pg.plan.collectives import all_gather_rows, broadcast_text
from megatron_pg.plan.errors import ScheduleError, StepPlanError
from megatron_pg.plan.plan import StepPlan
from megatron_pg.plan.planned_step import PlannedStep
from megatron_pg.plan.sampling_masks import members
from megatron_pg.plan.settings import LossSettings
from megatron_pg.step.context_groups import ContextGroups
from megatron_pg.step.schedule import ScheduleCall

_WITH_STATE = {"MambaMixer", "GatedDeltaNet"}  # by name: every release has them in other modules


def check_model(chunks: list[Any], settings: LossSettings, *, forward_only: bool, is_attached: bool) -> None:
    """Refuse a model that was not built for the loss scaling, or has no policy-gradient loss in it."""
    config = chunks[0].config
    if config.calculate_per_token_loss != settings.per_token:
        raise ScheduleError(
            f"calculate_per_token_loss of the model is {config.calculate_per_token_loss}, and that of the arguments is "
            f"{settings.per_token}. Call validate_args before the model config is made."
        )
    if config.finalize_model_grads_func is None and not forward_only:
        raise ScheduleError(
            "config.finalize_model_grads_func is None. Set it to megatron.core.distributed.finalize_model_grads."
        )
    _check_prediction(chunks[-1], settings)
    if not forward_only:
        _check_wrapper(chunks[0], settings)
    if getattr(config, "overlap_moe_expert_parallel_comm", False) and not _has(chunks[0], "build_schedule_plan"):
        raise ScheduleError(
            "--overlap-moe-expert-parallel-comm runs a model by its build_schedule_plan, which the model provider's "
            "model does not have. Return a GPTModel, or remove the flag."
        )
    vocabulary, columns = settings.vocab_size, get_attr_wrapped_model(chunks[0], "vocab_size")
    if vocabulary is not None and vocabulary > columns:
        raise ScheduleError(
            f"--pg-vocab-size {vocabulary} is more than the {columns} columns of the model's logits. Give the rollout "
            "engine's."
        )
    is_last_stage = any(get_attr_wrapped_model(chunk, "post_process") for chunk in chunks)
    if is_last_stage and not is_attached:
        raise ScheduleError(
            "the model has no policy-gradient loss. Call PolicyGradientStep.attach before it is wrapped."
        )


def _check_prediction(model: Any, settings: LossSettings) -> None:
    """Refuse multi-token prediction without weights of the step, or with a defect in Megatron."""
    depths, config = getattr(model.config, "mtp_num_layers", None) or 0, model.config
    if depths != settings.mtp_depths:
        raise ScheduleError(
            f"mtp_num_layers of the model is {depths}, and that of the arguments is {settings.mtp_depths}, so "
            "predictions have no weight. Call validate_args after mtp_num_layers is final."
        )
    if not depths:
        return
    if getattr(config, "mtp_grad_scale_func", None) is not None:
        raise ScheduleError(
            "config.mtp_grad_scale_func is set and has no effect, because the loss of multi-token prediction is part "
            "of the policy loss here. Set mtp_loss_scaling_factor."
        )
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if stages > 1 and get_attr_wrapped_model(model, "position_embedding_type") == "learned_absolute":
        raise ScheduleError(
            "multi-token prediction with learned positions and pipeline parallelism has a second copy of the position "
            "embedding, and Megatron does not add its gradient to the first. Use rope, or one pipeline stage."
        )
    has_copy = stages > 1 and _has(model, "mtp_process") and not get_attr_wrapped_model(model, "pre_process")
    if has_copy and parallel_state.get_embedding_group(check_initialized=False) is None:
        raise ScheduleError(
            "multi-token prediction has a copy of the word embedding on a pipeline stage outside Megatron's embedding "
            "group, so its gradient is lost. Give pretrain or initialize_model_parallel a get_embedding_ranks with "
            "that stage, or move m to the last stage of --pipeline-model-parallel-layout."
        )


def always_averages(model: Any) -> bool:
    """Whether the wrapper is torch's FSDP2, which inherits a `scale_gradients` that does nothing."""
    scale = getattr(getattr(model, "scale_gradients", None), "__func__", None)
    return scale is _BaseDataParallel.scale_gradients


def _is_megatron_fsdp(model: Any) -> bool:
    return hasattr(model, "param_and_grad_buffer")  # by its attribute: every release has its class in another module


def _check_wrapper(model: Any, settings: LossSettings) -> None:
    """Refuse what gives silently wrong gradients under FSDP (rule E19, for models that no flag has wrapped)."""
    if always_averages(model):
        if settings.per_token and getattr(model.config, "num_moe_experts", None):
            raise ScheduleError(
                "torch FSDP2 averages gradients regardless of calculate_per_token_loss. Use Megatron-FSDP, or an "
                "aggregation other than token_mean."
            )
        if settings.head_mode:
            raise ScheduleError(
                "torch FSDP2 frees the output layer's weight after its forward, and the fused head reads it later. Use "
                "float32_logits, or Megatron-FSDP."
            )
    elif _is_megatron_fsdp(model) and settings.head_mode and core_version() < FUSES_UNDER_FSDP:
        raise ScheduleError(
            "Megatron-FSDP before megatron-core 0.19.2 loses gradients if the output layer returns no gradient itself, "
            "as under the fused head. Use float32_logits, or 0.19.2."
        )


def _has(model: Any, name: str) -> bool:
    try:
        return bool(get_attr_wrapped_model(model, name))
    except RuntimeError:  # Megatron raises it for a missing attribute
        return False


def source_of(data_iterator: Any) -> Iterator:
    """The data iterator that serves every virtual stage."""
    source = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
    if source is None:
        raise ScheduleError(
            "this rank has no data iterator, and every rank needs one. Set is_distributed = True on the dataset "
            "provider."
        )
    return source


def take_microbatches(source: Iterator, num_microbatches: int) -> list[PackedBatch]:
    """The step's micro-batches."""
    batches: list[PackedBatch] = []
    for _ in range(num_microbatches):
        batch = next(source, None)
        if batch is None:
            raise ScheduleError(
                f"the data ended after {len(batches)} of the {num_microbatches} micro-batches of this step. Lower "
                "--train-iters, or fill up with empty micro-batches."
            )
        if not isinstance(batch, PackedBatch):
            raise ScheduleError(
                f"the data iterator gave a {type(batch).__name__}, not a PackedBatch. Use megatron_pg.pack."
            )
        batches.append(batch)
    return batches


def check_batches(batches: Sequence[PackedBatch], call: ScheduleCall, vocab_size: int | None = None) -> None:
    """Refuse what would otherwise fail, or pass unseen, on one rank in the middle of the step."""
    model = call.chunks[0]
    vocabulary = vocab_size or get_attr_wrapped_model(model, "vocab_size")
    learned = get_attr_wrapped_model(model, "position_embedding_type") == "learned_absolute"
    positions = get_attr_wrapped_model(model, "max_sequence_length") if learned else float("inf")
    cp_size = parallel_state.get_context_parallel_world_size()
    static = parallel_state.get_pipeline_model_parallel_world_size() > 1 and not model.config.variable_seq_lengths
    shape = (call.keywords["micro_batch_size"], call.keywords["seq_length"])
    _check_recompute(batches, model.config)
    for k, batch in enumerate(batches):
        size = cp_size if batch.cp_ranks is None else batch.cp_ranks.size
        zigzag_index(batch.padded_lengths, cp_rank=0, cp_size=size)  # raises when they do not divide
        if int(batch.tokens.max()) >= vocabulary:
            raise ScheduleError(
                f"micro-batch {k} contains token id {int(batch.tokens.max())}, and the vocabulary has {vocabulary} "
                "ids. Check the tokenizer."
            )
        if int(batch.position_ids.max()) >= positions:
            raise ScheduleError(
                f"micro-batch {k} contains a sample of {int(batch.position_ids.max()) + 1} positions, and the model "
                f"has {positions}. Raise --max-position-embeddings, or drop the sample."
            )
        if static and tuple(batch.tokens.shape) != shape:
            raise ScheduleError(
                f"micro-batch {k} has shape {tuple(batch.tokens.shape)}, and pipeline stages exchange {shape} "
                "(--micro-batch-size, --seq-length). Pack with max_seq_len and rows of that size."
            )


def check_teachers(batches: Sequence[PackedBatch], model: Any, settings: LossSettings) -> None:
    """Refuse a teacher's tokens outside the vocabulary, and hidden states of another width than the teacher's head."""
    _check_widths(batches, settings)
    terms = [term.tokens for term in settings.terms.further if term.reads_topk]
    vocabulary = settings.vocab_size or get_attr_wrapped_model(model, "vocab_size")
    for sample in samples_of(batches):
        if sample.teacher_topk is None:
            continue
        ids = sample.teacher_topk.ids
        for mask in (mask for name in terms if (mask := sample.mask_of(name)) is not None):
            if (bad := mask & (ids >= vocabulary).any(dim=1)).any():
                raise ScheduleError(
                    f"teacher_topk of sample {sample.sample_id} contains token id {int(ids[bad].max())} at response "
                    f"token {int(bad.nonzero()[0])}, and the vocabulary has {vocabulary} ids. Check the teacher for "
                    "another tokenizer or padding columns."
                )


def _check_widths(batches: Sequence[PackedBatch], settings: LossSettings) -> None:
    head, readers = settings.teacher_head, [s.tokens for s in settings.terms.further if s.reads_hidden]
    if head is None:
        return
    for sample in samples_of(batches):
        states, is_read = sample.teacher_hidden, any(sample.mask_of(name) is not None for name in readers)
        if is_read and states is not None and states.shape[1] != head.width:
            raise ScheduleError(
                f"teacher_hidden of sample {sample.sample_id} have width {states.shape[1]}, and the rows of "
                f"the teacher's head have {head.width}. Record the last hidden states of the model that the head "
                "belongs to."
            )


def check_vocabulary_of_sampling_masks(batches: Sequence[PackedBatch], model: Any, settings: LossSettings) -> None:
    """Refuse ids of a sampling mask that the model has no logit for, where a term reads the token's sampling mask."""
    vocabulary = settings.vocab_size or get_attr_wrapped_model(model, "vocab_size")
    for sample, sampling_mask, mask in members(samples_of(batches), settings):
        if (bad := mask & sampling_mask.any_of(sampling_mask.ids >= vocabulary)).any():
            k = int(bad.nonzero()[0])
            raise ScheduleError(
                f"sampling_mask of sample {sample.sample_id} holds token id "
                f"{int(sampling_mask.ids[sampling_mask.positions == k].max())} at response token {k}, the vocabulary "
                f"has {vocabulary}. Does the engine sample padding columns, or was it given another tokenizer?"
            )


def _check_recompute(batches: Sequence[PackedBatch], config: Any) -> None:
    recomputes = getattr(config, "mtp_num_layers", None) and config.recompute_granularity == "full"
    is_packed = any(batch.qkv_format == "thd" for batch in batches)
    if recomputes and is_packed and core_version() < (0, 18):
        raise ScheduleError(
            "multi-token prediction under --recompute-granularity full raises a TypeError for packed rows inside "
            'megatron-core before 0.18. Pack with qkv_format="bshd", recompute selectively, or use 0.19.2.'
        )


def check_packing(batches: Sequence[PackedBatch], chunks: list[Any]) -> None:
    """Refuse packed rows for layers with a state, which could leak from one sample into the next."""
    if all(batch.qkv_format != "thd" for batch in batches):
        return
    modules = [module for chunk in chunks for module in chunk.modules()]
    names = {base.__name__ for kind in set(map(type, modules)) for base in kind.__mro__}
    if with_state := sorted(names & _WITH_STATE):
        pattern = next((m.hybrid_layer_pattern for m in modules if hasattr(m, "hybrid_layer_pattern")), None)
        shown = f" (--hybrid-layer-pattern {pattern})" if pattern else ""
        raise ScheduleError(
            f"the rows are packed (thd), and the model has {' and '.join(with_state)} layers{shown}, whose state must "
            "be reset between samples. This was never verified on a GPU. Give padded rows (qkv_format bshd)."
        )


def check_cuts(batches: Sequence[PackedBatch], groups: ContextGroups | None) -> None:
    """Refuse micro-batches with cp_ranks without dynamic_cp, and micro-batches without them under it."""
    if groups is not None:
        groups.check(batches)
    elif given := [k for k, batch in enumerate(batches) if batch.cp_ranks is not None]:
        raise ScheduleError(
            f"micro-batch {given[0]} has cp_ranks={batches[given[0]].cp_ranks}, and the step uses Megatron's "
            "context-parallel group. Give dynamic_cp=True to PolicyGradientStep or pretrain, or pack with cp_size."
        )


def check_dynamic_cp(chunks: list[Any], settings: LossSettings, *, takes_documents: bool) -> None:
    """Refuse what needs Megatron's context-parallel group, or was not run with a micro-batch's own group."""
    config = chunks[0].config
    cores = [m.core_attention for chunk in chunks for m in chunk.modules() if hasattr(m, "core_attention")]
    refused = {
        "multi-token prediction, which shifts tokens over Megatron's own group": settings.mtp_depths,
        "a DocumentAccumulator, which takes a rank's own documents (use SharedDocumentAccumulator)": takes_documents,
        "pipeline parallelism, which was not run": parallel_state.get_pipeline_model_parallel_world_size() > 1,
        "a wrapper that shards weights (FSDP), which was not run": always_averages(chunks[0])
        or _is_megatron_fsdp(chunks[0]),
        "a mixture of experts, whose router sums over Megatron's own group": config.num_moe_experts,
        "multi-latent attention, which Megatron refuses": getattr(config, "multi_latent_attention", False),
        "captured layers (--cuda-graph-impl), which keep one group": getattr(config, "cuda_graph_impl", None)
        not in (None, "none"),
        "Transformer Engine with --context-parallel-size 1, where Megatron makes no CUDA stream (use 2 or more)": any(
            getattr(core, "cp_stream", ...) is None for core in cores
        ),
    }
    if names := [name for name, is_on in refused.items() if is_on]:
        raise ScheduleError(
            f"dynamic_cp splits every micro-batch over its own ranks and cannot be combined with {names[0]}. Remove "
            "one of the two."
        )


def check_open(chunks: list[Any], *, takes_documents: bool, dynamic_cp: bool) -> None:
    """Refuse an open step where data-parallel ranks wait for each other, or something else divides by the step."""
    config, ddp = chunks[0].config, getattr(chunks[0], "ddp_config", None)
    balances = config.moe_router_load_balancing_type not in ("none", ["none"])
    coefficients = (balances and config.moe_aux_loss_coeff, config.moe_z_loss_coeff)
    refused = {
        "FSDP, which gathers weights in every forward": always_averages(chunks[0]) or _is_megatron_fsdp(chunks[0]),
        "the router's own losses, which Megatron divides by the micro-batches of a call (set moe_aux_loss_coeff and "
        "moe_z_loss_coeff to 0)": config.num_moe_experts and any(c not in (0, None, False) for c in coefficients),
        "expert parallelism, whose all-to-all joins data-parallel ranks": config.expert_model_parallel_size > 1,
        "--overlap-moe-expert-parallel-comm": getattr(config, "overlap_moe_expert_parallel_comm", False),
        "dynamic_cp, whose micro-batches are split over data-parallel ranks": dynamic_cp,
        "--docs-per-step, which decides when a step is full": takes_documents,
        "captured layers (--cuda-graph-impl)": getattr(config, "cuda_graph_impl", None) not in (None, "none"),
        "reuse_grad_buf_for_mxfp8_param_ag": getattr(ddp, "reuse_grad_buf_for_mxfp8_param_ag", False),
    }
    if names := [name for name, is_on in refused.items() if is_on]:
        raise ScheduleError(
            "an open step runs data-parallel ranks independently until it closes, so it cannot be combined with "
            f"{names[0]}. Use forward_backward, or change the model."
        )


def planned_alike(plan: Callable[[], PlannedStep], group: ProcessGroup, earlier: Sequence[bytes] = ()) -> PlannedStep:
    """The planned step, after a comparison of all ranks by `check_agreement`; every rank must call.

    `earlier`: digests of the micro-batches that an open step has run.
    """
    try:
        planned = plan()
    except StepPlanError as failure:
        check_agreement([], None, failure, group)
        raise
    check_agreement([*earlier, *(batch.digest for batch in planned.batches)], planned.plan, None, group)
    return planned


def check_agreement(
    digests: Sequence[bytes], plan: StepPlan | None, failure: StepPlanError | None, group: ProcessGroup
) -> None:
    """Raise on every rank if one could not plan, or if peers have different micro-batches (rule P9).

    `digests`: of the micro-batches, in their order.
    """
    if torch.distributed.get_world_size() == group.size():
        if failure is not None:  # every rank has it
            raise failure
        return
    digest = 0.0 if plan is None else _digest(digests, plan)
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
            raise ScheduleError(
                f"step plan differs between ranks {first} and {rank}: they are peers of one data-parallel rank and "
                "must receive the same micro-batches and flags"
            )


def _digest(digests: Sequence[bytes], plan: StepPlan) -> float:
    """48 bits of everything that the loss and the metrics read, exact in float64."""
    content = hashlib.blake2b(plan.denominators.numpy().tobytes(), digest_size=6)
    content.update(plan.agreed.to_bytes(4, "big"))
    for digest in digests:
        content.update(digest)
    return float(int.from_bytes(content.digest(), "big"))
