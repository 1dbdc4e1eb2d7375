"""Random steps for the corrections that choose tokens of the whole step, with ties and twins, and what the oracle expects."""

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import objective_cases
import objective_oracle
import selection_oracle
import simulation
import torch
from compare import gradient_error, scalar_error
from selection_oracle import Row, Rule
from simulation import Layout, Outcome, Step
from torch import Tensor

from megatron_pg.declarations.corrections import CORRECTIONS, PENALTY
from megatron_pg.declarations.loss_terms import AS_POLICY, LossTerm
from megatron_pg.objectives.corrections.correction import Correction
from megatron_pg.plan.settings import LossSettings, metrics_of
from megatron_pg.rollouts.sample import Sample

NAMES = tuple(name for name, declared in CORRECTIONS.items() if declared.selection)
FRACTIONS = ("0.0002", "0.1", "0.25", "0.29", "0.5", "0.97")
BETA = 0.3


def random_rule(rng: random.Random, name: str) -> Rule:
    """Fractions from none of a step's tokens to nearly all; bounds that some keys reach, and lie on."""
    seed = rng.choice([0, 1234])
    if name == "m2po":
        return Rule(name, high=rng.choice([1e-3, 1 / 64, 0.04, 0.25, 10.0]), seed=seed)
    bounds = {"low": rng.choice([-2.0, 0.0, 0.0625]), "high": 1.5} if name == "clip_cov" else {}
    return Rule(name, fraction=rng.choice(FRACTIONS), seed=seed, **bounds)


def correction_of(rule: Rule) -> Correction:
    return Correction(
        name=rule.name,
        low=rule.low,
        high=rule.high,
        fraction=None if rule.fraction is None else float(rule.fraction),
        coef=BETA if rule.name == PENALTY else None,
    )


def settings_of(loss: LossSettings, rule: Rule) -> LossSettings:
    """The settings with the correction."""
    correction, terms = correction_of(rule), loss.terms
    if rule.name == PENALTY:
        penalty = LossTerm(name=PENALTY, kind=PENALTY, weight=BETA, on="rl", aggregation=AS_POLICY, estimator="abs")
        terms = dataclasses.replace(terms, further=(*terms.further, penalty))
    metrics = metrics_of("with_entropy", terms, correction)
    return dataclasses.replace(loss, correction=correction, terms=terms, seed=rule.seed, metrics=metrics)


def with_keys(samples: Sequence[Sample], rng: random.Random) -> list[Sample]:
    """The samples with fields that keys are made of; of a few values in most steps, so that choices end among equals."""
    is_coarse, twin = rng.random() < 0.7, rng.choice(samples)
    found = [with_fields(sample, rng, is_coarse=is_coarse) for sample in samples]
    twins = [with_fields(twin, rng, is_coarse=is_coarse) for _ in range(rng.choice([0, 0, 1, 2]))]
    return found + twins  # one name, other numbers


def with_fields(sample: Sample, rng: random.Random, *, is_coarse: bool) -> Sample:
    def draw(low: float, high: float) -> list[float]:
        size = sample.response_length
        return [
            rng.randint(int(2 * low), int(2 * high)) / 2 if is_coarse else rng.uniform(low, high) for _ in range(size)
        ]

    old = draw(-2.5, -0.5)
    fields = {
        "old_logprobs": old,
        "advantages": draw(-2.0, 2.0),
        "rollout_logprobs": [o + x for o, x in zip(old, draw(-0.5, 0.5), strict=True)],
        "old_entropies": draw(0.0, 1.0),
    }
    whole = {name: torch.tensor(values, dtype=torch.float64) for name, values in fields.items()}
    return dataclasses.replace(
        sample, **{name: torch.where(sample.loss_mask, values, torch.nan) for name, values in whole.items()}
    )


def rows_of(samples: Sequence[Sample]) -> list[Row]:
    return [
        Row(
            name=(s.step, s.prompt_id, s.rollout_id, s.response_length),
            tokens=s.tokens.numpy(),
            mask=s.loss_mask.numpy(),
            advantages=s.advantages.numpy(),
            old=s.old_logprobs.numpy(),
            rollout=s.rollout_logprobs.numpy(),
            entropies=s.old_entropies.numpy(),
        )
        for s in samples
    ]


@dataclass(frozen=True)
class Case:
    samples: Sequence[Sample]
    logits: Sequence[Tensor]
    expected: objective_oracle.Settings
    rule: Rule

    @cached_property
    def selected(self) -> list[np.ndarray]:
        """[R] bool of each sample."""
        return selection_oracle.select(rows_of(self.samples), self.rule)

    @cached_property
    def wanted(self) -> objective_oracle.Result:
        documents = objective_cases.documents(self.samples, self.logits)
        field = "penalised" if self.rule.name == PENALTY else "kept"
        for document, chosen in zip(documents, self.selected, strict=True):
            setattr(document, field, chosen if field == "penalised" else ~chosen)
        return objective_oracle.step(documents, self.expected)

    @cached_property
    def loss(self) -> LossSettings:
        return settings_of(objective_cases.settings_of(self.expected), self.rule)

    def step(self, layout: Layout, rng: random.Random) -> Step:
        return Step(self.samples, self.logits, self.loss, simulation.scatter_samples(self.samples, layout, rng))

    def error(self, found: Outcome) -> float:
        """Worst of pg_loss, the penalty and the gradient; the counts are compared here."""
        wanted = self.wanted
        count, size = sum(int(each.sum()) for each in self.selected), sum(s.num_trained for s in self.samples)
        assert found.metrics["selected_fraction"] == count / size
        logged = {name: value for name, value in found.metrics.items() if name.startswith("selection_")}
        assert logged == selection_oracle.facts(rows_of(self.samples), self.rule)
        scale = sum(w * np.abs(x).sum() for w, x in zip(wanted.weights, wanted.token_losses, strict=True))
        errors = [scalar_error(found.metrics["pg_loss"], wanted.pg_loss, scale)]
        if self.rule.name == PENALTY:
            errors.append(scalar_error(found.metrics["kl_cov_loss"], wanted.penalty, wanted.penalty))
            terms = {"penalty": BETA, "kl_loss": self.expected.kl_coef, "entropy_loss": self.expected.entropy_coef}
            scale += sum(abs(coefficient * getattr(wanted, term)) for term, coefficient in terms.items())
            errors.append(scalar_error(found.metrics["loss"], wanted.loss, scale))
        gradients = [self._spread(i, rows) for i, rows in enumerate(wanted.gradients)]
        return max(*errors, gradient_error(found.gradients, gradients))

    def _spread(self, i: int, rows: np.ndarray) -> Tensor:
        sample, table = self.samples[i], torch.zeros_like(self.logits[i])
        first = len(sample.tokens) - sample.response_length - 1
        table[first : first + len(rows)] = torch.from_numpy(rows)
        return table
