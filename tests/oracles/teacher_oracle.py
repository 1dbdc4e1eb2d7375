"""Independent oracle of the divergences over the whole vocabulary of a teacher: loops over one row of logits, in float64.

q = softmax(z / tau), p = softmax(y / tau)
dD/dz_j = q_j (g_j - sum_k q_k g_k) / tau,    g_j = dD/dq_j
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

KINDS = ("full_forward_kl", "full_reverse_kl", "full_jsd")


@dataclass
class Row:
    """What one token gives: its divergence, the gradient by its logits, and what the value is a sum of."""

    value: float
    gradient: np.ndarray  # [V]
    magnitude: float


def probabilities(logits: Sequence[float], temperature: float) -> list[float]:
    scaled = [float(z) / temperature for z in logits]
    peak = max(scaled)
    total = math.fsum(math.exp(z - peak) for z in scaled)
    return [math.exp(z - peak) / total for z in scaled]


def summand(kind: str, p: float, q: float, share: float | None) -> tuple[float, float]:
    """The term of a token, and dD/dq of it; p, q > 0."""
    if kind == "full_forward_kl":
        return p * math.log(p / q), -p / q
    if kind == "full_reverse_kl":
        return q * math.log(q / p), math.log(q / p) + 1
    assert kind == "full_jsd"
    m = share * p + (1 - share) * q
    return share * p * math.log(p / m) + (1 - share) * q * math.log(q / m), (1 - share) * math.log(q / m)


def row_of(
    kind: str, student: Sequence[float], teacher: Sequence[float], *, temperature: float, share: float | None
) -> Row:
    q, p = probabilities(student, temperature), probabilities(teacher, temperature)
    terms = [summand(kind, *each, share) for each in zip(p, q, strict=True)]
    mean = math.fsum(each * slope for each, (_, slope) in zip(q, terms, strict=True))
    gradient = [each * (slope - mean) / temperature for each, (_, slope) in zip(q, terms, strict=True)]
    magnitude = math.fsum(max(a, b) * (1 + abs(math.log(a)) + abs(math.log(b))) for a, b in zip(p, q, strict=True))
    return Row(math.fsum(value for value, _ in terms), np.array(gradient), magnitude)
