"""Values of ranks and micro-batches come together, in one collective."""

import random

import pytest
import simulation
import torch
from compare import scalar_error
from samples import make_sample
from simulation import Layout

from megatron_pg.declarations.choices import METRIC_LEVELS as LEVELS
from megatron_pg.metrics import Reduction
from megatron_pg.step import findings


@pytest.mark.parametrize("size", [2, 4])
def test_entropy_is_the_same_over_a_split_vocabulary_in_float32(size):
    rng = random.Random(size)
    samples = [make_sample(prompt_length=2, mask=[1] * 6, rng=rng, sample_id=str(i)) for i in range(4)]
    logits = [3 * torch.randn(len(s.tokens), 12) for s in samples]
    loss = simulation.settings("sample_mean", per_token=False)
    whole, split = (
        simulation.run_step(samples, logits, Layout(tensor=n), loss, random.Random(1)).metrics["entropy"]
        for n in (1, size)
    )
    assert scalar_error(split, whole, 1.0) <= 1e-6


def test_one_collective_per_step_serves_checks_and_all_metrics(monkeypatch):
    """Counted where the step makes them; the number of metrics changes the length, not the count."""
    calls = []
    count = lambda values: calls.append(len(values)) or values[None]  # noqa: E731
    monkeypatch.setattr(findings, "all_gather_rows", count)
    monkeypatch.setattr(findings, "device_of", lambda group: torch.device("cpu"))
    for level in LEVELS:
        findings.gather_found({}, Reduction(level), reports=True)
    assert calls == [7 + Reduction(level).width for level in LEVELS]
