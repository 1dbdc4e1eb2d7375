"""Sums over whole sequences in one launch, float64, in a fixed order, then added over context-parallel ranks.

`PolicyLoss`, the specification, takes a dozen launches for each sum.
"""

from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_pg.batch.sequences import Sequences
from megatron_pg.kernels.policy_loss import PolicyLoss
from megatron_pg.kernels.triton.terms import KernelTerms
from megatron_pg.kernels.triton.tiles import FUSED
from megatron_pg.objectives.interface.token_kernel import TokenKernel

BLOCK = 1024
LOG_RATIO, ADVANTAGE, DRIFT, OWN, WEIGHT, SUMS = (tl.constexpr(i) for i in range(6))


class SequencePointers(NamedTuple):
    """What `surrogate_kernel` reads of sequences, tensors or in the kernel pointers."""

    slots: Any  # [T] int64, S where there is no sequence
    counts: Any  # [S] float64, trained tokens of the whole sequence, at least 1
    sums: Any  # [5, S] float64 over the sequence: log-ratio, A, anchor - log π, the objective's own average, weights


def sequence_fields(policy_loss: PolicyLoss, logprobs: Tensor) -> tuple[SequencePointers, dict[str, Any]]:
    """The sums over the sequences of all context-parallel ranks, and what the kernel is compiled for.

    The ranks call with the same terms and sequences.
    """
    fields, terms, kernel = policy_loss.fields, policy_loss.terms, cast(TokenKernel, policy_loss.terms.token_kernel)
    sequences = cast(Sequences, fields.sequences)  # which check_loss has asked for
    has_one_weight = terms.objective.has_one_loss_per_sequence and fields.corrections is not None
    constants = {"OPSM": terms.opsm_anchor is not None, "ONE_WEIGHT": has_one_weight}
    count = len(sequences.counts)
    sums = torch.empty(SUMS.value, count, dtype=torch.float64, device=logprobs.device)
    if count:
        averaged = None if kernel.load_averaged is None else kernel.load_averaged()
        anchors = fields.mask if terms.opsm_anchor is None else getattr(fields, terms.opsm_anchor)
        read: list[Any] = [fields.old_logprobs, anchors, fields.advantages, fields.corrected_weights, fields.mask]
        read += [sequences.order, sequences.lengths]
        tensors = logprobs, *(values.contiguous() for values in read), sums
        options = {"AVERAGED": averaged, "BLOCK": BLOCK, "num_warps": 8} | constants | FUSED
        segment_kernel[(count,)](*tensors, count, KernelTerms.of(terms).numbers, **options)
    sequences.over_ranks(sums)
    return SequencePointers(sequences.slots.contiguous(), sequences.counts.contiguous(), sums), constants


@triton.jit(do_not_specialize=["sequences"])
def segment_kernel(
    logprobs,
    old_logprobs,
    anchors,
    advantages,
    weights,
    mask,
    order,
    lengths,
    results,
    sequences,
    numbers,
    AVERAGED: tl.constexpr,
    OPSM: tl.constexpr,
    ONE_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One sequence per program: the sums of `SequencePointers` over its trained tokens."""
    sequence = tl.program_id(0)
    block = tl.arange(0, BLOCK)
    first = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, sequence, BLOCK):
        first += tl.load(lengths + start + block, start + block < sequence, 0)
    tokens = order + tl.sum(first)
    length = tl.load(lengths + sequence)
    log_ratios = tl.zeros((BLOCK,), tl.float64)
    rewards = tl.zeros((BLOCK,), tl.float64)
    drifts = tl.zeros((BLOCK,), tl.float64)
    owns = tl.zeros((BLOCK,), tl.float64)
    shares = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, length, BLOCK):
        here = start + block < length
        token = tl.load(tokens + start + block, here, 0)
        live = here & (tl.load(mask + token, here, 0) != 0)
        logprob = tl.load(logprobs + token, live, 0.0)
        log_ratio = logprob - tl.load(old_logprobs + token, live, 0.0).to(tl.float32)
        advantage = tl.load(advantages + token, live, 0.0).to(tl.float32)
        log_ratios += log_ratio.to(tl.float64)
        rewards += advantage.to(tl.float64)
        if OPSM:
            drifts += (tl.load(anchors + token, live, 0.0).to(tl.float32) - logprob).to(tl.float64)
        if AVERAGED is not None:
            owns += tl.where(live, AVERAGED(log_ratio, advantage, numbers), 0.0).to(tl.float64)
        if ONE_WEIGHT:
            shares += tl.load(weights + token, live, 0.0).to(tl.float32).to(tl.float64)
    tl.store(results + LOG_RATIO * sequences + sequence, tl.sum(log_ratios))
    tl.store(results + ADVANTAGE * sequences + sequence, tl.sum(rewards))
    tl.store(results + DRIFT * sequences + sequence, tl.sum(drifts))
    tl.store(results + OWN * sequences + sequence, tl.sum(owns))
    tl.store(results + WEIGHT * sequences + sequence, tl.sum(shares))
