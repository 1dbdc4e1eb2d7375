"""Independent oracle of the loss of a token: closed forms in NumPy float64, from the papers, without autograd.

Every loss gives its value and g, the derivative of the value by the log-probability l of the token y. Then

    d loss / d z_j = (g (1[j = y] - p_j) + b p_j (log p_j + H)) / tau        b: coefficient of the negative entropy -H

A divergence from a teacher gives its gradient by the logits itself (`divergence_of_row`). `step_oracle` weighs the
losses.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MAX_LOG_RATIO = 20.0


@dataclass
class Tokens:
    """The k trained tokens of one document, k >= 1, in order. A field that no loss reads is None."""

    log_probabilities: np.ndarray  # [k, V], of softmax(logits / temperature)
    targets: np.ndarray  # [k] in [0, V)
    new: np.ndarray  # [k] nats, of the targets
    old: np.ndarray | None = None  # [k] nats, of the anchor policy at the same temperature
    advantages: np.ndarray | None = None  # [k]
    rollout: np.ndarray | None = None  # [k] nats, of the rollout engine
    ref: np.ndarray | None = None  # [k] nats, of the reference policy

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


def tokens_of(logits: np.ndarray, targets: np.ndarray, temperature: float, **fields: np.ndarray | None) -> Tokens:
    """The tokens that the rows of logits [k, V] predict. A logit of -inf is a column that cannot be sampled.

    Raises:
        ValueError: a value is not finite.
    """
    log_probabilities = log_softmax(logits, temperature)
    new = log_probabilities[np.arange(len(targets)), targets]
    for name, values in {"new": new, **fields}.items():
        if values is not None and not np.isfinite(values).all():
            raise ValueError(
                f"{name} of a trained token is not finite: {values}. Mask the token out or repair the data."
            )
    return Tokens(log_probabilities, targets, new, **fields)


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


def softcapped(logits: np.ndarray, cap: float) -> tuple[np.ndarray, np.ndarray]:
    """z = c tanh(x / c) and dz/dx = 1 / cosh^2(x / c), 2408.00118; a column of -inf stays one."""
    with np.errstate(over="ignore"):
        slopes = np.cosh(logits / cap) ** -2.0
    return np.where(np.isneginf(logits), -math.inf, cap * np.tanh(logits / cap)), slopes


def logit_gradient(tokens: Tokens, slopes: np.ndarray, bonus: np.ndarray | float, temperature: float) -> np.ndarray:
    """[k, V]: (g (1[j = y] - p_j) + b p_j (log p_j + H)) / tau, with g = `slopes` and b = `bonus`."""
    gradient = -slopes[:, None] * np.exp(tokens.log_probabilities)
    gradient[np.arange(len(slopes)), tokens.targets] += slopes
    if np.any(bonus):
        shifted = p_log_p(tokens.log_probabilities, tokens.entropy[:, None])
        gradient += np.broadcast_to(bonus, slopes.shape)[:, None] * shifted
    return gradient / temperature


# ---- Objectives: (tokens, numbers by name) -> loss [k], g [k] ----

OBJECTIVES: dict[str, Callable] = {}
RANGES: dict[str, tuple[float, float]] = {}  # of the numbers, from which tests draw
ONE_LOSS_PER_DOCUMENT = ("gspo", "gmpo")


def objective(**ranges: tuple[float, float]) -> Callable:
    """Register an objective, and the ranges of those numbers that no other objective has named before."""

    def register(function: Callable) -> Callable:
        OBJECTIVES[function.__name__] = function
        RANGES.update(ranges)
        return function

    return register


def loss_of(name: str, tokens: Tokens, numbers: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """Loss and g of an objective, which takes its numbers out of `numbers`."""
    own = list(inspect.signature(OBJECTIVES[name]).parameters)[1:]
    return OBJECTIVES[name](tokens, **{number: numbers[number] for number in own if number in numbers})


def is_dead(ratio, advantage, clip_eps_low: float, clip_eps_high: float):
    """Beyond a clip bound in the direction of the advantage. Bounds are inclusive: a ratio on one keeps its
    gradient."""
    return ((advantage > 0) & (ratio > 1 + clip_eps_high)) | ((advantage < 0) & (ratio < 1 - clip_eps_low))


def clipped_loss(ratio, advantage, clip_eps_low: float, clip_eps_high: float):
    """-min(r A, clip(r, 1 - clip_eps_low, 1 + clip_eps_high) A)."""
    return -np.minimum(ratio * advantage, np.clip(ratio, 1 - clip_eps_low, 1 + clip_eps_high) * advantage)


@objective(clip_eps_low=(0.0, 0.5), clip_eps_high=(0.0, 0.6))
def grpo(tokens: Tokens, clip_eps_low: float, clip_eps_high: float):
    """PPO's clip, 1707.06347 and 2402.03300; two different bounds: 2503.14476."""
    r, a, clip = tokens.ratio, tokens.advantages, (clip_eps_low, clip_eps_high)
    return clipped_loss(r, a, *clip), np.where(is_dead(r, a, *clip), 0.0, -r * a * tokens.moves)


@objective(cap=(1.05, 4.0))
def dual_clip(tokens: Tokens, clip_eps_low: float, clip_eps_high: float, cap: float):
    """A < 0: min(loss of grpo, -c A), 1912.09729."""
    loss, g = grpo(tokens, clip_eps_low, clip_eps_high)
    negative = tokens.advantages < 0
    capped = np.where(negative, np.minimum(loss, -cap * tokens.advantages), loss)
    return capped, np.where(negative & (tokens.ratio > cap), 0.0, g)


def sequence_clip(tokens: Tokens, advantages: np.ndarray, clip_eps_low: float, clip_eps_high: float):
    """With R = exp of the mean log-ratio of all trained tokens of the document.

    The clamp is of the mean: single tokens are not clamped in it, else R would depend on how a mean is spread over its
    tokens. Where the clamp acts, no token of the document has a gradient.
    """
    mean, clip = tokens.log_ratio.mean(), (clip_eps_low, clip_eps_high)
    ratios = np.full_like(advantages, bounded_exp(mean))
    moves = abs(mean) <= MAX_LOG_RATIO
    g = np.where(is_dead(ratios, advantages, *clip), 0.0, -ratios * advantages * moves)
    return clipped_loss(ratios, advantages, *clip), g


@objective()
def gspo(tokens: Tokens, clip_eps_low: float, clip_eps_high: float):
    """-min(R B, clip(R) B), B the mean advantage of the document, at each of its tokens, 2507.18071.

    g is that of N tokens of equal weight: the 1 / N of the mean in R meets N of them. `sequence_share` is about others.
    """
    advantages = np.full_like(tokens.advantages, tokens.advantages.mean())
    return sequence_clip(tokens, advantages, clip_eps_low, clip_eps_high)


@objective()
def gspo_token(tokens: Tokens, clip_eps_low: float, clip_eps_high: float):
    """grpo with r = sg[R] exp(l - sg[l]), whose value is R, and an advantage per token, 2507.18071."""
    return sequence_clip(tokens, tokens.advantages, clip_eps_low, clip_eps_high)


def sequence_share(coefficients: np.ndarray) -> np.ndarray:
    """What each of a document's N tokens weighs in the gradient of one loss that they share.

    S loss(R), S = sum_t c_t over the document, has d/dl_t = S loss'(R) R / N for every t: the mean of c times g, for
    all c_t itself is, 0 included.
    """
    return np.full_like(coefficients, coefficients.sum() / len(coefficients))


@objective()
def cispo(tokens: Tokens, cap: float, clip_eps_low: float = 1.0):
    """-sg[min(max(r, low), cap)] A l, 2506.13585. The cap is absolute. clip_eps_low >= 1: no lower bound, the paper's
    form.

    The clamp of the log-ratio stops the gradient of everything that reads r. So it does here, although r is in a
    stopped
    factor: these are the only tokens that CISPO drops.
    """
    low = max(1 - clip_eps_low, 0.0)
    scale = -np.minimum(np.maximum(tokens.ratio, low), cap) * tokens.advantages
    return scale * tokens.new, scale * tokens.moves


@objective(tau_pos=(0.5, 2.0), tau_neg=(0.5, 2.0))
def sapo(tokens: Tokens, tau_pos: float, tau_neg: float):
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A (A = 0 gives 0 with either), 2511.20347."""
    r, a = tokens.ratio, tokens.advantages
    tau = np.where(a > 0, tau_pos, tau_neg)
    # 1 / (1 + e^-x) and 1 - s as e^-x s lose nothing here: x > -tau, so e^-x stays below e^tau.
    decay = np.exp(-tau * (r - 1))
    s = 1 / (1 + decay)
    return -4 / tau * s * a, -4 * s * (decay * s) * r * a * tokens.moves


def dppo(tokens: Tokens, cap: float, rejected: np.ndarray):
    scale = np.where(rejected, 0.0, -np.minimum(tokens.ratio, cap) * tokens.advantages)
    return scale * tokens.new, scale * tokens.moves


@objective(delta_low=(0.01, 0.3), delta_high=(0.01, 0.3))
def dppo_tv(tokens: Tokens, delta_low: float, delta_high: float, cap: float = math.inf):
    """-sg[min(r, c)] A l, 0 where pi left pi_old by more than a probability in the direction of A, 2602.04879."""
    shift = np.exp(tokens.new) - np.exp(tokens.old)
    a = tokens.advantages
    return dppo(tokens, cap, ((a > 0) & (shift > delta_high)) | ((a < 0) & (shift < -delta_low)))


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


@objective()
def dppo_kl(tokens: Tokens, delta_low: float, delta_high: float, cap: float = math.inf):
    """As dppo_tv, by the KL of the token against all others, in nats, with a threshold for each sign of A."""
    a = tokens.advantages
    threshold = np.where(a > 0, delta_high, delta_low)
    away = ((a > 0) & (tokens.new > tokens.old)) | ((a < 0) & (tokens.new < tokens.old))
    return dppo(tokens, cap, away & (binary_kl(tokens.old, tokens.new) > threshold))


@objective()
def reinforce(tokens: Tokens):
    """-A l, 2402.14740. Reads no ratio, so no clamp acts."""
    return -tokens.advantages * tokens.new, -tokens.advantages


@objective()
def reinforce_is(tokens: Tokens):
    """-r A, not clipped."""
    loss = -tokens.ratio * tokens.advantages
    return loss, loss * tokens.moves


@objective(beta=(0.01, 2.0))
def dro(tokens: Tokens, beta: float):
    """(beta / 2) (d - A / beta)^2 - A^2 / (2 beta) - A l_old, d = l - l_old: 2405.19107's regression, without a
    ratio."""
    d, a = tokens.log_ratio, tokens.advantages
    return beta / 2 * (d - a / beta) ** 2 - a**2 / (2 * beta) - a * tokens.old, beta * (d - a / beta)


def tapered(tokens: Tokens, log_weight):
    """-sg[c] A l, c = 1 for A >= 0 and the ratio up to 1 for A < 0; e^d of a d <= 0 needs no clamp."""
    c = np.where(tokens.advantages >= 0, 1.0, np.exp(np.minimum(log_weight, 0.0)))
    return -c * tokens.advantages * tokens.new, -c * tokens.advantages


@objective()
def topr(tokens: Tokens):
    """Ratio of the whole document, 2503.14286."""
    return tapered(tokens, tokens.log_ratio.sum())


@objective()
def topr_token(tokens: Tokens):
    return tapered(tokens, tokens.log_ratio)


@objective(delta_low=(0.01, 0.3), delta_high=(0.01, 0.3), tau=(0.001, 1.0))
def ipo(tokens: Tokens, delta_low: float, delta_high: float, tau: float):
    """-1[-low <= pi - pi_old <= high] r A + tau d^2 (prime-rl)."""
    shift = np.exp(tokens.new) - np.exp(tokens.old)
    kept = (shift <= delta_high) & (shift >= -delta_low)
    surrogate = np.where(kept, -tokens.ratio * tokens.advantages, 0.0)
    d = tokens.log_ratio
    return surrogate + tau * d**2, surrogate * tokens.moves + 2 * tau * d


@objective(k_pos=(0.5, 3.0), lambda_pos=(0.5, 3.0), k_neg=(0.5, 3.0), lambda_neg=(0.5, 3.0))
def vespo(tokens: Tokens, k_pos: float, lambda_pos: float, k_neg: float, lambda_neg: float):
    """-sg[phi(W)] A l, phi(W) = W^k e^(lambda (1 - W)), 2602.10693. log W is clamped, and beyond it nothing moves."""
    total = tokens.log_ratio.sum()
    weight = bounded_exp(total)
    rises = tokens.advantages > 0
    shape = np.where(rises, k_pos, k_neg)
    rate = np.where(rises, lambda_pos, lambda_neg)
    scale = -(weight**shape) * np.exp(rate * (1 - weight)) * tokens.advantages
    return scale * tokens.new, scale * (abs(total) <= MAX_LOG_RATIO)


@objective(eps_low=(0.05, 0.5), eps_high=(0.05, 0.5))
def gmpo(tokens: Tokens, eps_low: float, eps_high: float):
    """-sgn(A) prod_t |min(r_t A, clip(r_t, e^-low, e^high) A)|^(1 / N), 2507.20673, A one number per document.

    g is that of N tokens of equal weight, as in `gspo`.
    """
    a = tokens.advantages
    bounded = np.clip(tokens.log_ratio, -eps_low, eps_high)
    log_ratio = np.where(a >= 0, np.minimum(tokens.log_ratio, bounded), np.maximum(tokens.log_ratio, bounded))
    alive = log_ratio == tokens.log_ratio
    mean = log_ratio.mean()
    loss = -a * bounded_exp(mean)
    return loss, loss * alive * (abs(mean) <= MAX_LOG_RATIO)


# ---- Corrections: gamma [k], kappa [k] bool ----


def correction(
    name: str, tokens: Tokens, low: float | None, high: float | None, anchor: str = "rollout"
) -> tuple[np.ndarray, np.ndarray]:
    """Weight gamma and keep mask kappa of each trained token; neither is differentiated.

    What an indicator zeroes is rejected: that is kappa, also for icepop and mis. tis and seq_tis reject nothing. Bounds
    are inclusive. Every exponent (token, sum, mean) is clamped to +-MAX_LOG_RATIO.

    Raises:
        ValueError: the correction reads rollout log-probabilities, and there are none.
    """
    ones, all_kept = np.ones(len(tokens.new)), np.ones(len(tokens.new), dtype=bool)
    if name == "none":
        return ones, all_kept
    if name == "opsm":
        # 2512.02556 means by pi_old what the inference engine reports: rollout; old if there is no rollout.
        # kappa is by token: the document's divergence, the token's own advantage.
        sampled = tokens.old if tokens.rollout is None else tokens.rollout
        strays = (sampled - tokens.new).mean() > high
        return ones, ~((tokens.advantages < 0) & strays)
    if tokens.rollout is None:
        raise ValueError(f"correction={name!r} needs rollout log-probabilities; a document has none.")
    mismatch = tokens.old - tokens.rollout
    rho, product = bounded_exp(mismatch), ones * bounded_exp(mismatch.sum())
    if name == "tis":
        return np.clip(rho, low, high), all_kept
    if name == "seq_tis":
        return np.clip(product, low, high), all_kept
    if name == "kpop":  # a token against all others, in both directions
        divergence = np.maximum(binary_kl(tokens.old, tokens.rollout), binary_kl(tokens.rollout, tokens.old))
        return rho, divergence <= high
    gamma, tested = {
        "icepop": (rho, rho),
        "mis": (product, product),
        "seq_mask_tis": (rho, ones * bounded_exp(mismatch.mean())),
    }[name]
    return gamma, (low <= tested) & (tested <= high)


# ---- KL from one other log-probability: (x = l - f, r) -> value [k], g [k] ----


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


def kl_of(tokens: Tokens, against: np.ndarray, estimator: str) -> tuple[np.ndarray, np.ndarray]:
    """Value and g; the weighted forms read r = pi_new / pi_old of the token, so their g is 0 where its clamp acts."""
    if not estimator.endswith("_weighted"):
        return KL_ESTIMATORS[estimator](tokens.new - against, None)
    value, g = KL_ESTIMATORS[estimator](tokens.new - against, tokens.ratio)
    return value, g * tokens.moves


# ---- Divergences from a teacher's distribution: loops over the vocabulary of one row ----

DEFAULT_SHARES = {"topk_jsd": 0.5, "full_jsd": 0.5, "topk_skew_forward": 0.1, "topk_skew_reverse": 0.1}


@dataclass
class DivergenceRow:
    """What one token gives: its divergence, the gradient by its logits, and what the value is a sum of."""

    value: float
    gradient: np.ndarray  # [V]
    magnitude: float
    teacher_mass: float = 1.0  # of the named tokens
    student_mass: float = 1.0
    is_floored: bool = False


# The term of a category with teacher p and student q, both > 0, and dD/dq of it.


def forward_kl(p: float, q: float, share: float | None) -> tuple[float, float]:
    return p * math.log(p / q), -p / q


def reverse_kl(p: float, q: float, share: float | None) -> tuple[float, float]:
    return q * math.log(q / p), math.log(q / p) + 1


def jsd(p: float, q: float, share: float | None) -> tuple[float, float]:
    m = share * p + (1 - share) * q
    return share * p * math.log(p / m) + (1 - share) * q * math.log(q / m), (1 - share) * math.log(q / m)


def skew_forward(p: float, q: float, share: float | None) -> tuple[float, float]:
    m = share * p + (1 - share) * q
    return p * math.log(p / m), -(1 - share) * p / m


def skew_reverse(p: float, q: float, share: float | None) -> tuple[float, float]:
    m = share * q + (1 - share) * p
    return q * math.log(q / m), math.log(q / m) + 1 - share * q / m


def generalised_reverse(p: float, q: float, share: float | None) -> tuple[float, float]:
    return q * math.log(q / p) - q + p, math.log(q / p)


DIVERGENCES: dict[str, Callable] = {
    "topk_forward_kl": forward_kl,
    "topk_reverse_kl": reverse_kl,
    "topk_jsd": jsd,
    "topk_skew_forward": skew_forward,
    "topk_skew_reverse": skew_reverse,
    "topk_generalised_reverse": generalised_reverse,
    "full_forward_kl": forward_kl,
    "full_reverse_kl": reverse_kl,
    "full_jsd": jsd,
}


def probabilities(logits: Sequence[float], temperature: float) -> list[float]:
    scaled = [float(z) / temperature for z in logits]
    peak = max(scaled)
    total = math.fsum(math.exp(z - peak) for z in scaled)
    return [math.exp(z - peak) / total for z in scaled]


def full_divergence(
    kind: str, logits: Sequence[float], teacher: Sequence[float], *, temperature: float, share: float | None
) -> DivergenceRow:
    """Over the whole vocabulary, from the teacher's logits; `kind`: full_…"""
    p, q = probabilities(teacher, temperature), probabilities(logits, temperature)
    categories = [(own, theirs, [j]) for j, (own, theirs) in enumerate(zip(q, p, strict=True))]
    return _divergence(kind, q, categories, temperature, share)


def topk_divergence(
    kind: str,
    logits: Sequence[float],
    ids: Sequence[int],
    logprobs: Sequence[float],
    *,
    temperature: float,
    share: float | None,
    floor: float,
) -> DivergenceRow:
    """Over the teacher's top-k tokens, and one category of all other tokens of the vocabulary if there are any.

    The teacher's tail is 1 - sum p, at least the floor. `topk_generalised_reverse` has no tail.
    """
    q = probabilities(logits, temperature)
    named = {int(token): math.exp(float(value)) for token, value in zip(ids, logprobs, strict=True)}
    others = [j for j in range(len(q)) if j not in named]
    categories = [(q[token], p, [token]) for token, p in named.items()]
    tail = 1.0 - math.fsum(named.values())
    has_tail = bool(others) and kind != "topk_generalised_reverse"
    if has_tail:
        categories.append((math.fsum(q[j] for j in others), max(tail, floor), others))
    row = _divergence(kind, q, categories, temperature, share)
    row.teacher_mass, row.student_mass = math.fsum(named.values()), math.fsum(q[token] for token in named)
    row.is_floored = has_tail and tail < floor
    return row


def _divergence(kind: str, q: Sequence[float], categories, temperature: float, share: float | None) -> DivergenceRow:
    """dD/dz_j = q_j (g_c(j) - sum_c Q_c g_c) / tau, g_c = dD/dQ_c of a category (Q, P, its tokens); 0 outside them."""
    value, mean, magnitude, slopes = [], [], [], [0.0] * len(q)
    for student, teacher, tokens in categories:
        term, slope = DIVERGENCES[kind](teacher, student, share)
        value.append(term)
        mean.append(student * slope)
        magnitude.append(max(student, teacher) * (1 + abs(math.log(student)) + abs(math.log(teacher))))
        for token in tokens:
            slopes[token] = slope
    centre = math.fsum(mean)
    gradient = np.array([own * (slope - centre) / temperature for own, slope in zip(q, slopes, strict=True)])
    return DivergenceRow(math.fsum(value), gradient, math.fsum(magnitude))
