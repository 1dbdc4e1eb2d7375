"""The objectives: the loss of one token, and the numbers that it reads."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from megatron_pg.declarations.declaration import ABOVE_ONE, ABOVE_ZERO, Number, Numbers, Reads


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
    help="Lower clip bound of the probability ratio is 1 - EPS; 0 <= EPS <= 1, 1 switches it off. Default 0.2 (gspo "
    "and gspo_token: 3e-4; cispo: 1).",
    metavar="EPS",
)
CLIP_EPS_HIGH = Number(
    name="clip_eps_high",
    low=0.0,
    high=math.inf,
    requirement="finite and >= 0",
    help="Upper clip bound of the probability ratio is 1 + EPS; EPS >= 0. Default 0.2 (DAPO clip-higher: 0.28; gspo "
    "and gspo_token: 4e-4).",
    metavar="EPS",
)


def _above(name: str, low: float, text: str) -> Number:
    bound = 1 if low == ABOVE_ONE else 0
    return Number(name=name, low=low, high=math.inf, requirement=f"finite and > {bound}", help=text)


DUAL_CLIP = _above(
    "dual_clip",
    ABOVE_ONE,
    "c of --pg-objective dual_clip: cap of r where A < 0. With dppo_tv and dppo_kl: cap of the weight r for either "
    "sign of A; default: none.",
)
CISPO_CAP = Number(
    name="cispo_cap",
    low=1.0,
    high=math.inf,
    requirement="finite and >= 1 (an absolute cap of the ratio: 5 means r <= 5)",
    help="Upper bound of the weight of --pg-objective cispo. Absolute: 1.28 is what others call an upper eps of 0.28.",
)
SAPO_TAU_POS = _above("sapo_tau_pos", ABOVE_ZERO, "τ of --pg-objective sapo where A > 0. Default 1.")
SAPO_TAU_NEG = _above("sapo_tau_neg", ABOVE_ZERO, "τ of --pg-objective sapo elsewhere. Default 1.05.")
DPPO_DELTA_LOW = _above(
    "dppo_delta_low",
    ABOVE_ZERO,
    "Trust region of --pg-objective dppo_tv (a probability) or dppo_kl (nats) where A < 0.",
)
DPPO_DELTA_HIGH = _above("dppo_delta_high", ABOVE_ZERO, "The same where A > 0.")

DRO_BETA = _above("dro_beta", ABOVE_ZERO, "β of --pg-objective dro: strength of its pull back to π_old.")
IPO_DELTA_LOW = _above(
    "ipo_delta_low",
    ABOVE_ZERO,
    "How far below π_old a token's probability may lie under --pg-objective ipo. Default 0.2.",
)
IPO_DELTA_HIGH = _above("ipo_delta_high", ABOVE_ZERO, "How far above it. Default 0.2.")
IPO_TAU = Number(
    name="ipo_tau",
    low=0.0,
    high=math.inf,
    requirement="finite and >= 0",
    help="τ of --pg-objective ipo: strength of its pull back to π_old; 0 switches it off. Default 1e-3.",
)
VESPO_K_POS = _above("vespo_k_pos", ABOVE_ZERO, "k of --pg-objective vespo where A > 0. Default 2.")
VESPO_LAMBDA_POS = _above("vespo_lambda_pos", ABOVE_ZERO, "λ of --pg-objective vespo where A > 0. Default 3.")
VESPO_K_NEG = _above("vespo_k_neg", ABOVE_ZERO, "k of --pg-objective vespo elsewhere. Default 3.")
VESPO_LAMBDA_NEG = _above("vespo_lambda_neg", ABOVE_ZERO, "λ of --pg-objective vespo elsewhere. Default 2.")
GMPO_EPS_LOW = _above(
    "gmpo_eps_low",
    ABOVE_ZERO,
    "Lower clip bound of a token's log-ratio under --pg-objective gmpo is -EPS, in nats, where A < 0. Default 0.4.",
)
GMPO_EPS_HIGH = _above("gmpo_eps_high", ABOVE_ZERO, "Upper bound, where A >= 0. Default 0.4.")

_CLIP: Reads = {CLIP_EPS_LOW: 0.2, CLIP_EPS_HIGH: 0.2}
_DPPO: Reads = {DPPO_DELTA_LOW: None, DPPO_DELTA_HIGH: None, DUAL_CLIP: math.inf}
_R = "r = exp(log π - log π_old)"
_SEQUENCE_R = "R = exp(mean of log r over the sequence)"
_PRODUCT = "W = Π r over the sequence"


def _trust_region(unit: str) -> dict[str, str]:
    return {
        "trust region": f"{{dppo_delta_high:g}} where A > 0, {{dppo_delta_low:g}} where A < 0, {unit}  "
        "(--pg-dppo-delta-high/-low)",
        "cap": "c = {dual_clip:g}, for both signs of A  (--pg-dual-clip)",
    }


def _clipped(variable: str) -> str:
    return f"{variable} in [{{lower:g}}, {{upper:g}}]  (--pg-clip-eps-low/-high)"


def _wide_eps_message(numbers: Numbers) -> str | None:
    widest = max(numbers.values())
    if widest <= 0.05:
        return None
    return (
        f"clips the geometric mean of a sequence's ratios, which an eps of {widest:g} almost never reaches "
        "(the paper: 3e-4 and 4e-4)"
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
        numbers={**_CLIP, DUAL_CLIP: None},
        bounds={"clip": _clipped("r"), "dual clip": "c = {dual_clip:g}  (--pg-dual-clip)"},
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
        numbers={CLIP_EPS_LOW: 1.0, CISPO_CAP: None},
        bounds={"clip": "weight in [{lower:g}, {cispo_cap:g}]  (--pg-clip-eps-low, --pg-cispo-cap, which is absolute)"},
    ),
    "sapo": ObjectiveDeclaration(
        formula=f"ℓ = -(4/τ)·σ(τ(r - 1))·A, {_R}",
        numbers={SAPO_TAU_POS: 1.0, SAPO_TAU_NEG: 1.05},
        bounds={"tau": "{sapo_tau_pos:g} where A > 0, else {sapo_tau_neg:g}  (--pg-sapo-tau-pos/-neg)"},
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
        formula=f"ℓ = -A·log π + (β/2)·(log r)², {_R}",
        numbers={DRO_BETA: None},
        bounds={"pull": "β = {dro_beta:g}  (--pg-dro-beta)"},
    ),
    "topr": ObjectiveDeclaration(
        formula=f"ℓ = -sg[c]·A·log π, c = 1 where A >= 0, else min(W, 1), {_PRODUCT}, {_R}", reads_sequences=True
    ),
    "topr_token": ObjectiveDeclaration(
        module="megatron_pg.objectives.topr", formula=f"ℓ = -sg[c]·A·log π, c = 1 where A >= 0, else min(r, 1), {_R}"
    ),
    "ipo": ObjectiveDeclaration(
        formula=f"ℓ = -r·A where π - π_old is inside the band, and everywhere + τ·(log r)², {_R}",
        numbers={IPO_DELTA_LOW: 0.2, IPO_DELTA_HIGH: 0.2, IPO_TAU: 1e-3},
        bounds={
            "band": "π - π_old in [-{ipo_delta_low:g}, {ipo_delta_high:g}], for both signs of A  "
            "(--pg-ipo-delta-low/-high)",
            "pull": "τ = {ipo_tau:g}  (--pg-ipo-tau)",
        },
    ),
    "vespo": ObjectiveDeclaration(
        formula=f"ℓ = -sg[φ]·A·log π, φ = W^k·exp(λ(1 - W)), {_PRODUCT}, {_R}",
        numbers={VESPO_K_POS: 2.0, VESPO_LAMBDA_POS: 3.0, VESPO_K_NEG: 3.0, VESPO_LAMBDA_NEG: 2.0},
        bounds={
            "k, λ": "{vespo_k_pos:g}, {vespo_lambda_pos:g} where A > 0, else {vespo_k_neg:g}, {vespo_lambda_neg:g}  "
            "(--pg-vespo-k-pos, --pg-vespo-lambda-pos, -neg)"
        },
        reads_sequences=True,
    ),
    "gmpo": ObjectiveDeclaration(
        formula=f"ℓ = -G·A, G = exp(mean over the sequence of log r clipped towards A), {_R}",
        numbers={GMPO_EPS_LOW: 0.4, GMPO_EPS_HIGH: 0.4},
        bounds={
            "clip": "log r <= {gmpo_eps_high:g} where A >= 0, >= -{gmpo_eps_low:g} where A < 0  "
            "(--pg-gmpo-eps-high/-low)"
        },
        published_with="sample_mean",
        reads_sequences=True,
        has_one_loss_per_sequence=True,
        has_one_advantage_per_sequence=True,
    ),
}
ELSEWHERE = {
    "ppo": "grpo",
    "ppo_clip": "grpo",
    "vanilla": "grpo",
    "rloo": "reinforce",
    "dppo": "dppo_tv or dppo_kl",
    "two_sided": "dual_clip, the same loss with the cap as --pg-dual-clip",  # removed in 0.3.0
}
DEFAULT = "grpo"


def numbers() -> tuple[Number, ...]:
    """Every number that an objective reads, once."""
    return tuple(dict.fromkeys(number for each in OBJECTIVES.values() for number in each.numbers))
