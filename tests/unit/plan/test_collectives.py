"""Tables and texts between ranks, which run as threads."""

import pytest
import threads
import torch
import torch.distributed as dist

from megatron_pg.plan.collectives import all_gather_rows, broadcast_text, gathered_texts, text_of_failed


def test_rows_of_a_group_are_those_of_its_members():
    def gather(rank):
        mine = threads.subgroup(lambda r: r % 2, 4, rank)
        return all_gather_rows(torch.tensor([rank]), mine).tolist()

    assert threads.run(4, gather) == [[[0], [2]], [[1], [3]], [[0], [2]], [[1], [3]]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float32])
def test_values_keep_their_bits(dtype):
    odd = torch.tensor([2**53 - 1 if dtype == torch.int64 else float("nan"), 1], dtype=dtype)
    for rows in threads.run(2, lambda rank: all_gather_rows(odd)):
        assert rows.dtype == dtype
        assert all(bytes(row.numpy()) == bytes(odd.numpy()) for row in rows)


def test_a_table_costs_one_collective(monkeypatch):
    calls, gather = [], dist.all_gather
    monkeypatch.setattr(dist, "all_gather", lambda *given, **named: calls.append(1) or gather(*given, **named))
    threads.run(2, lambda rank: all_gather_rows(torch.zeros(5)))
    assert len(calls) == 2  # one on each rank


def test_what_failed_here_is_raised_where_the_others_cannot_be_told(monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(threads.multi_threaded_pg.ProcessLocalGroup, "allgather", broken)
    with pytest.raises(OSError, match="no such shard"):
        threads.run(1, lambda rank: all_gather_rows(torch.zeros(5), error=OSError("no such shard")))
    with pytest.raises(RuntimeError, match="Connection closed"):
        threads.run(1, lambda rank: all_gather_rows(torch.zeros(5)))


TEXTS = ["", "a", "Σ m·ℓ", "line\nline\0", "x" * 20_000]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_of_any_length_arrives_whole(text):
    assert threads.run(3, lambda rank: broadcast_text(text if rank == 1 else "mine", 1)) == [text] * 3
    assert threads.run(1, lambda rank: gathered_texts(text, None)) == [[text]]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("failing", [set(), {0}, {1, 2}, {2}])
def test_every_rank_has_the_text_of_the_first_that_failed(text, failing, monkeypatch):
    """Else that of rank 0; in both cases after two collectives, one where that text is empty."""
    calls = []

    def counted(name):
        original = getattr(dist, name)
        monkeypatch.setattr(dist, name, lambda *given, **named: calls.append(name) or original(*given, **named))

    counted("all_gather")
    counted("broadcast")
    speaker = min(failing, default=0)

    def work(rank):
        try:
            return text_of_failed(text if rank == speaker else "mine", OSError(rank) if rank in failing else None)
        except OSError as error:
            return error.args

    heard = (speaker if failing else None, text)
    assert threads.run(3, work) == [(rank,) if rank in failing else heard for rank in range(3)]
    others = 3 - len(failing)  # those that failed call the group's own, to wait shortly
    assert (calls.count("all_gather"), calls.count("broadcast")) == (others, others if text else 0)


@pytest.mark.parametrize("missing", [{}, {1}, set(range(5))])
def test_texts_of_different_lengths_come_in_the_order_of_the_ranks(missing):
    expected = ["" if rank in missing else text for rank, text in enumerate(TEXTS)]
    assert threads.run(5, lambda rank: gathered_texts(expected[rank], dist.group.WORLD)) == [expected] * 5


def test_a_text_comes_from_a_rank_of_the_group():
    def work(rank):
        mine = threads.subgroup(lambda r: r % 2, 4, rank)
        return broadcast_text(f"rank {rank}", 1, mine)

    assert threads.run(4, work) == ["rank 2", "rank 3", "rank 2", "rank 3"]
