"""Analytic gradients against numerical ones in float64: whole Jacobians, and random projections of larger ones."""

import math
import random

import pytest
import torch
from simulation import EPS_HIGH, EPS_LOW
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck

from megatron_pg.kernels import Vocabulary, grpo_loss
from megatron_pg.kernels.label_logprobs import label_logprobs
from megatron_pg.objectives import MAX_LOG_RATIO, Parameters
from megatron_pg.objectives.grpo import clipped_surrogate
from megatron_pg.objectives.interface.tokens import ratio

BOUNDS = {"eps": 1e-6, "atol": 1e-6, "rtol": 1e-5, "nondet_tol": 0.0}
CLIP = {"clip_eps_low": EPS_LOW, "clip_eps_high": EPS_HIGH}
PARAMETERS = Parameters(**CLIP)
KINKS = torch.tensor(
    [math.log(1 - EPS_LOW), math.log(1 + EPS_HIGH), MAX_LOG_RATIO, -MAX_LOG_RATIO], dtype=torch.float64
)


def random_generator(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(60))


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def off_the_kinks(log_ratios: Tensor) -> Tensor:
    """Log-ratios at least 1e-3 away from where the derivative jumps."""
    near = (log_ratios[:, None] - KINKS).abs().amin(dim=1) < 1e-3
    return torch.where(near, log_ratios + 0.01, log_ratios)


def objective_point(rng: random.Random, tokens: int, vocabulary: int):
    generator = random_generator(rng)
    advantages = normal(tokens, generator=generator)
    log_ratios = off_the_kinks(rng.choice([0.1, 1.0, 3.0]) * normal(tokens, generator=generator)).requires_grad_()
    return lambda d: clipped_surrogate(ratio(d), advantages, PARAMETERS), log_ratios


def logprob_point(rng: random.Random, tokens: int, vocabulary: int):
    generator = random_generator(rng)
    logits = (rng.choice([0.1, 1.0, 4.0]) * normal(tokens, vocabulary, generator=generator)).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    temperature = rng.choice([0.5, 1.0, 2.0])
    vocabulary_ = Vocabulary.of(vocabulary, temperature=temperature)
    return lambda z: label_logprobs(z, targets, vocabulary_, impl="torch"), logits


def loss_point(rng: random.Random, tokens: int, vocabulary: int):
    generator = random_generator(rng)
    logits = normal(tokens, vocabulary, generator=generator)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    temperature = rng.choice([0.7, 1.0])
    logprobs, _ = label_logprobs(logits, targets, Vocabulary.of(vocabulary, temperature=temperature), impl="torch")
    log_ratios = off_the_kinks(rng.choice([0.1, 1.0]) * normal(tokens, generator=generator))
    fields = {
        "old_logprobs": logprobs - log_ratios,
        "advantages": normal(tokens, generator=generator),
        "weights": normal(tokens, generator=generator).abs(),  # upstream gradient of every token
        "mask": torch.rand(tokens, generator=generator) < 0.8,
    }
    loss = lambda z: grpo_loss(z, targets, **fields, **CLIP, temperature=temperature, impl="torch").loss  # noqa: E731
    return loss, logits.requires_grad_()


POINTS = [objective_point, logprob_point, loss_point]


@pytest.mark.proof("gradcheck: whole Jacobians in float64")
@pytest.mark.parametrize("point", POINTS)
def test_the_whole_jacobian_is_right(point, full, evidence):
    rng, count = random.Random(point.__name__), 50 if full else 6
    for _ in range(count):
        assert gradcheck(*point(rng, rng.randint(2, 6), rng.randint(2, 7)), **BOUNDS)
    evidence(cases=count)


@pytest.mark.proof("gradcheck: random projections in float64")
@pytest.mark.parametrize("point", POINTS)
def test_random_projections_of_the_jacobian_are_right(point, full, evidence):
    rng, count = random.Random(point.__name__), 340 if full else 20
    for _ in range(count):
        assert gradcheck(*point(rng, rng.randint(1, 20), rng.randint(2, 30)), **BOUNDS, fast_mode=True)
    evidence(cases=count)


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("point", POINTS)
def test_a_gradient_that_is_wrong_by_a_thousandth_would_be_seen(point, fast_mode):
    function, at = point(random.Random(0), 12, 5)

    def wrong(x):
        values = function(x)
        values = values if isinstance(values, tuple) else (values,)
        return tuple(1.001 * value - 0.001 * value.detach() for value in values)

    with pytest.raises(GradcheckError, match="Jacobian mismatch"):
        gradcheck(wrong, at, **BOUNDS, fast_mode=fast_mode)


@pytest.mark.parametrize(("bound", "inwards"), [(1 - EPS_LOW, 1), (1 + EPS_HIGH, -1)])
def test_at_a_clip_bound_the_gradient_is_the_one_sided_difference_from_inside(bound, inwards):
    step, advantage = inwards * 1e-7, torch.tensor([-1.0 if inwards > 0 else 1.0], dtype=torch.float64)
    at = torch.tensor([math.log(bound) + inwards * 1e-12], dtype=torch.float64, requires_grad=True)
    loss = lambda d: clipped_surrogate(ratio(d), advantage, PARAMETERS)  # noqa: E731
    value = loss(at)
    (gradient,) = torch.autograd.grad(value.sum(), at)
    with torch.no_grad():
        inside, outside = (float((loss(at + s) - value) / s) for s in (step, -step))
    assert float(gradient) == pytest.approx(inside, rel=1e-6)
    assert outside == pytest.approx(0.0, abs=1e-4)
