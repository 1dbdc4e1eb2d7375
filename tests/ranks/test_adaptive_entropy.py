"""`--pg-entropy-target` on real ranks: the sequence of coefficients, and what a step with one of them trains."""

import json

import launches
import processes
import pytest
from rank_cases import crossed, words

FAST = words("dp2-sample_mean-entropy cp2t-token_mean-entropy-gspo pp2-constant-fused-entropy")
FULL = [*FAST, *crossed("dp2t tp2s cp2 pp2v", "sample_mean token_mean", "entropy fused-entropy entropy-gspo")]
TARGET, STEP, MOST, FIRST = 2.2, 0.04, 0.1, 0.05


@launches.launch
def results(folder, full):
    with processes.finished([processes.start(2, folder, FULL if full else FAST, script="open_ranks.py")]):
        return folder


def coefficients_of(entropies: list[float]) -> list[tuple[float, float]]:
    """c and η of every step and of the one after the last, from the steps' entropies."""
    found, c, eta = [], FIRST, FIRST
    for e in entropies:
        found.append((c, eta))
        if e < TARGET:
            c = min(c + STEP, MOST)
        if e > TARGET:
            c = max(c - STEP, 0.0)
        eta = c if e <= TARGET else 0.0
    return [*found, (c, eta)]


@pytest.mark.proof(
    "Adaptive entropy coefficient, 2 ranks: the rule's sequence on every rank, each step's gradient that of the "
    "constant coefficient bit for bit, resumed in the middle (steps)"
)
def test_every_step_has_the_coefficient_of_the_rule_on_every_rank(results, full, evidence):
    cases, num_steps = FULL if full else FAST, 0
    for case in cases:
        found, other = (json.loads((results / f"{case}.{rank}.json").read_text()) for rank in range(2))
        assert other == found  # the program compares the gradients
        is_dp = case.startswith("dp2")
        assert ("terms" if is_dp else "step plan differs between ranks 0 and 1") in found["message"]
        records = found["steps"]
        expected = coefficients_of([record["entropy_mean"] for record in records])
        assert [record["entropy_coef"] for record in records] == [eta for _, eta in expected[:-1]]
        assert [record["state"]["entropy_coef"] for record in records] == [c for c, _ in expected[1:]]
        for record, (_, eta) in zip(records, expected, strict=False):
            assert record["state"]["entropy"] == record["entropy_mean"]
            assert record["loss"] == pytest.approx(record["pg_loss"] - eta * record["entropy_loss"], rel=1e-6)
        assert {0.0, MOST} < {c for c, _ in expected}
        assert any(eta == 0 < c for c, eta in expected)
        num_steps += len(records)
    evidence(cases=num_steps)
