"""All terms of the loss of one token, for the kernels: the policy term by its row, the KL term and the entropy bonus.

    loss_t = w l + beta u kl - eta u H,   and its derivatives by log π and by H

`PolicyLoss`, the specification, is torch.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megatron_pg.declarations.corrections import KL_ESTIMATORS
from megatron_pg.kernels import rows
from megatron_pg.kernels.policy_loss import PolicyLoss
from megatron_pg.objectives.row import MOST_NUMBERS


def term_fields(policy_loss: PolicyLoss) -> tuple[Tensor, ...]:
    """Old log-probabilities, advantages, weights, mask, reference log-probabilities and the weights of the other terms.

    [T] each and contiguous, because kernels have no strides. What no term reads has the mask in its place.
    """
    fields, terms = policy_loss.fields, policy_loss.terms
    refs = fields.ref_logprobs if terms.kl_coef else fields.mask
    others = fields.term_weights if terms.kl_coef or terms.entropy_coef else fields.mask
    read = (fields.old_logprobs, fields.advantages, fields.corrected_weights, fields.mask, refs, others)
    return tuple(values.contiguous() for values in read)


def term_numbers(policy_loss: PolicyLoss) -> tuple[float, ...]:
    """The numbers of the row, filled up, and the coefficients beta and eta."""
    numbers = policy_loss.row.numbers
    filled = (*numbers, *[0.0] * (MOST_NUMBERS - len(numbers)))
    return *filled, policy_loss.terms.kl_coef, policy_loss.terms.entropy_coef


def term_constants(policy_loss: PolicyLoss) -> dict[str, Any]:
    """What a kernel is compiled for: the Triton functions of the objective and the estimator, and whether H is in the loss."""
    terms = policy_loss.terms
    kl = getattr(rows, KL_ESTIMATORS[terms.kl_estimator].function) if terms.kl_coef else None
    return {"ROW": policy_loss.row.load(), "KL": kl, "BONUS": terms.entropy_coef != 0}


@triton.jit
def loss_terms(
    logprob,
    entropy,
    old_logprob,
    advantage,
    weight,
    ref_logprob,
    other_weight,
    numbers,
    kl_coef,
    entropy_coef,
    ROW: tl.constexpr,
    KL: tl.constexpr,
    BONUS: tl.constexpr,
):
    """The policy term before its weight, the whole loss, the derivatives by log π and H, and the value of the KL estimator."""
    policy, slope = ROW(logprob, old_logprob, advantage, numbers)
    loss = weight * policy
    slope = weight * slope
    bend = 0.0
    kl = 0.0
    if KL is not None:
        kl, kl_slope = KL(logprob, old_logprob, ref_logprob)
        loss += kl_coef * other_weight * kl
        slope += kl_coef * other_weight * kl_slope
    if BONUS:
        bend = -entropy_coef * other_weight
        loss += bend * entropy
    return policy, loss, slope, bend, kl
