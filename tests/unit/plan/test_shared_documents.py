"""Documents that every rank has, taken step by step under dynamic_cp."""

import dataclasses
import random
from functools import partial

import pytest
import threads
import torch
from document_streams import Rewindable
from samples import make_sample

from megatron_pg.batch import cut_over_ranks
from megatron_pg.plan.documents import EndOfDocuments, Position, StepRule
from megatron_pg.plan.errors import StepPlanError
from megatron_pg.plan.plan import plan_from_table
from megatron_pg.plan.shared_documents import SharedDocumentAccumulator
from megatron_pg.plan.table import PlanRule

RANKS = 4


def groups(lengths, sizes=(1,)) -> list[list]:
    """Groups of rollouts, of these sizes in turn."""
    rng, found, lengths = random.Random(3), [], list(lengths)
    while lengths:
        taken, lengths = lengths[: (size := sizes[len(found) % len(sizes)])], lengths[size:]
        ids = [{"rollout_id": len(found), "sample_id": f"{len(found)}.{k}"} for k in range(len(taken))]
        rows = zip(taken, ids, strict=True)
        found.append([make_sample(prompt_length=n - 2, mask=[1, 1], rng=rng, **own) for n, own in rows])
    return found


def cut(rank: int, samples, num_microbatches: int):
    return cut_over_ranks(
        samples, num_microbatches=num_microbatches, rank=rank, num_ranks=RANKS, max_tokens=16, attention_length=1000.0
    )


def run(documents, *, num_documents, policy="exact", end="partial", steps=9, begin=0, change=lambda rank, found: found):
    """The steps of every rank: documents by rank and micro-batch, and figures; then the message at the end."""

    def work(rank: int):
        rule = StepRule(num_documents=num_documents, policy=policy, end=end)
        position = Position(begin, (begin,))
        accumulator = SharedDocumentAccumulator(rule=rule, cut=partial(cut, rank), room=16 * RANKS, position=position)
        found, source = [], iter(change(rank, documents[begin:]))
        for _ in range(steps):
            try:
                batches, figures, error = accumulator.take(source, group=torch.distributed.group.WORLD)
            except EndOfDocuments as farewell:
                return [*found, str(farewell)]
            if figures is None:
                return [*found, error]
            found.append(([[s.sample_id for s in batch.samples] for batch in batches], figures))
        return found

    return threads.run(RANKS, work)


LENGTHS = [40, 4, 5, 6, 7, 12, 30, 3, 3, 9]


def test_every_document_is_taken_once_in_order_and_long_ones_lie_on_several_ranks():
    found = run(groups(LENGTHS), num_documents=4)
    assert [len(rank) for rank in found] == [4] * RANKS
    for step, count in enumerate((4, 4, 2)):
        of_ranks = [rank[step] for rank in found]
        assert len({len(batches) for batches, _ in of_ranks}) == 1  # micro-batches
        (figures,) = {figures for _, figures in of_ranks}
        seen = min(4 * (step + 1), 10)
        assert (figures.num_documents, figures.documents_seen, figures.documents_waiting) == (count, seen, 0)
        assert figures.documents_surplus == 0  # of a last step that is too small too
        held = [name for batches, _ in of_ranks for names in batches for name in names]
        assert sorted(set(held)) == sorted(f"{i}.0" for i in range(4 * step, seen))
        assert [held.count(f"{i}.0") >= least for i, least in ((0, 4), (6, 2)) if 4 * step <= i < seen] in ([True], [])
    assert {rank[3] for rank in found} == {"the documents have ended: 10 were trained"}


def test_the_last_step_follows_the_flag():
    found = run(groups(LENGTHS), num_documents=4, end="stop")
    left = "2 are too few for a step of 4 and were left (--docs-per-step-end stop)"
    assert {rank[2] for rank in found} == {f"the documents have ended: 8 were trained, {left}"}


def test_groups_are_never_cut_and_an_exact_step_that_cannot_be_is_refused():
    for policy in ("exact", "at_least"):
        found = run(groups(LENGTHS, sizes=(2,)), num_documents=4, policy=policy)
        assert [figures.num_documents for _, figures in found[0][:3]] == [4, 4, 2]
    documents = groups(LENGTHS, sizes=(3,))
    found = run(documents, num_documents=4, policy="at_least")
    assert [(f.num_documents, f.documents_surplus) for _, f in found[0][:2]] == [(6, 2), (4, 0)]
    refused = run(documents, num_documents=4)
    assert (
        "4 with --docs-per-step-policy exact: 1 documents are missing, and the next groups, which are never split, "
        "have 3. Choose" in str(refused[0][0])
    )


def test_a_resumed_run_takes_what_the_whole_one_does():
    whole, rest = (run(groups(LENGTHS), num_documents=4, begin=begin) for begin in (0, 4))
    assert [rank[1:] for rank in whole] == rest


def with_another_mask(documents: list) -> list:
    (first, *_), *others = documents
    return [[dataclasses.replace(first, loss_mask=torch.tensor([False, True]))], *others]


@pytest.mark.parametrize("of_rank_2", [lambda documents: documents[1:], with_another_mask], ids=["other", "mask"])
def test_a_rank_with_other_documents_stops_all(of_rank_2):
    found = run(groups(LENGTHS), num_documents=4, change=lambda rank, d: of_rank_2(d) if rank == 2 else d)
    assert all("ranks 0 and 2 have different documents (4 and 4 in this step)" in str(rank[0]) for rank in found)


def test_a_rank_whose_source_fails_stops_all_and_a_document_that_fits_on_no_ranks_is_named():
    found = run(groups(LENGTHS), num_documents=4, change=lambda rank, d: iter([3]) if rank == 1 else d)
    assert "the documents gave a int" in str(found[1][0])
    assert [found[rank] for rank in (0, 2, 3)] == [[None]] * 3  # the metadata exchange brings them the message
    assert "65" in str(run(groups([65]), num_documents=1)[0][0])


def test_every_rank_raises_the_message_of_the_rank_whose_source_fails():
    def work(rank: int) -> str:
        rule = StepRule(num_documents=4, policy="exact", end="partial")
        documents = SharedDocumentAccumulator(
            rule=rule, cut=partial(cut, rank), room=16 * RANKS, position=Position(0, (0,))
        )
        source, group = iter([3] if rank == 1 else groups(LENGTHS)), torch.distributed.group.WORLD
        _, _, error = documents.take(source, group=group)
        with pytest.raises(StepPlanError) as caught:
            plan_from_table(None, PlanRule(aggregation="token_mean"), error=error, group=group)
        return str(caught.value)

    text = "data-parallel rank 1: the documents gave a int, not a Sample or a list of Samples. Use Sample.build."
    assert threads.run(RANKS, work) == [text] * RANKS


def test_a_replayed_step_takes_the_same_documents_and_counts_them_once():
    rule = StepRule(num_documents=3, policy="exact", end="partial")
    sizes = {"rank": 0, "num_ranks": 1, "max_tokens": 64, "attention_length": 10.0}
    cut_all = lambda samples, count: cut_over_ranks(samples, num_microbatches=count, **sizes)  # noqa: E731
    accumulator = SharedDocumentAccumulator(rule=rule, cut=cut_all, room=64, position=Position(0, (0,)))
    source = Rewindable(iter(groups(LENGTHS)))
    accumulator.take(source, group=None)
    first = accumulator.take(source, group=None)
    source.replaying = True  # nothing more may be read
    again = accumulator.take(source, group=None)
    names = [[[s.sample_id for s in batch.samples] for batch in batches] for batches, _, _ in (first, again)]
    assert names[0] == names[1]
    assert first[1] == again[1]
    assert accumulator.position == Position(6, (6,))
