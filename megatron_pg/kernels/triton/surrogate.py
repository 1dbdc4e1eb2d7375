"""The loss from log-probabilities and entropies in one launch; `PolicyLoss`, its specification, takes 30 to 100.

That many small launches cost more host time than the device needs for a shard of logits. A loss that reads whole
sequences takes another launch first, `segments`. A loss by token over the vocabulary of one rank takes none after the
launch that reads the logits.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_pg.kernels.policy_loss import PolicyGradientLoss, PolicyLoss
from megatron_pg.kernels.triton.segments import sequence_fields
from megatron_pg.kernels.triton.terms import (
    FieldValues,
    KernelTerms,
    field_pointers,
    load_values,
    loss_terms,
    term_losses,
)
from megatron_pg.kernels.triton.tiles import FUSED, store_each
from megatron_pg.kernels.triton.vocab_parallel import OfRows, log2_scale, reading, row_statistics, store_row
from megatron_pg.kernels.vocabulary import Vocabulary

BLOCK = 256


def surrogate_loss(policy_loss: PolicyLoss, logprobs: Tensor, entropy: Tensor) -> PolicyGradientLoss:
    """`policy_loss(logprobs, entropy)` of a loss with a token kernel, from [T] float32 each, 0 where masked."""
    found: list[PolicyGradientLoss] = []
    _Surrogate.apply(logprobs, entropy, policy_loss, found)
    return found[0]


class _Surrogate(torch.autograd.Function):
    """Returns the loss alone; `found` receives it with the values per token."""

    @staticmethod
    def forward(ctx, logprobs, entropy, policy_loss, found):
        result, slopes = surrogate_and_slopes(policy_loss, logprobs.detach(), entropy.detach())
        ctx.save_for_backward(*slopes)
        found.append(result)
        return result.loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss):
        slope, bend = ctx.saved_tensors
        return slope * grad_loss, None if bend is None else bend * grad_loss, None, None


def surrogate_and_slopes(
    policy_loss: PolicyLoss, logprobs: Tensor, entropy: Tensor
) -> tuple[PolicyGradientLoss, tuple[Tensor, Tensor | None]]:
    """The same without autograd, and its derivatives by log π and by H, [T] each; None: no term reads the entropy."""
    terms, known, rows = policy_loss.terms, KernelTerms.of(policy_loss.terms), logprobs.shape[0]
    sequences = sequence_fields(policy_loss, logprobs) if terms.reads_sequences else None
    count = 0 if sequences is None else len(sequences.counts)
    out = torch.empty(len(known.results), rows, dtype=torch.float32, device=logprobs.device)
    if rows:
        read = logprobs, entropy, field_pointers(policy_loss), sequences
        numbers = known.numbers, known.coefficients, known.slope_scale, terms.opsm_threshold or 0.0
        options = known.constants | {"SEQUENCES": terms.reads_sequences, "BLOCK": BLOCK} | FUSED
        surrogate_kernel[(-(-rows // BLOCK),)](*read, out, rows, count, *numbers, **options)
    return _found(policy_loss, logprobs, entropy, out.unbind())


def loss_of_rows(
    logits: Tensor, targets: Tensor, policy_loss: PolicyLoss, vocabulary: Vocabulary, *, entropy: bool
) -> tuple[PolicyGradientLoss, OfRows]:
    """A loss by token over the vocabulary of one rank, in one launch, and what `write_gradient` needs of its rows."""
    known, rows = KernelTerms.of(policy_loss.terms), logits.shape[0]
    out = torch.empty(4 + len(known.results), rows, dtype=torch.float32, device=logits.device)
    sizes = rows, vocabulary.valid, logits.stride(0), log2_scale(vocabulary)
    numbers = known.numbers, known.coefficients, known.slope_scale
    options = reading(logits, vocabulary) | known.constants
    token_loss_kernel[(rows,)](logits, targets, field_pointers(policy_loss), out, *sizes, *numbers, **options)
    logprobs, entropies, _, _, *values = out.unbind()
    found, (_, bend) = _found(policy_loss, logprobs, entropies, values, has_entropy=entropy)
    return found, OfRows(out, by_entropies=bend)


def _found(
    policy_loss: PolicyLoss, logprobs: Tensor, entropy: Tensor, values: Sequence[Tensor], *, has_entropy: bool = True
) -> tuple[PolicyGradientLoss, tuple[Tensor, Tensor | None]]:
    """The results of a kernel by their names, and the derivatives."""
    found: dict[Any, Any] = dict(zip(KernelTerms.of(policy_loss.terms).results, values, strict=True))
    kept = found.get("kept")
    loss = PolicyGradientLoss(
        found["loss"].sum(),
        found["policy"],
        logprobs,
        found["log_ratio"],
        entropy if has_entropy else None,
        term_losses(policy_loss, found.get("kl"), entropy),
        None if kept is None else kept != 0,
        found.get("sequence_log_ratio"),
        found.get("sequence_advantage"),
    )
    return loss, (found["slope"], found.get("bend"))


@triton.jit
def _average(sums, of_slot):
    """A sum over the token's sequence divided by its trained tokens; 0 where the token has no sequence."""
    slot, known, count = of_slot
    return (tl.load(sums + slot, known, 0.0) / count).to(tl.float32)


@triton.jit
def _of_sequences(
    logprob, values, sequences, num_sequences, place, numbers, opsm_threshold, TOKEN_KERNEL: tl.constexpr
):
    """Loss, slope and fields of tokens whose objective reads sequences; stores the values of their sequence.

    `place`: results, their number of rows, and the rows of a block, whether they exist and whether they are trained.
    """
    results, rows, row, here, live = place
    old_logprob, token_advantage, weight, other_logprob, kl_weight, bonus_weight = values
    slot = tl.load(sequences.slots + row, here, num_sequences)
    known = slot < num_sequences
    count = tl.load(sequences.counts + slot, known, 1.0)
    of_slot = (slot, known, count)
    log_ratio = _average(sequences.log_ratios, of_slot)
    advantage = _average(sequences.advantages, of_slot)
    own = _average(sequences.owns, of_slot)
    numbers = numbers + (log_ratio, advantage, count.to(tl.float32), own)
    policy, slope = TOKEN_KERNEL(logprob, old_logprob, token_advantage, numbers)
    policy = tl.where(live, policy, 0.0)  # a token that is not trained has a sequence, too
    slope = tl.where(live, slope, 0.0)
    store_each(results + 6 * rows + row, rows, (log_ratio, advantage), here)
    if sequences.drifts is not None:
        drift = _average(sequences.drifts, of_slot)
        kept = ((token_advantage < 0) & (drift > opsm_threshold)) == 0
        policy = tl.where(kept, policy, 0.0)
        slope = tl.where(kept, slope, 0.0)
        tl.store(results + 8 * rows + row, kept.to(tl.float32), here)
    if sequences.weights is not None:
        weight = tl.where(live, _average(sequences.weights, of_slot), 0.0)
    return policy, slope, FieldValues(old_logprob, token_advantage, weight, other_logprob, kl_weight, bonus_weight)


@triton.jit(do_not_specialize=["rows", "num_sequences"])
def surrogate_kernel(
    logprobs,
    entropies,
    fields,
    sequences,
    results,
    rows,
    num_sequences,
    numbers,
    coefficients,
    slope_scale,
    opsm_threshold,
    TOKEN_KERNEL: tl.constexpr,
    KL: tl.constexpr,
    BONUS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Results [9, rows] in the order of `RESULTS`, with slope_scale times the derivatives.

    `fields` are `FieldPointers`, `sequences` `SequencePointers`, `coefficients` lambda and eta of `terms`.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = row < rows
    live = here & (tl.load(fields.mask + row, here, 0) != 0)
    values = load_values(fields, row, live, KL, BONUS)
    logprob = tl.load(logprobs + row, live, 0.0)
    entropy = tl.load(entropies + row, live, 0.0) if BONUS else 0.0
    if SEQUENCES:
        place = (results, rows, row, here, live)
        policy, slope, values = _of_sequences(
            logprob, values, sequences, num_sequences, place, numbers, opsm_threshold, TOKEN_KERNEL
        )
    else:
        policy, slope = TOKEN_KERNEL(logprob, values.old_logprob, values.advantage, numbers)
    of_token = (logprob, entropy, values, policy, slope)
    _store_loss(results + row, rows, here, of_token, coefficients, slope_scale, KL, BONUS)


@triton.jit
def _store_loss(result, rows, here, of_token, coefficients, slope_scale, KL: tl.constexpr, BONUS: tl.constexpr):
    """`RESULTS` of tokens without a sequence, each `rows` numbers after the previous one."""
    logprob, entropy, values, policy, slope = of_token
    loss, slope, bend, kl = loss_terms(policy, slope, logprob, entropy, values, coefficients, KL, BONUS)
    store_each(result, rows, (loss, policy, logprob - values.old_logprob, slope * slope_scale), here)
    if BONUS:
        tl.store(result + 4 * rows, bend * slope_scale, here)
    if KL is not None:
        tl.store(result + 5 * rows, kl, here)


@triton.jit(do_not_specialize=["rows"])
def token_loss_kernel(
    logits,
    targets,
    fields,
    results,
    rows,
    valid,
    stride,
    c,
    numbers,
    coefficients,
    slope_scale,
    TOKEN_KERNEL: tl.constexpr,
    KL: tl.constexpr,
    BONUS: tl.constexpr,
    WALK: tl.constexpr,
):
    """One row per program: the results of `store_row` [4, rows], then those of `surrogate_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    live = tl.load(fields.mask + row) != 0
    values = load_values(fields, row, live, KL, BONUS)
    of_row = (logits, targets, row, live, valid, 0, stride, c)
    m, s, t, target_logit, exists = row_statistics(*of_row, WALK)
    logprob, entropy = store_row(results + row, rows, m, s, t, target_logit, c, exists, live, True)
    policy, slope = TOKEN_KERNEL(logprob, values.old_logprob, values.advantage, numbers)
    of_token = (logprob, entropy, values, policy, slope)
    _store_loss(results + 4 * rows + row, rows, True, of_token, coefficients, slope_scale, KL, BONUS)
