"""Which reader a loss needs, and the loss from the reader's outputs, in torch or in few launches of Triton kernels."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_pg.kernels.policy_loss import PolicyGradientLoss, PolicyLoss
from megatron_pg.kernels.readers import PlainReader, Reader, Slopes
from megatron_pg.kernels.sampling_masks import Restriction, SamplingMaskReader
from megatron_pg.kernels.teacher import TeacherLogits, TeacherReader
from megatron_pg.kernels.topk import TopKReader, topk_logprobs
from megatron_pg.kernels.vocabulary import Vocabulary

Detail = Tensor | Restriction | TeacherLogits | None  # ids [n, K], what the rows are restricted to, or their teacher


def detail_of(policy_loss: PolicyLoss, *, entropy: bool) -> Tensor | Restriction | None:
    """What the reader of a loss on stored logits needs in addition to the targets."""
    restriction = policy_loss.restriction(entropy)
    return policy_loss.topk_ids if restriction is None else restriction


def reader_of(
    impl: str, vocabulary: Vocabulary, targets: Tensor, detail: Detail = None, mask: Tensor | None = None
) -> Reader:
    """The reader of rows with these targets; `mask`: the rows that Triton kernels read, None: all."""
    if impl == "torch":
        if detail is None:
            return PlainReader(vocabulary, targets)
        if isinstance(detail, Tensor):
            return TopKReader(vocabulary, targets, detail)
        if isinstance(detail, Restriction):
            return SamplingMaskReader(vocabulary, targets, detail)
        return TeacherReader(vocabulary, targets, detail)
    from megatron_pg.kernels.triton import sampling_masks, teacher, topk, vocab_parallel  # torch needs no Triton

    if detail is None:
        return vocab_parallel.TritonPlainReader(vocabulary, targets, mask=mask)
    if isinstance(detail, Tensor):
        return topk.TritonTopKReader(vocabulary, targets, detail.contiguous(), mask=mask)
    if isinstance(detail, Restriction):
        return sampling_masks.TritonSamplingMaskReader(vocabulary, targets, detail, mask=mask)
    return teacher.TritonTeacherReader(vocabulary, targets, detail)


def loss_of(
    policy_loss: PolicyLoss, outputs: Sequence[Tensor], vocabulary: Vocabulary, impl: str
) -> PolicyGradientLoss:
    """The loss from the `outputs` of its reader's statistics; differentiable."""
    (logprobs, entropy, *details), ids = outputs, policy_loss.topk_ids
    if impl == "triton" and ids is not None:
        from megatron_pg.kernels.triton.topk_loss import topk_loss

        return topk_loss(policy_loss, outputs, ids, vocabulary)
    if impl == "triton" and policy_loss.token_kernel:
        from megatron_pg.kernels.triton.surrogate import surrogate_loss

        return surrogate_loss(policy_loss, logprobs, entropy)
    if ids is not None:
        head, tail = details
        return policy_loss(logprobs, entropy, topk_logprobs(head, tail, ids, vocabulary))
    return policy_loss(logprobs, entropy, divergence=details[0] if details else None)


def loss_and_slopes(
    policy_loss: PolicyLoss, outputs: Sequence[Tensor], vocabulary: Vocabulary, impl: str
) -> tuple[PolicyGradientLoss, Slopes]:
    """The loss, detached, and its derivatives by the `outputs` of its reader's statistics."""
    if impl == "triton":
        from megatron_pg.kernels.triton.surrogate import surrogate_and_slopes

        logprobs, entropy, *details = outputs
        if policy_loss.token_kernel:
            return surrogate_and_slopes(policy_loss, logprobs, entropy)
        has_teacher = policy_loss.terms.whole_form is not None and bool(details)
        if has_teacher and (rest := replace(policy_loss, terms=policy_loss.terms.without_teacher)).token_kernel:
            return _with_divergence(policy_loss, details[0], *surrogate_and_slopes(rest, logprobs, entropy))
    with torch.enable_grad():
        leaves = [values.detach().requires_grad_() for values in outputs]
        result = loss_of(policy_loss, leaves, vocabulary, impl)
        slopes = torch.autograd.grad(result.loss, leaves, materialize_grads=True, allow_unused=True)
    return replace(result, loss=result.loss.detach()), slopes


def _with_divergence(
    policy_loss: PolicyLoss, divergence: Tensor, rest: PolicyGradientLoss, slopes: Slopes
) -> tuple[PolicyGradientLoss, Slopes]:
    """Adds the loss terms over the teacher's hidden states to the loss of the others."""
    terms = [term for term in policy_loss.terms.further if term.reads_hidden]
    fields, dtype = [policy_loss.fields.of_term(term.name) for term in terms], rest.loss.dtype
    own = zip(terms, fields, strict=True)
    weights = [torch.where(each.mask, term.weight * each.weights, 0).to(dtype) for term, each in own]
    losses = [torch.where(each.mask, divergence, 0) for each in fields]
    # NaN at a weight of 0, too
    added = [(weight * values).sum() for weight, values in zip(weights, losses, strict=True)]
    weight, divisor = sum(weights[1:], start=weights[0]), policy_loss.terms.grad_divisor
    by_divergence = weight if divisor == 1.0 else weight / divisor
    return rest.with_terms(policy_loss, added, losses), (*slopes, by_divergence)
