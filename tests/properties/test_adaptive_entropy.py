"""The entropy that the coefficient follows, over layouts and loss scalings, and the coefficient that a step reports."""

import math
import random

import pytest
import simulation
import torch
from loss_terms import kl_and_entropy
from samples import random_step
from simulation import LAYOUTS
from step_cases import first_row

from megatron_pg.declarations.adaptive_entropy import AdaptiveEntropy
from megatron_pg.kernels import LossTerms
from megatron_pg.rollouts.sample import Sample

LIMIT = 1e-12
VOCABULARY = 12


def mean_entropy(samples: list[Sample], logits: list[torch.Tensor], *, of_tokens: bool) -> float:
    """Over all trained tokens of the step, or over rollouts with one of the mean over their trained tokens."""
    rollouts: dict[object, list[float]] = {}
    for sample, table in zip(samples, logits, strict=True):
        for k, is_trained in enumerate(sample.loss_mask.tolist()):
            row = table[first_row(sample) + k].tolist()
            log_total = math.log(math.fsum(math.exp(z) for z in row))
            entropy = -math.fsum(math.exp(z - log_total) * (z - log_total) for z in row)
            rollouts.setdefault(sample.rollout_id, []).extend([entropy] * is_trained)
    means = [[entropy] for own in rollouts.values() for entropy in own] if of_tokens else rollouts.values()
    return math.fsum(math.fsum(own) / len(own) for own in means if own) / sum(map(bool, means))


@pytest.mark.proof("Adaptive entropy coefficient over layouts, both loss scalings, float64: the step's mean entropy")
def test_the_coefficient_follows_the_mean_entropy_of_the_whole_step(full, evidence):
    rng, worst, cases = random.Random("entropy"), 0.0, 0
    for layout in LAYOUTS if full else LAYOUTS[2::2]:
        steps, expected = [], []
        for aggregation in ["sample_mean", "token_mean", "constant"] * (10 if full else 1):
            samples = random_step(rng, vocabulary=VOCABULARY)
            logits = [
                torch.tensor([[rng.gauss(0, 2) for _ in range(VOCABULARY)] for _ in sample.tokens], dtype=torch.float64)
                for sample in samples
            ]
            of_tokens, coefficient = aggregation == "token_mean", rng.uniform(0, 1)
            by = (
                "policy"
                if rng.random() < 0.3 and aggregation != "constant"
                else f"{'token' if of_tokens else 'sample'}_mean"
            )
            own = AdaptiveEntropy(target=rng.uniform(1, 3), step=0.1, max=1.0, coefficient=coefficient)
            terms = LossTerms(
                objective=simulation.GRPO.objective,
                further=kl_and_entropy(entropy_coef=coefficient, aggregation=by),
                adaptive_entropy=own,
            )
            settings = {"per_token": of_tokens, "divisor": 9.0 if aggregation == "constant" else None, "terms": terms}
            loss = simulation.settings(aggregation, **settings)
            steps.append(simulation.Step(samples, logits, loss, simulation.scatter_samples(samples, layout, rng)))
            expected.append((mean_entropy(samples, logits, of_tokens=of_tokens), coefficient))
        for (entropy, coefficient), found in zip(expected, simulation.run_steps(steps, layout), strict=True):
            assert found.metrics["entropy_coef"] == coefficient
            worst = max(worst, abs(found.metrics["entropy_mean"] - entropy))
            cases += 1
    assert worst <= LIMIT
    evidence(cases=cases, worst=worst, tolerance=LIMIT)
