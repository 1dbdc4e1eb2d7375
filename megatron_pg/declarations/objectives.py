"""The objectives: the loss of one token, and the numbers that it reads."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from megatron_pg.declarations.declaration import ABOVE_ONE, Number, Numbers, Reads, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveDeclaration:
    """An objective NAME, an entry of `OBJECTIVES`: formula, numbers and kind. Its functions are found by its name.

    The module `megatron_pg.objectives.NAME` has `NAME(tokens, parameters) -> [T]`, and may have `outside` (to [T] bool
    each: above and below its bounds) and `averaged` (to [T], whose averages over whole sequences the loss reads). The
    Triton module `megatron_pg.kernels.triton.token_kernels` has `NAME`, and `NAME_averaged` where there is `averaged`.
    """

    formula: str
    numbers: Reads = field(default_factory=dict)
    bounds: Mapping[str, str] = field(default_factory=dict)  # of its numbers: rows of the banner, to be formatted
    advice: Callable[[Numbers], str | None] = lambda numbers: None  # on legal numbers that are probably wrong
    published_with: str | None = None  # the aggregation that it is published with, where it matters
    reads_sequences: bool = False  # a token's loss depends on its whole sequence
    has_one_loss_per_sequence: bool = False  # so that its tokens must have one weight
    has_one_advantage_per_sequence: bool = False
    module: str = ""  # of its functions; empty: megatron_pg.objectives.NAME
    no_token_kernel: str = ""  # why kernels do not compute it; empty: they do, by `token_kernels.NAME`
    role: str = "policy"  # of the model that it trains; a critic's value v takes the place of log π
    reads: tuple[str, str] = ("old_logprobs", "advantages")  # of the samples: the model's old output, and the target

    def bound_rows(self, numbers: Numbers) -> list[tuple[str, str]]:
        """Rows of the banner, from its numbers by name; `lower` and `upper` are the clip bounds."""
        clip = {"lower": 1 - numbers.get("clip_eps_low", 0.0), "upper": 1 + numbers.get("clip_eps_high", 0.0)}
        return [(name, text.format(**numbers, **clip)) for name, text in self.bounds.items()]

    def token_kernel_numbers(self, numbers: Numbers) -> tuple[float, ...]:
        """The numbers of its token kernel: its own in order, with bounds of the ratio for their distances from 1."""
        sides = {CLIP_EPS_LOW: -1.0, CLIP_EPS_HIGH: 1.0}
        return tuple(1.0 + sides[n] * numbers[n.name] if n in sides else numbers[n.name] for n in self.numbers)

    def load(self, name: str) -> tuple[Callable, Callable | None, Callable | None]:
        """The functions `name`, `outside` and `averaged` of its module; None where the module has none."""
        module = import_module(self.module or f"megatron_pg.objectives.{name}")
        return getattr(module, name), getattr(module, "outside", None), getattr(module, "averaged", None)


CLIP_EPS_LOW = Number(
    name="clip_eps_low",
    low=0.0,
    high=1.0,
    requirement="between 0 and 1 (1 switches the bound off)",
    flag="--pg-clip-eps-low",
)
CLIP_EPS_HIGH = Number(name="clip_eps_high", low=0.0, requirement="finite and >= 0", flag="--pg-clip-eps-high")
VALUE_CLIP = positive("clip", "--pg-value-clip")
CAP = Number(name="cap", low=ABOVE_ONE, requirement="finite and > 1")  # of the ratio
WEIGHT_CAP = Number(
    name="cap",
    low=1.0,
    requirement="finite and >= 1 (an absolute cap of the ratio: 1.28 is what others call an upper eps of 0.28)",
)
DELTA_LOW, DELTA_HIGH = positive("delta_low"), positive("delta_high")
TAU_POS, TAU_NEG = positive("tau_pos"), positive("tau_neg")
BETA = positive("beta")
_K_POS, _LAMBDA_POS, _K_NEG, _LAMBDA_NEG = map(positive, ("k_pos", "lambda_pos", "k_neg", "lambda_neg"))
_TAU = Number(name="tau", low=0.0, requirement="finite and >= 0 (0 switches the pull off)")

_CLIP: Reads = {CLIP_EPS_LOW: 0.2, CLIP_EPS_HIGH: 0.2}
_DPPO: Reads = {DELTA_LOW: None, DELTA_HIGH: None, CAP: math.inf}
_R = "r = exp(log π - log π_old)"
_SEQUENCE_R = "R = exp(mean of log r over the sequence)"
_PRODUCT = "W = Π r over the sequence"


def _trust_region(unit: str) -> dict[str, str]:
    return {
        "trust region": f"{{delta_high:g}} where A > 0, {{delta_low:g}} where A < 0, {unit}  (delta_high, delta_low)",
        "cap": "c = {cap:g}, for both signs of A  (cap)",
    }


def _clipped(variable: str) -> str:
    return f"{variable} in [{{lower:g}}, {{upper:g}}]  (--pg-clip-eps-low/-high)"


def _wide_eps_message(numbers: Numbers) -> str | None:
    widest = max(numbers.values())
    if widest <= 0.05:
        return None
    return (
        f"clips the geometric mean of a sequence's ratios, which an eps of {widest:g} almost never reaches. Leave the "
        "clip flags out, for the paper's 3e-4 and 4e-4."
    )


def _gspo(**rest: Any) -> ObjectiveDeclaration:
    """What the two objectives of sequence ratios share."""
    return ObjectiveDeclaration(
        numbers={CLIP_EPS_LOW: 3e-4, CLIP_EPS_HIGH: 4e-4},
        advice=_wide_eps_message,
        published_with="sample_mean",
        reads_sequences=True,
        **rest,
    )


OBJECTIVES = {
    "grpo": ObjectiveDeclaration(
        formula=f"ℓ = -min(r·A, clip(r)·A), {_R}", numbers=_CLIP, bounds={"clip": _clipped("r")}
    ),
    "dual_clip": ObjectiveDeclaration(
        formula=f"ℓ = -min(r·A, clip(r)·A), and min(that, -c·A) where A < 0, {_R}",
        numbers={**_CLIP, CAP: None},
        bounds={"clip": _clipped("r"), "dual clip": "c = {cap:g}  (cap)"},
    ),
    "gspo": _gspo(
        formula=f"ℓ = -min(R·Ā, clip(R)·Ā), {_SEQUENCE_R}, Ā = mean of A",
        bounds={"clip": _clipped("R")},
        has_one_loss_per_sequence=True,
    ),
    "gspo_token": _gspo(
        formula=f"ℓ = -min(s·A, clip(s)·A), s = sg[R]·π/sg[π], {_SEQUENCE_R}", bounds={"clip": _clipped("s")}
    ),
    "cispo": ObjectiveDeclaration(
        formula=f"ℓ = -sg[min(max(r, lo), cap)]·A·log π, {_R}",
        numbers={CLIP_EPS_LOW: 1.0, WEIGHT_CAP: None},
        bounds={"clip": "weight in [{lower:g}, {cap:g}]  (--pg-clip-eps-low, cap, which is absolute)"},
    ),
    "sapo": ObjectiveDeclaration(
        formula=f"ℓ = -(4/τ)·σ(τ(r - 1))·A, {_R}",
        numbers={TAU_POS: 1.0, TAU_NEG: 1.05},
        bounds={"tau": "{tau_pos:g} where A > 0, else {tau_neg:g}  (tau_pos, tau_neg)"},
    ),
    "dppo_tv": ObjectiveDeclaration(
        formula=f"ℓ = -sg[min(r, c)]·A·log π where |π - π_old| is inside the trust region, {_R}",
        numbers=_DPPO,
        bounds=_trust_region("probability"),
    ),
    "dppo_kl": ObjectiveDeclaration(
        formula=f"ℓ = -sg[min(r, c)]·A·log π where KL of the token is inside the trust region, {_R}",
        numbers=_DPPO,
        bounds=_trust_region("nats"),
    ),
    "reinforce": ObjectiveDeclaration(formula="ℓ = -A·log π"),
    "reinforce_is": ObjectiveDeclaration(module="megatron_pg.objectives.reinforce", formula=f"ℓ = -r·A, {_R}"),
    "dro": ObjectiveDeclaration(
        formula=f"ℓ = -A·log π + (β/2)·(log r)², {_R}", numbers={BETA: None}, bounds={"pull": "β = {beta:g}  (beta)"}
    ),
    "topr": ObjectiveDeclaration(
        formula=f"ℓ = -sg[c]·A·log π, c = 1 where A >= 0, else min(W, 1), {_PRODUCT}, {_R}", reads_sequences=True
    ),
    "topr_token": ObjectiveDeclaration(
        module="megatron_pg.objectives.topr", formula=f"ℓ = -sg[c]·A·log π, c = 1 where A >= 0, else min(r, 1), {_R}"
    ),
    "ipo": ObjectiveDeclaration(
        formula=f"ℓ = -r·A where π - π_old is inside the band, and everywhere + τ·(log r)², {_R}",
        numbers={DELTA_LOW: 0.2, DELTA_HIGH: 0.2, _TAU: 1e-3},
        bounds={
            "band": "π - π_old in [-{delta_low:g}, {delta_high:g}], for both signs of A  (delta_low, delta_high)",
            "pull": "τ = {tau:g}  (tau)",
        },
    ),
    "vespo": ObjectiveDeclaration(
        formula=f"ℓ = -sg[φ]·A·log π, φ = W^k·exp(λ(1 - W)), {_PRODUCT}, {_R}",
        numbers={_K_POS: 2.0, _LAMBDA_POS: 3.0, _K_NEG: 3.0, _LAMBDA_NEG: 2.0},
        bounds={
            "k, λ": "{k_pos:g}, {lambda_pos:g} where A > 0, else {k_neg:g}, {lambda_neg:g}  "
            "(k_pos, lambda_pos, k_neg, lambda_neg)"
        },
        reads_sequences=True,
    ),
    "gmpo": ObjectiveDeclaration(
        formula=f"ℓ = -G·A, G = exp(mean over the sequence of log r clipped towards A), {_R}",
        numbers={positive("eps_low"): 0.4, positive("eps_high"): 0.4},
        bounds={"clip": "log r <= {eps_high:g} where A >= 0, >= -{eps_low:g} where A < 0  (eps_high, eps_low)"},
        published_with="sample_mean",
        reads_sequences=True,
        has_one_loss_per_sequence=True,
        has_one_advantage_per_sequence=True,
    ),
}
VALUE_LOSS = "value_loss"  # the objective of `--pg-role critic`, which has no name among those of policies
CRITIC = ObjectiveDeclaration(
    formula="ℓ = ½·max((v - R)², (v_c - R)²), v_c = v held to v_old ± clip",
    numbers={VALUE_CLIP: math.inf},
    bounds={"clip": "{clip:g} on either side of v_old, inf: off  (--pg-value-clip)"},
    no_token_kernel="its values are one number per token",
    role="critic",
    reads=("values", "returns"),
)
ELSEWHERE = {
    "ppo": "grpo",
    "ppo_clip": "grpo",
    "vanilla": "grpo",
    "dapo": "grpo with --pg-clip-eps-high 0.28",
    "dr_grpo": "grpo with --loss-aggregation constant",
    "gpg": "reinforce",
    "geo_mean": "gmpo",
    "luspo": "gspo with --loss-aggregation constant --loss-aggregation-divisor 1",
    "clip_cov": "grpo with --pg-correction clip_cov",
    "kl_cov": "reinforce_is with --pg-correction kl_cov",
    "rloo": "reinforce",
    "dppo": "dppo_tv or dppo_kl",
    "two_sided": "dual_clip,cap=…, the same loss",  # removed in 0.3.0
}
DEFAULT = "grpo"
