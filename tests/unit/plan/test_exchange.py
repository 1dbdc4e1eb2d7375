"""The exchange against counting by hand over all ranks' samples, and what goes over the network."""

import math
import random
import threading
from collections import defaultdict
from fractions import Fraction

import pytest
import threads
import torch
import torch.distributed as dist
from samples import divisor_of

from megatron_pg import StepPlanError, plan_step
from megatron_pg.declarations.aggregations import AGGREGATIONS
from megatron_pg.declarations.loss_terms import OBJECTIVE, LossTerm
from megatron_pg.plan import collectives
from megatron_pg.plan.exchange import KINDS, MIXED, WholeStep, _owners, exchange
from megatron_pg.plan.facts import SampleFacts, fact_sums, largest_facts, ordered_bits, unit_facts
from megatron_pg.plan.table import PROMPT, ROLLOUT, LocalTable, PlanRule

HAS_REWARD = 1 << 40
FACTS, TOKENS = 2, 5  # first columns of a row here, after the keys


def random_rule(rng: random.Random) -> PlanRule:
    named = [LossTerm(name=name, kind="ce", aggregation="token_mean") for name in rng.sample("abc", rng.randint(0, 3))]
    terms = (OBJECTIVE, *named)
    undivided = tuple(rng.sample(sorted(KINDS), rng.randint(0, 2)))
    return PlanRule(aggregation="prompt_mean", terms=terms, depths=rng.randint(0, 2), undivided=undivided)


def random_rows(rng: random.Random, rule: PlanRule) -> list[list[int]]:
    """One sample each; a rollout has one prompt, but for a few."""
    found = []
    for _ in range(rng.randint(0, 6)):
        prompt = rng.choice([0, 7, -(2**61), rng.randint(-9, 9) << 44])
        rollout = 16 * prompt + rng.randint(0, 2) if rng.random() < 0.95 else 5
        reward = rng.choice([0.0, 1.0, rng.gauss(0, 1)])
        bits = int(bits_of(torch.tensor(reward, dtype=torch.float64)))
        facts = [bits, rng.randint(1, 9) + HAS_REWARD, 0] if rng.random() < 0.8 else [0, rng.randint(1, 9), 0]
        found.append([rollout % 2**62, prompt, *facts, *(rng.choice([-1, 0, 1, 5, 2**40]) for _ in range(rule.width))])
    return found


def table_of(rows: list[list[int]], held: list[list[int]], rule: PlanRule) -> LocalTable:
    parts = torch.tensor(rows, dtype=torch.int64).view(-1, TOKENS + rule.width).tensor_split([FACTS, TOKENS], dim=1)
    keys = torch.tensor(held, dtype=torch.int64).view(-1, TOKENS + rule.width)[:, :FACTS]
    return LocalTable(parts[0], parts[2], parts[1], True, True, 3 * len(rows), len(rows), 2 * len(rows), keys)


def check_units(found: WholeStep, ranks: list[list[list[int]]], held: list[list[int]], rule: PlanRule) -> None:
    """Every number of one kind of units, by loops."""
    rows = [row for own in ranks for row in own]
    for kind in KINDS.values():
        units = found.units[kind]
        for c, column in enumerate(range(TOKENS, TOKENS + rule.width)):
            totals = defaultdict(int)
            for row in rows:
                if row[column] >= 0:
                    totals[row[kind]] += row[column]
            assert units.counted[c] == len(totals)
            assert units.live[c] == sum(total > 0 for total in totals.values())
            assert units.tokens[:, c].tolist() == [totals.get(row[kind], 0) for row in held]
            assert found.tokens[c] == sum(totals.values())
        if MIXED in found.strays:  # a rollout of two prompts has two rows, and ends the step
            continue
        sets = [{row[kind] for row in own} for own in ranks]
        assert units.distinct == len(set().union(*sets))
        assert units.brought == sum(map(len, sets))
        assert units.most == max(map(len, sets))
        assert units.fewest == min((len(each) for each in sets if each), default=0)


def first_apart(places: list[tuple[int, list[int]]], kind: int, part_of) -> tuple[int, int] | None:
    """Place of the first sample that lies apart from its unit's first, and of that one."""
    first = {}
    for place, row in places:
        begun, part = first.setdefault(row[kind], (place, part_of(place, row)))
        if part != part_of(place, row):
            return place, begun
    return None


def bits_of(rewards: torch.Tensor) -> torch.Tensor:
    return ordered_bits(rewards.view(torch.int64))


def rewarded(ranks: list[list[list[int]]]) -> list[list[int]]:
    """Rollout and bits of the reward of every sample that has one."""
    return [[row[ROLLOUT], row[FACTS]] for own in ranks for row in own if row[FACTS + 1] & HAS_REWARD]


def rewards_of(ranks: list[list[list[int]]]) -> dict[int, float]:
    return {rollout: ordered_bits(torch.tensor(bits)).view(torch.float64).item() for rollout, bits in rewarded(ranks)}


def check_strays(found: WholeStep, ranks: list[list[list[int]]], rule: PlanRule) -> None:
    places = [((rank << 32) + i, row) for rank, own in enumerate(ranks) for i, row in enumerate(own)]
    assert found.strays.get(MIXED) == first_apart(places, ROLLOUT, lambda place, row: row[PROMPT])
    assert ("reward" in found.strays) == (len(rewards_of(ranks)) < len({*map(tuple, rewarded(ranks))}))
    for kind in rule.undivided:
        assert found.strays.get(kind) == first_apart(places, KINDS[kind], lambda place, row: place >> 32)


@pytest.mark.proof("The step's exchange: counts, totals and strays equal those by hand")
def test_every_count_equals_counting_by_hand(full, evidence):
    rng = random.Random(20)
    steps = 1000 if full else 25
    for _ in range(steps):
        rule, size = random_rule(rng), rng.randint(1, 6)
        ranks = [random_rows(rng, rule) for _ in range(size)]
        everyone = [row for own in ranks for row in own]
        # some ranks hold samples that others bring, as under dynamic context parallelism
        held = [own + rng.sample(everyone, rng.randint(0, len(everyone))) for own in ranks]

        def work(rank: int, rule=rule, size=size, ranks=ranks, held=held) -> WholeStep:
            group = dist.group.WORLD if size > 1 else None
            return exchange(table_of(ranks[rank], held[rank], rule), rule, group)

        for rank, found in enumerate(threads.run(size, work)):
            check_units(found, ranks, held[rank], rule)
            check_strays(found, ranks, rule)
            assert (found.num_positions, found.num_response_tokens) == (len(everyone), 2 * len(everyone))
            assert found.num_trained == 3 * len(everyone)
            rewards = rewards_of(ranks).values()
            assert found.facts.num_rewards == (len(rewards) or None)
            if rewards and "reward" not in found.strays:
                assert found.facts.reward == float(sum(map(Fraction, rewards)) / len(rewards))
    evidence(cases=steps)


@pytest.mark.parametrize("scale", [1e-308, 1.0, 1e150, 1e300])
def test_rewards_are_added_up_exactly_in_any_cut(scale):
    rng = random.Random(3)
    rewards = [rng.gauss(0, 1) * scale * 10 ** rng.randint(-7, 7) for _ in range(48)]
    rewards += rewards[:2]
    bits = bits_of(torch.tensor(rewards, dtype=torch.float64))
    rows = unit_facts(torch.stack([bits, torch.full_like(bits, HAS_REWARD + 1), torch.zeros_like(bits)], dim=1))
    mean = sum(map(Fraction, rewards)) / 50
    variance = sum((Fraction(reward) - mean) ** 2 for reward in rewards) / 50
    for cut in (0, 7, 50):
        sums = fact_sums(rows[:cut]) + fact_sums(rows[cut:])
        found = SampleFacts.of(sums, largest_facts(rows), torch.zeros(2, dtype=torch.int64))
        assert found.reward == float(mean)
        assert abs(Fraction(found.reward_std) ** 2 / variance - 1) < Fraction(1, 2**51)
        assert (found.max_reward, found.min_reward) == (max(rewards), min(rewards))


def test_equal_rewards_have_no_spread():
    bits = bits_of(torch.full((3,), 0.1, dtype=torch.float64))
    rows = unit_facts(torch.stack([bits, torch.full_like(bits, HAS_REWARD + 1), torch.zeros_like(bits)], dim=1))
    found = SampleFacts.of(fact_sums(rows), largest_facts(rows), torch.zeros(2, dtype=torch.int64))
    # the sum of three, divided by 3, is 0.10000000000000002 / 3 · 3
    assert (found.reward, found.reward_std) == (0.1, 0.0)


def test_without_prompts_there_are_no_groups_of_rewards():
    bits = int(bits_of(torch.ones(1, dtype=torch.float64)))
    keys, tokens = torch.tensor([[rollout, 0] for rollout in range(4)]), torch.ones(4, 2, dtype=torch.int64)
    facts = torch.tensor([[bits, HAS_REWARD + 1, 0]] * 4)
    for has_prompt_ids, expected in ((True, 1.0), (False, None)):
        local = LocalTable(keys, tokens, facts, True, has_prompt_ids, 4, 4, 4, keys)
        found = exchange(local, PlanRule(aggregation="token_mean"), None)
        assert found.facts.zero_variance_fraction == expected


@pytest.mark.parametrize(
    "keys", [torch.arange(64_000), torch.arange(64_000) << 32, -(2**62) - torch.arange(64_000) * 2654435761]
)
def test_units_fall_on_all_ranks(keys):
    counts = torch.bincount(_owners(keys, 640), minlength=640)
    assert int(counts.sum()) == 64_000
    assert int(counts.min()) > 100 - 6 * math.sqrt(100)
    assert int(counts.max()) < 100 + 6 * math.sqrt(100)


def calls_of(work, size: int, monkeypatch) -> tuple[list[object], dict[int, list[tuple]]]:
    """Results of `work` on every rank, and the collectives that each reached, with what the ranks must agree on."""
    calls, of_thread, lock = defaultdict(list), {}, threading.Lock()
    for name in ("all_gather", "all_to_all_single", "all_reduce"):
        original = getattr(collectives.dist, name)

        def called(*positional, name=name, original=original, **rest):
            values = positional[0] if name == "all_reduce" else positional[1]
            with lock:
                shape = tuple(values.shape[int(name == "all_to_all_single") :])
                calls[of_thread[threading.get_ident()]].append((name, values.dtype, shape))
            return original(*positional, **rest)

        monkeypatch.setattr(collectives.dist, name, called)

    def on_rank(rank: int) -> object:
        with lock:
            of_thread[threading.get_ident()] = rank
        return work(rank, dist.group.WORLD)

    return threads.run(size, on_rank), calls


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS.keys() - {"turn_mean"}))
@pytest.mark.parametrize("sizes", [[2000, 3], [0, 1, 5], [1, 0]])
def test_every_rank_reaches_the_same_collectives(monkeypatch, aggregation, sizes):
    def work(rank: int, group) -> int:
        ids = [f"{rank} {i}" for i in range(sizes[rank])]
        rest = {"aggregation": aggregation, "divisor": divisor_of(aggregation), "prompt_ids": ids}
        return plan_step([1] * sizes[rank], rollout_ids=ids, group=group, **rest).num_rollouts

    found, calls = calls_of(work, len(sizes), monkeypatch)
    assert set(found) == {sum(sizes)}
    assert [name for name, _, _ in calls[0]] == ["all_gather", *["all_to_all_single"] * 3, *["all_reduce"] * 2]
    assert all(calls[rank] == calls[0] for rank in calls)
    assert len(calls) == len(sizes)


def test_every_rank_reaches_those_behind_a_mistake(monkeypatch):
    def work(rank: int, group) -> str:
        ids = {"rollout_ids": ["r" if rank < 2 else rank], "prompt_ids": [rank]}
        with pytest.raises(StepPlanError) as caught:
            plan_step([1], aggregation="sample_mean", group=group, **ids)
        return str(caught.value)

    found, calls = calls_of(work, 3, monkeypatch)
    assert len(set(found)) == 1
    assert "rollout 'r' belongs to prompt groups 0 and 1" in found[0]
    assert calls[0] == calls[1] == calls[2]


def test_what_a_rank_sends_follows_its_samples(monkeypatch):
    """Not a table of fixed size; and nothing but sizes grows with the number of ranks."""
    sent = defaultdict(int)

    def counted(values, *rest, original=collectives.dist.all_to_all_single, **more):
        sent[threading.get_ident()] += rest[0].nbytes
        return original(values, *rest, **more)

    monkeypatch.setattr(collectives.dist, "all_to_all_single", counted)

    def work(rank: int, group) -> int:
        plan_step([1] * 10, aggregation="sample_mean", rollout_ids=[f"{rank} {i}" for i in range(10)], group=group)
        return sent[threading.get_ident()]

    for found in threads.run(2, lambda rank: work(rank, dist.group.WORLD)):
        assert found < 64 * 8 * 22  # ten rollouts, and the one row of no prompts, out and back
