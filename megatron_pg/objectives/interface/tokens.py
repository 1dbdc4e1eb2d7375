"""What an objective sees: values per token, and the numbers that its flags set."""

import math
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from megatron_pg.declarations.objectives import CLIP_EPS_HIGH, CLIP_EPS_LOW

MAX_LOG_RATIO = 20.0  # beyond it the ratio is meaningless (e^20 = 5e8): value clamped, gradient 0, counted as a metric


def bounded(values: Tensor, low: float | Tensor = -math.inf, high: float | Tensor = math.inf) -> Tensor:
    """Values clamped to [low, high]; the gradient is 1 from bound to bound, both inclusive, and 0 outside.

    The gradient of `torch.clamp` exactly at a bound is 1 up to torch 2.13 and 0 from 2.14 on. Ratios are often exactly
    on a bound, and kernels keep their gradient there.
    """
    return torch.where(values > high, high, torch.where(values < low, low, values))


def ratio(log_ratios: Tensor) -> Tensor:
    """e^d, with d clamped to ±MAX_LOG_RATIO: finite, and without gradient beyond."""
    return bounded(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def unclamped(values: Tensor, log_ratios: Tensor) -> Tensor:
    """The values, without their gradient where `ratio` clamps."""
    return torch.where(log_ratios.abs() > MAX_LOG_RATIO, values.detach(), values)


class Parameters(SimpleNamespace):
    """The numbers of an objective, under the names of their options. The same on every rank.

    An objective of the package has the numbers that its declaration names, a custom objective those that are given.
    """

    def __getattr__(self, name: str) -> None:
        known = ", ".join(sorted(vars(self))) or "none"
        raise AttributeError(f"the number {name!r} is not given; given are: {known}. Add {given_by(name)}.")


def given_by(name: str) -> str:
    """How a user gives a number."""
    flags = {number.name: number.flag for number in (CLIP_EPS_LOW, CLIP_EPS_HIGH)}
    return flags.get(name) or f"the option {name}=… to the objective"


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """[T] of one dtype (float32 or float64) each. Tokens that are not trained hold 0, but for the averages.

    Of a critic, the values v are in the place of log π, its old values of log π_old, and its returns of A.
    """

    logprobs: Tensor  # log π, nats, differentiable
    old_logprobs: Tensor  # log π_old, nats
    advantages: Tensor  # A, never differentiated
    log_ratios: Tensor  # log π - log π_old, differentiable
    sequence_log_ratios: Tensor | None = None  # its average over the whole sequence; its gradient is the token's own
    sequence_advantages: Tensor | None = None  # average of A over the whole sequence
    sequence_lengths: Tensor | None = None  # trained tokens of the whole sequence
    sequence_average: Tensor | None = None  # of what the objective averages itself; its gradient is the token's own

    @cached_property
    def ratios(self) -> Tensor:
        """r = π / π_old, differentiable."""
        return ratio(self.log_ratios)

    @cached_property
    def weighable_logprobs(self) -> Tensor:
        """log π to multiply by a ratio without gradient; it has no gradient either where the ratio is clamped."""
        return unclamped(self.logprobs, self.log_ratios)

    @cached_property
    def sequence_ratios(self) -> Tensor:
        """R, the geometric mean of r over the whole sequence; its gradient is the token's own."""
        return ratio(cast(Tensor, self.sequence_log_ratios))

    @cached_property
    def sequence_log_weights(self) -> Tensor:
        """log W, of the product of r over the whole sequence; its gradient is the token's own."""
        return cast(Tensor, self.sequence_log_ratios) * cast(Tensor, self.sequence_lengths)
