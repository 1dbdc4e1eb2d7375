"""What is looked at before a step runs, so that a mistake on one rank stops every rank, and stops it here."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model

from megatron_pg.batch import PackedBatch
from megatron_pg.batch.zigzag import zigzag_index
from megatron_pg.rollouts.fields import OPTIONAL
from megatron_pg.step.collectives import all_gather_rows, broadcast_text
from megatron_pg.step.errors import ContractError, StepPlanError
from megatron_pg.step.plan import StepPlan
from megatron_pg.step.settings import LossSettings


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
    for k, batch in enumerate(batches):
        zigzag_index(batch.padded_lengths, cp_rank=0, cp_size=cp_size)  # raises when they do not divide
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


def agree(batches: Sequence[PackedBatch], plan: StepPlan | None, failure: StepPlanError | None) -> None:
    """Stop every rank when one could not plan, or when model-parallel peers hold different micro-batches (rule P9)."""
    if torch.distributed.get_world_size() == parallel_state.get_data_parallel_world_size():
        if failure is not None:  # every rank has it
            raise failure
        return
    digest = 0.0 if plan is None else _digest(batches, plan)
    mine = [float(parallel_state.get_data_parallel_rank()), digest, float(failure is not None)]
    ranks = all_gather_rows(torch.tensor(mine, dtype=torch.float64)).tolist()
    if failed := [rank for rank, (_, _, has_failed) in enumerate(ranks) if has_failed]:
        raise StepPlanError(broadcast_text(str(failure or ""), failed[0])) from failure
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
        facts = [(sample.reward, sample.truncated) for sample in batch.samples]
        content.update(repr((batch.qkv_format, batch.padded_lengths, facts)).encode())
        for values in (
            batch.tokens,
            *(batch.response_values(name) for name in ("loss_mask", "old_logprobs", "advantages")),
            *(batch.optional_values(name) for name in OPTIONAL),
        ):
            content.update(b"" if values is None else values.numpy().tobytes())
    return float(int.from_bytes(content.digest(), "big"))
