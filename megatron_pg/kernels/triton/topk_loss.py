"""The loss from `TopKRowStatistics`: one launch per divergence; the other terms as without a teacher."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_pg.declarations.loss_terms import KINDS
from megatron_pg.kernels.policy_loss import PolicyGradientLoss, PolicyLoss
from megatron_pg.kernels.triton import divergences
from megatron_pg.kernels.triton.surrogate import surrogate_loss
from megatron_pg.kernels.triton.tiles import FUSED
from megatron_pg.kernels.triton.topk import block_of
from megatron_pg.kernels.vocabulary import Vocabulary


def topk_loss(
    policy_loss: PolicyLoss, outputs: Sequence[Tensor], ids: Tensor, vocabulary: Vocabulary
) -> PolicyGradientLoss:
    """The loss from `TopKRowStatistics.outputs` and its `topk_ids`; differentiable."""
    logprobs, entropy, head, tail = outputs
    rest = replace(policy_loss, terms=policy_loss.terms.without_teacher)
    found = surrogate_loss(rest, logprobs, entropy) if rest.token_kernel else rest(logprobs, entropy)
    added, losses, mass = _Divergences.apply(head, tail, ids, policy_loss, vocabulary)
    return replace(found.with_terms(policy_loss, [added], losses), student_mass=mass)


class _Divergences(torch.autograd.Function):
    """Of the terms over the teacher's top-k tokens: weighted sum, losses [n, T], and the student's mass [T]."""

    @staticmethod
    def forward(ctx, head, tail, ids, policy_loss, vocabulary):
        terms = [term for term in policy_loss.terms.further if term.reads_topk]
        results = torch.empty(2 * len(terms) + 1, len(ids), dtype=torch.float32, device=ids.device)
        weighted, values, (mass,) = results.split([len(terms), len(terms), 1])
        teacher = policy_loss.fields.teacher_topk
        by_head, by_tail = torch.empty_like(head), torch.empty_like(tail)
        for number, term in enumerate(terms):
            own = policy_loss.fields.of_term(term.name)
            pairs = (head, tail), (teacher.logprobs, teacher.tails), (own.mask, own.weights)
            read = (tuple(each.contiguous() for each in pair) for pair in pairs)
            written = (weighted[number], values[number], mass), (by_head, by_tail)
            scalars = ids.shape[1], vocabulary.size, term.weight, 1.0 / policy_loss.terms.grad_divisor
            form, numbers = getattr(divergences, KINDS[term.kind].function), divergences.numbers_of(term.mixture)
            constants = {"FORM": form, "NUMBERS": numbers, "TAIL_FLOOR": term.tail_floor, "FIRST": number == 0}
            options = constants | block_of(ids) | FUSED
            divergence_kernel[(len(ids),)](ids.contiguous(), *read, *written, *scalars, **options)
        ctx.save_for_backward(by_head, by_tail)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(values, mass)
        return weighted.sum(), values, mass

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, *_):
        by_head, by_tail = ctx.saved_tensors
        return by_head * grad, by_tail * grad, None, None, None


@triton.jit(do_not_specialize=["K"])
def divergence_kernel(
    ids,
    student,
    teacher,
    own,
    results,
    slopes,
    K,
    vocab_size,
    coefficient,
    slope_scale,
    FORM: tl.constexpr,
    NUMBERS: tl.constexpr,
    TAIL_FLOOR: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: the divergence, weighted and not, and slope_scale times its derivatives by log q and log Q_tail.

    Student, teacher and slopes are a number for each id and one for the tail; `own` are the term's mask and weights.
    """
    heads, tails = student
    logprobs, teacher_tails = teacher
    mask, weights = own
    weighted, values, masses = results
    by_heads, by_tails = slopes
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    token = tl.load(ids + row * K + k, k < K, -1)
    named = token >= 0
    trained = tl.load(mask + row) != 0
    head = tl.load(heads + row * K + k, named, 0.0)
    exists = tl.where(trained, token, -1) >= 0  # not `named & trained`, a mask that Triton 3.9's interpreter refuses
    log_p = tl.load(logprobs + row * K + k, exists, 0.0).to(tl.float64)
    value, slope = FORM(tl.where(exists, head, 0.0), log_p, NUMBERS)
    divergence = tl.sum(tl.where(exists, value, 0.0), 0)
    of_tail = tl.full([], 0.0, tl.float64)
    if TAIL_FLOOR is not None:
        has_tail = trained & (tl.sum(named.to(tl.int32), 0) < vocab_size)
        of_teacher = tl.where(has_tail, tl.load(teacher_tails + row).to(tl.float64), 1.0)
        of_teacher = tl.where(of_teacher < TAIL_FLOOR, TAIL_FLOOR, of_teacher)  # NaN stays
        log_q = tl.where(has_tail, tl.load(tails + row), 0.0)
        value, of_tail = FORM(log_q, tl.log(of_teacher), NUMBERS)
        divergence += tl.where(has_tail, value, 0.0)
        of_tail = tl.where(has_tail, of_tail, 0.0)
    weight = coefficient * tl.where(trained, tl.load(weights + row).to(tl.float32), 0.0)
    tl.store(values + row, divergence.to(tl.float32))
    tl.store(weighted + row, weight * divergence.to(tl.float32))
    by = (weight * slope_scale).to(tl.float64)
    slope = by * tl.where(exists, slope, 0.0)
    of_tail = by * of_tail
    if FIRST:
        mass = tl.sum(tl.where(named, tl.exp(head), 0.0), 0)
        tl.store(masses + row, mass.to(tl.float32))
    else:
        slope += tl.load(by_heads + row * K + k, k < K, 0.0)
        of_tail += tl.load(by_tails + row)
    tl.store(by_heads + row * K + k, slope, k < K)
    tl.store(by_tails + row, of_tail)
