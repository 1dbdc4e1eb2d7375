"""A critic's step: value loss, gradient of every value and all metrics equal an independent oracle in every layout.

The table of logits of the simulation holds one column per tensor-parallel rank, each with the same values: a critic's
values are whole on every rank.
"""

import dataclasses
import functools
import math
import random
from collections import Counter
from dataclasses import dataclass

import pytest
import simulation
import torch
import value_oracle
from compare import gradient_error, metrics_error, scalar_error
from samples import divisor_of, random_step
from simulation import LAYOUTS, Layout, Step
from step_cases import AGGREGATIONS, CUSTOM, first_row, root_length_reducer, silent_positions
from step_oracle import Settings
from torch import Tensor
from value_oracle import CriticDocument
from weight_cases import with_weights_and_turns

from megatron_pg.batch import pack
from megatron_pg.kernels import LossTerms
from megatron_pg.objectives import objective_of
from megatron_pg.objectives.corrections.correction import NONE
from megatron_pg.plan.planned_step import PlannedStep
from megatron_pg.plan.settings import LossSettings, metrics_of
from megatron_pg.rollouts.sample import Sample

FULL = {1: 240, 2: 160, 4: 120, 8: 120}  # cases of a layout, by the size of its world: more than 1,000
LIMIT = 1e-12
BAD = (math.nan, math.inf, -math.inf, 1e30)
pytestmark = pytest.mark.usefixtures("rank_zero")


@dataclass(frozen=True)
class CriticCase:
    """A step in the words of the oracle and of the package."""

    samples: list[Sample]
    values: list[Tensor]  # [n] of every sample, of all its positions
    asked: Settings
    clip: float

    @property
    def loss(self) -> LossSettings:
        is_custom, asked = self.asked.aggregation == CUSTOM, self.asked
        terms = LossTerms(objective=objective_of("value_loss", clip=self.clip), grad_divisor=asked.grad_divisor)
        found = simulation.settings(
            "sample_mean" if is_custom else asked.aggregation,
            per_token=asked.per_token,
            divisor=asked.divisor,
            reducer=root_length_reducer if is_custom else None,
            terms=terms,
            denominator=asked.denominator,
        )
        sums_weights = asked.weight_denominator == "weights"
        return dataclasses.replace(found, metrics=metrics_of("basic", terms, NONE), sums_weights=sums_weights)

    def step(self, layout: Layout, rng: random.Random) -> Step:
        columns = [values[:, None].repeat(1, layout.tensor) for values in self.values]
        return Step(self.samples, columns, self.loss, simulation.scatter_samples(self.samples, layout, rng))

    @functools.cached_property
    def wanted(self) -> value_oracle.CriticResult:
        documents = [
            CriticDocument(
                values=values[first_row(s) : first_row(s) + s.response_length].numpy(),
                old=s.values.numpy(),
                returns=s.returns.numpy(),
                mask=s.loss_mask.numpy(),
                rollout_id=s.rollout_id,
                prompt_id=s.prompt_id,
                token_weights=None if s.token_weights is None else s.token_weights.numpy(),
                turns=s.turns,
            )
            for s, values in zip(self.samples, self.values, strict=True)
        ]
        return value_oracle.run(documents, self.asked, self.clip)

    def errors(self, found: simulation.Outcome, layout: Layout) -> dict[str, float]:
        """On every tensor-parallel rank the whole gradient."""
        wanted, expected = self.wanted, []
        for sample, values, gradient in zip(self.samples, self.values, self.wanted.gradients, strict=True):
            whole, first = torch.zeros_like(values), first_row(sample)
            whole[first : first + len(gradient)] = torch.from_numpy(gradient)
            expected.append(whole[:, None].repeat(1, layout.tensor))
        assert found.num_nonfinite == 0
        assert not found.metrics.keys() & {"pg_loss", "advantage", "new_logprobs", "ess", "kl_new_old", "entropy"}
        assert found.metrics["num_tokens"] == sum(s.num_trained for s in self.samples)
        own = {name: value for name, value in found.metrics.items() if name in value_oracle.METRICS}
        return {
            "loss": scalar_error(found.reported, wanted.loss, wanted.loss),
            "gradient": gradient_error(found.gradients, expected),
            "metrics": metrics_error(own, wanted.metrics),
        }


def random_case(rng: random.Random) -> CriticCase:
    """Values on both sides of the clip range, and in some steps equal returns, or a masked token's garbage."""
    aggregation, clip = rng.choice([*AGGREGATIONS, "turn_mean"]), rng.choice([math.inf, 0.1, 0.5])
    p_none = 0.0 if aggregation == "turn_mean" else 0.5
    samples = [with_weights_and_turns(sample, rng, p_none) for sample in random_step(rng, vocabulary=12)]
    at, scale = rng.choice([0.0, 0.0, 5.0]), rng.choice([0.3, 3.0])

    def drawn(sample: Sample) -> Tensor:
        own = torch.tensor([rng.gauss(at, scale) for _ in sample.loss_mask], dtype=torch.float64)
        return torch.where(sample.loss_mask, own, rng.choice(BAD))

    made, values = [], []
    for sample in samples:
        returns = drawn(sample) if rng.random() < 0.9 else torch.where(sample.loss_mask, 1.0, torch.nan).double()
        own = dataclasses.replace(sample, values=drawn(sample), returns=returns)
        made.append(dataclasses.replace(own, old_logprobs=None, advantages=None) if rng.random() < 0.5 else own)
        table = torch.tensor([rng.gauss(at, scale) for _ in sample.tokens], dtype=torch.float64)
        table[silent_positions(sample)] = rng.choice(BAD)
        values.append(table)
    per_token = rng.random() < 0.5
    is_live = rng.random() < 0.3 and aggregation not in ("token_mean", "turn_mean", CUSTOM)
    asked = Settings(
        aggregation=aggregation,
        divisor=divisor_of(aggregation, rng.uniform(1, 5000)),
        per_token=per_token,
        denominator="live" if is_live else "scheduled",
        weight_denominator=rng.choice(["tokens", "weights"]),
        grad_divisor=rng.choice([1.0, 64.0]),
    )
    return CriticCase(made, values, asked, clip)


@functools.cache
def drawn(layout: Layout, block: int) -> list[CriticCase]:
    """20 cases for a layout."""
    rng = random.Random(f"critics {layout} {block}")
    return [random_case(rng) for _ in range(20)]


@pytest.mark.proof("Critics over layouts, float64: value loss, gradient and metrics within 1e-12 of the oracle")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_loss_gradients_and_metrics_of_a_critic_equal_the_oracle(layout, full, evidence):
    for block in range(FULL[layout.world_size] // 20 if full else 1):
        cases, rng = drawn(layout, block)[: 20 if full else 5], random.Random(block)
        found = simulation.run_steps([case.step(layout, rng) for case in cases], layout)
        errors = [case.errors(outcome, layout) for case, outcome in zip(cases, found, strict=True)]
        bad = {
            i: (own, cases[i].asked, cases[i].clip) for i, own in enumerate(errors) if not max(own.values()) <= LIMIT
        }
        assert not bad, bad
        evidence(cases=len(cases), worst=max(max(own.values()) for own in errors), tolerance=LIMIT)


def test_the_cases_hold_what_breaks_such_code():
    seen: Counter = Counter()
    for case in [case for layout in LAYOUTS for case in drawn(layout, 0)]:
        metrics = case.wanted.metrics
        seen["clipped"] += metrics["value_clipped_fraction"] > 0
        seen["not clipped"] += case.clip == math.inf
        seen["without advantages"] += any(s.advantages is None for s in case.samples)
        seen["fully masked"] += any(not s.num_trained for s in case.samples)
        seen["negative explained variance"] += metrics.get("explained_variance", 0) < 0
        seen[case.asked.aggregation, case.asked.per_token] += 1
        seen[case.asked.denominator] += 1
    assert len(seen) == 5 + 2 * (len(AGGREGATIONS) + 1) + 2
    assert min(seen.values()) > 0


def planned(samples: list[Sample], loss: LossSettings) -> PlannedStep:
    return PlannedStep.of(lambda: [pack(samples, qkv_format="thd")], loss, group=None)


@pytest.mark.parametrize("name", ["values", "returns"])
def test_a_critic_needs_values_and_returns_of_every_sample(name):
    case = random_case(random.Random(1))
    case.samples[-1] = dataclasses.replace(_with_policy(case.samples[-1]), **{name: None})
    with pytest.raises(ValueError, match=f"has no {name}, which --pg-role critic needs"):
        planned(case.samples, case.loss)


def _with_policy(sample: Sample) -> Sample:
    zeros = torch.zeros(sample.response_length, dtype=torch.float64)
    return dataclasses.replace(sample, old_logprobs=zeros, advantages=zeros)


def test_a_policy_refuses_samples_for_a_critic_alone():
    case = random_case(random.Random(2))
    samples = [dataclasses.replace(sample, old_logprobs=None) for sample in case.samples]
    with pytest.raises(ValueError, match="returns for a critic and no old_logprobs or no advantages"):
        planned(samples, simulation.settings("sample_mean", per_token=False))


def test_a_value_that_is_not_finite_stops_the_step_and_is_named():
    case = random_case(random.Random(3))
    i = next(i for i, sample in enumerate(case.samples) if sample.num_trained)
    position = first_row(case.samples[i]) + int(case.samples[i].loss_mask.nonzero()[0])
    case.values[i][position] = math.inf
    found = simulation.run_step(case.samples, [v[:, None] for v in case.values], Layout(), case.loss, random.Random(0))
    assert found.num_nonfinite == 1
