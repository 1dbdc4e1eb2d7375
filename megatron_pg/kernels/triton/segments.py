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
from megatron_pg.kernels.triton.tiles import FUSED, store_each
from megatron_pg.objectives.interface.token_kernel import TokenKernel

BLOCK = 1024


class SequencePointers(NamedTuple):
    """What `surrogate_kernel` reads of sequences, tensors or in the kernel pointers."""

    slots: Any  # [T] int64, S where there is no sequence
    counts: Any  # [S] float64, trained tokens of the whole sequence, at least 1
    log_ratios: Any  # [S] float64 sums over the sequence, like the fields below
    advantages: Any
    owns: Any  # what the objective averages itself
    drifts: Any  # anchor - log π; None without opsm
    weights: Any  # None: the weights of a sequence are not averaged


def sequence_fields(policy_loss: PolicyLoss, logprobs: Tensor) -> SequencePointers:
    """The sums over the sequences of all context-parallel ranks, which call with the same terms and sequences."""
    fields, terms, kernel = policy_loss.fields, policy_loss.terms, cast(TokenKernel, policy_loss.terms.token_kernel)
    sequences = cast(Sequences, fields.sequences)  # which check_loss has asked for
    has_one_weight = terms.objective.has_one_loss_per_sequence and fields.corrections is not None
    anchors = None if terms.opsm_anchor is None else getattr(fields, terms.opsm_anchor)
    weights, count = fields.corrected_weights if has_one_weight else None, len(sequences.counts)
    sums = torch.empty(5, count, dtype=torch.float64, device=logprobs.device)
    if count:
        averaged = None if kernel.load_averaged is None else kernel.load_averaged()
        read = fields.old_logprobs, anchors, fields.advantages, weights, fields.mask
        of_tokens = tuple(None if values is None else values.contiguous() for values in read)
        tensors = logprobs, of_tokens, sequences.order.contiguous(), sequences.lengths.contiguous(), sums
        options = {"AVERAGED": averaged, "BLOCK": BLOCK, "num_warps": 8} | FUSED
        segment_kernel[(count,)](*tensors, count, KernelTerms.of(terms).numbers, **options)
    sequences.over_ranks(sums)
    log_ratios, advantages, owns, drifts, shares = sums.unbind()
    own = sequences.slots.contiguous(), sequences.counts.contiguous(), log_ratios, advantages, owns
    return SequencePointers(*own, None if anchors is None else drifts, None if weights is None else shares)


@triton.jit(do_not_specialize=["sequences"])
def segment_kernel(
    logprobs, of_tokens, order, lengths, results, sequences, numbers, AVERAGED: tl.constexpr, BLOCK: tl.constexpr
):
    """One sequence per program: the sums of `SequencePointers` over its trained tokens."""
    old_logprobs, anchors, advantages, weights, mask = of_tokens
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
        if anchors is not None:
            drifts += (tl.load(anchors + token, live, 0.0).to(tl.float32) - logprob).to(tl.float64)
        if AVERAGED is not None:
            owns += tl.where(live, AVERAGED(log_ratio, advantage, numbers), 0.0).to(tl.float64)
        if weights is not None:
            shares += tl.load(weights + token, live, 0.0).to(tl.float32).to(tl.float64)
    sums = (tl.sum(log_ratios), tl.sum(rewards), tl.sum(owns), tl.sum(drifts), tl.sum(shares))
    store_each(results + sequence, sequences, sums, True)
