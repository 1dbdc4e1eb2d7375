"""Loss, gradient and metrics do not depend on how the step is cut, and equal an independent oracle in float64."""

import random

import oracle
import pytest
import simulation
import torch
from simulation import EPS_HIGH, EPS_LOW, Layout
from support import divisor_of, random_step, relative_error

from megatron_pg.reducers import REDUCERS

VOCABULARY = 12
LAYOUTS = [
    Layout(),
    Layout(microbatches=3, qkv_format="bshd"),
    Layout(data=2, microbatches=2),
    Layout(data=3, microbatches=2, qkv_format="bshd"),
    Layout(context=2, microbatches=2),
    Layout(context=4, qkv_format="bshd"),
    Layout(tensor=2, microbatches=2),
    Layout(tensor=4),
    Layout(data=2, context=2, microbatches=3, pipeline=3),
    Layout(data=2, context=2, microbatches=2, qkv_format="bshd"),
    Layout(data=2, tensor=2, microbatches=2, pipeline=2),
    Layout(data=2, context=2, tensor=2, microbatches=2),
]
CASES_PER_LAYOUT = 11  # for each aggregation and contract: 12 layouts x 8 x 11 = 1,056 cases


def poisoned_logits(samples, rng: random.Random) -> list[torch.Tensor]:
    """[n, V] float64 per sample; NaN and inf wherever no trained token is predicted."""
    tables = []
    for sample in samples:
        table = torch.tensor(
            [[rng.gauss(0, 1.5) for _ in range(VOCABULARY)] for _ in sample.tokens], dtype=torch.float64
        )
        first = len(sample.tokens) - sample.response_length - 1
        predicts = {first + k for k, m in enumerate(sample.loss_mask.tolist()) if m}
        for position in set(range(len(table))) - predicts:
            table[position] = rng.choice([float("nan"), float("inf"), -float("inf"), 1e30])
        tables.append(table)
    return tables


def oracle_samples(samples, logits):
    return [
        oracle.OracleSample(
            tokens=s.tokens.tolist(),
            mask=s.loss_mask.int().tolist(),
            old_logprobs=s.old_logprobs.tolist(),
            advantages=s.advantages.tolist(),
            logits=table.tolist(),
            rollout=s.rollout_id,
            prompt=s.prompt_id,
            ref_logprobs=None if s.ref_logprobs is None else s.ref_logprobs.tolist(),
            rollout_logprobs=None if s.rollout_logprobs is None else s.rollout_logprobs.tolist(),
        )
        for s, table in zip(samples, logits, strict=True)
    ]


def random_case(rng: random.Random, temperature: float):
    """A step away from the clip bounds, where the gradient jumps and rounding decides."""
    while True:
        samples = random_step(rng, vocabulary=VOCABULARY)
        logits = poisoned_logits(samples, rng)
        expected = oracle_samples(samples, logits)
        if not oracle.near_kink(expected, eps_low=EPS_LOW, eps_high=EPS_HIGH, temperature=temperature, margin=1e-9):
            return samples, logits, expected


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("per_token", [False, True], ids=["flag_off", "flag_on"])
@pytest.mark.parametrize("aggregation", sorted(REDUCERS))
def test_loss_gradient_and_metrics_equal_the_oracle_in_every_layout(aggregation, per_token, layout):
    rng = random.Random(f"{aggregation}{per_token}{layout}")
    for _ in range(CASES_PER_LAYOUT):
        divisor, temperature = divisor_of(aggregation, rng.uniform(1, 5000)), rng.choice([1.0, 0.7])
        samples, logits, expected = random_case(rng, temperature)
        clip = {"eps_low": EPS_LOW, "eps_high": EPS_HIGH, "temperature": temperature}
        objective, gradients = oracle.objective(expected, aggregation, divisor=divisor, **clip)
        scale = oracle.weighted_absolute(expected, aggregation, divisor=divisor, **clip)
        loss = simulation.settings(aggregation, per_token=per_token, divisor=divisor, temperature=temperature)

        found = simulation.run_step(samples, logits, layout, loss, rng)

        assert abs(found.reported - objective) <= 1e-12 * scale
        assert abs(found.metrics["pg_loss"] - objective) <= 1e-12 * scale
        flat = torch.cat([g.flatten() for g in found.gradients])
        wanted = torch.tensor([v for g in gradients for row in g for v in row], dtype=torch.float64)
        assert relative_error(flat, wanted) <= 1e-12
        wanted_metrics = oracle.all_metrics(expected, aggregation, divisor=divisor, **clip)
        assert found.metrics.keys() == wanted_metrics.keys() | {"pg_loss"}
        for name, value in wanted_metrics.items():
            exact = name.startswith(("max_", "min_", "num_", "mismatch_max"))
            assert found.metrics[name] == (value if exact else pytest.approx(value, rel=1e-11, abs=1e-13)), name


def test_the_four_modes_differ_from_each_other_on_a_random_step():
    rng = random.Random(3)
    samples, logits, _ = random_case(rng, 1.0)
    values = set()
    for aggregation in REDUCERS:
        loss = simulation.settings(aggregation, per_token=False, divisor=divisor_of(aggregation))
        values.add(round(simulation.run_step(samples, logits, Layout(), loss, rng).reported, 9))
    assert len(values) == len(REDUCERS)


def test_the_divisor_scales_pg_loss_and_leaves_every_other_metric_bit_identical():
    rng = random.Random(4)
    samples, logits, _ = random_case(rng, 1.0)
    layout = Layout(data=2, microbatches=2)

    def run(divisor: float):
        loss = simulation.settings("constant", per_token=False, divisor=divisor)
        return simulation.run_step(samples, logits, layout, loss, random.Random(5))

    half, full = run(2048.0), run(4096.0)
    assert half.metrics["pg_loss"] == 2 * full.metrics["pg_loss"]
    assert all(torch.equal(a, 2 * b) for a, b in zip(half.gradients, full.gradients, strict=True))
    for name, value in half.metrics.items():
        assert value == full.metrics[name] or name == "pg_loss", name


def test_a_denominator_per_microbatch_would_be_seen():
    """The mistake that public systems make: each micro-batch's own token mean, averaged."""
    rng = random.Random(6)
    samples, logits, expected = random_case(rng, 1.0)
    objective, _ = oracle.objective(expected, "token_mean", eps_low=EPS_LOW, eps_high=EPS_HIGH, temperature=1.0)
    loss = simulation.settings("token_mean", per_token=True)
    pieces = [
        simulation.run_step([s], [t], Layout(), loss, rng).reported
        for s, t in zip(samples, logits, strict=True)
        if s.num_trained
    ]
    assert abs(sum(pieces) / len(pieces) - objective) > 1e-3 * abs(objective)
