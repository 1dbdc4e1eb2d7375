"""`--docs-per-step`: which documents a step takes, on ranks that are threads; every document once, never a hang."""

import gc
import itertools
import os
import random
from pathlib import Path

import document_streams as streams
import pytest
from document_streams import take_all

from megatron_pg.plan.documents import Packing, Position, StepRule, schedulable_count

PACKED = Packing(qkv_format="thd", seq_length=32, micro_batch_size=2)
PADDED = Packing(qkv_format="bshd", seq_length=32, micro_batch_size=3)


def rule(num_documents: int, policy: str = "exact", end: str = "partial") -> StepRule:
    return StepRule(num_documents=num_documents, policy=policy, end=end)


def random_streams(rng: random.Random, *, groups: int = 30, group_sizes=(1,)) -> list:
    """One to four ranks with different amounts of data, one of them perhaps with none."""
    return [
        streams.stream(rng, rank=rank, num_groups=rng.choice([0, groups // 2, groups]), group_sizes=group_sizes)
        for rank in range(rng.randint(1, 4))
    ]


def names_of(found: list) -> list[str]:
    """Every document that any rank trained, in any order."""
    return [name for run in found for step in run.steps for part in step.names for name in part]


def all_names(given: list) -> list[str]:
    return [sample.sample_id for stream in given for group in stream for sample in group]


def check_ranks_agree(found: list) -> None:
    for steps in itertools.zip_longest(*(run.steps for run in found)):
        assert len({step.documents for step in steps}) == 1
        assert {len(step.batches) for step in steps} == {steps[0].documents.num_microbatches}
        assert sum(len(part) for step in steps for part in step.names) == steps[0].documents.num_documents
    assert len({run.position for run in found}) == 1
    assert len({run.farewell for run in found}) == 1
    for run in found:
        for number, again in run.again.items():
            assert (again.names, again.documents) == (run.steps[number].names, run.steps[number].documents)


@pytest.mark.proof("Documents per step: exact, random sizes: N in every step, every document trained once (steps)")
def test_exact_steps_have_n_documents_and_train_each_once(full, evidence):
    rng = random.Random(1)
    wanted, steps = (10_000 if full else 60), 0
    while steps < wanted:
        given = random_streams(rng, groups=rng.choice([3, 60, 200]))
        n, packing = rng.randint(1, 12), rng.choice([PACKED, PADDED])
        if any(given):
            steps += check_exact_steps(given, n, packing)
        else:
            assert all("there are no documents to train" in run.error for run in take_all(given, rule(n), packing))
    evidence(cases=steps)


def check_exact_steps(given: list, n: int, packing: Packing, **more: object) -> int:
    """The number of steps, every one of which but the last has n documents, and every document one step."""
    found = take_all(given, rule(n), packing, **more)
    check_ranks_agree(found)
    assert sorted(names_of(found)) == sorted(all_names(given))
    sizes = [step.documents.num_documents for step in found[0].steps]
    assert set(sizes[:-1]) <= {n}
    assert 0 < sizes[-1] <= n
    assert found[0].position.documents_seen == len(all_names(given)) == sum(sizes)
    assert found[0].steps[-1].documents.documents_seen == sum(sizes)
    return len(sizes)


@pytest.mark.proof(
    "Documents per step: soak over skewed lengths, at_least: no document lost, no hang, no memory (micro-batches)"
)
def test_at_least_fills_whole_microbatches_and_loses_nothing(full, evidence):
    rng = random.Random(2)
    wanted, count, memory = (10_000 if full else 100), 0, None
    while count < wanted:
        given = random_streams(rng, groups=100)
        n = rng.choice([1, 5, 17, 60])
        found = take_all(given, rule(n, "at_least"), PACKED)
        if not any(given):
            continue
        check_ranks_agree(found)
        assert sorted(names_of(found)) == sorted(all_names(given))
        for step in found[0].steps[:-1]:
            assert step.documents.num_documents == n + step.documents.documents_surplus >= n
        for run in found:
            for step in run.steps:
                sizes = [[len(sample.tokens) for sample in batch.samples] for batch in step.batches]
                assert all(sum(part) <= 64 for part in sizes)
                for before, after in itertools.pairwise([part for part in sizes if part]):
                    assert sum(before) + after[0] > 64, "a micro-batch was closed with room for the next document"
        count += sum(len(step.batches) for run in found for step in run.steps)
        if memory is None and count >= wanted / 2:
            memory = resident_bytes()
    assert resident_bytes() - memory < 5e6
    evidence(cases=count)


def resident_bytes() -> int:
    """Memory of this process now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("policy", ["exact", "at_least"])
def test_groups_are_never_cut(policy):
    rng = random.Random(3)
    for _ in range(4):
        given = random_streams(rng, groups=12, group_sizes=(4,))
        if not any(given):
            continue
        found = take_all(given, rule(rng.choice([4, 8, 24]), policy), PACKED, undivided=("rollout_id", "prompt_id"))
        check_ranks_agree(found)
        assert sorted(names_of(found)) == sorted(all_names(given))
        for run in found:
            for step in run.steps:
                groups = [name.rpartition("/")[0] for part in step.names for name in part]
                assert all(groups.count(group) == 4 for group in groups)


def of_sizes(rng: random.Random, *sizes: list[int]) -> list:
    """Every rank's groups by their sizes."""
    return [
        [[streams.document(rng, f"{rank}/{g}/{i}", f"{rank}/{g}") for i in range(size)] for g, size in enumerate(own)]
        for rank, own in enumerate(sizes)
    ]


def test_a_step_of_exactly_n_that_exists_is_found():
    given = of_sizes(random.Random(5), [2, 2, 2], [1, 2, 2])
    found = take_all(given, rule(2), PACKED)
    check_ranks_agree(found)
    assert [step.documents.num_documents for step in found[0].steps] == [2, 2, 2]
    assert [step.documents.documents_waiting for step in found[0].steps] == [1, 1, 1]
    assert "1 documents are missing" in found[0].error  # 1, 2, 2 on one rank: no step of 2 begins so
    for run in take_all(of_sizes(random.Random(4), [3] * 6, [3] * 6), rule(8), PACKED):
        assert run.steps == []
        text = "2 documents are missing, and the next groups, which are never split, have 3 on rank 0, 3 on rank 1"
        assert text in run.error


def exists(rest: list[list[int]], n: int) -> bool:
    """Whether first groups of the ranks are n documents together, by trying all."""
    return any(
        sum(map(sum, parts)) == n
        for parts in itertools.product(*([own[:k] for k in range(len(own) + 1)] for own in rest))
    )


@pytest.mark.proof(
    "Documents per step: exact, uneven groups: a step is found wherever one exists, also resumed and replayed (steps)"
)
def test_exact_steps_of_uneven_groups_are_found_wherever_they_exist(full, evidence):
    rng, steps = random.Random(13), 0
    for _ in range(300 if full else 25):
        sizes = [[rng.randint(1, 4) for _ in range(rng.randint(0, 6))] for _ in range(rng.randint(1, 3))]
        given, n = of_sizes(rng, *sizes), rng.randint(1, 7)
        if not any(given):
            continue
        found = take_all(given, rule(n), PACKED)
        replayed = take_all(given, rule(n), PACKED, replays=lambda step: step % 2 == 0)
        check_ranks_agree(found)
        for run, other in zip(found, replayed, strict=True):
            assert taken(other) == taken(run)
        rest = [list(own) for own in sizes]
        for step in range(len(found[0].steps)):
            assert exists(rest, n) or sum(map(sum, rest)) < n
            for own, run in zip(rest, found, strict=True):
                count = sum(map(len, run.steps[step].names))
                while count > 0:
                    count -= own.pop(0)
                assert count == 0
        if found[0].error is not None:
            assert not exists(rest, n)
        else:
            assert not any(rest)
        check_resumed(given, rule(n), stops=range(1, min(2, len(found[0].steps))))
        steps += len(found[0].steps)
    evidence(cases=steps)


@pytest.mark.parametrize(("end", "trained"), [("partial", 11), ("stop", 8)])
def test_documents_that_are_too_few_for_a_step_follow_the_flag(end, trained):
    rng = random.Random(6)
    given = [streams.stream(rng, rank=rank, num_groups=count) for rank, count in enumerate([9, 2])]
    found = take_all(given, rule(4, end=end), PADDED)
    check_ranks_agree(found)
    assert len(names_of(found)) == trained == found[0].position.documents_seen
    surplus = {step.documents.documents_surplus for step in found[0].steps}
    assert surplus == {0}  # nothing beyond N, in a partial step too
    left = ", 3 are too few for a step of 4 and were left (--docs-per-step-end stop)" if end == "stop" else ""
    assert found[0].farewell == f"the documents have ended: {trained} were trained{left}"


def test_what_a_division_leaves_goes_round():
    """After as many steps as there are ranks, each has trained the same number, regardless of N leaves over."""
    rng = random.Random(13)
    given = [streams.stream(rng, rank=rank, num_groups=12) for rank in range(3)]
    for n in (1, 2, 4, 5):
        found = take_all(given, rule(n), PADDED, most_steps=3)
        assert found[0].position.per_rank == (n, n, n)


def test_every_document_that_was_pulled_is_trained_or_waits():
    rng, pulled = random.Random(14), [0, 0, 0]

    def counted(rank, source):
        for group in source:
            pulled[rank] += len(group)
            yield group

    given = [streams.stream(rng, rank=rank, num_groups=9, group_sizes=(1, 2, 3)) for rank in range(3)]
    (step, *_), *_ = (run.steps for run in take_all(given, rule(12, "at_least"), PACKED, most_steps=1, change=counted))
    assert sum(pulled) == step.documents.num_documents + step.documents.documents_waiting
    assert step.documents.documents_waiting > 3


@pytest.mark.parametrize("policy", ["exact", "at_least"])
def test_a_resumed_run_takes_the_same_steps_from_every_step_on(policy):
    rng = random.Random(8)
    given = [streams.stream(rng, rank=rank, num_groups=count) for rank, count in enumerate((12, 30, 5))]
    check_resumed(given, rule(7, policy), stops=range(1, 7))


def taken(run) -> list[tuple]:
    return [(step.names, step.documents) for step in run.steps]


def check_resumed(given: list, step_rule: StepRule, stops) -> None:
    """Runs that stop after as many steps and are resumed take the steps of one that does not."""
    whole = take_all(given, step_rule, PACKED)
    for stop in stops:
        first = take_all(given, step_rule, PACKED, most_steps=stop)
        saved = Position.from_text(first[0].position.to_text(), len(given))
        second = take_all(given, step_rule, PACKED, position=saved)
        for run, before, after in zip(whole, first, second, strict=True):
            assert taken(before) + taken(after) == taken(run)


@pytest.mark.parametrize("policy", ["exact", "at_least"])
@pytest.mark.parametrize("end", ["partial", "stop"])
def test_a_replayed_step_takes_the_same_documents_and_counts_them_once(policy, end):
    rng = random.Random(9)
    given = [streams.stream(rng, rank=rank, num_groups=count) for rank, count in enumerate([12, 40, 3])]
    plain = take_all(given, rule(7, policy, end), PACKED)
    found = take_all(given, rule(7, policy, end), PACKED, replays=lambda step: step % 3 != 1)
    check_ranks_agree(found)
    assert len(found[0].again) > 2
    for run, replayed in zip(plain, found, strict=True):
        assert taken(replayed) == taken(run)
        assert replayed.position == run.position


def too_long(rank, source):
    for number, group in enumerate(source):
        if rank == 1 and number == 3:
            yield long_document()
        yield group


def long_document():
    return streams.make_sample(prompt_length=60, mask=[1] * 5, rng=random.Random(0), sample_id="long one")


def breaks(rank, source):
    yield next(source)
    if rank == 1:
        raise RuntimeError("the sampler broke")
    yield from source


def gives(value: object):
    """Rank 1's first group is this."""

    def change(rank, source):
        yield value if rank == 1 else next(source)
        yield from source

    return change


def twice(rank, source):
    first = next(source)
    yield first
    yield first if rank == 1 else next(source)
    yield from source


@pytest.mark.parametrize(
    ("change", "packing", "message"),
    [
        (too_long, PACKED, "65 tokens and a micro-batch holds 64 (--micro-batch-size x --seq-length)"),
        (too_long, PADDED, "document long one has 65 tokens and a micro-batch holds 32 (--seq-length)"),
        (breaks, PACKED, "the sampler broke"),
        (gives({"tokens": [1]}), PACKED, "the documents gave a dict, not a Sample or a list of Samples"),
        (gives(None), PACKED, "the documents gave a NoneType, not a Sample"),
        (gives([]), PACKED, "the documents gave an empty list, not a Sample"),
        (twice, PACKED, "rollout_id '1/0/0' of document 1/0/0 is already in another group of this step"),
    ],
)
def test_a_fault_of_one_rank_stops_every_rank_before_the_step(change, packing, message):
    rng = random.Random(10)
    given = [streams.stream(rng, rank=rank, num_groups=20) for rank in range(3)]
    found = take_all(given, rule(30), packing, change=change)
    assert [run.steps for run in found] == [[], [], []]
    assert message in found[1].error
    assert found[0].error == found[2].error == "None"  # they hear of it in the step's plan


def test_a_number_of_microbatches_that_virtual_stages_cannot_run_is_filled_up():
    # groups of 4 on 2 stages: a remainder of 1 would leave a stage without work
    counts = [schedulable_count(k, num_stages=2, group_size=4) for k in range(1, 10)]
    assert counts == [4, 4, 4, 4, 6, 6, 7, 8, 10]
    assert [schedulable_count(k, num_stages=3, group_size=3) for k in (1, 3, 4, 6, 7)] == [3, 3, 6, 6, 9]
    assert schedulable_count(5, num_stages=4, group_size=None) == 5
    rng = random.Random(11)
    given = [streams.stream(rng, rank=rank, num_groups=9) for rank in range(2)]
    found = take_all(given, rule(3), PACKED, schedulable=lambda k: schedulable_count(k, num_stages=2, group_size=2))
    check_ranks_agree(found)
    assert {step.documents.num_microbatches for step in found[0].steps} == {2}


def test_a_checkpoint_of_another_number_of_ranks_is_a_named_error():
    text = Position(12, (7, 5)).to_text()
    assert Position.from_text(text, 2) == Position(12, (7, 5))
    assert Position.from_text(None, 3) == Position(0, (0, 0, 0))
    with pytest.raises(ValueError, match="document positions of 2 data-parallel ranks and this run has 4"):
        Position.from_text(text, 4)


@pytest.mark.parametrize(
    ("packing", "message"),
    [
        ({"qkv_format": "sbhd", "seq_length": 8, "micro_batch_size": 1}, "neither thd nor bshd"),
        ({"qkv_format": "bshd", "seq_length": 9, "micro_batch_size": 1, "cp_size": 2}, "not a multiple of 4"),
        ({"qkv_format": "thd", "seq_length": 9, "micro_batch_size": 2, "cp_size": 2}, "a multiple of 4"),
        ({"qkv_format": "thd", "seq_length": 8, "micro_batch_size": 2, "is_static": True}, "Use --micro-batch-size 1"),
    ],
)
def test_sizes_that_cannot_work_are_refused_at_the_start(packing, message):
    with pytest.raises(ValueError, match=message):
        Packing(**packing)


def test_packed_rows_count_the_padding_of_context_parallelism():
    packing = Packing(qkv_format="thd", seq_length=16, micro_batch_size=1, cp_size=2)
    short = streams.make_sample(prompt_length=1, mask=[1], rng=random.Random(0))
    assert packing.size_of(short) == 4
    long = streams.make_sample(prompt_length=10, mask=[1] * 7, rng=random.Random(0), sample_id="x")
    with pytest.raises(ValueError, match="document x has 17 tokens, padded to 20, and a micro-batch holds 16"):
        packing.size_of(long)
