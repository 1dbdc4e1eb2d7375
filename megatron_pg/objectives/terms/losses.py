"""The losses of loss terms: each maps what is known of its tokens to one loss per token, [T], before weights.

What a loss reads is there: its term's declaration names it.
"""

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from megatron_pg.declarations.corrections import KL_ESTIMATORS


@dataclass(frozen=True, eq=False)
class Categories:
    """[T, C] each: C - 1 named tokens, then the tail. Categories that do not exist hold 0."""

    log_q: Tensor  # nats, of the policy being trained, differentiable
    log_p: Tensor  # nats, of the teacher
    exist: Tensor  # bool


@dataclass(frozen=True, kw_only=True, eq=False)
class TermTokens:
    """[T] of one dtype each. Tokens that are not of the loss term hold 0, and have the loss 0."""

    logprobs: Tensor  # log π, nats, differentiable
    log_ratios: Tensor | None  # log π - log π_old, differentiable; None where nothing reads it
    against: Tensor | None  # nats, of the policy that a divergence is measured from
    entropy: Tensor | None  # H of the token's distribution, nats, differentiable; None where nothing reads it
    estimator: str | None
    categories: Categories | None = None  # of a divergence over a teacher's top-k tokens
    mixture: float | None = None  # of such a divergence
    whole_divergence: Tensor | None = None  # from the teacher over the whole vocabulary, nats, differentiable


def cross_entropy(tokens: TermTokens) -> Tensor:
    """-log π."""
    return -tokens.logprobs


def divergence(tokens: TermTokens) -> Tensor:
    """The estimator's value of KL(π‖·), from x = log π - log of the other policy."""
    estimator = KL_ESTIMATORS[cast(str, tokens.estimator)].load()
    return estimator(tokens.logprobs - cast(Tensor, tokens.against), tokens.log_ratios)


def negative_entropy(tokens: TermTokens) -> Tensor:
    """-H."""
    return -cast(Tensor, tokens.entropy)


def whole_divergence(tokens: TermTokens) -> Tensor:
    """The divergence from the teacher over the whole vocabulary, which the head has made with the logits of both."""
    return cast(Tensor, tokens.whole_divergence)
