"""Random optimizer steps with what the oracle expects of them: the cases of the partition tests."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import oracle
import simulation
import torch
from compare import gradient_error, metrics_error, scalar_error
from samples import divisor_of, random_step
from simulation import EPS_HIGH, EPS_LOW, Layout, Outcome, Step
from torch import Tensor

from megatron_pg.declarations.aggregations import AGGREGATIONS as DECLARED
from megatron_pg.rollouts.sample import Sample

VOCABULARY = 12
CUSTOM = "root_length"  # the aggregation of the cases that use the custom reducer below
AGGREGATIONS = (*sorted(DECLARED), CUSTOM)
CONTRACTS = [(aggregation, per_token) for aggregation in AGGREGATIONS for per_token in (False, True)]
BAD = (math.nan, math.inf, -math.inf, 1e30)


@dataclass(frozen=True)
class Errors:
    """Error figures of one outcome: loss over Σ|w·ℓ|, gradient over its largest entry, metrics over themselves."""

    loss: float
    gradient: float
    metrics: float

    def within(self, bounds: "Errors") -> bool:
        return self.loss <= bounds.loss and self.gradient <= bounds.gradient and self.metrics <= bounds.metrics


BOUNDS = {torch.float64: Errors(1e-12, 1e-12, 1e-12), torch.float32: Errors(1e-5, 2e-6, 1e-5)}
KINK_MARGIN = {torch.float64: 1e-9, torch.float32: 1e-3}  # nearer to a clip bound, rounding decides on the gradient
MOST_CANCELLATION = {torch.float64: math.inf, torch.float32: 4.0}  # of 1 - p, which no float32 gradient can undo
METRIC_FLOOR = {torch.float64: 0.1, torch.float32: 1.0}


def root_length_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    """A user's reducer: each sample's token sum over the root of its response length."""

    def reduce(x):
        parts = zip(x.split(response_lengths), loss_masks, strict=True)
        return sum((part * mask).sum() / math.sqrt(len(mask)) for part, mask in parts)

    return reduce


@dataclass(frozen=True)
class Case:
    """One random step, how its tokens are weighed, and which contract with Megatron is used."""

    samples: Sequence[Sample]
    logits: Sequence[Tensor]  # [n, V] of every sample
    aggregation: str
    per_token: bool
    divisor: float | None
    temperature: float

    @property
    def dtype(self) -> torch.dtype:
        return self.logits[0].dtype

    @cached_property
    def settings(self):
        custom = self.aggregation == CUSTOM
        return simulation.settings(
            "sample_mean" if custom else self.aggregation,
            per_token=self.per_token,
            divisor=self.divisor,
            reducer=root_length_reducer if custom else None,
            temperature=self.temperature,
        )

    @cached_property
    def expected(self) -> list[oracle.OracleSample]:
        return oracle_samples(self.samples, self.logits)

    @property
    def oracle_settings(self) -> dict:
        name = f"{CUSTOM}_per_token" if self.aggregation == CUSTOM and self.per_token else self.aggregation
        clip = {"eps_low": EPS_LOW, "eps_high": EPS_HIGH, "temperature": self.temperature}
        return clip | {"aggregation": name, "divisor": self.divisor}

    def step(self, layout: Layout, rng: random.Random) -> Step:
        return Step(self.samples, self.logits, self.settings, simulation.scatter_samples(self.samples, layout, rng))

    def errors(self, found: Outcome) -> Errors:
        """How far the outcome is from the oracle."""
        objective, gradients = oracle.objective(self.expected, **self.oracle_settings)
        scale = oracle.weighted_absolute(self.expected, **self.oracle_settings)
        reported = (found.reported, found.metrics.get("pg_loss", math.nan))
        wanted = [torch.tensor(table, dtype=torch.float64) for table in gradients]
        metrics = oracle.all_metrics(self.expected, **self.oracle_settings)
        floor = METRIC_FLOOR[self.dtype]
        return Errors(
            loss=max(scalar_error(value, objective, scale) for value in reported),
            gradient=gradient_error(found.gradients, wanted),
            metrics=metrics_error(found.metrics, metrics, ignore=["pg_loss"], floor=floor),
        )


def random_case(
    rng: random.Random,
    aggregation: str,
    *,
    per_token: bool,
    dtype: torch.dtype = torch.float64,
    temperature: float | None = None,
    most_tokens: int = 14,
) -> Case:
    """A case away from the clip bounds, where the gradient jumps, and whose gradient the precision can hold."""
    while True:
        samples = random_step(rng, vocabulary=VOCABULARY, most_tokens=most_tokens)
        case = Case(
            samples=samples,
            logits=poisoned_logits(samples, rng, dtype),
            aggregation=aggregation,
            per_token=per_token,
            divisor=divisor_of(aggregation, rng.uniform(1, 5000)),
            temperature=rng.choice([1.0, 0.7]) if temperature is None else temperature,
        )
        if is_well_conditioned(case):
            return case


def is_well_conditioned(case: Case) -> bool:
    clip = {"eps_low": EPS_LOW, "eps_high": EPS_HIGH, "temperature": case.temperature}
    if oracle.near_kink(case.expected, **clip, margin=KINK_MARGIN[case.dtype]):
        return False
    most = MOST_CANCELLATION[case.dtype]
    return most == math.inf or oracle.cancellation(case.expected, **case.oracle_settings) <= most


def poisoned_logits(samples: Sequence[Sample], rng: random.Random, dtype=torch.float64) -> list[Tensor]:
    """[n, V] per sample; NaN and inf wherever no trained token is predicted."""
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    tables = []
    for sample in samples:
        table = 1.5 * torch.randn(len(sample.tokens), VOCABULARY, dtype=dtype, generator=generator)
        for position in silent_positions(sample):
            table[position] = rng.choice(BAD)
        tables.append(table)
    return tables


def silent_positions(sample: Sample) -> list[int]:
    """Positions whose logits predict no trained token."""
    first = len(sample.tokens) - sample.response_length - 1
    predicts = {first + k for k, trained in enumerate(sample.loss_mask.tolist()) if trained}
    return [position for position in range(len(sample.tokens)) if position not in predicts]


def oracle_samples(samples: Sequence[Sample], logits: Sequence[Tensor]) -> list[oracle.OracleSample]:
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
            reward=s.reward,
            truncated=s.truncated,
        )
        for s, table in zip(samples, logits, strict=True)
    ]
