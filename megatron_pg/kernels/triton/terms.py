"""All terms of the loss of one token, for the kernels: the objective by its row, a divergence and an entropy term.

    loss_t = w l + lambda u kl - eta v H,   and its derivatives by log π and by H

`PolicyLoss`, the specification, is torch; its `row` says whether these are all the terms that there are.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_pg.declarations.corrections import KL_ESTIMATORS
from megatron_pg.declarations.streams import KINDS, Stream
from megatron_pg.kernels.policy_loss import PolicyLoss
from megatron_pg.kernels.triton import rows
from megatron_pg.objectives.interface.row import MOST_NUMBERS


def _streams(policy_loss: PolicyLoss) -> tuple[Stream | None, Stream | None]:
    """The divergence and the entropy term, each None where there is none."""
    kl = next((each for each in policy_loss.terms.streams if each.kind != "entropy"), None)
    return kl, next((each for each in policy_loss.terms.streams if each.kind == "entropy"), None)


def term_fields(policy_loss: PolicyLoss) -> tuple[Tensor, ...]:
    """Old log-probabilities, advantages, weights, mask, the log-probabilities that a divergence is from, u and v.

    [T] each and contiguous, because kernels have no strides. What no term reads has the mask in its place.
    """
    fields, (kl, bonus) = policy_loss.fields, _streams(policy_loss)
    read: list[Any] = [fields.old_logprobs, fields.advantages, fields.corrected_weights, fields.mask]
    read.append(fields.mask if kl is None else getattr(fields, str(KINDS[kl.kind].against)))
    read += [fields.mask if each is None else fields.of_stream(each.name).weights for each in (kl, bonus)]
    return tuple(values.contiguous() for values in read)


def term_numbers(policy_loss: PolicyLoss) -> tuple[float, ...]:
    """`numbers_of`, and lambda and eta."""
    return *numbers_of(policy_loss), *(0.0 if each is None else each.weight for each in _streams(policy_loss))


def numbers_of(policy_loss: PolicyLoss) -> tuple[float, ...]:
    """The numbers of the row, filled up."""
    numbers = policy_loss.row.numbers if policy_loss.row else ()
    return *numbers, *[0.0] * (MOST_NUMBERS - len(numbers))


def term_constants(policy_loss: PolicyLoss) -> dict[str, Any]:
    """What a kernel is compiled for: the Triton functions of the objective and the estimator, and whether H is in the loss."""
    row, (kl, bonus) = policy_loss.row, _streams(policy_loss)
    estimator = None if kl is None else getattr(rows, KL_ESTIMATORS[kl.estimator].function)
    return {"ROW": row.load() if row else None, "KL": estimator, "BONUS": bonus is not None}


def stream_losses(policy_loss: PolicyLoss, kl: Tensor | None, entropy: Tensor) -> Tensor | None:
    """[n, T] of the n streams in their order, from [T] each; None: n = 0."""
    losses: list[Any] = [-entropy if stream.kind == "entropy" else kl for stream in policy_loss.terms.streams]
    return torch.stack(losses) if losses else None


@triton.jit
def loss_terms(
    policy,
    slope,
    logprob,
    entropy,
    old_logprob,
    weight,
    other_logprob,
    kl_weight,
    bonus_weight,
    kl_coef,
    entropy_coef,
    KL: tl.constexpr,
    BONUS: tl.constexpr,
):
    """From the row's loss and slope: the whole loss, its derivatives by log π and by H, and the value of the KL estimator."""
    loss = weight * policy
    slope = weight * slope
    bend = 0.0
    kl = 0.0
    if KL is not None:
        kl, kl_slope = KL(logprob, old_logprob, other_logprob)
        loss += kl_coef * kl_weight * kl
        slope += kl_coef * kl_weight * kl_slope
    # NaN in the whole row, also where the objective's slope does not read the log-probability
    slope = tl.where(logprob == logprob, slope, logprob)
    if BONUS:
        bend = -entropy_coef * bonus_weight
        loss += bend * entropy
    return loss, slope, bend, kl
