"""The trainer's log-probabilities of a step's packed rows, before it is trained."""

from dataclasses import replace

import torch
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn

from megatron_pg import PackedBatch
from megatron_pg.kernels import Vocabulary
from megatron_pg.kernels.label_logprobs import label_logprobs
from megatron_pg.kernels.sampling_masks import Restriction
from megatron_pg.rollouts.payloads import PAYLOADS
from megatron_pg.rollouts.payloads.base import Layout


@torch.no_grad()
def with_trainers_logprobs(chunks: list[nn.Module], batches: list[PackedBatch]) -> list[PackedBatch]:
    """The micro-batches with `old_logprobs` of the model under training, on every model-parallel rank.

    Args:
        chunks: this rank's (virtual) pipeline stages.
        batches: packed rows, the same on tensor- and pipeline-parallel ranks.
    """
    iterators = [iter(batches) for _ in chunks]
    losses = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks,
        num_microbatches=len(batches),
        seq_length=max(batch.num_positions for batch in batches),
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    scored = []
    for k, batch in enumerate(batches):
        logprobs = -losses[k].float() if losses else torch.empty(batch.tokens.shape, device=torch.cuda.current_device())
        if mpu.get_pipeline_model_parallel_world_size() > 1:
            source, group = mpu.get_pipeline_model_parallel_last_rank(), mpu.get_pipeline_model_parallel_group()
            torch.distributed.broadcast(logprobs, source, group=group)
        values = logprobs.flatten().cpu().double()[batch.response_positions].split(batch.lengths.tolist())
        samples = [replace(s, old_logprobs=v) for s, v in zip(batch.samples, values, strict=True)]
        scored.append(batch.with_samples(samples))
    return scored


def _forward(data_iterator, model: nn.Module):
    batch, device = next(data_iterator), torch.cuda.current_device()
    boundaries = torch.tensor([0, *batch.padded_lengths], device=device).cumsum(dim=0).int()
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    longest = dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max(batch.padded_lengths))
    packed = PackedSeqParams(qkv_format="thd", **dict.fromkeys(names, boundaries), **longest)
    tokens, positions, labels = (x.to(device) for x in (batch.tokens, batch.position_ids, batch.labels))
    if all(sample.sampling_mask is None for sample in batch.samples):
        output = model(tokens, positions, None, labels=labels, packed_seq_params=packed)  # cross-entropy [1, T]
        return output, lambda output, non_loss_data=False: output
    logits = model(tokens, positions, None, packed_seq_params=packed)  # [1, T, V / tp] on the last stage
    return logits, lambda logits, non_loss_data=False: _cross_entropy_over_masks(logits, labels, batch)


def _cross_entropy_over_masks(logits: torch.Tensor, labels: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """[1, T], over each response token's sampling mask; 0 elsewhere."""
    whole = Layout(batch.lengths.tolist(), lambda values: values)
    is_read = torch.ones_like(batch.response_positions, dtype=torch.bool)
    mask = PAYLOADS["sampling_mask"].rows(batch.records_of("sampling_mask"), whole, is_read)
    vocabulary = Vocabulary.of(logits.shape[-1], tp_group=mpu.get_tensor_model_parallel_group())
    positions = batch.response_positions.to(labels.device)
    targets, over = labels.flatten()[positions], Restriction(sampling_mask=mask.to(lambda x: x.to(labels.device)))
    logprobs, _ = label_logprobs(logits[0, positions], targets, vocabulary, impl="torch", restriction=over)
    return logprobs.new_zeros(labels.numel()).index_copy(0, positions, -logprobs).view(labels.shape)
