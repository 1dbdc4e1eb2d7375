"""Independent oracle of the divergences over a teacher's likeliest tokens: loops over the whole vocabulary of one row, in float64.

    categories: every named token, and one of all other tokens of the vocabulary, if there are any
    dD/dz_j = q_j (g_c(j) - sum_c Q_c g_c) / tau,    g_c = dD/dQ_c

The teacher's tail is 1 - sum p, at least the floor. `topk_generalised_reverse` has no tail: g is 0 there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass
class Row:
    """What one token gives: its divergence, the gradient by its logits, and what the value is a sum of."""

    value: float
    gradient: np.ndarray  # [V]
    magnitude: float
    teacher_mass: float
    student_mass: float
    is_floored: bool


def summand(kind: str, p: float, q: float, share: float | None) -> tuple[float, float]:
    """The term of a category, and dD/dQ of it; q > 0, p > 0."""
    if kind == "topk_forward_kl":
        return p * math.log(p / q), -p / q
    if kind == "topk_reverse_kl":
        return q * math.log(q / p), math.log(q / p) + 1
    if kind == "topk_jsd":
        m = share * p + (1 - share) * q
        return share * p * math.log(p / m) + (1 - share) * q * math.log(q / m), (1 - share) * math.log(q / m)
    if kind == "topk_skew_forward":
        m = share * p + (1 - share) * q
        return p * math.log(p / m), -(1 - share) * p / m
    if kind == "topk_skew_reverse":
        m = share * q + (1 - share) * p
        return q * math.log(q / m), math.log(q / m) + 1 - share * q / m
    assert kind == "topk_generalised_reverse"
    return q * math.log(q / p) - q + p, math.log(q / p)


def row_of(
    kind: str,
    logits: Sequence[float],
    ids: Sequence[int],
    logprobs: Sequence[float],
    *,
    temperature: float,
    share: float | None,
    floor: float,
) -> Row:
    scaled = [float(z) / temperature for z in logits]
    peak = max(scaled)
    total = math.fsum(math.exp(z - peak) for z in scaled)
    q = [math.exp(z - peak) / total for z in scaled]
    named = {int(token): math.exp(float(value)) for token, value in zip(ids, logprobs, strict=True)}
    others = [j for j in range(len(q)) if j not in named]
    categories = [(q[token], p, [token]) for token, p in named.items()]
    left = 1.0 - math.fsum(named.values())
    has_tail = bool(others) and kind != "topk_generalised_reverse"
    if has_tail:
        categories.append((math.fsum(q[j] for j in others), max(left, floor), others))
    value = mean = magnitude = 0.0
    slopes = [0.0] * len(q)
    for student, teacher, tokens in categories:
        term, slope = summand(kind, teacher, student, share)
        value += term
        mean += student * slope
        magnitude += max(student, teacher) * (1 + abs(math.log(student)) + abs(math.log(teacher)))
        for token in tokens:
            slopes[token] = slope
    return Row(
        value=value,
        gradient=np.array([q[j] * (slopes[j] - mean) / temperature for j in range(len(q))]),
        magnitude=magnitude,
        teacher_mass=math.fsum(named.values()),
        student_mass=math.fsum(q[token] for token in named),
        is_floored=has_tail and left < floor,
    )
