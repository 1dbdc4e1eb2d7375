"""Weights of tokens and turns: by hand, bit for bit in every cut, and what is refused."""

import dataclasses
import itertools
import math
import random

import pytest
import simulation
import torch
from plans import planned
from samples import TINY_PROMPTS, TINY_ROLLOUTS, TINY_TURN_DENOMINATORS, TINY_TURNS, make_sample, plain_sample
from weight_cases import random_turns, random_weight

from megatron_pg import StepPlanError
from megatron_pg.batch import pack
from megatron_pg.objectives import objective_of
from megatron_pg.objectives.corrections.correction import Correction, correction_factors
from megatron_pg.plan.planned_step import PlannedStep
from megatron_pg.plan.table import PlanRule
from megatron_pg.plan.weights import token_factors

GSPO = dataclasses.replace(simulation.GRPO, objective=objective_of("gspo"))
GMPO = dataclasses.replace(simulation.GRPO, objective=objective_of("gmpo"))


def weights_of(samples, aggregation, cells=None, **settings):
    """[R] of every sample, from a step that is cut into these micro-batches."""
    cells = [list(range(len(samples)))] if cells is None else cells
    batches = [pack([samples[i] for i in cell], qkv_format="thd") for cell in cells]
    loss = simulation.settings(aggregation, per_token=False, **settings)
    step = PlannedStep.of(lambda: batches, loss, group=None)
    found = {}
    for cell, batch, fields in zip(cells, batches, step.fields, strict=True):
        found |= dict(zip(cell, fields["weights"].split(batch.lengths.tolist()), strict=True))
    return [found[i] for i in range(len(samples))], step.plan


def test_hand_worked_weights_of_turns():
    ids = zip(TINY_ROLLOUTS, TINY_PROMPTS, strict=True)
    masks = [[int(bool(own))] * sum(turns) for turns, own in zip(TINY_TURNS, TINY_TURN_DENOMINATORS, strict=True)]
    samples = [
        dataclasses.replace(
            make_sample(prompt_length=1, mask=mask, rng=random.Random(0), rollout_id=rollout, prompt_id=prompt),
            turns=turns,
        )
        for mask, turns, (rollout, prompt) in zip(masks, TINY_TURNS, ids, strict=True)
    ]
    weights, plan = weights_of(samples, "turn_mean")
    assert [(1 / own).tolist() for own in weights[:4]] == TINY_TURN_DENOMINATORS[:4]
    assert weights[4].tolist() == [0.0]
    assert (plan.num_turns, plan.num_tokens) == (6, 32)
    metrics = simulation.settings("turn_mean", per_token=False).metrics
    values = metrics.finish(metrics.identity(), plan)
    wanted = {"num_turns": 6, "turn_length": 32 / 6, "turns_per_rollout": 6 / 4}
    assert {name: values[name] for name in wanted} == wanted


def test_a_masked_turn_does_not_count_and_tokens_of_a_tool_do_not_either():
    sample = plain_sample(6, loss_mask=[1, 1, 0, 0, 0, 1], turns=[3, 2, 1])
    (weights,), plan = weights_of([sample], "turn_mean")
    assert plan.num_turns == 2
    assert weights.tolist() == [0.25, 0.25, 0, 0, 0, 0.5]


@pytest.mark.parametrize(
    ("aggregation", "by", "wanted"),
    [
        ("sample_mean", "tokens", [2 / 4, 1 / 4, 0, 1 / 2]),  # N_r 2, M 2 and 1
        ("sample_mean", "weights", [2 / 6, 1 / 6, 0, 1 / 2]),  # M 3 and 1
        ("token_mean", "tokens", [2 / 3, 1 / 3, 0, 1 / 3]),
        ("token_mean", "weights", [2 / 4, 1 / 4, 0, 1 / 4]),
        ("constant", "tokens", [2 / 8, 1 / 8, 0, 1 / 8]),  # L 4
        ("turn_mean", "tokens", [2 / 3, 1 / 3, 0, 1 / 3]),  # three turns of one token
        ("turn_mean", "weights", [1 / 3, 1 / 3, 0, 1 / 3]),
    ],
)
def test_hand_worked_weights_of_tokens(aggregation, by, wanted):
    first = plain_sample(3, loss_mask=[1, 1, 0], token_weights=[2.0, 1.0, math.nan], turns=[1, 2])
    samples = [first, plain_sample(1, turns=[1])]  # without weights: 1
    divisor = 4.0 if aggregation == "constant" else None
    weights, plan = weights_of(samples, aggregation, divisor=divisor, sums_weights=by == "weights")
    assert torch.cat(weights).tolist() == wanted
    assert plan.num_tokens == 3  # tokens, not weights


@pytest.mark.parametrize("aggregation", ["sample_mean", "prompt_mean", "token_mean", "constant", "turn_mean"])
def test_varied_is_the_step_without_groups_of_equal_rewards(aggregation):
    """Of prompts p (rewards 0 and 1), q (1 and 1, one of them masked) and r (one rollout); bit for bit."""
    given = [("p", 0, 1.0), ("p", 1, 0.0), ("q", 2, 1.0), ("q", 3, 1.0), ("r", 4, 1.0), ("p", 5, 0.0)]
    samples = [
        plain_sample(n + 1, loss_mask=[int(n != 5)] * (n + 1), prompt_id=p, rollout_id=n, reward=r, turns=[n + 1])
        for p, n, r in given
    ]
    others = [sample for sample in samples if sample.prompt_id != "q"]
    divisor = {"divisor": 7.0} if aggregation == "constant" else {}
    for by in (False, True):
        wanted, _ = weights_of(others, aggregation, sums_weights=by, **divisor)
        settings = {"sums_weights": by, "denominator": "varied"} | divisor
        found, plan = weights_of(samples, aggregation, [[0, 3], [1, 2], [4, 5]], **settings)
        assert [own.tolist() for own in found[:2] + found[4:]] == [own.tolist() for own in wanted]
        assert not any(own.any() for own in found[2:4])
        assert (plan.num_rollouts, plan.num_tokens) == (6, sum(sample.num_trained for sample in samples))


def test_a_step_without_variance_has_no_weight_and_missing_rewards_are_named():
    samples = [plain_sample(1, prompt_id="p", rollout_id=n, reward=1.0) for n in range(2)]
    weights, _ = weights_of(samples, "sample_mean", denominator="varied")
    assert [own.tolist() for own in weights] == [[0.0], [0.0]]
    for missing in ("reward", "prompt_id"):
        lacking = [dataclasses.replace(sample, **{missing: None}) for sample in samples]
        with pytest.raises(StepPlanError, match=rf"{missing}.* --pg-denominator varied needs|varied needs a {missing}"):
            weights_of(lacking, "sample_mean", denominator="varied")


@pytest.mark.parametrize("by", [False, True])
def test_hand_worked_weights_of_predictions(by):
    """One depth, which predicts all but the first token of a response after one prompt token: two turns."""
    sample = plain_sample(4, turns=[2, 2], token_weights=[9.0, 2.0, 1.0, 3.0])
    settings = {"mtp_depths": 1, "mtp_aggregation": "policy", "sums_weights": by}
    loss = simulation.settings("turn_mean", per_token=False, **settings)
    step = PlannedStep.of(lambda: [pack([sample], qkv_format="thd")], loss, group=None)
    (local,) = step.slices(lambda batch: None)
    weights = [w for w in local.depths[0].weights.tolist() if w]
    assert weights == ([0.5, 1 / 8, 3 / 8] if by else [1.0, 1 / 4, 3 / 4])  # N_turn 2, M 1 and 2, or 2 and 4
    assert step.plan.depth_counts == (3,)


def test_weights_that_are_all_zero_weigh_nothing():
    samples = [plain_sample(2, token_weights=[0.0, 0.0], turns=[1, 1]), plain_sample(1, turns=[1])]
    for aggregation, by in itertools.product(("sample_mean", "token_mean", "turn_mean"), (False, True)):
        weights, _ = weights_of(samples, aggregation, sums_weights=by)
        assert weights[0].tolist() == [0.0, 0.0]
        assert torch.isfinite(weights[1]).all()
        assert weights[1] > 0


@pytest.mark.proof("Weights and turns: bit-identical in every cut and order")
@pytest.mark.parametrize("aggregation", ["sample_mean", "prompt_mean", "token_mean", "turn_mean"])
def test_sums_of_weights_are_bit_identical_in_every_cut(aggregation, full, evidence):
    rng, cases = random.Random(aggregation), 250 if full else 6
    for case in range(cases):
        samples = []
        for i in range(rng.randint(2, 12)):
            size = rng.randint(1, 9)
            own = {"token_weights": [random_weight(rng) for _ in range(size)], "turns": random_turns(rng, size)}
            samples.append(plain_sample(size, prompt_id=i % 2, rollout_id=f"{i % 2}/{i % 4}", sample_id=str(i), **own))
        wanted, _ = weights_of(samples, aggregation, sums_weights=True)
        order = rng.sample(range(len(samples)), len(samples))
        cut = sorted(rng.choices(range(len(samples) + 1), k=2))
        cells = [order[: cut[0]], order[cut[0] : cut[1]], order[cut[1] :]]
        found, _ = weights_of(samples, aggregation, cells, sums_weights=True)
        assert [own.tolist() for own in found] == [own.tolist() for own in wanted], case
    evidence(cases=cases)


@pytest.mark.parametrize("aggregation", ["sample_mean", "prompt_mean", "token_mean", "turn_mean"])
def test_weights_of_one_are_no_weights_bit_for_bit(aggregation):
    rng = random.Random(0)
    plain = [plain_sample(n, prompt_id=n % 3, turns=random_turns(rng, n), sample_id=str(n)) for n in range(1, 9)]
    ones = [dataclasses.replace(s, token_weights=torch.ones(s.response_length).double()) for s in plain]
    wanted, _ = weights_of(plain, aggregation)
    for samples in (plain, ones):
        found, _ = weights_of(samples, aggregation, sums_weights=True)
        assert [own.tolist() for own in found] == [own.tolist() for own in wanted]


def test_sums_beyond_float32_and_float64_are_exact():
    rule = PlanRule(aggregation="token_mean", sums_weights=True)
    samples = [
        plain_sample(2, token_weights=pair, sample_id=str(i)) for i, pair in enumerate([[1e6, 1e-8], [1e-8, 1.0]])
    ]
    plan = planned([pack(samples, qkv_format="thd")], rule)
    exact = math.fsum([1e6, 1e-8, 1e-8, 1.0])
    assert plan.denominators.tolist() == [exact, exact]


def test_importance_weights_and_rejections_are_by_turn():
    sample = plain_sample(
        4, turns=[2, 2], old_logprobs=[-1.0, -1.0, -1.0, -1.0], rollout_logprobs=[-1.0, -1.0, -1.5, -1.5]
    )
    mis = Correction(name="mis", low=0.0, high=2.0)
    whole, _ = correction_factors([sample], mis)
    assert whole.tolist() == [0.0] * 4  # e^1 is above 2
    factors, kept = correction_factors([sample], mis, "turn")
    assert factors.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert kept.tolist() == [True, True, False, False]


def test_advantages_may_differ_between_turns_but_not_in_one():
    sample = plain_sample(3, turns=[1, 2], advantage=[0.5, -1.0, -1.0])
    by_turn = simulation.settings("sample_mean", per_token=False, terms=GMPO, sequence_level="turn")
    token_factors(pack([sample], qkv_format="thd"), by_turn)
    with pytest.raises(ValueError, match=r"go from -1 to 0.5 in one sample, and gmpo has one"):
        token_factors(pack([sample], qkv_format="thd"), dataclasses.replace(by_turn, sequence_level="sample"))
    with pytest.raises(ValueError, match=r"go from -1 to 0.5 in one turn, and gmpo has one"):
        token_factors(pack([dataclasses.replace(sample, turns=[2, 1])], qkv_format="thd"), by_turn)


def test_a_sample_without_turns_is_refused_where_they_are_read():
    by_turn = {"aggregation": "sample_mean", "terms": GSPO, "sequence_level": "turn"}
    for settings in ({"aggregation": "turn_mean"}, by_turn):
        loss = simulation.settings(**settings, per_token=False)
        message = r"sample s has no turns, which --(loss-agg|pg-seq).* needs. Give it to every"
        with pytest.raises(ValueError, match=message):
            token_factors(pack([plain_sample(2, sample_id="s")], qkv_format="thd"), loss)


@pytest.mark.parametrize("turns", [(1, 2), torch.tensor([1, 2])])
def test_an_advantage_per_turn_is_that_of_its_tokens(turns):
    sample = plain_sample(3, turns=turns, advantage=[0.5, -1.0])
    assert sample.turns == (1, 2)
    assert sample.advantages.tolist() == [0.5, -1.0, -1.0]
    assert plain_sample(3, turns=turns, advantage=[0.5, -1.0, 2.0]).advantages.tolist() == [0.5, -1.0, 2.0]
    with pytest.raises(ValueError, match=r"advantages of sample .* has 2 entries for 3 response tokens"):
        plain_sample(3, turns=[3], advantage=[0.5, -1.0])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, -0.5], "token_weights of sample .* contain -0.5. A weight is 0, or from 1e-8 to 1e6"),
        ([1.0, 1e-9], "contain 1e-09. A weight is 0, or"),
        ([1.0, 2e6], r"contain 2e\+06. A weight is 0, or"),
        ([1.0, math.inf], "token_weights of sample .* is inf at response token 1"),
        ([1.0, math.nan], "token_weights of sample .* is nan at response token 1"),
        ([1.0], "token_weights of sample .* has 1 entries for 2 response tokens"),
    ],
)
def test_weights_that_are_not_weights_are_refused_unless_they_are_masked(weights, message):
    for masks in ({}, {"loss_mask": [0, 0], "masks": {"sft": [1, 1]}}):  # a token of a further term is trained too
        with pytest.raises(ValueError, match=message):
            plain_sample(2, token_weights=weights, **masks)
    assert plain_sample(3, loss_mask=[1, 0, 0], token_weights=[1.0, math.nan, -3.0]).token_weights[0] == 1


@pytest.mark.parametrize("turns", [[], [2], [1, 3], [3, 0], [4, -1], [1.5, 1.5], "12", 3, [True, 2]])
def test_lengths_that_are_not_those_of_the_response_are_refused(turns):
    message = r"turns=.* of sample without id are not lengths of turns that add up to its 3 response"
    with pytest.raises(ValueError, match=message):
        plain_sample(3, turns=turns)
