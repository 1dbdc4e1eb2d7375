"""Random steps for every objective with corrections, KL, entropy and denominators, and what the oracle expects of them."""

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

import cases
import numpy as np
import objective_oracle as oracle
import simulation
import torch
from compare import gradient_error, scalar_error
from loss_terms import kl_and_entropy
from samples import divisor_of, random_step
from simulation import Layout, Outcome, Step
from torch import Tensor

from megatron_pg.declarations.aggregations import AGGREGATIONS, STEP_MEANS
from megatron_pg.declarations.corrections import CORRECTIONS
from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.kernels import LossTerms
from megatron_pg.objectives import objective_of
from megatron_pg.objectives.corrections.correction import Correction
from megatron_pg.plan.settings import LossSettings
from megatron_pg.rollouts.sample import Sample

# name of a number: (of the oracle's field, its range)
NUMBERS = {
    "clip_eps_low": ("eps_low", (0.0, 0.5)),
    "clip_eps_high": ("eps_high", (0.0, 0.6)),
    "dual_clip": ("dual_clip", (1.05, 4.0)),
    "cispo_cap": ("cispo_cap", (1.0, 4.0)),
    "sapo_tau_pos": ("sapo_tau_pos", (0.5, 2.0)),
    "sapo_tau_neg": ("sapo_tau_neg", (0.5, 2.0)),
    "dppo_delta_low": ("dppo_delta_low", (0.01, 0.3)),
    "dppo_delta_high": ("dppo_delta_high", (0.01, 0.3)),
    "dro_beta": ("dro_beta", (0.01, 2.0)),
    "ipo_delta_low": ("ipo_low", (0.01, 0.3)),
    "ipo_delta_high": ("ipo_high", (0.01, 0.3)),
    "ipo_tau": ("ipo_tau", (0.001, 1.0)),
    "gmpo_eps_low": ("gmpo_low", (0.05, 0.5)),
    "gmpo_eps_high": ("gmpo_high", (0.05, 0.5)),
    **{name: (name, (0.5, 3.0)) for name in ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")},
}
PRODUCTS = ("topr", "vespo")  # whose ratio is a product over the sequence
BOUNDS = {
    "tis": ((0.0, 0.8), (1.0, 2.0)),
    "seq_tis": ((0.0, 0.8), (1.0, 2.0)),
    "icepop": ((0.5, 0.95), (1.0, 1.5)),
    "mis": ((0.2, 0.9), (1.0, 3.0)),
    "seq_mask_tis": ((0.7, 0.99), (1.0, 1.4)),
    "opsm": (None, (-0.5, 0.5)),
}


def numbers_of(objective: str) -> list[str]:
    return [number.name for number in OBJECTIVES[objective].numbers]


@dataclass(frozen=True)
class Case:
    samples: Sequence[Sample]
    logits: Sequence[Tensor]
    expected: oracle.Settings
    loss: LossSettings

    def step(self, layout: Layout, rng: random.Random) -> Step:
        return Step(self.samples, self.logits, self.loss, simulation.scatter_samples(self.samples, layout, rng))

    def error(self, found: Outcome) -> float:
        """Worst of: loss and its terms over the sum of their magnitudes, gradient over its largest entry."""
        wanted = oracle.step(documents(self.samples, self.logits), self.expected)
        scale = sum(
            w * np.abs(f * x).sum() for w, f, x in zip(wanted.weights, wanted.factors, wanted.token_losses, strict=True)
        )
        errors = [scalar_error(value, wanted.pg_loss, scale) for value in (found.reported, found.metrics["pg_loss"])]
        terms = {"kl_loss": self.expected.kl_coef, "entropy_loss": self.expected.entropy_coef}
        for name, coefficient in terms.items():
            assert (name in found.metrics) == (coefficient != 0)
            if coefficient:
                errors.append(scalar_error(found.metrics[name], getattr(wanted, name), abs(getattr(wanted, name))))
                scale += abs(coefficient * getattr(wanted, name))
        if any(terms.values()):
            errors.append(scalar_error(found.metrics["loss"], wanted.loss, scale))
        gradients = [self._spread(i, rows) for i, rows in enumerate(wanted.gradients)]
        return max(*errors, gradient_error(found.gradients, gradients))

    def _spread(self, i: int, rows: np.ndarray) -> Tensor:
        table, first = torch.zeros_like(self.logits[i]), _first(self.samples[i])
        table[first : first + len(rows)] = torch.from_numpy(rows)
        return table


def documents(samples: Sequence[Sample], logits: Sequence[Tensor]) -> list[oracle.Document]:
    return [
        oracle.Document(
            logits=table[_first(s) : _first(s) + s.response_length].numpy(),
            targets=s.tokens[_first(s) + 1 :].numpy(),
            mask=s.loss_mask.numpy(),
            old=s.old_logprobs.numpy(),
            advantages=s.advantages.numpy(),
            rollout=s.rollout_logprobs.numpy(),
            ref=s.ref_logprobs.numpy(),
            rollout_id=s.rollout_id,
            prompt_id=s.prompt_id,
        )
        for s, table in zip(samples, logits, strict=True)
    ]


def _first(sample: Sample) -> int:
    return len(sample.tokens) - sample.response_length - 1


def random_case(rng: random.Random, objective: str) -> Case:
    samples = [_with_engines(sample, rng) for sample in random_step(rng, vocabulary=cases.VOCABULARY)]
    logits = cases.poisoned_logits(samples, rng)
    expected = random_settings(rng, objective)
    if OBJECTIVES[objective].has_one_advantage_per_sequence:
        samples = [_with_one_advantage(sample) for sample in samples]
    if objective in PRODUCTS:
        near = zip(samples, logits, strict=True)
        samples = [_with_near_anchor(sample, table, expected.temperature, rng) for sample, table in near]
    if expected.denominator == "kept" and not _keeps_some(samples, logits, expected):
        expected.denominator = "live"
    return Case(samples, logits, expected, settings_of(expected))


def _with_engines(sample: Sample, rng: random.Random) -> Sample:
    """The sample with rollout and reference log-probabilities, one token in 50 far from the others."""
    size, spread = sample.response_length, rng.choice([0.02, 0.2, 0.6])
    noise = [rng.gauss(0, spread) for _ in range(size)]
    far = [rng.choice([-25.0, 0.0]) if rng.random() < 0.02 else 0.0 for _ in range(size)]
    old = sample.old_logprobs + torch.tensor(far, dtype=torch.float64)
    rollout = (old + torch.tensor(noise, dtype=torch.float64)).clamp(max=0)
    ref = torch.tensor([rng.uniform(-5, -0.5) for _ in range(size)], dtype=torch.float64)
    return dataclasses.replace(sample, old_logprobs=old, rollout_logprobs=rollout, ref_logprobs=ref)


def _with_one_advantage(sample: Sample) -> Sample:
    trained = sample.advantages[sample.loss_mask]
    return dataclasses.replace(sample, advantages=torch.where(sample.loss_mask, trained[:1].sum(), sample.advantages))


def _with_near_anchor(sample: Sample, table: Tensor, temperature: float, rng: random.Random) -> Sample:
    """The sample with old log-probabilities from which a product of ratios over the sequence is not 0 or infinite."""
    rows = table[_first(sample) : _first(sample) + sample.response_length] / temperature
    new = rows.log_softmax(-1).gather(1, sample.tokens[_first(sample) + 1 :, None])[:, 0]
    noise = torch.tensor([rng.gauss(0, 0.3) for _ in new], dtype=torch.float64)
    old = torch.where(sample.loss_mask, (new + noise).clamp(max=0), sample.old_logprobs)
    return dataclasses.replace(sample, old_logprobs=old)


def random_settings(rng: random.Random, objective: str) -> oracle.Settings:
    numbers = {NUMBERS[n][0]: rng.uniform(*NUMBERS[n][1]) for n in numbers_of(objective)}
    correction = rng.choice(["none", *BOUNDS])
    low, high = BOUNDS.get(correction, (None, None))
    aggregation = rng.choice(sorted(AGGREGATIONS))
    return oracle.Settings(
        objective=objective,
        aggregation=aggregation,
        divisor=divisor_of(aggregation, rng.uniform(1, 5000)),
        temperature=rng.choice([1.0, 0.7]),
        correction=correction,
        correction_low=rng.uniform(*low) if low else None,
        correction_high=rng.uniform(*high) if high else None,
        denominator=rng.choice(["scheduled", "live", *(["kept"] if CORRECTIONS[correction].rejects == "data" else [])]),
        kl_coef=rng.choice([0.0, rng.uniform(0.01, 2.0)]),
        kl_estimator=rng.choice(sorted(oracle.KL_ESTIMATORS)),
        entropy_coef=rng.choice([0.0, rng.uniform(0.01, 2.0)]),
        aux_aggregation=rng.choice(["default", "policy"]),
        per_token=rng.random() < 0.5,
        grad_divisor=rng.choice([1.0, 64.0]),
        **numbers,
    )


def _keeps_some(samples: Sequence[Sample], logits: Sequence[Tensor], expected: oracle.Settings) -> bool:
    return any(factors.any() for factors in oracle.step(documents(samples, logits), expected).factors)


def settings_of(expected: oracle.Settings) -> LossSettings:
    """The package's settings for the oracle's."""
    numbers = {name: getattr(expected, NUMBERS[name][0]) for name in numbers_of(expected.objective)}
    is_opsm = expected.correction == "opsm"
    terms = LossTerms(
        objective=objective_of(expected.objective, **numbers),
        opsm_anchor="rollout_logprobs" if is_opsm else None,
        opsm_threshold=expected.correction_high if is_opsm else None,
        further=kl_and_entropy(
            kl_coef=expected.kl_coef,
            kl_estimator=expected.kl_estimator,
            entropy_coef=expected.entropy_coef,
            aggregation="policy" if expected.aux_aggregation == "policy" else STEP_MEANS[expected.per_token],
        ),
        grad_divisor=expected.grad_divisor,
    )
    low, high = expected.bounds
    return simulation.settings(
        expected.aggregation,
        per_token=expected.per_token,
        divisor=expected.divisor,
        temperature=expected.temperature,
        terms=terms,
        correction=Correction(name=expected.correction, low=low, high=high),
        denominator=expected.denominator,
    )
