import dataclasses
import math
import random
import warnings
from functools import partial
from unittest import mock

import numpy as np
import pytest
import threads
import torch
import torch.distributed as dist
from plans import planned
from samples import (
    TINY_DENOMINATORS,
    TINY_OBJECTIVE,
    TINY_PROMPTS,
    TINY_ROLLOUTS,
    TINY_TOKENS,
    divisor_of,
    make_sample,
    random_step,
)

from megatron_pg import ContextRanks, Sample, StepPlanError, pack, plan_step
from megatron_pg.declarations.aggregations import AGGREGATIONS
from megatron_pg.declarations.loss_terms import OBJECTIVE, LossTerm
from megatron_pg.plan.plan import check_count, plan_from_table
from megatron_pg.plan.table import PlanRule, local_table_of, table_of

MODES = sorted(AGGREGATIONS.keys() - {"turn_mean"})  # which `plan_step` refuses


def plan(tokens, aggregation, **rest):
    return plan_step(tokens, **{"aggregation": aggregation, "divisor": divisor_of(aggregation)} | rest)


def plan_on_ranks(cells, aggregation, tokens, rollouts, prompts):
    """Plans of every data-parallel rank, each with the samples of its cell."""

    def work(rank: int):
        return plan(
            [tokens[i] for i in cells[rank]],
            aggregation,
            rollout_ids=[rollouts[i] for i in cells[rank]],
            prompt_ids=[prompts[i] for i in cells[rank]],
            group=dist.group.WORLD,
        )

    return threads.run(len(cells), work)


@pytest.mark.parametrize("aggregation", MODES)
@pytest.mark.parametrize(
    "cells", [[[0, 1, 2, 3, 4]], [[4, 0], [3, 1, 2]], [[], [2, 3], [0, 1, 4]], [[0], [1], [2], [3, 4]]]
)
def test_denominators_do_not_depend_on_where_the_samples_are(aggregation, cells):
    plans, objective = plan_on_ranks(cells, aggregation, TINY_TOKENS, TINY_ROLLOUTS, TINY_PROMPTS), 0.0
    for cell, found in zip(cells, plans, strict=True):
        assert found.denominators.tolist() == [TINY_DENOMINATORS[aggregation][i] for i in cell]
        assert found.denominators.dtype == torch.float64
        assert (found.num_samples, found.num_rollouts, found.num_prompts, found.num_tokens) == (5, 4, 2, 32)
        objective += sum(TINY_TOKENS[i] / d for i, d in zip(cell, found.denominators.tolist(), strict=True))
    assert objective == TINY_OBJECTIVE[aggregation]


def packed(samples: list[Sample], **layout):
    return pack(samples, qkv_format="thd", **layout)


def mixture() -> list[Sample]:
    """Two rollouts with two and no tokens, and two supervised samples of one prompt; `echo` trains three tokens."""
    rng = random.Random(0)
    of = [("a", "p", [1, 1, 0], None), ("b", "p", [0], None), ("c", "q", [1, 1, 1], "sft"), ("d", "q", [1], "sft")]
    samples = []
    for rollout, prompt, mask, term in of:
        sample = make_sample(
            prompt_length=2, mask=mask, rng=rng, rollout_id=rollout, prompt_id=prompt, sample_id=rollout
        )
        if term:
            sample = dataclasses.replace(sample, term=term, old_logprobs=None, advantages=None, reward=None)
        samples.append(sample)
    samples[0] = dataclasses.replace(samples[0], masks={"echo": torch.tensor([True, True, True])})
    return samples


@pytest.mark.parametrize(
    ("aggregation", "sft", "echo"),
    [("sample_mean", [6, 2], 3), ("prompt_mean", [4, 4], 3), ("token_mean", [4, 4], 3), ("constant", [20, 20], 10)],
)
def test_a_term_counts_its_own_tokens_alone(aggregation, sft, echo):
    weighed = {"kind": "ce", "aggregation": aggregation, "divisor": divisor_of(aggregation, 10.0)}
    terms = (OBJECTIVE, LossTerm(name="sft", **weighed), LossTerm(name="echo", **weighed))
    rule = PlanRule(aggregation="sample_mean", terms=terms)
    samples = mixture()
    found = planned([packed(samples[:1]), packed(samples[1:])], rule)
    alone = plan([2, 0], "sample_mean", rollout_ids=["a", "b"], prompt_ids=["p", "p"])
    assert found.denominators[:2].tolist() == alone.denominators.tolist() == [4, 2]
    assert (found.num_rollouts, found.num_prompts, found.num_tokens) == (2, 1, 2)
    assert (found.num_trained, found.num_samples) == (7, 4)  # of echo one token that the objective leaves out
    assert found.terms["sft"].denominators[2:].tolist() == sft
    assert found.terms["echo"].denominators[:1].tolist() == [echo]
    counted = {name: (each.num_rollouts, each.num_tokens) for name, each in found.terms.items()}
    assert counted == {"sft": (2, 4), "echo": (1, 3)}
    assert found.facts.num_rewards == 2  # of the objective's samples


def test_a_step_without_a_token_of_the_objective_trains_the_terms():
    sft = LossTerm(name="sft", kind="ce", aggregation="token_mean")
    rule = PlanRule(aggregation="sample_mean", terms=(OBJECTIVE, sft))
    found = planned([packed(mixture()[2:])], rule)
    assert (found.num_tokens, found.num_trained) == (0, 4)
    assert torch.isinf(found.denominators).all()
    empty = [dataclasses.replace(sample, loss_mask=sample.loss_mask & False) for sample in mixture()[2:]]
    with pytest.raises(StepPlanError, match="the step has no trained token"):
        planned([packed(empty)], rule)


def test_integer_and_string_ids_both_work_and_equal_ids_meet_across_ranks():
    for ids in ([7, 7, -3], ["q7", "q7", "q-3"]):
        plans = plan_on_ranks([[0], [1, 2]], "prompt_mean", [1, 2, 4], [0, 1, 2], ids)
        assert [p.denominators.tolist() for p in plans] == [[6.0], [6.0, 8.0]]


def test_ids_that_differ_in_anything_are_different_units():
    ids = ["a", "A", " a", "a ", "7", 7, -7, "-7", "07", "\u00e9", "e\u0301", ""]
    plans = plan_on_ranks([range(0, 12, 2), range(1, 12, 2)], "sample_mean", [1] * 12, ids, [0] * 12)
    assert {found.num_rollouts for found in plans} == {12}
    many = [f"{n:x}" for n in range(20_000)]
    assert plan([1] * 20_000, "sample_mean", rollout_ids=many).num_rollouts == 20_000


@pytest.mark.parametrize(
    ("rollouts", "kinds", "named"),
    [
        (["r", "r"], ["rollout_id"], "rollout_id 'r'"),
        (["r", "r"], ["prompt_id"], "prompt_id 'p'"),
        (["r", "s"], ["rollout_id", "prompt_id"], "prompt_id 'p'"),
        (["r", "s"], ["rollout_id"], None),
    ],
)
def test_a_unit_that_may_not_lie_on_two_ranks_is_named(rollouts, kinds, named):
    def work(rank: int):
        group = dist.group.WORLD
        rule = PlanRule(aggregation="sample_mean", undivided=kinds)
        table = table_of(rule, group, torch.tensor([[1, 1]]), [rollouts[rank]], ["p"])
        return plan_from_table(table, rule, error=None, group=group)

    if named is None:
        assert threads.run(2, work)[0].num_rollouts == 2
        return
    with pytest.raises(StepPlanError, match=f"{named} has samples on data-parallel ranks 0 and 1"):
        threads.run(2, work)


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("no file /data/\udcff.jsonl"), r"rank 1: OSError: no file /data/\\udcff.jsonl"),
        (Unreadable(), r"rank 1: Unreadable: its text cannot be formatted \(RuntimeError\)"),
        (KeyError(), "rank 1: KeyError: no text"),
        (ValueError("\x1b[2J gone"), r"rank 1: \\x1b\[2J gone"),
    ],
)
def test_a_ranks_error_reaches_the_others_whatever_its_text_is(error, message):
    def work(rank: int):
        group = dist.group.WORLD
        rule = PlanRule(aggregation="sample_mean")
        table = table_of(rule, group, torch.tensor([[1, 1]]), None, None)
        return plan_from_table(None if rank else table, rule, error=error if rank else None, group=group)

    with pytest.raises(StepPlanError, match=message):
        threads.run(2, work)


@pytest.mark.parametrize("kind", [torch.tensor, np.array, lambda ids: [np.int32(i) for i in ids], tuple])
def test_integer_ids_may_come_as_a_tensor_or_array(kind):
    found = plan([1, 2, 3], "prompt_mean", rollout_ids=kind([4, 5, 6]), prompt_ids=kind([7, 7, 8]))
    assert (found.num_rollouts, found.num_prompts) == (3, 2)
    assert found.denominators.tolist() == [6.0, 6.0, 6.0]


def test_counts_beyond_float32_and_int32_stay_exact():
    found = plan([2**24 + 1, 2**31 + 3], "token_mean")
    assert found.num_tokens == 2**24 + 2**31 + 4
    assert found.denominators.tolist() == [float(2**24 + 2**31 + 4)] * 2
    assert plan([2**40, 2**40], "token_mean").denominators.tolist() == [2.0**41] * 2


@pytest.mark.parametrize(
    ("tokens", "aggregation", "rest", "message"),
    [
        ([1, 1], "prompt_mean", {}, "prompt_mean needs a prompt_id for every sample, and sample 0 has none"),
        ([1, 1], "prompt_mean", {"prompt_ids": [1, None]}, "sample 1 has none"),
        ([1, 1], "sample_mean", {"rollout_ids": [1]}, "rollout_ids has 1 entries for 2 samples"),
        ([1, 1], "sample_mean", {"rollout_ids": [1, 1.5]}, "rollout_ids[1]=1.5 is neither"),
        ([1, 1], "sample_mean", {"rollout_ids": torch.tensor([1.0, 2.0])}, "rollout_ids[0]=1.0 is neither"),
        ([1, 1], "sample_mean", {"rollout_ids": np.array([[1], [2]])}, "rollout_ids[0]="),
        ([1, 1], "sample_mean", {"rollout_ids": [1, True]}, "rollout_ids[1]=True is neither"),
        (
            [1, 1],
            "sample_mean",
            {"rollout_ids": "rr", "prompt_ids": [4, "5"]},
            "'r' belongs to prompt groups 4 and '5'",
        ),
        ([0, 0], "token_mean", {}, "the step has no trained token"),
        ([], "token_mean", {}, "the step has no trained token"),
        ([0.5], "token_mean", {}, "not [S] integers"),
        ([-1, 3], "token_mean", {}, "tokens_per_sample[0]=-1 is negative"),
        ([1], "seq_mean", {}, "aggregation='seq_mean' is not one of"),
        ([1], "turn_mean", {}, "aggregation='turn_mean' divides by tokens of turns, which plan_step does not"),
        ([1, None], "token_mean", {}, "tokens_per_sample=[1, None] are not counts"),
        ([1, 2, 3], "token_mean", {"positions_per_sample": [4]}, "positions_per_sample has 1 entries for 3 samples"),
        ([1, 2], "token_mean", {"positions_per_sample": [4, -1]}, "positions_per_sample[1]=-1 is negative"),
        ([1, 2], "token_mean", {"positions_per_sample": [4, 0.5]}, "positions_per_sample has dtype torch.float32"),
        # sums of more could overflow
        *(([n], "token_mean", {}, f"tokens_per_sample[0]={n} is more than {2**40}") for n in (2**40 + 1, 2**63 - 1)),
        ([1], "token_mean", {"divisor": 4.0}, "has no effect with token_mean"),
        *(
            ([1], "constant", {"divisor": divisor}, " of constant must be a finite number > 0. Set it to a length, for")
            for divisor in (None, 0.0, -1.0, math.inf, math.nan, True, "5", [5], 10**400)
        ),
    ],
)
def test_what_cannot_be_planned_is_a_named_error(tokens, aggregation, rest, message):
    with pytest.raises(ValueError) as error:
        plan(tokens, aggregation, **rest)
    assert message in str(error.value)


def test_positions_are_the_trained_tokens_unless_given():
    assert plan([2, 6], "sample_mean").num_positions == 8
    assert plan([2, 6], "sample_mean", positions_per_sample=[5, 9]).num_positions == 14


OF_CLIP = (("pg_objective", "grpo"), ("pg_clip_eps_low", "0.3"))
DIFFERENT = {
    "aggregation: rank 0 has constant, rank 2 has token_mean": {"aggregation": "token_mean", "divisor": None},
    "divisor: rank 0 has 6.0, rank 2 has 12.0": {"divisor": 12.0},
    "--pg-clip-eps-low: rank 0 has 0.2, rank 2 has 0.3": {"arguments": OF_CLIP, "divisor": 12.0},
    "terms: rank 0 has .*, rank 2 has .*sft": {"terms": (OBJECTIVE, LossTerm(name="sft", kind="ce"))},
}


@pytest.mark.parametrize("expected", DIFFERENT)
def test_ranks_with_different_settings_are_refused_on_every_rank(expected):
    def work(rank: int):
        same = {"aggregation": "constant", "divisor": 6.0, "arguments": (OF_CLIP[0], ("pg_clip_eps_low", "0.2"))}
        rule = PlanRule(**same | (DIFFERENT[expected] if rank == 2 else {}))
        table = table_of(rule, dist.group.WORLD, torch.tensor([[2, 2], [6, 6]]), None, None)
        with pytest.raises(StepPlanError, match=f"^data-parallel ranks disagree on {expected}"):
            plan_from_table(table, rule, error=None, group=dist.group.WORLD)

    threads.run(3, work)


def test_a_long_error_arrives_whole_on_every_rank_and_an_endless_one_is_cut():
    def work(rank: int, text: str) -> str:
        error = ValueError(text) if rank == 1 else None
        with pytest.raises(StepPlanError) as caught:
            plan_from_table(None, PlanRule(aggregation="token_mean"), error=error, group=dist.group.WORLD)
        return str(caught.value)

    long, endless = "word " * 900 + "end", "x" * 1_000_000
    assert threads.run(2, partial(work, text=long)) == [f"data-parallel rank 1: {long}"] * 2
    (message, other) = threads.run(2, partial(work, text=endless))
    assert message == other
    assert message.startswith("data-parallel rank 1: xxx")
    assert message.endswith("xxx...")
    assert len(message) < 10_000


def test_a_plan_without_a_group_warns_in_a_job_of_several_ranks():
    found = []
    with mock.patch.object(warnings, "warn", lambda message, **_: found.append(message)):  # threads share the filters
        alone = threads.run(2, lambda rank: plan([2, 6], "token_mean").num_tokens)
        together = threads.run(2, lambda rank: plan([2, 6], "token_mean", group=dist.group.WORLD).num_tokens)
    assert (alone, together) == ([8, 8], [16, 16])
    assert [text[:71] for text in found] == [
        "plan_step without group counts the samples of this rank alone, in a job"
    ] * 2
    assert plan([2, 6], "token_mean").num_tokens == 8


def test_ids_on_one_rank_only_are_refused_on_every_rank():
    def work(rank: int):
        with pytest.raises(StepPlanError, match="rank 1 has rollout_ids and rank 0 has none"):
            plan([1, 2], "sample_mean", rollout_ids=["a", "b"] if rank else None, group=dist.group.WORLD)

    threads.run(2, work)


def test_megatrons_int32_counter_is_guarded():
    check_count(2**31 - 1)
    with pytest.raises(StepPlanError, match="2147483648 positions in one step exceed"):
        check_count(2**31)


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean", "prompt_mean", "constant"])
def test_a_depth_has_a_denominator_of_its_own_tokens(aggregation):
    """Those of the whole step, over both ranks; counted by hand."""
    rng = random.Random(0)
    on = [  # prompt length, mask, rollout, prompt; a depth loses what lies within it of the sample's begin
        [(1, [1, 1, 1], "a", "p"), (3, [1, 0, 1, 1], "a", "p")],
        [(2, [1], "b", "p"), (1, [1], "c", "q"), (5, [1] * 6, "d", "q")],
    ]
    tokens = {0: [3, 3, 1, 1, 6], 1: [2, 3, 1, 0, 6], 2: [1, 3, 0, 0, 6]}
    of_rollout = {1: [5, 5, 1, None, 6], 2: [4, 4, None, None, 6]}
    of_prompt = {1: [6, 6, 6, None, 6], 2: [4, 4, None, None, 6]}
    rule = PlanRule(aggregation=aggregation, depths=2, depth_aggregation=aggregation, divisor=divisor_of(aggregation))

    def work(rank: int):
        samples = [
            make_sample(prompt_length=length, mask=mask, rng=rng, rollout_id=rollout, prompt_id=prompt)
            for length, mask, rollout, prompt in on[rank]
        ]
        batches = [packed([sample]) for sample in samples]
        batches += [packed([]) for _ in range(3 - len(batches))]
        return planned(batches, rule, dist.group.WORLD)

    plans = threads.run(2, work)
    for depth in (1, 2):
        found = torch.cat([plan.depth_denominators[depth - 1] for plan in plans]).tolist()
        expected = {
            "token_mean": [sum(tokens[depth])] * 5,
            "sample_mean": [n and 4 * n for n in of_rollout[depth]],
            "prompt_mean": [n and 2 * n for n in of_prompt[depth]],
            "constant": [64] * 5,
        }[aggregation]
        assert all(e is None or f == e for f, e in zip(found, expected, strict=True)), (depth, found)
        assert {plan.depth_counts[depth - 1] for plan in plans} == {sum(tokens[depth])}
    assert [plan.num_tokens for plan in plans] == [14, 14]


def test_a_depth_counts_the_rollouts_that_the_policys_denominators_count():
    """Under `live` those with a token of the depth: two of the three, and one of them at depth 2."""
    rng = random.Random(0)
    samples = [make_sample(prompt_length=1, mask=mask, rng=rng) for mask in ([0, 0], [1, 1], [1, 1, 1])]
    batches = [packed(samples)]
    for denominator, expected in (("scheduled", [[3.0, 6.0], [3.0]]), ("live", [[2.0, 4.0], [1.0]])):
        rule = PlanRule(aggregation="sample_mean", denominator=denominator, depths=2, depth_aggregation="sample_mean")
        plan = planned(batches, rule)
        assert plan.depth_counts == (3, 1)
        for depth, found in enumerate(plan.depth_denominators):
            assert found.tolist()[1 + depth :] == expected[depth]


def test_samples_of_two_ranks_without_rollout_ids_are_rollouts_of_their_own():
    def work(rank: int):
        return plan([3, 5], "sample_mean", group=dist.group.WORLD)

    for found in threads.run(2, work):
        assert (found.num_rollouts, found.denominators.tolist()) == (4, [12.0, 20.0])


def test_a_depth_that_no_token_reaches_weighs_nothing():
    sample = make_sample(prompt_length=1, mask=[1], rng=random.Random(0))
    rule = PlanRule(aggregation="sample_mean", depths=1)
    batches = [packed([sample])]
    plan = planned(batches, rule)
    assert plan.depth_counts == (0,)
    assert plan.depth_denominators[0].tolist() == [math.inf]


def on_runs(samples, rng, *, num_ranks: int, num_microbatches: int) -> list[list]:
    """The samples on random runs of ranks: every rank's micro-batches."""
    found: list[list] = [[] for _ in range(num_ranks)]
    runs = []
    for _ in range(num_microbatches):
        size = rng.choice([1, 2, num_ranks])
        runs.append([ContextRanks(first, size) for first in range(0, num_ranks, size)])
    places = [(k, run) for k, own in enumerate(runs) for run in own]
    dealt = {place: [] for place in places}
    for sample in samples:
        dealt[rng.choice(places)].append(sample)
    for (_, run), part in dealt.items():
        for rank in run:
            batch = packed(part, cp_ranks=run)
            found[rank].append(dataclasses.replace(batch, num_missing=len(part)))
    return found


TOTALS = ("num_samples", "num_rollouts", "num_prompts", "num_tokens", "num_response_tokens")


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("aggregation", MODES)
def test_a_sample_that_lies_on_several_ranks_counts_once_and_all_have_its_denominator(aggregation, seed, with_ids):
    rng = random.Random(seed)
    samples = random_step(rng)
    if not with_ids:
        if aggregation == "prompt_mean":
            return
        samples = [dataclasses.replace(sample, rollout_id=None, prompt_id=None) for sample in samples]
    rule = PlanRule(aggregation=aggregation, divisor=divisor_of(aggregation), depths=1)
    ranks = on_runs(samples, rng, num_ranks=4, num_microbatches=3)

    def work(rank: int):
        return planned(ranks[rank], rule, dist.group.WORLD)

    whole = planned([packed(samples)], rule)
    expected = {id(sample): value for sample, value in zip(samples, whole.denominators.tolist(), strict=True)}
    brought = [batch for rank, own in enumerate(ranks) for batch in own if batch.cp_ranks.first == rank]
    for found, batches in zip(threads.run(4, work), ranks, strict=True):
        held = [sample for batch in batches for sample in batch.samples]
        assert found.denominators.tolist() == [expected[id(sample)] for sample in held]
        assert len(found.depth_denominators[0]) == len(held)
        for total in (*TOTALS, "depth_counts"):
            assert getattr(found, total) == getattr(whole, total), total
        assert found.num_missing == len(samples)
        assert found.num_positions == sum(batch.num_positions for batch in brought)
        assert repr(found.facts) == repr(whole.facts)  # a repr names every bit of a float


@pytest.mark.parametrize("mistake", ["another sample", "alone", "another place"])
def test_a_micro_batch_that_its_ranks_have_otherwise_is_named_on_every_rank(mistake):
    rule, both = PlanRule(aggregation="token_mean"), ContextRanks(0, 2)
    one, two = (make_sample(prompt_length=1, mask=[1, 1], rng=random.Random(i)) for i in range(2))
    right = [packed([one], cp_ranks=both), packed([two], cp_ranks=both)]
    wrong = {
        "another sample": [right[0], packed([one], cp_ranks=both)],
        "alone": [right[0], packed([two], cp_ranks=ContextRanks(1, 1))],
        "another place": right[::-1],
    }[mistake]

    def work(rank: int) -> str:
        group = dist.group.WORLD
        own = [packed([], cp_ranks=ContextRanks(2, 1))] * 2
        table = local_table_of([right, wrong, own][rank], rule, group)
        with pytest.raises(StepPlanError) as caught:
            plan_from_table(table, rule, error=None, group=group)
        return str(caught.value)

    message = "micro-batch 0 of rank " if mistake == "another place" else "micro-batch 1 of rank "
    found = threads.run(3, work)
    assert len(set(found)) == 1
    assert message in found[0]
