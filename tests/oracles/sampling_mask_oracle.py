"""Independent oracle of one row's distribution over what could be sampled: loops over the vocabulary, in float64.

log π_S(y) = z_y/tau - log Σ_{j∈S} e^(z_j/tau)
"""

import math
from collections.abc import Sequence


def log_probabilities(logits: Sequence[float], allowed: Sequence[int], temperature: float) -> dict[int, float]:
    """Of the allowed tokens, in nats."""
    scaled = {j: float(logits[j]) / temperature for j in allowed}
    peak = max(scaled.values())
    log_total = peak + math.log(math.fsum(math.exp(z - peak) for z in scaled.values()))
    return {j: z - log_total for j, z in scaled.items()}


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
