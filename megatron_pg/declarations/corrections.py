"""The corrections for the mismatch of trainer and rollout engine, and the estimators of the KL term.

ρ = exp(log π_old - log π_rollout) of a token, P = Π ρ over the sequence.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_pg.declarations.declaration import Number, Reads, load


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionDeclaration:
    """A correction: how it reads, its bounds, and the function that computes it."""

    formula: str
    numbers: Reads = field(default_factory=dict)
    bounds_a_ratio: bool = False  # of probabilities, which is never below 0
    rejects: str | None = None  # "data" or "model": what its rejections are known from; None: it rejects no token
    reads: str | None = None  # field that every sample must have
    anchor: str | None = (
        None  # field that off-policy sequences are measured from, where the model's log-probability decides
    )
    factors: tuple[str, ...] | None = None  # function, and its first arguments; None: data do not decide

    def load(self) -> Callable | None:
        """From log ρ of a sequence's trained tokens and the bounds to factors, and what is kept; None: data do not decide."""
        if self.factors is None:
            return None
        function, *arguments = self.factors
        return functools.partial(load(f"megatron_pg.objectives.corrections:{function}"), *arguments)


CORRECTION_LOW = Number(
    name="correction_low",
    low=-math.inf,
    high=math.inf,
    requirement="finite",
    help="Lower bound of --pg-correction; its meaning and default are the correction's (docs/objectives.md).",
)
CORRECTION_HIGH = Number(
    name="correction_high",
    low=-math.inf,
    high=math.inf,
    requirement="finite",
    help="Upper bound of --pg-correction, likewise.",
)
NUMBERS = (CORRECTION_LOW, CORRECTION_HIGH)


def _ratio(name: str, formula: str, low: float, high: float, *, rejects: bool) -> CorrectionDeclaration:
    return CorrectionDeclaration(
        formula=formula,
        numbers={CORRECTION_LOW: low, CORRECTION_HIGH: high},
        bounds_a_ratio=True,
        rejects="data" if rejects else None,
        reads="rollout_logprobs",
        factors=(name,),
    )


def _rejection(level: str, divergence: str) -> CorrectionDeclaration:
    low: Reads = {CORRECTION_LOW: -math.inf} if divergence == "k1" else {}
    return CorrectionDeclaration(
        formula=f"tokens kept where {level} {divergence} of log ρ is in bounds",
        numbers={CORRECTION_HIGH: None, **low},
        rejects="data",
        reads="rollout_logprobs",
        factors=("reject", level, divergence),
    )


def _opsm(anchor: str, shown: str) -> CorrectionDeclaration:
    return CorrectionDeclaration(
        formula=f"0 where A < 0 and the sequence's mean of log {shown} - log π > hi",
        numbers={CORRECTION_HIGH: None},
        rejects="model",
        reads="rollout_logprobs" if anchor == "rollout_logprobs" else None,
        anchor=anchor,
    )


CORRECTIONS = {
    "none": CorrectionDeclaration(formula="none"),
    "tis": _ratio("tis", "ℓ times min(max(ρ, lo), hi)", 0.0, 2.0, rejects=False),
    "seq_tis": _ratio("seq_tis", "ℓ times min(max(P, lo), hi)", 0.0, 2.0, rejects=False),
    "icepop": _ratio("icepop", "ℓ times ρ where lo <= ρ <= hi, else 0", 0.5, 5.0, rejects=True),
    "mis": _ratio("mis", "ℓ times P where lo <= P <= hi, else 0", 0.0, 3.0, rejects=True),
    "seq_mask_tis": _ratio(
        "seq_mask_tis",
        "ℓ times ρ where the sequence's geometric mean of ρ is in [lo, hi], else 0",
        0.999,
        1.002,
        rejects=True,
    ),
    "opsm": _opsm("rollout_logprobs", "π_rollout"),
    "opsm_old": _opsm("old_logprobs", "π_old"),
    **{
        f"{level}_{divergence}": _rejection(level, divergence)
        for level in ("token", "seq_sum", "seq_mean", "seq_max")
        for divergence in ("k1", "k2", "k3")
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorDeclaration:
    """An estimator of KL(π‖π_ref) per token."""

    formula: str  # of x = log π - log π_ref and r = π / π_old
    flaw: str | None = None  # what its gradient is, where it is not that of KL(π‖π_ref)
    is_weighted: bool = False  # by r, so that it reads π_old
    function: str  # of `megatron_pg.objectives.kl`

    def load(self) -> Callable:
        """From x and log r, [T] each, to [T]."""
        return load(f"megatron_pg.objectives.kl:{self.function}")


KL_ESTIMATORS = {
    "k1": EstimatorDeclaration(
        formula="x",
        flaw="its expected gradient is 0, so it adds noise and no penalty; k1_weighted or k3_weighted has the right gradient",
        function="k1",
    ),
    "k2": EstimatorDeclaration(formula="x²/2", function="k2"),
    "k3": EstimatorDeclaration(
        formula="e^-x - 1 + x",
        flaw="its gradient is that of KL(π_ref‖π), not of KL(π‖π_ref); k3_weighted has the right one with the same value",
        function="k3",
    ),
    "abs": EstimatorDeclaration(
        formula="|x|",
        flaw="its gradient is not that of a KL divergence; k3_weighted has the right one",
        function="absolute",
    ),
    "k1_weighted": EstimatorDeclaration(formula="r·x", is_weighted=True, function="k1_weighted"),
    "k3_weighted": EstimatorDeclaration(formula="r·(e^-x - 1 + x)", is_weighted=True, function="k3_weighted"),
}
