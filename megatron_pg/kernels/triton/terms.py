"""All terms of the loss of one token, for the kernels: objective, a divergence and an entropy term.

    loss_t = w l + lambda u kl - eta v H,   and its derivatives by log π and by H

`PolicyLoss`, the specification, is torch; its `token_kernel` is set if these are all its terms.
"""

from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_pg.declarations.corrections import KL_ESTIMATORS
from megatron_pg.declarations.loss_terms import KINDS, LossTerm
from megatron_pg.kernels.policy_loss import LossTerms, PolicyLoss
from megatron_pg.kernels.triton import token_kernels
from megatron_pg.objectives.interface.token_kernel import MOST_NUMBERS, TokenKernel

# of a token, float32: the weighted loss of all terms, what `PolicyGradientLoss` has, and the derivatives by log π and H
RESULTS = "loss", "policy", "log_ratio", "slope", "bend", "kl", "sequence_log_ratio", "sequence_advantage", "kept"


class KernelTerms(NamedTuple):
    """The terms of a loss with a token kernel, as kernels are launched with them."""

    kl: LossTerm | None  # the divergence
    bonus: LossTerm | None  # the entropy term
    constants: dict[str, Any]  # compiled for: the functions of objective and KL estimator, and whether H is in the loss
    numbers: tuple[float, ...]  # of the token kernel, filled up with zeros
    coefficients: tuple[float, float]  # lambda and eta, 0 for a term that the loss does not have
    slope_scale: float  # of the derivatives
    results: tuple[str | None, ...]  # those of `RESULTS` that there are, to the last: a view costs the host 1 µs

    @classmethod
    @lru_cache(maxsize=16)  # once per settings, not per launch: a small launch costs less
    def of(cls, terms: LossTerms) -> "KernelTerms":
        """From the settings of the loss."""
        kl = next((each for each in terms.further if each.kind != "entropy"), None)
        bonus = next((each for each in terms.further if each.kind == "entropy"), None)
        kernel = cast(TokenKernel, terms.token_kernel)
        estimator = None if kl is None else getattr(token_kernels, KL_ESTIMATORS[cast(str, kl.estimator)].function)
        constants = {"TOKEN_KERNEL": kernel.load(), "KL": estimator, "BONUS": bonus is not None}
        numbers = *kernel.numbers, *[0.0] * (MOST_NUMBERS - len(kernel.numbers))
        coefficients = kl.weight if kl else 0.0, bonus.weight if bonus else 0.0
        is_found = [True] * 4 + [bonus is not None, kl is not None]
        is_found += [terms.objective.reads_sequences] * 2 + [terms.opsm_anchor is not None]
        results = tuple(name if there else None for name, there in zip(RESULTS, is_found, strict=True))
        results = results[: len(results) - is_found[::-1].index(True)]
        return cls(kl, bonus, constants, numbers, coefficients, 1.0 / terms.grad_divisor, results)


class FieldPointers(NamedTuple):
    """What the terms read per token: [T] tensors, in a kernel pointers. Contiguous, because kernels take no strides.

    A field that no term reads is None, which costs the host no work at the launch.
    """

    old_logprobs: Any
    advantages: Any
    weights: Any  # w
    mask: Any
    other_logprobs: Any  # of the policy that a divergence is measured from
    kl_weights: Any  # u
    bonus_weights: Any  # v


class FieldValues(NamedTuple):
    """In a kernel, the fields of one token or a block: float32, 0 where nothing is trained or no term reads them."""

    old_logprob: Any
    advantage: Any
    weight: Any
    other_logprob: Any
    kl_weight: Any
    bonus_weight: Any


def field_pointers(policy_loss: PolicyLoss) -> FieldPointers:
    """The fields of a micro-batch."""
    fields, (kl, bonus, *_) = policy_loss.fields, KernelTerms.of(policy_loss.terms)
    read: list[Any] = [fields.old_logprobs, fields.advantages, fields.corrected_weights, fields.mask]
    read.append(None if kl is None else getattr(fields, str(KINDS[kl.kind].against)))
    read += [None if each is None else fields.of_term(each.name).weights for each in (kl, bonus)]
    return FieldPointers(*(None if values is None else values.contiguous() for values in read))


def term_losses(policy_loss: PolicyLoss, kl: Tensor | None, entropy: Tensor) -> Tensor | None:
    """[n, T] of the n loss terms in their order, from [T] each; None: n = 0."""
    losses: list[Any] = [-entropy if term.kind == "entropy" else kl for term in policy_loss.terms.further]
    return torch.stack(losses) if losses else None


@triton.jit
def load_values(fields, token, live, KL: tl.constexpr, BONUS: tl.constexpr):
    """`FieldValues` of the tokens at the indices `token`, a scalar or a block; 0 where they are not live."""
    old_logprob = tl.load(fields.old_logprobs + token, live, 0.0).to(tl.float32)
    weight = tl.load(fields.weights + token, live, 0.0).to(tl.float32)
    advantage = tl.load(fields.advantages + token, live, 0.0).to(tl.float32)
    other_logprob = 0.0
    kl_weight = 0.0
    bonus_weight = 0.0
    if KL is not None:
        other_logprob = tl.load(fields.other_logprobs + token, live, 0.0).to(tl.float32)
        kl_weight = tl.load(fields.kl_weights + token, live, 0.0).to(tl.float32)
    if BONUS:
        bonus_weight = tl.load(fields.bonus_weights + token, live, 0.0).to(tl.float32)
    return FieldValues(old_logprob, advantage, weight, other_logprob, kl_weight, bonus_weight)


@triton.jit
def loss_terms(policy, slope, logprob, entropy, values, coefficients, KL: tl.constexpr, BONUS: tl.constexpr):
    """From the objective's loss and slope: the whole loss, its derivatives by log π and H, and the KL estimate."""
    loss = values.weight * policy
    slope = values.weight * slope
    bend = 0.0
    kl = 0.0
    if KL is not None:
        kl, kl_slope = KL(logprob, values.old_logprob, values.other_logprob)
        loss += coefficients[0] * values.kl_weight * kl
        slope += coefficients[0] * values.kl_weight * kl_slope
    # NaN in the whole row, also where the objective's slope does not read the log-probability
    slope = tl.where(logprob == logprob, slope, logprob)
    if BONUS:
        bend = -coefficients[1] * values.bonus_weight
        loss += bend * entropy
    return loss, slope, bend, kl
