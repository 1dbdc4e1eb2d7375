"""Independent oracle of one row's distribution over what could be sampled: loops over the vocabulary, in float64.

log π_S(y) = z_y/tau - log Σ_{j∈S} e^(z_j/tau),    d log π_S(y) / dz_j = (1[j = y] - q_j) / tau in S, 0 outside
H = -Σ_j p_j log p_j over the vocabulary or over S,    dH/dz_j = -p_j (log p_j + H) / tau
"""

import math
from collections.abc import Sequence

import numpy as np


def log_probabilities(logits: Sequence[float], allowed: Sequence[int], temperature: float) -> dict[int, float]:
    """Of the allowed tokens, in nats."""
    scaled = {j: float(logits[j]) / temperature for j in allowed}
    peak = max(scaled.values())
    log_total = peak + math.log(math.fsum(math.exp(z - peak) for z in scaled.values()))
    return {j: z - log_total for j, z in scaled.items()}


def row_of(
    logits: Sequence[float],
    target: int,
    sampling_mask: Sequence[int],
    *,
    temperature: float,
    kept: bool,
    a: float,
    e: float,
) -> tuple[float, float, np.ndarray]:
    """Log-probability, entropy, and the gradient [V] of a log π + e H; an empty sampling mask is the whole
    vocabulary."""
    everything = list(range(len(logits)))
    own = log_probabilities(logits, list(sampling_mask) or everything, temperature)
    of_entropy = own if kept else log_probabilities(logits, everything, temperature)
    entropy = -math.fsum(math.exp(x) * x for x in of_entropy.values())
    gradient = np.zeros(len(logits))
    for j, x in own.items():
        gradient[j] += a * ((j == target) - math.exp(x)) / temperature
    for j, x in of_entropy.items():
        gradient[j] -= e * math.exp(x) * (x + entropy) / temperature
    return own[target], entropy, gradient


def kept_by_top_p(logits: Sequence[float], p: float, temperature: float) -> list[int]:
    """The fewest top-k tokens that have the probability p together."""
    found = log_probabilities(logits, range(len(logits)), temperature)
    order = sorted(found, key=lambda j: -found[j])
    total, kept = 0.0, []
    for j in order:
        kept.append(j)
        total += math.exp(found[j])
        if total >= p:
            break
    return kept
