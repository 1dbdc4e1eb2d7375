"""The corrections for the mismatch of trainer and rollout engine, and the estimators of the KL term.

ρ = exp(log π_old - log π_rollout) of a token, P = Π ρ over the sequence; over the T trained tokens of the whole step
cov = (A - mean A)(log π_old - mean log π_old).
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megatron_pg.declarations.declaration import ABOVE_ZERO, Number, Reads, load, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionDeclaration:
    """A selection of tokens by data of the whole step, with functions of `objectives.corrections.selections`."""

    key: str  # the number by which tokens are selected
    reads: tuple[str, ...]  # fields of the sample that the key is computed from
    is_centred: bool = False  # the key also reads the means of these fields over the step
    choice: str  # selects tokens from the keys of the step
    penalises: bool = False  # selected tokens get a penalty; False: they leave the policy term
    published_with: str | None = None  # the objective of its paper, if not the default

    def load_key(self) -> Callable:
        """From a sample, and means if `is_centred`, to [n] float64 for its trained tokens."""
        return load(f"megatron_pg.objectives.corrections.selections:{self.key}")

    def load_choice(self) -> Callable:
        """From `StepKeys` and the correction to `TokenSelection`."""
        return load(f"megatron_pg.objectives.corrections.selections:{self.choice}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionDeclaration:
    """A correction: its formula, its bounds, and the function that computes it."""

    formula: str
    numbers: Reads = field(default_factory=dict)
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # required options and their choices
    bounds: str | None = None  # what the bounds apply to, if it is never negative
    reads_sequences: bool = False  # its ratio is over a whole sequence; of rejection, its level decides
    rejects: str | None = None  # "data" or "model", which decide its rejections; None: it rejects no token
    reads: str | None = None  # field that every sample must have
    anchor: str | None = None  # field that off-policy sequences are measured from, if the model decides
    factors: str | None = None  # the function, if data of a sequence decide
    reads_logprobs: bool = False  # the function reads log π_old and log π_rollout in the place of log ρ
    selection: SelectionDeclaration | None = None  # if data of the whole step decide

    def load(self) -> Callable | None:
        """From words, log ρ of a sequence's trained tokens (`reads_logprobs`) and bounds to factors and kept tokens."""
        return None if self.factors is None else load(f"megatron_pg.objectives.corrections.correction:{self.factors}")


_LOW, _HIGH = (Number(name=name, requirement="finite") for name in ("low", "high"))
_FRACTION = Number(name="fraction", low=ABOVE_ZERO, high=math.nextafter(1.0, 0.0), requirement="between 0 and 1")
_COEF = positive("coef")  # of the penalty
PENALTY = "kl_cov"  # the correction that adds a penalty, and the name of that loss term


def _ratio(
    name: str, formula: str, low: float, high: float, *, rejects: bool, reads_sequences: bool = False
) -> CorrectionDeclaration:
    return CorrectionDeclaration(
        formula=formula,
        numbers={_LOW: low, _HIGH: high},
        bounds="a ratio of probabilities",
        reads_sequences=reads_sequences,
        rejects="data" if rejects else None,
        reads="rollout_logprobs",
        factors=name,
    )


def _opsm(anchor: str, shown: str) -> CorrectionDeclaration:
    return CorrectionDeclaration(
        formula=f"0 where A < 0 and the sequence's mean of log {shown} - log π > hi",
        numbers={_HIGH: None},
        reads_sequences=True,
        rejects="model",
        reads="rollout_logprobs" if anchor == "rollout_logprobs" else None,
        anchor=anchor,
    )


_covariance = functools.partial(
    SelectionDeclaration, key="covariance", reads=("advantages", "old_logprobs"), is_centred=True
)
CORRECTIONS = {
    "none": CorrectionDeclaration(formula="none"),
    "tis": _ratio("tis", "ℓ times min(max(ρ, lo), hi)", 0.0, 2.0, rejects=False),
    "seq_tis": _ratio("seq_tis", "ℓ times min(max(P, lo), hi)", 0.0, 2.0, rejects=False, reads_sequences=True),
    "icepop": _ratio("icepop", "ℓ times ρ where lo <= ρ <= hi, else 0", 0.5, 5.0, rejects=True),
    "kpop": CorrectionDeclaration(
        formula="ℓ times ρ where KL of π_old, π_rollout over (token, all others) is <= hi in both directions, else 0",
        numbers={_HIGH: 0.1},
        bounds="a KL divergence",
        rejects="data",
        reads="rollout_logprobs",
        factors="kpop",
        reads_logprobs=True,
    ),
    "mis": _ratio("mis", "ℓ times P where lo <= P <= hi, else 0", 0.0, 3.0, rejects=True, reads_sequences=True),
    "seq_mask_tis": _ratio(
        "seq_mask_tis",
        "ℓ times ρ where the sequence's geometric mean of ρ is in [lo, hi], else 0",
        0.999,
        1.002,
        rejects=True,
        reads_sequences=True,
    ),
    "opsm": _opsm("rollout_logprobs", "π_rollout"),
    "opsm_old": _opsm("old_logprobs", "π_old"),
    "rejection": CorrectionDeclaration(
        formula="tokens kept where {level} {estimator} of log ρ is in bounds",
        numbers={_HIGH: None, _LOW: -math.inf},
        words={"level": ("token", "seq_sum", "seq_mean", "seq_max"), "estimator": ("k1", "k2", "k3")},
        rejects="data",
        reads="rollout_logprobs",
        factors="reject",
    ),
    "m2po": CorrectionDeclaration(
        formula="0 for those of the step's tokens with the largest (log ρ)² without which its mean is at most hi",
        numbers={_HIGH: 0.04},
        bounds="a mean of squares",
        rejects="data",
        reads="rollout_logprobs",
        selection=SelectionDeclaration(
            key="squared_gap",
            reads=("old_logprobs", "rollout_logprobs"),
            choice="second_moment",
            published_with="reinforce_is",
        ),
    ),
    "clip_cov": CorrectionDeclaration(
        formula="0 for ⌊f·T⌋ of the step's tokens, drawn from those with lo < cov < hi",
        numbers={_FRACTION: 2e-4, _LOW: 1.0, _HIGH: 5.0},
        rejects="data",
        selection=_covariance(choice="drawn_between"),
    ),
    PENALTY: CorrectionDeclaration(
        formula="ℓ + β·|log r| for the ⌊f·T⌋ of the step's tokens with the largest cov",
        numbers={_FRACTION: 2e-4, _COEF: 1.0},
        selection=_covariance(choice="largest", penalises=True, published_with="reinforce_is"),
    ),
    "top_entropy": CorrectionDeclaration(
        formula="0 for the tokens whose H under the sampling policy is below the (1 - f) quantile of the step",
        numbers={_FRACTION: 0.2},
        rejects="data",
        reads="old_entropies",
        selection=SelectionDeclaration(key="entropy", reads=("old_entropies",), choice="below_quantile"),
    ),
}

ELSEWHERE = {  # names of earlier releases
    f"{level}_{estimator}": f"rejection,level={level},estimator={estimator},high=…"
    for level in CORRECTIONS["rejection"].words["level"]
    for estimator in CORRECTIONS["rejection"].words["estimator"]
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorDeclaration:
    """An estimator of KL(π‖π_ref) per token."""

    formula: str  # of x = log π - log π_ref and r = π / π_old
    flaw: str | None = None  # how its gradient differs from that of KL(π‖π_ref)
    is_weighted: bool = False  # by r, so that it reads π_old
    function: str  # of `megatron_pg.objectives.terms.kl`

    def load(self) -> Callable:
        """From x and log r, [T] each, to [T]."""
        return load(f"megatron_pg.objectives.terms.kl:{self.function}")


KL_ESTIMATORS = {
    "k1": EstimatorDeclaration(
        formula="x",
        flaw="has an expected gradient of 0, so it adds noise and no penalty. Use k1_weighted or k3_weighted, which "
        "have the right gradient.",
        function="k1",
    ),
    "k2": EstimatorDeclaration(formula="x²/2", function="k2"),
    "k3": EstimatorDeclaration(
        formula="e^-x - 1 + x",
        flaw="has the gradient of KL(π_ref‖π), not of KL(π‖π_ref). Use k3_weighted, which has the same value and the "
        "right gradient.",
        function="k3",
    ),
    "abs": EstimatorDeclaration(
        formula="|x|",
        flaw="has a gradient that is not that of a KL divergence. Use k3_weighted, which has the right one.",
        function="absolute",
    ),
    "k1_weighted": EstimatorDeclaration(formula="r·x", is_weighted=True, function="k1_weighted"),
    "k3_weighted": EstimatorDeclaration(formula="r·(e^-x - 1 + x)", is_weighted=True, function="k3_weighted"),
}
OTHER_ESTIMATORS = {  # by their names in slime and verl
    "kl": "k1",
    "mse": "k2",
    "low_var_kl": "k3_weighted, or k3 for the same gradient without the clamp at 10",
}
