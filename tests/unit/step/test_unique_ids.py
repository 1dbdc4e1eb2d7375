"""Ids that every rank numbers anew are refused; rollouts and prompts that really lie on several ranks are not."""

import random

import pytest
import threads

from megatron_pg import StepPlanError, pack, plan_step
from megatron_pg.rollouts.sample import Sample
from megatron_pg.step.plan import plan_from_table
from megatron_pg.step.table import PlanRule, local_table_of


def sample(prompt: list[int], advantage: float, rollout_id, prompt_id, response: int = 3) -> Sample:
    return Sample.build(
        tokens=[*prompt, *range(1, response + 1)],
        response_length=response,
        loss_mask=[1] * response,
        old_logprobs=[-1.0] * response,
        advantage=advantage,
        rollout_id=rollout_id,
        prompt_id=prompt_id,
    )


def warning_of(ranks: list[list[Sample]], aggregation: str = "sample_mean") -> str | None:
    """The plan's warning, equal on every rank."""
    rule = PlanRule(aggregation=aggregation)

    def work(rank: int) -> str | None:
        group = threads.subgroup(lambda r: 0, len(ranks), rank)
        table = local_table_of([pack(ranks[rank], qkv_format="thd")], rule, group)
        return plan_from_table(table, rule, error=None, group=group).warning

    (warning,) = set(threads.run(len(ranks), work))
    return warning


def prompt_of(rng: random.Random, system: tuple[int, ...] = (7, 8, 9)) -> list[int]:
    return [*system, *(rng.randrange(100) for _ in range(rng.randint(4, 9)))]


def locally_numbered(counts: list[int], *, constant: bool = False) -> list[list[Sample]]:
    """`counts[r]` prompts of rank r, each with two rollouts, numbered from 0 on every rank."""
    rng = random.Random(3)
    ranks = []
    for count in counts:
        prompts = [prompt_of(rng) for _ in range(count)]
        ranks.append(
            [
                sample(prompt, 1.0 if constant else rng.gauss(0, 1), f"{n}-{i}", f"{n}")
                for n, prompt in enumerate(prompts)
                for i in range(2)
            ]
        )
    return ranks


@pytest.mark.parametrize("ranks", [[4, 4], [4, 3, 5], [1] * 4])
@pytest.mark.parametrize("constant", [False, True])
def test_ids_numbered_on_every_rank_are_refused(ranks, constant):
    with pytest.raises(
        StepPlanError, match=r"every data-parallel rank brings the same rollout_ids .* put the data-para"
    ):
        warning_of(locally_numbered(ranks, constant=constant))


def test_a_tiny_step_of_such_ids_is_a_warning():
    assert "brings the same rollout_ids (2 came again" in warning_of(locally_numbered([1, 1]))


def turns(rng: random.Random, number: int, advantage: float, ranks: int, *, begins_alike: bool) -> list[Sample]:
    """One sample of a rollout for every rank: later turns repeat the earlier ones, or have contexts of their own."""
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
    with pytest.warns(UserWarning, match="unless those rollouts do lie on several ranks"):
        threads.run(2, lambda r: plan_ids(r, [["a", "b", "c", "d"]] * 2))


def plan_ids(rank: int, ids: list[list[str]]):
    group = threads.subgroup(lambda r: 0, len(ids), rank)
    return plan_step([1] * len(ids[rank]), aggregation="sample_mean", rollout_ids=ids[rank], group=group)


def test_prompts_numbered_on_every_rank_are_a_warning_where_prompts_are_counted():
    rng = random.Random(6)
    ranks = [[sample(prompt_of(rng), rng.gauss(0, 1), f"{rank}-{n}", n) for n in range(6)] for rank in range(2)]
    assert warning_of(ranks) is None
    assert "every data-parallel rank brings the same prompt_ids" in warning_of(ranks, "prompt_mean")


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
