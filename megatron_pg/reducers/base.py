"""What a reducer sees: integer counts of the whole optimizer step, never a loss, a rank or a micro-batch."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Trained tokens of the units that this process's S samples belong to, counted over the whole step.

    A unit's count includes its samples on other data-parallel ranks and in other micro-batches. Fully masked units
    count in `num_rollouts` and `num_prompts`, unless `live_only`. With `--pg-weight-denominator weights`, M and T are
    float64 sums of the tokens' weights.
    """

    tokens_per_rollout: Tensor  # [S] int64, M of the sample's rollout
    tokens_per_prompt: Tensor | None  # [S] int64, M of the sample's prompt group; None without prompt ids
    num_rollouts: int  # N_r
    num_prompts: int | None  # P
    num_tokens: float  # T
    divisor: float | None  # L
    live_only: bool = False  # units without a counted token are in neither number
    num_turns: int | None = None  # with a counted token; None where nothing reads it


def at_least(tokens: Tensor) -> Tensor:
    """[S] float64 from M of each unit: 1 where nothing is trained, so that no denominator is 0."""
    return torch.where(tokens > 0, tokens, 1).double()
