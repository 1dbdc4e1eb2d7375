"""Advantages whitened over the step: against numpy in float64, and bit for bit over any split."""

import dataclasses
import math
import random

import numpy as np
import pytest
import threads
import torch
from samples import make_sample, plain_sample

from megatron_pg import whiten_advantages
from megatron_pg.rollouts.sample import Sample


def step(seed: int) -> list[Sample]:
    """Samples with advantages of very different sizes, masked tokens with NaN, and one of another loss term."""
    rng = random.Random(seed)
    masks = [[rng.random() < 0.7 for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(4, 12))]
    samples = [make_sample(prompt_length=2, mask=[1, *mask], rng=rng, poison=True) for mask in masks]
    return [*samples, plain_sample(3, term="sft", advantage=None), plain_sample(2, advantage=[1e-200, 1e8])]


def values_of(samples: list[Sample]) -> np.ndarray:
    return torch.cat([s.advantages[s.loss_mask] for s in samples if s.term == "rl"]).numpy()


@pytest.mark.proof("Advantages: whitened over the step, mean and variance against numpy, and equal bits over any ranks")
def test_whitened_advantages_equal_numpys_and_do_not_depend_on_the_ranks(full, evidence):
    count, worst = 200 if full else 5, 0.0
    for seed in range(count):
        samples = step(seed)
        alone, before = whiten_advantages(samples), values_of(samples).astype(np.longdouble)
        expected = (before - before.mean()) / np.sqrt(before.var(ddof=1) + 1e-8)
        worst = max(worst, float(np.abs(values_of(alone) / expected.astype(float) - 1).max()))
        size = 2 + seed % 3
        owner = [random.Random(seed + i).randrange(size) for i in range(len(samples))]
        parts = [[s for s, r in zip(samples, owner, strict=True) if r == rank] for rank in range(size)]
        spread = threads.run(size, lambda rank, parts=parts: whiten_advantages(parts[rank], group=_world()))
        for part, whitened in zip(parts, spread, strict=True):
            wanted = [alone[[s is other for other in samples].index(True)] for s in part]
            assert [_bits(s) for s in whitened] == [_bits(s) for s in wanted]
    evidence(cases=count, worst=worst, tolerance=1e-12)


def test_mean_and_variance_of_the_result_and_what_stays():
    samples = [plain_sample(3, advantage=[1.0, 2.0, 6.0]), plain_sample(1, term="sft", advantage=None)]
    first, second = whiten_advantages(samples, epsilon=0.0)
    assert first.advantages.tolist() == pytest.approx([-2 / math.sqrt(7), -1 / math.sqrt(7), 3 / math.sqrt(7)])
    assert second is samples[1]


def test_equal_advantages_become_zero():
    (sample,) = whiten_advantages([plain_sample(4, advantage=0.1)])
    assert sample.advantages.tolist() == [0.0] * 4


def test_one_trained_token_is_refused_on_every_rank():
    with pytest.raises(ValueError, match="has 1 trained tokens of the objective, and a variance needs two"):
        threads.run(2, lambda rank: whiten_advantages([plain_sample(1)] if rank else [], group=_world()))


def test_without_group_in_a_job_of_several_ranks_it_warns():
    with pytest.warns(UserWarning, match="whiten_advantages without group counts the samples of this rank alone"):
        threads.run(2, lambda rank: whiten_advantages([plain_sample(2)]))


def _world() -> torch.distributed.ProcessGroup:
    return torch.distributed.group.WORLD


def _bits(sample: Sample) -> object:
    return None if sample.advantages is None else sample.advantages.view(torch.int64).tolist()


def test_a_critics_samples_stay_and_no_rank_waits_for_another():
    critics = dataclasses.replace(plain_sample(2), advantages=None, returns=torch.zeros(2, dtype=torch.float64))
    parts = [[critics], [plain_sample(2, advantage=[1.0, 2.0])]]
    (left,), (whitened,) = threads.run(2, lambda rank: whiten_advantages(parts[rank], group=_world(), epsilon=0.0))
    assert left is critics
    assert whitened.advantages.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
