"""Documents on runs of ranks: all of them once, within the budget, and long ones on more."""

import random

import pytest
from samples import make_sample, random_step

from megatron_pg import ContextRanks, cut_over_ranks
from megatron_pg.batch.context_ranks import assign_rows, document_cost, run_sizes, slowest_rank


def skewed(seed: int, count: int = 60) -> list[int]:
    rng = random.Random(seed)
    return [max(2, min(4000, int(rng.lognormvariate(5, 1.5)))) for _ in range(count)]


@pytest.mark.parametrize("num_ranks", [1, 2, 6, 8])
@pytest.mark.parametrize("seed", range(3))
def test_every_document_lies_in_one_row_and_rows_share_no_place(seed, num_ranks):
    lengths, limit = skewed(seed), 4000
    rows = assign_rows(lengths, num_ranks=num_ranks, num_microbatches=12, max_tokens=limit, attention_length=500.0)
    assert sorted(i for row in rows for i in row.documents) == list(range(len(lengths)))
    places = [(row.microbatch, rank) for row in rows for rank in row.ranks]
    assert len(places) == len(set(places))
    assert {rank for _, rank in places} <= set(range(num_ranks))
    assert {row.ranks.size for row in rows} <= set(run_sizes(num_ranks))
    assert max(row.microbatch for row in rows) < 12
    for row in rows:
        assert pack_length([lengths[i] for i in row.documents], row.ranks.size) <= limit * row.ranks.size


def pack_length(lengths: list[int], size: int) -> int:
    unit = 1 if size == 1 else 2 * size
    return sum(-(-length // unit) * unit for length in lengths)


def test_a_row_takes_no_document_that_it_has_no_room_for():
    """One place of 8 tokens: a second document of 5 would be dropped or cut by whoever reads the row."""
    given = {"num_ranks": 1, "num_microbatches": 1, "max_tokens": 8, "attention_length": 500.0}
    assert [row.tokens for row in assign_rows([5, 3], **given)] == [8]
    with pytest.raises(ValueError, match="2 documents of 10 tokens, the longest of 5, do not fit into 1 micro-batches"):
        assign_rows([5, 5], **given)


@pytest.mark.parametrize("seed", range(4))
def test_long_documents_among_short_ones_leave_no_rank_waiting_long(seed):
    lengths = [*skewed(seed, count=200), 16000]
    known = {"num_ranks": 8, "attention_length": 500.0}
    rows = assign_rows(lengths, num_microbatches=10, max_tokens=4000, **known)
    perfect = sum(document_cost(length, 500.0) for length in lengths) / 8
    assert perfect <= slowest_rank(rows, lengths, **known) <= 1.05 * perfect
    sizes = {i: row.ranks.size for row in rows for i in row.documents}
    assert sizes[200] > 1 == sizes[min(sizes, key=lengths.__getitem__)]


def test_a_document_that_no_rank_can_hold_alone_lies_on_as_many_as_it_needs():
    rows = assign_rows([100], num_ranks=8, num_microbatches=1, max_tokens=30, attention_length=1e9)
    assert [row.ranks.size for row in rows] == [8]  # of 104 tokens on 4 ranks, each would hold 26; its cost asks for 8
    (row,) = assign_rows([100, *[10] * 20], num_ranks=8, num_microbatches=4, max_tokens=30, attention_length=1e9)[:1]
    assert row.ranks.size >= 4
    assert row.documents == [0]


@pytest.mark.parametrize("seed", range(3))
def test_every_rank_cuts_the_same_rows_and_fills_up_with_empty_ones(seed):
    samples = random_step(random.Random(seed))
    shape = {"num_microbatches": 5, "num_ranks": 4, "max_tokens": 40, "attention_length": 8.0, "multiple_of": 3}
    ranks = [cut_over_ranks(samples, rank=rank, **shape) for rank in range(4)]
    assert {len(batches) for batches in ranks} == {5}
    seen = []
    for k in range(5):
        for rank, batches in enumerate(ranks):
            batch = batches[k]
            assert rank in batch.cp_ranks
            assert batch.digest == ranks[batch.cp_ranks.first][k].digest
            assert batch.num_positions % (3 * batch.cp_ranks.size) == 0
            seen += [id(sample) for sample in batch.samples if rank == batch.cp_ranks.first]
    assert sorted(seen) == sorted(map(id, samples))


@pytest.mark.parametrize(("first", "size"), [(0, 3), (1, 2), (-2, 2), (0, 0)])
def test_runs_that_could_overlap_are_refused(first, size):
    with pytest.raises(ValueError, match="runs of ranks could overlap"):
        ContextRanks(first, size)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_tokens": 4}, "do not fit into 2 micro-batches of 4 tokens on each of 4 ranks"),
        ({"num_microbatches": 0}, "do not select the micro-batches of a rank"),
        ({"rank": 4}, "do not select the micro-batches of a rank"),
        ({"attention_length": 0.0}, "do not select the micro-batches of a rank"),
    ],
)
def test_a_cut_that_cannot_be_is_a_named_error(changed, message):
    samples = [make_sample(prompt_length=20, mask=[1] * 20, rng=random.Random(0))]
    known = {"num_microbatches": 2, "rank": 0, "num_ranks": 4, "max_tokens": 40, "attention_length": 8.0}
    with pytest.raises(ValueError, match=message):
        cut_over_ranks(samples, **known | changed)
