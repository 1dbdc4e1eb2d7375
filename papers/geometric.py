"""The policy that two of the demonstrations share: stop with probability p = sigmoid(theta) after every token.

The length T of a response is geometric, P(T) = (1 - p)^(T-1) p, and the reward is 1 when 3 <= T <= 9. Everything about
it has a closed form, so that an aggregation's gradient can be compared with the true one.
"""

import numpy as np

SHORTEST, LONGEST = 3, 9  # a response of so many tokens is right


def probability(lengths: np.ndarray, p: float) -> np.ndarray:
    """P(T) of each length."""
    return (1 - p) ** (lengths - 1.0) * p


def reward(lengths: np.ndarray) -> np.ndarray:
    """1 for a right length, else 0."""
    return ((lengths >= SHORTEST) & (lengths <= LONGEST)).astype(float)


def score(lengths: np.ndarray, p: float) -> np.ndarray:
    """d log P(T) / d theta = 1 - p T."""
    return 1 - p * lengths


def expected_reward(p: float) -> float:
    """J = P(T >= 3) - P(T > 9), from P(T > t) = (1 - p)^t."""
    return (1 - p) ** (SHORTEST - 1) - (1 - p) ** LONGEST


def true_gradient(p: float) -> float:
    """dJ / d theta, with dp / d theta = p (1 - p)."""
    slope = LONGEST * (1 - p) ** (LONGEST - 1) - (SHORTEST - 1) * (1 - p) ** (SHORTEST - 2)
    return slope * p * (1 - p)


def lengths_that_matter(p: float, tail: float = 1e-13) -> np.ndarray:
    """1, 2, ... until longer responses have no probability left to speak of."""
    return np.arange(1, int(np.ceil(np.log(tail) / np.log(1 - p))) + 1)
