"""Token kernels: for each objective and KL estimator, the loss of one token and its derivative by log π.

    loss, slope = kernel(logprob, old_logprob, advantage, numbers)
    value, slope = kernel(logprob, old_logprob, ref_logprob)

The torch functions of `megatron_pg.objectives` are the specification; a docstring here states where the form differs.
`numbers` are the four that the declaration makes of the flags. Objectives of whole sequences have four more, of the
token's sequence: the average of log r, the average of A, the number of trained tokens, and the average that the
objective defines itself. Their slope is by the token's own log-ratio in each average, times the trained tokens.

Comparisons choose, never `minimum` or `maximum`, which would drop a NaN: values that are not finite stay visible. Each
is finite where all fields are 0, as they are where nothing is trained.
"""

import triton
import triton.language as tl

from megatron_pg.objectives import MAX_LOG_RATIO

BOUND = tl.constexpr(MAX_LOG_RATIO)
NEAR = tl.constexpr(0.5)  # where e^x - 1 and log(1 + x) would lose digits


@triton.jit
def ratio(log_ratio):
    """r with its logarithm clamped, and whether it is, so that it has no gradient."""
    bounded = tl.where(log_ratio > BOUND, BOUND, tl.where(log_ratio < -BOUND, -BOUND, log_ratio))
    return tl.exp(bounded), (log_ratio > BOUND) | (log_ratio < -BOUND)


@triton.jit
def expm1(x):
    """e^x - 1 to full precision: near 0 the rounding of e^x is in the logarithm too, and goes."""
    power = tl.exp(x)
    small = tl.where(power == 1.0, x, (power - 1.0) * (x / tl.log(tl.where(power == 1.0, 2.0, power))))
    return tl.where((x > -NEAR) & (x < NEAR), small, power - 1.0)


@triton.jit
def log1p(x):
    """log(1 + x) to full precision, in the same way."""
    total = 1.0 + x
    small = tl.where(total == 1.0, x, tl.log(total) * (x / tl.where(total == 1.0, 1.0, total - 1.0)))
    return tl.where((x > -NEAR) & (x < NEAR), small, tl.log(total))


# --- objectives ---


@triton.jit
def clipped_surrogate(log_ratio, advantage, numbers):
    """-min(r A, clip(r) A); the bounds of r, low and high."""
    r, clamped = ratio(log_ratio)
    clipped = tl.where(r > numbers[1], numbers[1], tl.where(r < numbers[0], numbers[0], r))
    loss = tl.where(clipped * advantage < r * advantage, -clipped * advantage, -r * advantage)
    clips = tl.where(advantage >= 0, r > numbers[1], r < numbers[0])
    broken = (log_ratio != log_ratio) | (advantage != advantage)
    return loss, tl.where((clips | clamped) & (broken == 0), 0.0, -r * advantage)


@triton.jit
def grpo(logprob, old_logprob, advantage, numbers):
    """The bounds of r, low and high."""
    return clipped_surrogate(logprob - old_logprob, advantage, numbers)


@triton.jit
def dual_clip(logprob, old_logprob, advantage, numbers):
    """low, high and the cap where A < 0; -v A, v = min(r, high), where A < 0 r in [low, cap]."""
    r, clamped = ratio(logprob - old_logprob)
    highest = tl.where(advantage < 0, numbers[2], numbers[1])
    dead = (r > highest) | ((r < numbers[0]) & (advantage < 0))
    v = tl.where(r > highest, highest, tl.where((r < numbers[0]) & (advantage < 0), numbers[0], r))
    return -v * advantage, tl.where(dead | clamped, 0.0, -r * advantage)


@triton.jit
def cispo(logprob, old_logprob, advantage, numbers):
    """The bounds of the weight, low and cap."""
    r, clamped = ratio(logprob - old_logprob)
    slope = -tl.where(r > numbers[1], numbers[1], tl.where(r < numbers[0], numbers[0], r)) * advantage
    return slope * logprob, tl.where(clamped, 0.0, slope)


@triton.jit
def sapo(logprob, old_logprob, advantage, numbers):
    """τ where A > 0, and elsewhere. σ (1 - σ) is e / (1 + e)², e = e^-|x|: 1 - σ would cancel."""
    r, clamped = ratio(logprob - old_logprob)
    tau = tl.where(advantage > 0, numbers[0], numbers[1])
    x = tau * (r - 1.0)
    e = tl.exp(-tl.abs(x))
    sigmoid = tl.where(x < 0, e, 1.0) / (1.0 + e)
    slope = -4.0 * (e / ((1.0 + e) * (1.0 + e))) * r * advantage
    return -(4.0 / tau) * sigmoid * advantage, tl.where(clamped, 0.0, slope)


@triton.jit
def _inside(logprob, old_logprob, advantage, above, below, cap):
    """dppo: REINFORCE with weight min(r, cap), but where the token left its trust region in the direction of A."""
    r, clamped = ratio(logprob - old_logprob)
    dropped = (above & (advantage > 0)) | (below & (advantage < 0))
    slope = -tl.where(r > cap, cap, r) * advantage
    return tl.where(dropped, 0.0, slope * logprob), tl.where(dropped | clamped, 0.0, slope)


@triton.jit
def dppo_tv(logprob, old_logprob, advantage, numbers):
    """The trust region where A < 0, where A > 0, and the weight's cap."""
    moved = tl.exp(logprob) - tl.exp(old_logprob)
    return _inside(logprob, old_logprob, advantage, moved > numbers[1], moved < -numbers[0], numbers[2])


@triton.jit
def dppo_kl(logprob, old_logprob, advantage, numbers):
    """The same by the KL divergence: one logarithm of a quotient; a certain token has no rest and contributes 0."""
    new = tl.where(logprob > 0, 0.0, logprob)
    rest = -expm1(old_logprob)
    others = tl.where(rest > 0, rest * tl.log(rest / tl.abs(expm1(new))), 0.0)
    divergence = tl.exp(old_logprob) * (old_logprob - new) + others
    above = (new > old_logprob) & (divergence > numbers[1])
    below = (new < old_logprob) & (divergence > numbers[0])
    return _inside(logprob, old_logprob, advantage, above, below, numbers[2])


@triton.jit
def reinforce(logprob, old_logprob, advantage, numbers):
    """No number."""
    return -advantage * logprob, -advantage


@triton.jit
def reinforce_is(logprob, old_logprob, advantage, numbers):
    """No number."""
    r, clamped = ratio(logprob - old_logprob)
    return -r * advantage, tl.where(clamped, 0.0, -r * advantage)


@triton.jit
def dro(logprob, old_logprob, advantage, numbers):
    """β."""
    log_ratio = logprob - old_logprob
    loss = -advantage * logprob + 0.5 * numbers[0] * (log_ratio * log_ratio)
    return loss, -advantage + numbers[0] * log_ratio


@triton.jit
def topr_token(logprob, old_logprob, advantage, numbers):
    """No number."""
    log_ratio = logprob - old_logprob
    tapered = tl.exp(tl.where(log_ratio > 0, 0.0, log_ratio))
    slope = -tl.where(advantage < 0, tapered, 1.0) * advantage
    return slope * logprob, slope


@triton.jit
def ipo(logprob, old_logprob, advantage, numbers):
    """How far below and above π_old, and τ."""
    log_ratio = logprob - old_logprob
    r, clamped = ratio(log_ratio)
    moved = tl.exp(logprob) - tl.exp(old_logprob)
    dropped = (moved > numbers[1]) | (moved < -numbers[0])
    nothing = 0.0 * advantage  # but of one that is not finite, which stays visible
    loss = tl.where(dropped, nothing, -r * advantage) + numbers[2] * (log_ratio * log_ratio)
    return loss, tl.where(dropped | clamped, nothing, -r * advantage) + 2.0 * numbers[2] * log_ratio


# --- objectives of whole sequences ---


@triton.jit
def gspo(logprob, old_logprob, advantage, numbers):
    """The bounds of R, low and high."""
    return clipped_surrogate(numbers[4], numbers[5], numbers)


@triton.jit
def gspo_token(logprob, old_logprob, advantage, numbers):
    """The same."""
    return clipped_surrogate(numbers[4], advantage, numbers)


@triton.jit
def topr(logprob, old_logprob, advantage, numbers):
    """No number."""
    log_weight = numbers[4] * numbers[6]
    tapered = tl.exp(tl.where(log_weight > 0, 0.0, log_weight))
    slope = -tl.where(advantage < 0, tapered, 1.0) * advantage
    return slope * logprob, slope


@triton.jit
def vespo(logprob, old_logprob, advantage, numbers):
    """k and λ where A > 0, then elsewhere."""
    log_weight = numbers[4] * numbers[6]
    w, clamped = ratio(log_weight)
    bounded = tl.where(log_weight > BOUND, BOUND, tl.where(log_weight < -BOUND, -BOUND, log_weight))
    k = tl.where(advantage > 0, numbers[0], numbers[2])
    rate = tl.where(advantage > 0, numbers[1], numbers[3])
    slope = -tl.exp(k * bounded + rate * (1.0 - w)) * advantage
    return slope * logprob, tl.where(clamped, 0.0, slope)


@triton.jit
def gmpo(logprob, old_logprob, advantage, numbers):
    """How far a token's log-ratio may lie below 0 where A < 0, and above it elsewhere."""
    g, clamped = ratio(numbers[7])
    log_ratio = logprob - old_logprob
    clipped = tl.where(advantage < 0, log_ratio < -numbers[0], log_ratio > numbers[1])
    slope = -g * numbers[5]
    return slope, tl.where(clipped | clamped, 0.0, slope)


@triton.jit
def gmpo_averaged(log_ratio, advantage, numbers):
    """What gmpo averages."""
    lowered = tl.where(log_ratio < -numbers[0], -numbers[0], log_ratio)
    raised = tl.where(log_ratio > numbers[1], numbers[1], log_ratio)
    return tl.where(advantage < 0, lowered, raised)


# --- KL estimators: of x = log π - log π_ref ---


@triton.jit
def k1(logprob, old_logprob, ref_logprob):
    """Value x."""
    x = logprob - ref_logprob
    return x, tl.where(x == x, 1.0, x)


@triton.jit
def k2(logprob, old_logprob, ref_logprob):
    """Value x² / 2."""
    x = logprob - ref_logprob
    return x * x * 0.5, x


@triton.jit
def k3(logprob, old_logprob, ref_logprob):
    """Value e^-x - 1 + x, with the exponent clamped, which keeps its gradient."""
    x = logprob - ref_logprob
    bounded = tl.where(x > BOUND, BOUND, tl.where(x < -BOUND, -BOUND, x))
    shortfall = expm1(-bounded)
    return shortfall + x, -shortfall


@triton.jit
def absolute(logprob, old_logprob, ref_logprob):
    """Value |x|."""
    x = logprob - ref_logprob
    return tl.abs(x), tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


@triton.jit
def k1_weighted(logprob, old_logprob, ref_logprob):
    """Value r x."""
    x = logprob - ref_logprob
    r, clamped = ratio(logprob - old_logprob)
    return r * x, tl.where(clamped, 0.0, r * (x + 1.0))


@triton.jit
def k3_weighted(logprob, old_logprob, ref_logprob):
    """Value r (e^-x - 1 + x); slope r x."""
    r, clamped = ratio(logprob - old_logprob)
    value, _ = k3(logprob, old_logprob, ref_logprob)
    return r * value, tl.where(clamped, 0.0, r * (logprob - ref_logprob))
