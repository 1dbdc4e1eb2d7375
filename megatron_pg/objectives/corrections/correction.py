"""Corrections for the mismatch of trainer and rollout engine: one factor per token on the policy loss.

    ρ = exp(log π_old - log π_rollout) of a token,   P = product of ρ over the trained tokens of the sequence

All but opsm depend on data alone, so they are made on the CPU from whole samples, before denominators are counted and
before context parallelism slices anything: a factor is one more weight. Log-ratios and their sums are clamped to
±MAX_LOG_RATIO before exp. docs/corrections.md has the sources.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from megatron_pg.declarations.corrections import CORRECTIONS, CorrectionDeclaration
from megatron_pg.objectives.dppo_kl import token_divergence
from megatron_pg.objectives.interface.tokens import ratio
from megatron_pg.rollouts.sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A correction and its bounds. The same on every rank."""

    name: str
    low: float | None = None
    high: float | None = None
    fraction: float | None = None  # f, of the step's tokens
    coef: float | None = None  # β
    words: tuple[str, ...] = ()  # its further options, as declared

    @property
    def declared(self) -> CorrectionDeclaration:
        """What it is, without its numbers."""
        return CORRECTIONS[self.name]


NONE = Correction(name="none")
_ENOUGH = 16  # equal tokens that are not an accident

Factors = tuple[Tensor, Tensor]  # [n] float64 factor and [n] bool kept, of a sequence's n trained tokens


def tis(log_rho: Tensor, low: float, high: float) -> Factors:
    """Truncated importance sampling per token."""
    return ratio(log_rho).clamp(low, high), torch.ones_like(log_rho, dtype=torch.bool)


def seq_tis(log_rho: Tensor, low: float, high: float) -> Factors:
    """Truncated importance sampling per sequence."""
    return tis(log_rho.sum().expand_as(log_rho), low, high)


def icepop(log_rho: Tensor, low: float, high: float) -> Factors:
    """Importance sampling per token, 0 out of bounds."""
    return _within(ratio(log_rho), low, high)


def kpop(old: Tensor, rollout: Tensor, low: None, high: float) -> Factors:
    """Importance sampling per token, 0 where the KL over the token and all others is above the bound in a direction."""
    p, q = old.clamp(max=0), rollout.clamp(max=0)  # rounding may lift them above 0
    kept = torch.maximum(token_divergence(p, q), token_divergence(q, p)) <= high
    return torch.where(kept, ratio(old - rollout), 0), kept


def mis(log_rho: Tensor, low: float, high: float) -> Factors:
    """Importance sampling per sequence, 0 out of bounds."""
    return icepop(log_rho.sum().expand_as(log_rho), low, high)


def seq_mask_tis(log_rho: Tensor, low: float, high: float) -> Factors:
    """Importance sampling per token in the sequences whose geometric mean of ρ is in bounds."""
    _, kept = _within(ratio(log_rho.mean()).expand_as(log_rho), low, high)
    return torch.where(kept, ratio(log_rho), 0), kept


def _within(values: Tensor, low: float, high: float) -> Factors:
    kept = (low <= values) & (values <= high)
    return torch.where(kept, values, 0), kept


def reject(level: str, divergence: str, log_rho: Tensor, low: float, high: float) -> Factors:
    """Tokens as they are where the divergence is in bounds; all divergences estimate KL(rollout‖trainer)."""
    values = _LEVELS[level](_DIVERGENCES[divergence](log_rho)).expand_as(log_rho)
    kept = (values <= high) & (values >= low)
    return kept.double(), kept


_LEVELS: dict[str, Callable[[Tensor], Tensor]] = {
    "token": lambda d: d,
    "seq_sum": torch.sum,
    "seq_mean": torch.mean,
    "seq_max": torch.amax,
}
_DIVERGENCES = {"k1": lambda x: -x, "k2": lambda x: x.square() / 2, "k3": lambda x: ratio(x) - 1 - x}


def of_trained(sample: Sample, values: Tensor | None) -> Tensor:
    """[n] of the sample's trained tokens; that the values are there, the correction's declaration requires."""
    return cast(Tensor, values)[sample.loss_mask]


def correction_factors(samples: Sequence[Sample], correction: Correction, level: str = "sample") -> Factors | None:
    """[sum of R] float64 factor and [sum of R] bool kept, 1 and False where masked; None when data do not decide.

    A sequence is the whole sample, or under the level "turn" each turn.

    Raises:
        ValueError: old_logprobs are rollout_logprobs.
    """
    declared = correction.declared
    factors_of = declared.load()
    if factors_of is None and not (declared.selection and declared.reads == "rollout_logprobs"):
        return None
    trained = [(of_trained(s, s.old_logprobs), of_trained(s, s.rollout_logprobs)) for s in samples]
    informative = sum(int((old != 0).sum()) for old, _ in trained)  # a certain token is 0 under both
    if informative >= _ENOUGH and all(torch.equal(old, rollout) for old, rollout in trained):
        raise ValueError(
            f"old_logprobs equal rollout_logprobs in all {informative} trained tokens of a micro-batch. "
            f"--pg-correction {correction.name} has nothing to correct; recompute old_logprobs with the trainer, or "
            "remove the flag."
        )
    if factors_of is None:
        return None
    factors, kept = [torch.ones(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.bool)]
    for sample, (old, rollout) in zip(samples, trained, strict=True):
        mask = sample.loss_mask
        factors.append(torch.ones(len(mask), dtype=torch.float64))
        kept.append(torch.zeros(len(mask), dtype=torch.bool))
        if mask.any():
            numbers = correction.low, correction.high
            trained_of = [int(part.sum()) for part in mask.split(sample.sequence_lengths(level))]
            read = (old, rollout) if declared.reads_logprobs else (old - rollout,)
            parts = zip(*(values.split([n for n in trained_of if n]) for values in read), strict=True)
            of_parts = [factors_of(*correction.words, *values, *numbers) for values in parts]
            factors[-1][mask], kept[-1][mask] = (torch.cat(each) for each in zip(*of_parts, strict=True))
    return torch.cat(factors), torch.cat(kept)
