"""The ranks of the simulation, which are threads."""

import threading

import pytest
import threads
import torch


def test_a_rank_that_fails_is_the_only_error_of_its_world(monkeypatch):
    """While it ends the others, they begin and end collectives."""
    escaped = []
    monkeypatch.setattr(threading, "excepthook", lambda hooked: escaped.append(hooked.exc_value))

    def work(rank: int) -> None:
        pairs = [threads.subgroup(lambda r: r // 2, 8, rank), threads.subgroup(lambda r: r % 4, 8, rank)]
        for number in range(50):
            if (rank, number) == (5, 7):
                raise ArithmeticError("seeded")
            for pair in pairs:
                torch.distributed.all_reduce(torch.ones(2), group=pair)

    for _ in range(10):
        with pytest.raises(ArithmeticError, match="seeded"):
            threads.run(8, work)
    assert escaped == []
