"""Averages over whole sequences against loops, with padding, masked sequences and context-parallel ranks."""

import random

import pytest
import threads
import torch

from megatron_pg.batch.sequences import Sequences


def sequences_of(slots: list[int], counts: list[int], group=None) -> Sequences:
    slots = torch.tensor(slots, dtype=torch.int64)
    return Sequences(
        slots=slots,
        order=slots.argsort(stable=True),
        lengths=torch.bincount(slots, minlength=len(counts) + 1),
        counts=torch.tensor(counts, dtype=torch.float64),
        group=group,
    )


def by_loop(values: list[float], slots: list[int], counts: list[int]) -> list[float]:
    sums = [sum(v for v, s in zip(values, slots, strict=True) if s == sequence) for sequence in range(len(counts))]
    return [sums[s] / counts[s] if s < len(counts) else 0.0 for s in slots]


@pytest.mark.parametrize("seed", range(20))
def test_random_sequences_equal_a_loop(seed):
    rng = random.Random(seed)
    sequences, tokens = rng.randint(1, 6), rng.randint(0, 40)
    slots = [rng.randint(0, sequences) for _ in range(tokens)]
    counts = [max(1, slots.count(s) - rng.randint(0, 2)) for s in range(sequences)]
    values = [rng.gauss(0, 1) for _ in range(tokens)]
    found = sequences_of(slots, counts).averages(torch.tensor([values], dtype=torch.float64))
    assert found[0].tolist() == pytest.approx(by_loop(values, slots, counts), rel=1e-14, abs=1e-14)


def test_a_micro_batch_without_a_sequence_has_averages():
    assert sequences_of([0, 0], []).averages(torch.ones(3, 2)).tolist() == [[0, 0]] * 3
    assert sequences_of([], [1]).averages(torch.ones(1, 0)).shape == (1, 0)


def test_sums_are_made_in_float64_and_given_in_the_dtype_of_the_values():
    values = torch.tensor([[1e8, 1.0, -1e8]])  # in float32 the 1 would be lost
    found = sequences_of([0, 0, 0], [1]).averages(values)
    assert found.dtype == torch.float32
    assert found.tolist() == [[1, 1, 1]]


def test_averages_are_values_without_a_gradient():
    assert not sequences_of([0, 0], [2]).averages(torch.ones(1, 2, requires_grad=True)).requires_grad


def test_parts_of_a_sequence_on_two_ranks_have_the_average_of_the_whole():
    """Rank 1 has no token of the first sequence, and calls with the others."""
    slots = [[0, 1, 1], [1, 2]]
    values = [[1.0, 2.0, 4.0], [8.0, 100.0]]

    def averages(rank):
        group = threads.subgroup(lambda r: 0, 2, rank)
        return sequences_of(slots[rank], [1, 2], group).averages(torch.tensor([values[rank]])).tolist()

    assert threads.run(2, averages) == [[[1, 7, 7]], [[7, 0]]]
