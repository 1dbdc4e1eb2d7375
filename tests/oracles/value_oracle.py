"""Independent oracle of a critic's step: the value loss with its weights over all documents, its metrics, and GAE.

    loss_t = 1/2 max((v - R)^2, (w - R)^2),    w = v held to [u - eps, u + eps], u the old value
    d loss_t / dv = v - R, or 0 where (w - R)^2 is the larger one; without a clip always v - R

The weights 1 / delta are those of `step_oracle.policy_denominators`. Metrics are over the T trained tokens of the step,
each token once, but for the clipped fraction, which is the mean over documents of the document's mean.

Generalized advantage estimation of the steps 0 … n - 1 of a trajectory, with the value after the last step:

    delta_k = r_k + gamma V_{k+1} - V_k,    A_k = sum_{j >= k} (gamma lambda)^(j - k) delta_j,    R_k = A_k + V_k

Skipped masked tokens are not steps: the value after a step is that of the next trained token, and a masked token's
reward belongs to the step before it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import step_oracle
from step_oracle import POLICY, Document, Settings

METRICS = (
    *("value_loss", "value_clipped_fraction", "explained_variance"),
    *("value_mean", "value_std", "return_mean", "return_std"),
)


@dataclass
class CriticDocument:
    """One sample: R response tokens, masked ones with arbitrary numbers."""

    values: np.ndarray  # [R] v of the model being trained
    old: np.ndarray  # [R]
    returns: np.ndarray  # [R]
    mask: np.ndarray  # [R] bool
    rollout_id: object = None
    prompt_id: object = None
    reward: float | None = None
    token_weights: np.ndarray | None = None  # [R]
    turns: Sequence[int] | None = None

    def rows(self, tokens: str) -> np.ndarray | None:
        """[k] trained positions; it belongs to the objective alone."""
        return np.flatnonzero(self.mask) if tokens == POLICY else None

    factors, turn_of = Document.factors, Document.turn_of


@dataclass
class CriticResult:
    loss: float  # sum of w loss
    gradients: list[np.ndarray]  # [R] of each document, d loss / dv / grad_divisor
    metrics: dict[str, float]  # of values and returns


def loss_and_slope(v: float, old: float, target: float, clip: float) -> tuple[float, float, bool]:
    """Of one token; the third is whether the clipped loss is the larger one."""
    held = min(max(v, old - clip), old + clip)
    plain, clipped = (v - target) ** 2, (held - target) ** 2
    if clipped > plain:
        return clipped / 2, 0.0, True
    return plain / 2, v - target, False


def run(documents: Sequence[CriticDocument], settings: Settings, clip: float = math.inf) -> CriticResult:
    """Of `settings` the aggregation with its divisor, the denominator, per_token and grad_divisor are read."""
    trained = [document.rows(POLICY) for document in documents]
    deltas = step_oracle.policy_denominators(documents, settings, trained)
    gradients = [np.zeros(len(document.mask)) for document in documents]
    summands, tokens, clipped = [], [], []
    for document, delta, gradient in zip(documents, deltas, gradients, strict=True):
        found, rows = [], document.rows(POLICY)
        for k, weight in zip(rows, document.factors(rows) / delta, strict=True):
            v, target = float(document.values[k]), float(document.returns[k])
            loss, slope, is_clipped = loss_and_slope(v, float(document.old[k]), target, clip)
            summands.append(loss * weight)
            gradient[k] = slope * weight / settings.grad_divisor
            tokens.append((v, target))
            found.append(is_clipped)
        if found:
            clipped.append(sum(found) / len(found))
    values, returns = ([token[i] for token in tokens] for i in (0, 1))
    errors = [target - v for v, target in tokens]
    metrics = {
        "value_loss": math.fsum(summands),
        "value_clipped_fraction": math.fsum(clipped) / len(clipped),
        "value_mean": mean(values),
        "value_std": math.sqrt(variance(values)),
        "return_mean": mean(returns),
        "return_std": math.sqrt(variance(returns)),
    }
    if len(set(returns)) > 1:
        metrics["explained_variance"] = 1 - variance(errors) / variance(returns)
    return CriticResult(math.fsum(summands), gradients, metrics)


def mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def variance(numbers: Sequence[float]) -> float:
    """Of the numbers given, not of a population."""
    at = mean(numbers)
    return math.fsum((number - at) ** 2 for number in numbers) / len(numbers)


# ---- GAE ----


def gae(
    rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float, next_value: float = 0.0
) -> list[float]:
    """A of every step."""
    after = [*values[1:], next_value]
    deltas = [r + gamma * b - a for r, a, b in zip(rewards, values, after, strict=True)]
    return [math.fsum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(deltas))) for k in range(len(deltas))]


def steps_of(rewards: Sequence[float], values: Sequence[float], mask: Sequence[int]) -> tuple[list, list, list]:
    """Tokens, rewards and values of the steps where masked tokens are skipped."""
    tokens = [k for k, trained in enumerate(mask) if trained]
    ends = [*tokens[1:], len(mask)]
    return (
        tokens,
        [math.fsum(rewards[begin:end]) for begin, end in zip(tokens, ends, strict=True)],
        [values[k] for k in tokens],
    )
