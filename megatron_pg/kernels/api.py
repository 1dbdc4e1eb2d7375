"""From logits to the policy-gradient loss. `impl` picks the implementation; none falls back to another.

`torch` is the eager reference and the specification; `triton` needs a CUDA device, or TRITON_INTERPRET=1.
"""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.batch.fields import TokenFields
from megatron_pg.kernels.checks import check_for_triton, check_impl, check_labels, check_layout, check_loss
from megatron_pg.kernels.logprobs import check_logits
from megatron_pg.kernels.policy_loss import LossTerms, PolicyGradientLoss, PolicyLoss
from megatron_pg.kernels.reference import reference_loss
from megatron_pg.kernels.vocabulary import Vocabulary
from megatron_pg.objectives import objective_of

GRPOLoss = PolicyGradientLoss  # what `grpo_loss` returns


def grpo_loss(
    logits: Tensor,
    targets: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    mask: Tensor | None = None,
    clip_eps_low: float,
    clip_eps_high: float,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
    grad_divisor: float = 1.0,
    grad_scale: float = 1.0,
    tp_group: ProcessGroup | None = None,
    entropy: bool = False,
    inplace: bool = False,
    impl: str = "triton",
) -> GRPOLoss:
    """Clipped policy-gradient loss of one micro-batch from (vocabulary-parallel) logits.

        loss = sum_t w_t * -min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t)

    There is no ignore index; leave tokens out by `mask`, or by a weight of 0. A target of -100 at a trained token is a
    ValueError on a CPU. On a GPU, where a check would make the host wait, the loss and its row of the gradient are NaN.
    Computed in float32 (float64 for float64 logits). Masked tokens change neither loss nor gradient.

    Args:
        logits: [T, V / tp] this tensor-parallel rank's slice of the vocabulary.
        targets: [T] int64 global token ids, anything at tokens that are not trained. Equal on all tensor-parallel
            ranks, like every [T] field.
        old_logprobs: [T] nats, of the sampling policy at `temperature`.
        advantages: [T].
        weights: [T] the aggregation's weight of each token.
        mask: [T] bool, trained tokens. Default: weights != 0.
        clip_eps_low: distance of the lower clip bound from 1.
        clip_eps_high: distance of the upper clip bound from 1.
        temperature: tau of softmax(z / tau).
        vocab_size: columns of all tensor-parallel ranks beyond it are padding without probability. Default: none.
        softcap: c of softmax(c tanh(z / c) / tau), for logits that the model has not capped. Default: none.
        grad_divisor: the gradient, not the loss, is divided by it.
        grad_scale: the expected upstream gradient. It changes no result; another one may cost a pass over the gradient.
        tp_group: tensor-parallel group; every rank of it must call with the same T.
        entropy: also return the entropy of each trained token's distribution.
        inplace: the gradient may overwrite the logits, which nothing else may read then; not with impl="torch".
        impl: "triton" or "torch".

    Raises:
        ValueError: shapes, dtypes or options are not valid, or on a CPU a target.
    """
    columns = logits.shape[-1] if logits.dim() else 0
    vocabulary = Vocabulary.of(
        columns, temperature=temperature, vocab_size=vocab_size, softcap=softcap, tp_group=tp_group
    )
    fields = (targets, old_logprobs, advantages, weights, mask)
    policy_loss = clipped_surrogate(fields, vocabulary, clip_eps_low, clip_eps_high, grad_divisor)
    return policy_gradient_loss(
        logits, policy_loss, vocabulary, grad_scale=grad_scale, entropy=entropy, inplace=inplace, impl=impl
    )


def clipped_surrogate(
    fields: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    vocabulary: Vocabulary,
    clip_eps_low: float,
    clip_eps_high: float,
    grad_divisor: float,
) -> PolicyLoss:
    """The clipped surrogate alone; `fields` are targets, old log-probabilities, advantages, weights, mask or None.

    Raises:
        ValueError: on a CPU, a trained token's target is outside the vocabulary.
    """
    targets, old_logprobs, advantages, weights, mask = fields
    mask = weights != 0 if mask is None else mask
    known = TokenFields(targets=targets, old_logprobs=old_logprobs, advantages=advantages, weights=weights, mask=mask)
    policy_loss = PolicyLoss(_clipped_terms(clip_eps_low, clip_eps_high, grad_divisor), known)
    check_labels(policy_loss, vocabulary)
    return policy_loss


@lru_cache(maxsize=16)  # a small shard's launches cost less than what is found out about an objective
def _clipped_terms(clip_eps_low: float, clip_eps_high: float, grad_divisor: float) -> LossTerms:
    objective = objective_of("grpo", clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high)
    return LossTerms(objective=objective, grad_divisor=grad_divisor)


def policy_gradient_loss(  # noqa: D417
    logits: Tensor,
    policy_loss: PolicyLoss,
    vocabulary: Vocabulary,
    *,
    grad_scale: float = 1.0,
    entropy: bool = False,
    inplace: bool = False,
    impl: str = "triton",
) -> PolicyGradientLoss:
    """Any objective with any further terms, from (vocabulary-parallel) logits; the general form of `grpo_loss`.

        loss = policy_loss(log softmax(z / tau)[target], entropy of softmax(z / tau))

    Args:
        logits: [T, V / tp] as in `grpo_loss`, like every argument that is not named here.
        policy_loss: the loss as a function of log-probabilities and entropies, with its [T] fields. A target outside
            the vocabulary at a trained token makes the loss and its whole row of the gradient NaN, on every device.
        vocabulary: the columns of the logits, their padding, and tau.

    Raises:
        ValueError: invalid shapes, dtypes or options, or a field that a term needs is missing.
    """
    check_impl(impl)
    check_logits(logits, policy_loss.fields.targets, vocabulary)
    check_loss(logits, policy_loss, grad_scale)
    if policy_loss.terms.whole_form is not None:
        raise ValueError(
            "a loss over the whole vocabulary of a teacher needs the teacher's logits, which only the fused head "
            "computes. Use lm_head.policy_gradient_head_loss (--pg-fused-head forward)."
        )
    if impl == "torch":
        if inplace:
            raise ValueError("inplace=True cannot be done by impl='torch', which keeps the logits. Leave it off.")
        found = reference_loss(logits, policy_loss, vocabulary, entropy=entropy)
    else:
        check_layout(logits, inplace)
        check_for_triton(logits)
        from megatron_pg.kernels.triton.loss import triton_loss  # torch alone must not need Triton

        with torch.cuda.device_of(logits):
            found = triton_loss(
                logits, policy_loss, vocabulary, grad_scale=grad_scale, entropy=entropy, inplace=inplace
            )
    is_wanted = entropy or policy_loss.terms.reads_entropy
    return found if is_wanted or found.entropy is None else replace(found, entropy=None)
