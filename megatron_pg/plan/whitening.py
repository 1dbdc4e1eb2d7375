"""Advantages whitened over the whole step, with an exact mean and variance: the same bits under any layout."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.plan.collectives import gathered
from megatron_pg.plan.facts import limbs_of, whole_of
from megatron_pg.plan.plan import warn_if_alone
from megatron_pg.rollouts.fields import POLICY
from megatron_pg.rollouts.sample import Sample

_UNIT = 2**1074  # every float64 is an integer of 2^-1074
_LIMBS = 140  # of 32 bits, for sums of squares: integers of 2^-2148 below 2^2200


def whiten_advantages(
    samples: Sequence[Sample], *, group: ProcessGroup | None = None, epsilon: float = 1e-8
) -> list[Sample]:
    """A' = (A - mean) / √(var + ε) at the objective's trained tokens, mean and variance over those of the whole step.

    var = Σ (A - mean)² / (T - 1), as in `masked_whiten` of verl and slime. Both sums are exact and rounded once, so the
    result does not depend on the layout. One collective. Source: REINFORCE++, arXiv 2501.03262.

    Args:
        samples: this rank's samples of the step, before they are packed; those of other loss terms, and a critic's
            without advantages, stay as they are.
        group: the data-parallel ranks, which hold the step's other samples and must all call; None: this rank has
            every sample of the step.
        epsilon: ε, equal on every rank.

    Raises:
        ValueError: on every rank, if the step has fewer than two trained tokens of the objective.
    """
    warn_if_alone("whiten_advantages", group)
    policy = [sample for sample in samples if sample.term == POLICY and sample.advantages is not None]
    values = torch.cat([torch.zeros(0), *(cast(Tensor, s.advantages)[s.loss_mask] for s in policy)]).double()
    count, total, squares = _sums(values, group)
    if count < 2:
        raise ValueError(
            f"the step has {count} trained tokens of the objective, and a variance needs two. Mask fewer tokens."
        )
    mean = Fraction(total, count)
    variance = (Fraction(squares, count) - mean * mean) * Fraction(count, count - 1)
    center, scale = float(mean / _UNIT), math.sqrt(float(variance / _UNIT**2) + epsilon)
    whitened = {id(s): (cast(Tensor, s.advantages) - center) / scale for s in policy}
    return [replace(s, advantages=whitened[id(s)]) if id(s) in whitened else s for s in samples]


def _sums(values: Tensor, group: ProcessGroup | None) -> tuple[int, int, int]:
    """Number, sum and sum of squares of all ranks' values, in units of 2^-1074 and 2^-2148."""
    counted = Counter(values.tolist())
    integers = {int(Fraction(value) * _UNIT): n for value, n in counted.items()}
    sums = [len(values), sum(a * n for a, n in integers.items()), sum(a * a * n for a, n in integers.items())]
    of_ranks = gathered(torch.tensor([limbs_of(value, _LIMBS) for value in sums]), group)
    return cast(tuple[int, int, int], tuple(map(whole_of, of_ranks.sum(dim=0))))
