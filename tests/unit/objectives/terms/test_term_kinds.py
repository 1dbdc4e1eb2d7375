"""The losses of loss term kinds on one token, worked by hand."""

import math

import pytest
import torch

from megatron_pg.declarations.loss_terms import KINDS
from megatron_pg.objectives.terms.losses import Categories, TermTokens

LN = math.log
# π = 1/4 and the other policy's 1/2, so that x = log π - log of the other = -ln 2; an entropy of ln 2;
# over two categories Q = (1/4, 3/4), P = (1/2, 1/2) and the mixture of both halves m = (3/8, 5/8)
WORKED = {
    "ce": LN(4),
    "opd": 2 - 1 - LN(2),  # k3 = e^-x - 1 + x
    "kl": 2 - 1 - LN(2),
    "entropy": -LN(2),
    "kl_cov": LN(2),  # |x|
    "topk_forward_kl": (LN(2) + LN(2 / 3)) / 2,
    "topk_reverse_kl": LN(1 / 2) / 4 + 3 * LN(3 / 2) / 4,
    "topk_jsd": (LN(4 / 3) + LN(4 / 5)) / 4 + (LN(2 / 3) + 3 * LN(6 / 5)) / 8,
    "topk_skew_forward": (LN(4 / 3) + LN(4 / 5)) / 2,
    "topk_skew_reverse": (LN(2 / 3) + 3 * LN(6 / 5)) / 4,
    "topk_generalised_reverse": LN(1 / 2) / 4 - 1 / 4 + 1 / 2,  # of the first category; there is no tail
}


def of(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("kind", WORKED)
def test_hand_worked_losses(kind):
    declared = KINDS[kind]
    categories = Categories(
        log_q=of(1 / 4, 3 / 4)[None].log(),
        log_p=of(1 / 2, 1 / 2)[None].log(),
        exist=torch.tensor([[True, declared.has_tail]]),
    )
    tokens = TermTokens(
        logprobs=of(1 / 4).log(),
        log_ratios=of(0.0),
        against=of(1 / 2).log(),
        entropy=of(LN(2)),
        estimator=declared.estimator or "k3",
        categories=categories,
        mixture=declared.mixture and 0.5,
    )
    assert declared.load()(tokens).tolist() == pytest.approx([WORKED[kind]], rel=1e-14)
