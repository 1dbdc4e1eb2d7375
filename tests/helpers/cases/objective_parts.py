"""Objectives with their numbers, sequences, and drawn tokens whose gradients can be checked."""

import dataclasses
import math
import random

import torch
from loss_terms import kl_and_entropy
from torch import Tensor

from megatron_pg.batch import TokenFields
from megatron_pg.batch.sequences import Sequences
from megatron_pg.declarations.corrections import KL_ESTIMATORS
from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.kernels import LossTerms, PolicyLoss
from megatron_pg.objectives import objective_of

NUMBERS = {
    "clip_eps_low": 0.2,
    "clip_eps_high": 0.28,
    "cap": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "delta_low": 0.05,
    "delta_high": 0.1,
    "beta": 0.5,
    "tau": 0.1,
    "k_pos": 2.0,
    "lambda_pos": 3.0,
    "k_neg": 3.0,
    "lambda_neg": 2.0,
    "eps_low": 0.3,
    "eps_high": 0.4,
}
SIZES = [3, 1, 4]  # tokens of three sequences


def build(name: str, **changes: float):
    """The objective with the numbers that it reads."""
    numbers = NUMBERS | ({"cap": 1.5} if name == "cispo" else {}) | changes
    reads = {number.name for number in OBJECTIVES[name].numbers}
    return objective_of(name, **{n: v for n, v in numbers.items() if n in reads})


ESTIMATORS = {name: declared.load() for name, declared in KL_ESTIMATORS.items()}


def with_fields(loss: PolicyLoss, **changes) -> PolicyLoss:
    return PolicyLoss(loss.terms, dataclasses.replace(loss.fields, **changes))


def sequences_of(sizes, trained=None) -> Sequences:
    """Sequences one after the other; `trained`: their trained tokens, all by default."""
    slots = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return Sequences(
        slots=slots,
        order=slots.argsort(stable=True),
        lengths=torch.tensor([*sizes, 0]),
        counts=torch.tensor(trained or sizes, dtype=torch.float64).clamp(min=1),
    )


def drawn(name: str, rng: random.Random, **terms) -> tuple[PolicyLoss, Tensor, Tensor]:
    """A loss over three sequences with log-probabilities and entropies, off the kinks."""
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    normal = lambda: torch.randn(sum(SIZES), dtype=torch.float64, generator=generator)  # noqa: E731
    old = -0.1 - normal().abs()
    logprobs = (old + rng.choice([0.05, 0.5]) * normal()).clamp(max=-0.01)
    fields = TokenFields(
        targets=torch.zeros(sum(SIZES), dtype=torch.int64),
        mask=torch.rand(sum(SIZES), generator=generator) < 0.85,
        old_logprobs=old,
        advantages=normal(),
        weights=torch.repeat_interleave(torch.rand(3, generator=generator, dtype=torch.float64), torch.tensor(SIZES)),
        ref_logprobs=-normal().abs(),
        rollout_logprobs=old + 0.1 * normal(),
    )
    if OBJECTIVES[name].has_one_advantage_per_sequence:
        firsts = torch.stack([part[0] for part in fields.advantages.split(SIZES)])
        fields = dataclasses.replace(fields, advantages=torch.repeat_interleave(firsts, torch.tensor(SIZES)))
    trained = [int(part.sum()) for part in fields.mask.split(SIZES)]
    fields = dataclasses.replace(fields, sequences=sequences_of(SIZES, trained))
    shorthands = {key: terms[key] for key in ("kl_coef", "kl_estimator", "entropy_coef") if key in terms}
    rest = {key: value for key, value in terms.items() if key not in shorthands}
    loss = PolicyLoss(LossTerms(objective=build(name), further=kl_and_entropy(**shorthands), **rest), fields)
    found = loss(logprobs, entropy=0 * logprobs)
    ratios = [found.log_ratios.exp()]
    ratios += [] if found.sequence_log_ratios is None else [found.sequence_log_ratios.exp()]
    kinks = torch.tensor([0.8, 1.28, 2.0, 3.0, math.exp(-0.3), math.exp(0.4)], dtype=torch.float64)
    if any((r[:, None] - kinks).abs().min() < 1e-3 for r in ratios):
        return drawn(name, rng, **terms)
    return loss, logprobs.requires_grad_(), normal().abs().requires_grad_()
