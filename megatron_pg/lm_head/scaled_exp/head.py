"""The mode "scaled_exp" of the fused head: its first product ends in scaled exponentials, so no logits are stored.

One dot product per row gives the target's logit before the product. The product can therefore end in exponentials
relative to the target. bfloat16 keeps them to the same relative precision at any size; their sums are never rounded
below float32:

    s_j = z_j log2(e) / tau,   E_j = 2^(s_j - s_y - 60) for j != y,   S = sum_{j != y} E_j
    log π(y) = -log(1 + 2^60 S),   p_j = E_j / (S + 2^-60)
    E_y := -S,   v = -slope / (tau (S + 2^-60)),   dX = v ∘ (E W),   dW = E^T (v ∘ x) + r

Both factors of dW are rounded. r is what that took at the targets: v E_y x less the product of its rounded factors. A
target has half of its row's gradient or more, so the remaining error is at most that of one rounded factor.

Here slope is the derivative of the loss by log π(y). With a softcap z is the capped logit, and after S was summed each
E_j is multiplied by dz_j/dx_j = 1 - (z_j / c)². With 60 both ends are far away: E keeps columns of 2^-66 of the
target's probability, and is exact up to E = 2^90, that is log π(y) > -103. Below, S only gives an upper bound of the
log-probability. If the loss is the same for all lower values (a ratio below its bound), the row has no gradient.
Otherwise it is NaN, and the step stops.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_pg.kernels import Vocabulary
from megatron_pg.lm_head import products
from megatron_pg.lm_head.products import logits_dtype

HEADROOM = 60.0  # E_y would be 2^-60
LIMIT = 90.0  # largest log2 E; the sum of 2^37 such columns, and their product with weights, are still finite


class Part(NamedTuple):
    """Some of the rows, before and after the product."""

    states: Tensor  # [c, H]
    scaled: Tensor  # [c, V / tp], which the product fills
    targets: Tensor  # [c]
    target_logits: Tensor  # [c] s_y; `weigh` leaves E dz/dx there


class ScaledExpOutput(NamedTuple):
    """Results of a part of the rows; those of an unknown row become NaN."""

    loss: Tensor  # []
    logprobs: Tensor  # [c], like the log-ratios
    log_ratios: Tensor


class ScaledExp:
    """The steps in torch, of this rank's columns: the specification."""

    def __init__(self, weight: Tensor, vocabulary: Vocabulary):
        self._weight, self._vocabulary = weight, vocabulary
        self._scale = math.log2(math.e) / vocabulary.temperature
        self._cap = None if vocabulary.softcap is None else vocabulary.softcap * self._scale  # of s

    def target_logits(self, hidden: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
        """[n] s_y of the `rows` of hidden states [T, H]; 0 where another rank owns the target."""
        local, owned = self._vocabulary.owned(targets)
        logits = hidden.new_empty(len(rows), dtype=logits_dtype(hidden))
        for part in products.slices(len(rows), products.chunk_rows(self._weight, 1)):
            states, of_targets = hidden.index_select(0, rows[part]), self._weight.index_select(0, local[part])
            x = (states.to(logits.dtype) * of_targets.to(logits.dtype)).sum(dim=1)
            logits[part] = self._vocabulary.capped(x) * self._scale
        return torch.where(owned, logits, 0)

    def product(self, rows: Part) -> Tensor:
        """[c] S of this rank's columns. Fills `scaled` with E dz/dx, 0 at targets and in padding."""
        states, scaled, targets, target_logits = rows
        local, owned = self._vocabulary.owned(targets)
        sums = torch.empty_like(target_logits)
        for part in products.slices(len(states), products.chunk_rows(self._weight, 1)):
            x = products.product(states[part], self._weight.t(), target_logits.dtype)
            s = self._vocabulary.capped(x) * self._scale
            e = (s - (target_logits[part, None] + HEADROOM)).clamp_(max=LIMIT).exp2_()
            e[:, self._vocabulary.valid :] = 0
            at = local[part, None]
            e.scatter_(1, at, torch.where(owned[part, None], 0, e.gather(1, at)))
            sums[part] = e.sum(dim=1)
            scaled[part] = self._vocabulary.through_cap(e, x).to(scaled.dtype)
        return sums

    def logprobs(self, shares: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """[c] S and log π(y) from every rank's S [tp, c]; NaN where the target is not in the vocabulary."""
        sums = self._vocabulary.defined(shares.sum(dim=0), targets)
        return sums, logprobs_of(sums)

    def weigh(self, rows: Part, sums: Tensor, slopes: Tensor, v: Tensor, output: ScaledExpOutput) -> None:
        """Fills `v` [c], writes E dz/dx at the targets, also over s_y, and v ∘ x over the states x.

        If a row's loss depends on a log-probability that S does not determine, v and the row's output become NaN. A
        slope of 0 shows independence only for a ratio below 1: the true ratio may be below a ratio above 1.
        """
        states, scaled, targets, target_logits = rows
        depends = (slopes != 0) | (output.log_ratios > 0)
        unknown = torch.where((sums >= 2.0**LIMIT) & depends, torch.nan, 0.0).to(v.dtype)
        output.loss.add_(unknown.sum())
        output.logprobs.add_(unknown)
        output.log_ratios.add_(unknown)
        v.copy_((unknown - slopes) / (sums + 2.0**-HEADROOM) / self._vocabulary.temperature)
        local, owned = self._vocabulary.owned(targets)
        at = local[:, None]
        of_targets = -sums if self._cap is None else sums * ((target_logits / self._cap) ** 2 - 1)
        scaled.scatter_(1, at, torch.where(owned[:, None], of_targets[:, None].to(scaled.dtype), scaled.gather(1, at)))
        target_logits.copy_(of_targets)
        states.copy_(v[:, None] * states)

    def add_lost(self, hidden: Tensor, rows: Tensor, targets: Tensor, v: Tensor, e: Tensor, total: Tensor) -> None:
        """Adds r to the weight gradient `total` [V / tp, H]; `e` [n] are the E dz/dx of targets that `weigh` wrote."""
        local, owned = self._vocabulary.owned(targets)
        for part in products.slices(len(rows), products.ROWS):
            x, factor, at = hidden.index_select(0, rows[part]), v[part, None], e[part, None]
            lost = factor * at * x - at.to(x.dtype) * (factor * x).to(x.dtype).to(v.dtype)
            total.index_put_((local[part],), torch.where(owned[part, None], lost, 0).to(total.dtype), accumulate=True)

    def scatter(self, product: Tensor, v: Tensor, rows: Tensor, of_hidden: Tensor) -> None:
        """Writes v ∘ product [c, H] into the `rows` [c] of the hidden states' gradient, rounded once."""
        of_hidden.index_copy_(0, rows, (v[:, None] * product).to(of_hidden.dtype))


def logprobs_of(sums: Tensor) -> Tensor:
    """log π(y) of S, to the last bits near 0 too."""
    far = sums.log() + HEADROOM * math.log(2)  # where 1 + 2^60 S rounds to 2^60 S
    return -torch.where(sums < 1, torch.log1p(sums * 2.0**HEADROOM), far)
