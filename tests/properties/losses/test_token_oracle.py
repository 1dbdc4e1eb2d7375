"""The oracle has figures that others published."""

import math

import numpy as np
import pytest
import token_oracle
from token_oracle import Tokens, log_softmax


@pytest.mark.parametrize(
    ("name", "bounds", "expected"),
    [("tis", (0, 2), 0.032), ("icepop", (0.5, 2), 0.325), ("icepop", (0.5, 5), 0.0), ("none", (None, None), 0.494)],
)
def test_bias_of_corrections(name, bounds, expected):
    """V = 512: relative bias of the expected gradient under samples of another rollout policy, as published."""
    j = np.arange(512)
    z = 2 * np.sin(j)
    new = log_softmax(z, 1.0)
    rollout = log_softmax(z + 0.5 * math.sqrt(2) * np.sin(7 * j + 1), 1.0)
    p, q = np.exp(new), np.exp(rollout)
    a = np.cos(3 * j)
    a = a - p @ a
    tokens = Tokens(np.zeros((512, 1)), np.zeros(512, int), new, old=new, advantages=a, rollout=rollout)
    gamma, kappa = token_oracle.correction(name, tokens, *bounds)
    true, seen = p * a, q * gamma * kappa * a
    true, seen = (x - p * x.sum() for x in (true, seen))
    assert np.linalg.norm(seen - true) / np.linalg.norm(true) == pytest.approx(expected, abs=1e-3)
