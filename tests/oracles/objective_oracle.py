"""Independent oracle of every objective, correction, penalty and bonus: closed forms in numpy float64, no autograd.

    loss = sum_t w_t kappa_t gamma_t loss_t  +  beta sum_t v_t kl_t  -  eta sum_t v_t H_t        (t: trained tokens)

    d loss / d z_j = (w kappa gamma g + beta v g_kl) (1[j = y] - p_j) / tau  +  eta v p_j (log p_j + H) / tau

with g = d loss_t / d l, l the log-probability of the token y, w the weight of the policy loss and v that of the other two
terms. Under gspo and gmpo w kappa gamma is the document's mean of it in the gradient: see `sequence_share`. A step is all documents of one optimizer step, over all ranks and micro-batches.

Trap: fields at mask 0 may be NaN. They are dropped before any arithmetic; multiplying them by a mask would let them in.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

MAX_LOG_RATIO = 20.0

# What a correction takes where Settings leaves a bound out: the usual values. opsm has none for its threshold.
USUAL_BOUNDS = {
    "none": (None, None),
    "tis": (0.0, 2.0),
    "seq_tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "mis": (0.0, 3.0),
    "seq_mask_tis": (0.999, 1.002),
    "opsm": (None, None),
}


@dataclass
class Document:
    """One sample: the n response positions and the logit rows that predict them, over a vocabulary of V.

    Args:
        logits: [n, V]; row t predicts targets[t].
        targets: [n] in [0, V).
        mask: [n] bool; True marks a trained token. No other field is read where it is False.
        old: [n] nats, log-probabilities of the anchor policy at the same temperature.
        advantages: [n].
        rollout: [n] nats, log-probabilities of the rollout engine; needed by the corrections, opsm does without.
        ref: [n] nats, log-probabilities of the reference policy; needed by a KL coefficient other than 0.
        kept: [n] bool, what a choice of the whole step leaves in the policy term; None: everything.
        penalised: [n] bool, tokens with the further loss penalty_coef |log r|, of the policy's weights; None: there are none.
        rollout_id: hashable, shared by the samples of one trajectory; None: the sample is its own trajectory.
        prompt_id: hashable, shared by the samples of one prompt group; needed by prompt_mean.
    """

    logits: np.ndarray
    targets: np.ndarray
    mask: np.ndarray
    old: np.ndarray
    advantages: np.ndarray
    rollout: np.ndarray | None = None
    ref: np.ndarray | None = None
    kept: np.ndarray | None = None
    penalised: np.ndarray | None = None
    rollout_id: object = None
    prompt_id: object = None


@dataclass
class Settings:
    """What a step computes. A field that the chosen objective or correction does not name is not read."""

    objective: str = "grpo"
    aggregation: str = "sample_mean"
    divisor: float | None = None  # L of constant
    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None  # c > 1; dppo: of the weight, None: not capped
    cispo_cap: float | None = None  # an absolute ratio >= 1, not a distance from 1
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    dppo_delta_low: float | None = None  # probability (tv) or nats (kl), for A < 0
    dppo_delta_high: float | None = None  # the same for A > 0
    dro_beta: float | None = None
    ipo_low: float = 0.2  # probability
    ipo_high: float = 0.2
    ipo_tau: float = 1e-3
    vespo_k_pos: float = 2.0  # for A > 0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0  # elsewhere
    vespo_lambda_neg: float = 2.0
    gmpo_low: float = 0.4  # nats
    gmpo_high: float = 0.4
    temperature: float = 1.0
    correction: str = "none"
    correction_low: float | None = None
    correction_high: float | None = None  # opsm: the threshold, nats per token
    penalty_coef: float = 0.0
    denominator: str = "scheduled"
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    aux_aggregation: str = "default"
    per_token: bool = False  # Megatron's calculate_per_token_loss
    grad_divisor: float = 1.0

    def __post_init__(self):
        choices = {
            "objective": OBJECTIVES,
            "aggregation": ("sample_mean", "prompt_mean", "token_mean", "constant"),
            "correction": USUAL_BOUNDS,
            "denominator": ("scheduled", "live", "kept"),
            "kl_estimator": KL_ESTIMATORS,
            "aux_aggregation": ("default", "policy"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not defined; choose one of {', '.join(allowed)}.")
        needs = {
            "dual_clip": ("dual_clip",),
            "cispo": ("cispo_cap",),
            "dppo_tv": ("dppo_delta_low", "dppo_delta_high"),
            "dppo_kl": ("dppo_delta_low", "dppo_delta_high"),
            "dro": ("dro_beta",),
        }
        for name in needs.get(self.objective, ()):
            if getattr(self, name) is None:
                raise ValueError(f"{name}=None leaves {self.objective} undefined; give a number.")
        if self.aggregation == "constant" and self.divisor is None:
            raise ValueError("divisor=None leaves constant without a denominator; give a positive number.")
        if self.objective == "dual_clip" and self.dual_clip <= 1:
            raise ValueError(f"dual_clip={self.dual_clip} is not above 1 and would clip on-policy tokens; raise it.")
        if self.objective == "cispo" and self.cispo_cap < 1:
            raise ValueError(f"cispo_cap={self.cispo_cap} is below 1: it is the cap itself, not a distance from 1.")
        if self.correction == "opsm" and self.correction_high is None:
            raise ValueError("correction_high=None leaves opsm without a threshold; give one in nats per token.")
        if self.correction == "opsm" and self.denominator == "kept":
            raise ValueError("denominator='kept' needs what opsm knows only after the forward; choose another.")

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """Lower and upper bound of the correction."""
        low, high = USUAL_BOUNDS[self.correction]
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )


@dataclass
class Result:
    """What `step` returns: one entry per document in each list; arrays hold 0 at mask 0.

    loss = pg_loss + kl_coef * kl_loss - entropy_coef * entropy_loss + penalty_coef * penalty; the coefficients are in none of the parts.
    """

    loss: float
    pg_loss: float  # sum of w kappa gamma loss_t
    kl_loss: float  # sum of v kl_t
    entropy_loss: float  # sum of v H_t
    gradients: list[np.ndarray]  # [n, V], d loss / d logits / grad_divisor
    weights: list[float]  # w of the document's trained tokens; 0 for a document that counts in no unit
    aux_weights: list[float]  # v likewise
    token_losses: list[np.ndarray]  # [n], loss_t without w, kappa or gamma
    factors: list[np.ndarray]  # [n], kappa gamma
    penalty: float = 0.0  # sum of w |log r| over the penalised tokens


@dataclass
class Tokens:
    """The k trained tokens of one document, k >= 1, in order."""

    log_probabilities: np.ndarray  # [k, V], of softmax(logits / temperature)
    targets: np.ndarray
    new: np.ndarray
    old: np.ndarray
    advantages: np.ndarray
    rollout: np.ndarray | None
    ref: np.ndarray | None
    kept: np.ndarray | None = None
    penalised: np.ndarray | None = None

    @property
    def log_ratio(self) -> np.ndarray:
        return self.new - self.old

    @property
    def ratio(self) -> np.ndarray:
        """pi_new / pi_old, with the log-ratio clamped to +-MAX_LOG_RATIO."""
        return bounded_exp(self.log_ratio)

    @property
    def moves(self) -> np.ndarray:
        """1 where the clamp leaves the log-ratio alone, its bounds included, else 0."""
        return 1.0 * (np.abs(self.log_ratio) <= MAX_LOG_RATIO)

    @property
    def entropy(self) -> np.ndarray:
        """-sum_j p_j log p_j in nats; a probability of 0 adds 0."""
        return -p_log_p(self.log_probabilities).sum(axis=1)


def bounded_exp(x: np.ndarray | float) -> np.ndarray | float:
    """exp of x clamped to +-MAX_LOG_RATIO."""
    return np.exp(np.clip(x, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def p_log_p(log_probabilities: np.ndarray, shift: np.ndarray | float = 0.0) -> np.ndarray:
    """p (log p + shift), 0 where p is 0."""
    p = np.exp(log_probabilities)
    return p * (np.where(p > 0, log_probabilities, 0.0) + shift)


def log_softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probabilities of softmax(logits / temperature) along the last axis, in nats."""
    scaled = logits / temperature
    scaled = scaled - scaled.max(axis=-1, keepdims=True)
    return scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))


def trained_tokens(document: Document, temperature: float) -> Tokens | None:
    """The document's trained tokens, None if it has none.

    Raises:
        ValueError: a trained token holds a value that is not finite. A logit of -inf is a column that cannot be sampled.
    """
    rows = np.flatnonzero(document.mask)
    if not len(rows):
        return None

    def pick(field: np.ndarray | None) -> np.ndarray | None:
        return None if field is None else np.asarray(field)[rows].astype(np.float64)

    log_probabilities = log_softmax(pick(document.logits), temperature)
    targets = np.asarray(document.targets)[rows]
    new = log_probabilities[np.arange(len(rows)), targets]
    fields = {"old": document.old, "advantages": document.advantages, "rollout": document.rollout, "ref": document.ref}
    fields |= {"kept": document.kept, "penalised": document.penalised}
    picked = {name: pick(field) for name, field in fields.items()}
    for name, values in {"new": new, **picked}.items():
        if values is not None and not np.isfinite(values).all():
            raise ValueError(
                f"{name} of a trained token is not finite: {values}. Mask the token out or repair the data."
            )
    return Tokens(log_probabilities=log_probabilities, targets=targets, new=new, **picked)


# ---- Objectives: (tokens, settings) -> loss_t [k], g_t [k] ----


def is_dead(ratio, advantage, settings: Settings):
    """Beyond a clip bound in the direction of the advantage. Bounds are inclusive: a ratio on one keeps its gradient."""
    too_high = (advantage > 0) & (ratio > 1 + settings.eps_high)
    too_low = (advantage < 0) & (ratio < 1 - settings.eps_low)
    return too_high | too_low


def clipped_loss(ratio, advantage, settings: Settings):
    """-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)."""
    return -np.minimum(ratio * advantage, np.clip(ratio, 1 - settings.eps_low, 1 + settings.eps_high) * advantage)


def grpo(tokens: Tokens, settings: Settings):
    """PPO's clip, 1707.06347 and 2402.03300; eps_low != eps_high: 2503.14476."""
    r, a = tokens.ratio, tokens.advantages
    return clipped_loss(r, a, settings), np.where(is_dead(r, a, settings), 0.0, -r * a * tokens.moves)


def dual_clip(tokens: Tokens, settings: Settings):
    """A < 0: min(loss of grpo, -c A), 1912.09729."""
    loss, g = grpo(tokens, settings)
    negative = tokens.advantages < 0
    capped = np.where(negative, np.minimum(loss, -settings.dual_clip * tokens.advantages), loss)
    return capped, np.where(negative & (tokens.ratio > settings.dual_clip), 0.0, g)


def segment_ratio(tokens: Tokens) -> tuple[float, bool]:
    """exp of the mean log-ratio of all trained tokens of the document, and whether the clamp leaves the mean alone.

    The notes clamp "the log-ratio"; here that is the exponent of R, the mean. Single tokens are not clamped in it, else
    R would depend on how a mean is spread over its tokens. Where it acts, no token of the document has a gradient.
    """
    mean = tokens.log_ratio.mean()
    return bounded_exp(mean), abs(mean) <= MAX_LOG_RATIO


def gspo(tokens: Tokens, settings: Settings):
    """-min(R B, clip(R) B), B the mean advantage of the document, at each of its tokens, 2507.18071.

    g is that of N tokens of equal weight: the 1 / N of the mean in R meets N of them. `sequence_share` is about others.
    """
    advantages = np.full_like(tokens.advantages, tokens.advantages.mean())
    return segment_objective(tokens, advantages, settings)


def sequence_share(coefficients: np.ndarray) -> np.ndarray:
    """What each of a document's N tokens weighs in the gradient of one loss that they share.

    S loss(R), S = sum_t c_t over the document, has d/dl_t = S loss'(R) R / N for every t: the mean of c times g, whatever
    c_t itself is, 0 included.
    """
    return np.full_like(coefficients, coefficients.sum() / len(coefficients))


def gspo_token(tokens: Tokens, settings: Settings):
    """grpo with r = sg[R] exp(l - sg[l]), whose value is R, and an advantage per token, 2507.18071."""
    return segment_objective(tokens, tokens.advantages, settings)


def segment_objective(tokens: Tokens, advantages: np.ndarray, settings: Settings):
    ratio, moves = segment_ratio(tokens)
    ratios = np.full_like(advantages, ratio)
    g = np.where(is_dead(ratios, advantages, settings), 0.0, -ratios * advantages * moves)
    return clipped_loss(ratios, advantages, settings), g


def cispo(tokens: Tokens, settings: Settings):
    """-sg[min(max(r, low), cap)] A l, 2506.13585. eps_low >= 1: no lower bound, the paper's form.

    "g = 0 where the clamp of the log-ratio acts" is said of everything that reads r, so it holds here too although r is
    in a stopped factor: the only tokens that CISPO drops.
    """
    low = max(1 - settings.eps_low, 0.0)
    scale = -np.minimum(np.maximum(tokens.ratio, low), settings.cispo_cap) * tokens.advantages
    return scale * tokens.new, scale * tokens.moves


def sapo(tokens: Tokens, settings: Settings):
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A (A = 0 gives 0 with either), 2511.20347."""
    r, a = tokens.ratio, tokens.advantages
    tau = np.where(a > 0, settings.sapo_tau_pos, settings.sapo_tau_neg)
    # 1 / (1 + e^-x) and 1 - s as e^-x s lose nothing here: x > -tau, so e^-x stays below e^tau.
    decay = np.exp(-tau * (r - 1))
    s = 1 / (1 + decay)
    return -4 / tau * s * a, -4 * s * (decay * s) * r * a * tokens.moves


def dppo(tokens: Tokens, settings: Settings, rejected: np.ndarray):
    cap = math.inf if settings.dual_clip is None else settings.dual_clip
    scale = np.where(rejected, 0.0, -np.minimum(tokens.ratio, cap) * tokens.advantages)
    return scale * tokens.new, scale * tokens.moves


def dppo_tv(tokens: Tokens, settings: Settings):
    """-sg[min(r, c)] A l, 0 where pi left pi_old by more than a probability in the direction of A, 2602.04879."""
    shift = np.exp(tokens.new) - np.exp(tokens.old)
    a = tokens.advantages
    rejected = ((a > 0) & (shift > settings.dppo_delta_high)) | ((a < 0) & (shift < -settings.dppo_delta_low))
    return dppo(tokens, settings, rejected)


def log_one_minus_exp(x: np.ndarray) -> np.ndarray:
    """log(1 - e^x) for x <= 0."""
    with np.errstate(divide="ignore"):
        return np.where(x > -math.log(2), np.log(-np.expm1(x)), np.log1p(-np.exp(x)))


def binary_kl(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """KL of Bernoulli(e^old) from Bernoulli(e^new) in nats; an old probability of 1 has no second term."""
    rest = -np.expm1(old)
    certain = rest <= 0
    others = np.where(certain, 0.0, log_one_minus_exp(np.where(certain, -1.0, old)) - log_one_minus_exp(new))
    return np.exp(old) * (old - new) + np.where(certain, 0.0, rest * others)


def dppo_kl(tokens: Tokens, settings: Settings):
    """As dppo_tv, by the KL of the token against all others. The notes have one threshold; here one for each sign of A."""
    a = tokens.advantages
    threshold = np.where(a > 0, settings.dppo_delta_high, settings.dppo_delta_low)
    away = ((a > 0) & (tokens.new > tokens.old)) | ((a < 0) & (tokens.new < tokens.old))
    return dppo(tokens, settings, away & (binary_kl(tokens.old, tokens.new) > threshold))


def reinforce(tokens: Tokens, settings: Settings):
    """-A l, 2402.14740. Reads no ratio, so no clamp acts."""
    return -tokens.advantages * tokens.new, -tokens.advantages


def reinforce_is(tokens: Tokens, settings: Settings):
    """-r A, not clipped."""
    loss = -tokens.ratio * tokens.advantages
    return loss, loss * tokens.moves


def dro(tokens: Tokens, settings: Settings):
    """(beta / 2) (d - A / beta)^2 - A^2 / (2 beta) - A l_old, d = l - l_old: 2405.19107's regression. It has no ratio to clamp."""
    beta, d, a = settings.dro_beta, tokens.log_ratio, tokens.advantages
    return beta / 2 * (d - a / beta) ** 2 - a**2 / (2 * beta) - a * tokens.old, beta * (d - a / beta)


def tapered(tokens: Tokens, log_weight):
    """-sg[c] A l, c = 1 for A >= 0 and the ratio up to 1 for A < 0; e^d of a d <= 0 needs no clamp."""
    c = np.where(tokens.advantages >= 0, 1.0, np.exp(np.minimum(log_weight, 0.0)))
    return -c * tokens.advantages * tokens.new, -c * tokens.advantages


def topr(tokens: Tokens, settings: Settings):
    """Ratio of the whole document, 2503.14286."""
    return tapered(tokens, tokens.log_ratio.sum())


def topr_token(tokens: Tokens, settings: Settings):
    return tapered(tokens, tokens.log_ratio)


def ipo(tokens: Tokens, settings: Settings):
    """-1[-low <= pi - pi_old <= high] r A + tau d^2 (prime-rl)."""
    shift = np.exp(tokens.new) - np.exp(tokens.old)
    kept = (shift <= settings.ipo_high) & (shift >= -settings.ipo_low)
    surrogate = np.where(kept, -tokens.ratio * tokens.advantages, 0.0)
    d = tokens.log_ratio
    return surrogate + settings.ipo_tau * d**2, surrogate * tokens.moves + 2 * settings.ipo_tau * d


def vespo(tokens: Tokens, settings: Settings):
    """-sg[phi(W)] A l, phi(W) = W^k e^(lambda (1 - W)), 2602.10693. log W is clamped, and beyond nothing moves."""
    total = tokens.log_ratio.sum()
    weight = bounded_exp(total)
    rises = tokens.advantages > 0
    shape = np.where(rises, settings.vespo_k_pos, settings.vespo_k_neg)
    rate = np.where(rises, settings.vespo_lambda_pos, settings.vespo_lambda_neg)
    scale = -(weight**shape) * np.exp(rate * (1 - weight)) * tokens.advantages
    return scale * tokens.new, scale * (abs(total) <= MAX_LOG_RATIO)


def gmpo(tokens: Tokens, settings: Settings):
    """-sgn(A) prod_t |min(r_t A, clip(r_t, e^-low, e^high) A)|^(1 / N), 2507.20673, A one number per document.

    g is that of N tokens of equal weight, as in `gspo`.
    """
    a = tokens.advantages
    bounded = np.clip(tokens.log_ratio, -settings.gmpo_low, settings.gmpo_high)
    log_ratio = np.where(a >= 0, np.minimum(tokens.log_ratio, bounded), np.maximum(tokens.log_ratio, bounded))
    alive = log_ratio == tokens.log_ratio
    mean = log_ratio.mean()
    loss = -a * bounded_exp(mean)
    return loss, loss * alive * (abs(mean) <= MAX_LOG_RATIO)


OBJECTIVES: dict[str, Callable] = {
    "grpo": grpo,
    "dual_clip": dual_clip,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "reinforce": reinforce,
    "reinforce_is": reinforce_is,
    "dro": dro,
    "topr": topr,
    "topr_token": topr_token,
    "ipo": ipo,
    "vespo": vespo,
    "gmpo": gmpo,
}
ONE_LOSS_PER_DOCUMENT = ("gspo", "gmpo")


# ---- Corrections: (tokens, settings) -> gamma [k], kappa [k] bool ----


def correction(tokens: Tokens, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Weight gamma and keep mask kappa of each trained token; neither is differentiated.

    What an indicator zeroes is rejected: it is kappa, also for icepop and mis, so `kept` does not count it. tis and
    seq_tis reject nothing. Bounds are inclusive. Every exponent (token, sum, mean) is clamped to +-MAX_LOG_RATIO.
    """
    ones, all_kept = np.ones(len(tokens.new)), np.ones(len(tokens.new), dtype=bool)
    if tokens.kept is not None:
        return ones, tokens.kept == 1
    low, high = settings.bounds
    if settings.correction == "none":
        return ones, all_kept
    if settings.correction == "opsm":
        # 2512.02556 means by pi_old what the inference engine reports: rollout; old stands in where there is none.
        # kappa is by token: the document's divergence, the token's own advantage.
        sampled = tokens.old if tokens.rollout is None else tokens.rollout
        strays = (sampled - tokens.new).mean() > high
        return ones, ~((tokens.advantages < 0) & strays)
    if tokens.rollout is None:
        raise ValueError(f"correction={settings.correction!r} needs rollout log-probabilities; a document has none.")
    mismatch = tokens.old - tokens.rollout
    rho, product = bounded_exp(mismatch), ones * bounded_exp(mismatch.sum())
    if settings.correction == "tis":
        return np.clip(rho, low, high), all_kept
    if settings.correction == "seq_tis":
        return np.clip(product, low, high), all_kept
    gamma, tested = {
        "icepop": (rho, rho),
        "mis": (product, product),
        "seq_mask_tis": (rho, ones * bounded_exp(mismatch.mean())),
    }[settings.correction]
    return gamma, (low <= tested) & (tested <= high)


# ---- KL: (x = l - f, r) -> value [k], g [k] ----


def kl_k1(x, r):
    return x, np.ones_like(x)


def kl_k2(x, r):
    return x * x / 2, x


def kl_k3(x, r):
    # Only the exponent is clamped, in the value and in g alike: the penalty still acts where pi << pi_ref, and g of
    # the weighted form stays r x. Differentiating the clamped value would give +1 there, the wrong direction.
    inverse = bounded_exp(-x)
    return inverse - 1 + x, 1 - inverse


def kl_abs(x, r):
    return np.abs(x), np.sign(x)


def kl_k1_weighted(x, r):
    return r * x, r * (x + 1)


def kl_k3_weighted(x, r):
    return r * kl_k3(x, r)[0], r * x


KL_ESTIMATORS: dict[str, Callable] = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
    "abs": kl_abs,
    "k1_weighted": kl_k1_weighted,
    "k3_weighted": kl_k3_weighted,
}


def kl_penalty(tokens: Tokens, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Value and g of the penalty at each token; zeros without reference log-probabilities.

    The weighted forms read r = pi_new / pi_old of the token, whatever the objective's ratio, so their g is 0 where its
    clamp acts; that clamp does not concern the others.
    """
    if tokens.ref is None:
        if settings.kl_coef:
            raise ValueError(f"kl_coef={settings.kl_coef} needs reference log-probabilities; a document has none.")
        return np.zeros(len(tokens.new)), np.zeros(len(tokens.new))
    value, g = KL_ESTIMATORS[settings.kl_estimator](tokens.new - tokens.ref, tokens.ratio)
    return value, g * tokens.moves if settings.kl_estimator.endswith("_weighted") else g


# ---- Weights ----


def document_weights(
    documents: Sequence[Document], aggregation: str, divisor: float | None, denominator: str, num_kept: Sequence[int]
) -> list[float]:
    """1 / delta of each document's trained tokens.

        sample_mean: delta = N_r max(M_rollout, 1)      constant: delta = N_r L
        prompt_mean: delta = P max(M_prompt, 1)         token_mean: delta = T

    denominator: scheduled counts every unit and every trained token; live only units with a trained token; kept only
    kept tokens and units that have one. A document without a trained token, and under live and kept one whose unit does
    not count, weighs 0.
    """
    trained = [int(np.count_nonzero(d.mask)) for d in documents]
    rollouts = [("sample", i) if d.rollout_id is None else d.rollout_id for i, d in enumerate(documents)]
    if aggregation == "prompt_mean" and any(d.prompt_id is None for d in documents):
        raise ValueError("prompt_mean needs a prompt_id for every document; one has None.")
    keys = {
        "sample_mean": rollouts,
        "prompt_mean": [d.prompt_id for d in documents],
        "token_mean": ["step"] * len(documents),
        "constant": rollouts,
    }[aggregation]
    tokens_of = Counter(dict.fromkeys(keys, 0))
    for key, count in zip(keys, num_kept if denominator == "kept" else trained, strict=True):
        tokens_of[key] += count
    units = {key for key in keys if denominator == "scheduled" or tokens_of[key] > 0}
    weights = []
    for key, count in zip(keys, trained, strict=True):
        per_unit = divisor if aggregation == "constant" else max(tokens_of[key], 1)
        weights.append(1 / (len(units) * per_unit) if count and key in units else 0.0)
    return weights


def both_weights(documents, settings: Settings, num_kept: Sequence[int]) -> tuple[list[float], list[float]]:
    """Weights of the policy loss, and of the KL and entropy terms.

    No correction touches KL and entropy, so their own kappa is 1 everywhere: under `kept` their default weights count
    as `live` does. With the kept counts, a wholly rejected document would enter with delta = N_r * 1.
    """
    policy = document_weights(documents, settings.aggregation, settings.divisor, settings.denominator, num_kept)
    if settings.aux_aggregation == "policy":
        return policy, policy
    unit = "token_mean" if settings.per_token else "sample_mean"
    counting = "live" if settings.denominator == "kept" else settings.denominator
    return policy, document_weights(documents, unit, None, counting, num_kept)


# ---- The step ----


def logit_gradient(tokens: Tokens, coefficient: np.ndarray, bonus: float, temperature: float) -> np.ndarray:
    """[k, V]: (c (1[j = y] - p_j) + bonus p_j (log p_j + H)) / tau."""
    gradient = -coefficient[:, None] * np.exp(tokens.log_probabilities)
    gradient[np.arange(len(coefficient)), tokens.targets] += coefficient
    gradient += bonus * p_log_p(tokens.log_probabilities, tokens.entropy[:, None])
    return gradient / temperature


def spread(document: Document, values: np.ndarray) -> np.ndarray:
    """Values of the trained tokens at their positions, 0 elsewhere."""
    result = np.zeros((len(document.mask), *values.shape[1:]))
    result[np.flatnonzero(document.mask)] = values
    return result


def step(documents: Sequence[Document], settings: Settings) -> Result:
    """Loss and logit gradients of one optimizer step.

    Raises:
        ValueError: no trained token in the step, a trained value that is not finite, or a missing field.
    """
    trained = [trained_tokens(document, settings.temperature) for document in documents]
    if not any(tokens is not None for tokens in trained):
        raise ValueError("the step has no trained token, so no mean is defined. Give at least one.")
    corrections = [None if tokens is None else correction(tokens, settings) for tokens in trained]
    num_kept = [0 if pair is None else int(pair[1].sum()) for pair in corrections]
    weights, aux_weights = both_weights(documents, settings, num_kept)
    pg, kl, entropy, penalty = [], [], [], []
    gradients, token_losses, factors = [], [], []
    for document, tokens, pair, w, v in zip(documents, trained, corrections, weights, aux_weights, strict=True):
        if tokens is None:
            gradients.append(np.zeros(np.shape(document.logits)))
            token_losses.append(np.zeros(len(document.mask)))
            factors.append(np.zeros(len(document.mask)))
            continue
        gamma, kappa = pair
        # where, not a product: a rejected token is absent, whatever its weight.
        factor = np.where(kappa, gamma, 0.0)
        loss, g = OBJECTIVES[settings.objective](tokens, settings)
        kl_value, kl_g = kl_penalty(tokens, settings)
        pg.extend(w * factor * loss)
        kl.extend(v * kl_value)
        entropy.extend(v * tokens.entropy)
        of_penalty = np.zeros(len(loss)) if tokens.penalised is None else w * tokens.penalised
        penalty.extend(of_penalty * np.abs(tokens.log_ratio))
        share = sequence_share(w * factor) if settings.objective in ONE_LOSS_PER_DOCUMENT else w * factor
        coefficient = share * g + settings.kl_coef * v * kl_g
        coefficient = coefficient + settings.penalty_coef * of_penalty * np.sign(tokens.log_ratio)
        rows = logit_gradient(tokens, coefficient, settings.entropy_coef * v, settings.temperature)
        gradients.append(spread(document, rows / settings.grad_divisor))
        token_losses.append(spread(document, loss))
        factors.append(spread(document, factor))
    pg_loss, kl_loss, entropy_loss = math.fsum(pg), math.fsum(kl), math.fsum(entropy)
    further = math.fsum(penalty)
    loss = pg_loss + settings.kl_coef * kl_loss - settings.entropy_coef * entropy_loss + settings.penalty_coef * further
    return Result(loss, pg_loss, kl_loss, entropy_loss, gradients, weights, aux_weights, token_losses, factors, further)
