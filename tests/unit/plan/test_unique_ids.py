"""Ids that every rank numbers again are refused; rollouts and prompts that really lie on several ranks are not."""

import dataclasses
import random

import pytest
import threads
import torch.distributed as dist
from plans import planned
from samples import plain_sample

from megatron_pg import StepPlanError, cut_microbatches, pack, plan_step
from megatron_pg.batch import ContextRanks
from megatron_pg.declarations.loss_terms import LossTerm
from megatron_pg.plan.table import PlanRule, content_of
from megatron_pg.rollouts.sample import Sample


def sample(prompt: list[int], advantage: float, rollout_id, prompt_id, response: int = 3, **rest) -> Sample:
    ids = {"tokens": [*prompt, *range(1, response + 1)], "rollout_id": rollout_id, "prompt_id": prompt_id}
    return plain_sample(response, advantage=advantage, **ids, **rest)


def warning_of(ranks: list[list[Sample]], aggregation: str = "sample_mean", **rest) -> str | None:
    """The plan's warning, equal on every rank."""
    rule = PlanRule(aggregation=aggregation, **rest)

    def work(rank: int) -> str | None:
        return planned([pack(ranks[rank], qkv_format="thd")], rule, dist.group.WORLD).warning

    (warning,) = set(threads.run(len(ranks), work))
    return warning


def prompt_of(rng: random.Random, system: tuple[int, ...] = (7, 8, 9)) -> list[int]:
    return [*system, *(rng.randrange(100) for _ in range(rng.randint(4, 9)))]


def locally_numbered(counts: list[int], *, constant: bool = False) -> list[list[Sample]]:
    """`counts[r]` prompts of rank r, each with two rollouts, numbered from 0 on every rank."""
    rng = random.Random(3)
    ranks = [[prompt_of(rng) for _ in range(count)] for count in counts]
    advantage = lambda: 1.0 if constant else rng.gauss(0, 1)  # noqa: E731
    return [
        [sample(prompt, advantage(), f"{n}-{i}", f"{n}") for n, prompt in enumerate(prompts) for i in range(2)]
        for prompts in ranks
    ]


@pytest.mark.parametrize("ranks", [[4, 4], [4, 3, 5], [1] * 4])
@pytest.mark.parametrize("constant", [False, True])
def test_ids_numbered_on_every_rank_are_refused(ranks, constant):
    with pytest.raises(StepPlanError, match=r"every data-parallel rank has the same rollout_ids .* put the data-para"):
        warning_of(locally_numbered(ranks, constant=constant))


def test_a_tiny_step_of_such_ids_is_a_warning():
    assert "has the same rollout_ids (2 are repeated" in warning_of(locally_numbered([1, 1]))


def turns(rng: random.Random, number: int, advantage: float, ranks: int, *, begins_alike: bool) -> list[Sample]:
    """One sample of a rollout for every rank: later turns repeat the earlier ones, or have their own contexts."""
    context, found = prompt_of(rng), []
    for _ in range(ranks):
        found.append(sample(context, advantage, number, number))
        context = [*context, 1, 2, 3, *prompt_of(rng, ())] if begins_alike else prompt_of(rng, (rng.randrange(100),))
    return found


@pytest.mark.parametrize("begins_alike", [True, False])
@pytest.mark.parametrize("aggregation", ["sample_mean", "prompt_mean"])
def test_turns_dealt_out_over_the_ranks_are_neither_refused_nor_warned_about(begins_alike, aggregation):
    rng = random.Random(4)
    rollouts = [turns(rng, n, rng.choice([-0.5, 0.5]), 3, begins_alike=begins_alike) for n in range(8)]
    ranks = [list(column) for column in zip(*rollouts, strict=True)]
    warning = warning_of(ranks, aggregation)
    assert warning is None or (aggregation == "prompt_mean" and not begins_alike and "prompt_ids" in warning)


def test_where_it_cannot_be_told_there_is_a_warning():
    rng = random.Random(5)
    prompts = [prompt_of(rng) for _ in range(4)]
    ranks = [[sample(p, rng.gauss(0, 1), f"{n}", f"{n}") for n, p in enumerate(prompts)] for _ in range(2)]
    assert "unless they are turns or branches of one rollout" in warning_of(ranks)
    with pytest.warns(UserWarning, match="unless those rollouts are on several ranks"):
        threads.run(2, lambda r: plan_ids(r, [["a", "b", "c", "d"]] * 2))


def plan_ids(rank: int, ids: list[list[str]]):
    return plan_step([1] * len(ids[rank]), aggregation="sample_mean", rollout_ids=ids[rank], group=dist.group.WORLD)


def test_prompts_numbered_on_every_rank_are_a_warning_where_prompts_are_counted():
    rng = random.Random(6)
    ranks = [[sample(prompt_of(rng), rng.gauss(0, 1), f"{rank}-{n}", n) for n in range(6)] for rank in range(2)]
    assert warning_of(ranks) is None
    assert "every data-parallel rank has the same prompt_ids" in warning_of(ranks, "prompt_mean")


def test_prompts_shared_by_ranks_are_not():
    rng = random.Random(7)
    prompts = [prompt_of(rng) for _ in range(6)]
    ranks = [[sample(p, rng.gauss(0, 1), f"{r}-{n}", n) for n, p in enumerate(prompts)] for r in range(2)]
    assert warning_of(ranks, "prompt_mean") is None


def test_ids_that_overlap_by_chance_pass():
    rng = random.Random(8)
    samples = [sample(prompt_of(rng), rng.gauss(0, 1), n // 2, n // 4) for n in range(20)]
    rng.shuffle(samples)
    assert warning_of([samples[:10], samples[10:]]) is None


TERM = {"terms": (LossTerm(name="sft", kind="ce", aggregation="prompt_mean"),)}


def supervised(rng: random.Random, rollout_id, prompt_id) -> Sample:
    plain = sample(prompt_of(rng), 1.0, rollout_id, prompt_id)
    return dataclasses.replace(plain, term="sft", old_logprobs=None, advantages=None)


def test_ids_of_a_term_without_the_objective_are_compared_by_contexts():
    rng = random.Random(9)
    few, many = ([[supervised(rng, n, n) for n in range(count)] for _ in range(2)] for count in (2, 4))
    assert "(2 are repeated on another rank)" in warning_of(few, **TERM)
    with pytest.raises(StepPlanError, match="have no common advantage, so they are different rollouts"):
        warning_of(many, **TERM)
    prompts = [[supervised(rng, f"{rank} {n}", n) for n in range(4)] for rank in range(2)]
    assert "every data-parallel rank has the same prompt_ids" in warning_of(prompts, **TERM)


def dealt(rng: random.Random, *, ids: bool, size: int = 4) -> list[Sample]:
    return [sample(prompt_of(rng), rng.gauss(0, 1), n if ids else None, n if ids else None, 9) for n in range(size)]


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("copies", [[0, 0], [0, 1, 0], [1, 0, 0, 1]])
def test_ranks_that_bring_the_same_samples_are_refused_on_every_rank(ids, copies):
    rng = random.Random(10)
    samples = [dealt(rng, ids=ids) for _ in range(2)]
    if ids:
        samples[1] = [dataclasses.replace(s, rollout_id=f"{s.rollout_id} b") for s in samples[1]]
    first = next(rank for rank in range(len(copies)) if copies.index(copies[rank]) != rank)
    message = f"ranks {copies.index(copies[first])} and {first} have the same 4 samples.*data_parallel_rank"
    with pytest.raises(StepPlanError, match=message):
        warning_of([samples[i] for i in copies])


def test_the_wrong_data_parallel_rank_is_refused():
    samples = dealt(random.Random(11), ids=True, size=8)
    rule, layout = PlanRule(aggregation="sample_mean"), {"num_microbatches": 2, "qkv_format": "thd"}

    def work(rank: int, number: int) -> int:
        batches = cut_microbatches(samples, data_parallel_rank=number, data_parallel_size=2, **layout)
        return planned(batches, rule, dist.group.WORLD).num_rollouts

    assert threads.run(2, lambda rank: work(rank, rank)) == [8, 8]
    with pytest.raises(StepPlanError, match="data-parallel ranks 0 and 1 have the same 4 samples"):
        threads.run(2, lambda rank: work(rank, 0))


def test_equal_samples_that_may_be_different_ones_are_not_refused():
    """One-token responses, repeated samples of a policy without entropy, branches with names, and no samples."""
    warning_of([[sample([7, 8], 1.0, "r", "p", 1)] for _ in range(3)])
    certain = [[sample([7, 8], 0.0, None, "p", 4)] for _ in range(2)]
    assert sum(certain[0][0].old_logprobs) > -20
    assert warning_of(certain) is None
    warning_of([[sample([7, 8], 0.0, "r", "p", 4, sample_id=f"branch {rank}")] for rank in range(2)])
    assert warning_of([[], [sample([7], 1.0, 1, 1)], []]) is None


@pytest.mark.proof(
    "Ranks with different samples are never taken for copies: turns, branches, empty ranks, dynamic context parallelism"
)
def test_different_samples_are_never_taken_for_copies(full, evidence):
    rng, cases = random.Random(12), 600 if full else 12
    for _ in range(cases):
        rollouts = [
            turns(rng, n, rng.choice([-0.5, 0.5]), rng.randint(1, 4), begins_alike=rng.random() < 0.5)
            for n in range(rng.randint(1, 4))
        ]
        samples = [each for own in rollouts for each in own]
        if rng.random() < 0.3:
            samples = [dataclasses.replace(each, rollout_id=None) for each in samples]
        rng.shuffle(samples)
        size = rng.randint(2, 5)
        ranks = [samples[rank::size] for rank in range(size)]
        own = [content_of(part) for part in ranks if part]
        known = [content for content in own if content]
        assert len({*known}) == len(known)
        whole = ContextRanks(0, 2)

        def work(rank: int, ranks=ranks, whole=whole) -> None:
            """A micro-batch that both ranks hold, and one of each."""
            shared = pack(ranks[0], qkv_format="thd", cp_ranks=whole)
            batches = [shared, pack(ranks[1] if rank else [], qkv_format="thd", cp_ranks=ContextRanks(rank, 1))]
            rule = PlanRule(aggregation="token_mean")
            planned(batches, rule, dist.group.WORLD)

        threads.run(2, work)
    evidence(cases=cases)
