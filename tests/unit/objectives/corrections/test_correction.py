"""Corrections for the mismatch of trainer and rollout engine, what they reject, and what denominators then count."""

import contextlib
import dataclasses
import math
import random

import pytest
import simulation
import torch
from loss_terms import kl_and_entropy
from objective_parts import build
from samples import make_sample, plain_sample
from simulation import Layout

from megatron_pg.batch import TokenFields, pack
from megatron_pg.batch.sequences import Sequences
from megatron_pg.declarations.corrections import CORRECTIONS
from megatron_pg.declarations.loss_terms import OBJECTIVE
from megatron_pg.kernels import PolicyLoss
from megatron_pg.objectives.corrections.correction import Correction, correction_factors
from megatron_pg.plan.plan import StepPlanError, plan_from_table
from megatron_pg.plan.table import PlanRule, local_table_of
from megatron_pg.plan.weights import token_factors
from megatron_pg.rollouts.sample import Sample


def sample(log_rho: list[float], mask: list[int] | None = None, anchor: float = -3.0) -> Sample:
    """A sample whose trained tokens have these log ρ; NaN where masked."""
    mask = mask or [1] * len(log_rho)
    old = [anchor if m else math.nan for m in mask]
    return Sample.build(
        tokens=[1] * (len(mask) + 1),
        response_length=len(mask),
        loss_mask=mask,
        old_logprobs=old,
        rollout_logprobs=[o - x for o, x in zip(old, log_rho, strict=True)],
        advantage=1.0,
    )


_WORDS = CORRECTIONS["rejection"].words
REJECTIONS = [f"{level}_{estimator}" for level in _WORDS["level"] for estimator in _WORDS["estimator"]]


def correction_of(name: str, low: float | None, high: float) -> Correction:
    """A correction with its bounds; LEVEL_ESTIMATOR is a rejection."""
    if name not in REJECTIONS:
        return Correction(name=name, low=low, high=high)
    level, _, estimator = name.rpartition("_")
    low = -math.inf if low is None else low
    return Correction(name="rejection", words=(level, estimator), low=low, high=high)


def factors(name: str, low: float | None, high: float, *samples: Sample) -> tuple[list[float], list[bool]]:
    found, kept = correction_factors(samples, correction_of(name, low, high))
    return found.tolist(), kept.tolist()


LN2 = math.log(2)


@pytest.mark.parametrize(
    ("name", "low", "high", "expected", "kept"),
    [
        # ρ = 2, 1/2, 4; product 4, geometric mean 4^(1/3) = 1.587
        ("tis", 0.75, 3.0, [2, 0.75, 3], [1, 1, 1]),
        ("seq_tis", 0.0, 3.0, [3, 3, 3], [1, 1, 1]),
        ("seq_tis", 0.0, 5.0, [4, 4, 4], [1, 1, 1]),
        ("icepop", 0.45, 3.0, [2, 0.5, 0], [1, 1, 0]),
        ("mis", 0.0, 5.0, [4, 4, 4], [1, 1, 1]),
        ("mis", 0.0, 3.0, [0, 0, 0], [0, 0, 0]),
        ("seq_mask_tis", 0.9, 1.6, [2, 0.5, 4], [1, 1, 1]),
        ("seq_mask_tis", 0.9, 1.5, [0, 0, 0], [0, 0, 0]),
        # k1 = -log ρ = -ln 2, ln 2, -2 ln 2
        ("token_k1", -1.0, 0.5, [1, 0, 0], [1, 0, 0]),
        ("token_k1", None, 0.5, [1, 0, 1], [1, 0, 1]),
        ("seq_sum_k1", None, -2 * LN2 + 1e-9, [1, 1, 1], [1, 1, 1]),
        ("seq_mean_k1", -0.9, -0.6, [0, 0, 0], [0, 0, 0]),  # -2/3 ln 2 = -0.462
        ("seq_max_k1", None, LN2 - 1e-9, [0, 0, 0], [0, 0, 0]),
        # k2 = 0.2402, 0.2402, 0.9609
        ("token_k2", None, 0.3, [1, 1, 0], [1, 1, 0]),
        ("seq_sum_k2", None, 1.4, [0, 0, 0], [0, 0, 0]),
        ("seq_mean_k2", None, 0.5, [1, 1, 1], [1, 1, 1]),
        ("seq_max_k2", None, 0.95, [0, 0, 0], [0, 0, 0]),
        # k3 = ρ - 1 - log ρ = 0.3069, 0.1931, 1.6137
        ("token_k3", None, 0.25, [0, 1, 0], [0, 1, 0]),
        ("seq_sum_k3", None, 2.2, [1, 1, 1], [1, 1, 1]),
        ("seq_mean_k3", None, 0.7, [0, 0, 0], [0, 0, 0]),
        ("seq_max_k3", None, 1.62, [1, 1, 1], [1, 1, 1]),
    ],
)
def test_hand_worked_factors(name, low, high, expected, kept):
    found = factors(name, low, high, sample([LN2, -LN2, 2 * LN2]))
    assert found[0] == pytest.approx(expected, rel=1e-14)
    assert found[1] == [bool(k) for k in kept]


@pytest.mark.parametrize(
    ("old", "rollout", "high", "factor"),
    [
        # KL of 1/2 from 1/4 is ln(4/3)/2 = 0.14384, of 1/4 from 1/2 3/4 ln 3 - ln 2 = 0.13081
        (1 / 2, 1 / 4, 0.1439, 2.0),
        (1 / 2, 1 / 4, 0.1438, 0.0),
        (1 / 4, 1 / 2, 0.1439, 0.5),
        (1 / 4, 1 / 2, 0.1438, 0.0),
        (1.0, 1.0, 1e-9, 1.0),
        (1.0005, 1.0, 1e-9, 1.0005),
        (1.0, 0.999, 1e9, 0.0),  # what is certain under one policy alone is infinitely far
        (1e-9, 1e-5, 0.1, 1e-4),  # a rare token may have any ratio
    ],
)
def test_kpop_by_hand(old, rollout, high, factor):
    made = plain_sample(old_logprobs=[math.log(old)], rollout_logprobs=[math.log(rollout)])
    found, kept = factors("kpop", None, high, made)
    assert found == pytest.approx([factor], rel=1e-12)
    assert kept == [factor > 0]


@pytest.mark.parametrize("bound", ["low", "high"])
@pytest.mark.parametrize("name", [*REJECTIONS, "icepop", "mis", "seq_mask_tis"])
def test_a_bound_is_inclusive(name, bound):
    """Equal policies, whose ratios are exactly 1 and whose divergences are exactly 0, are on a bound there and
    inside."""
    value = 0.0 if name in REJECTIONS else 1.0
    bounds = {"low": value - 0.5, "high": value + 0.5}
    assert factors(name, *(bounds | {bound: value}).values(), sample([0.0, 0.0])) == ([1.0, 1.0], [True, True])
    beyond = {"low": value + 1e-9, "high": value - 1e-9}[bound]
    assert factors(name, *(bounds | {bound: beyond}).values(), sample([0.0, 0.0])) == ([0.0, 0.0], [False, False])


@pytest.mark.parametrize(
    ("threshold", "kept"),
    [(0.25, [True] * 4), (0.125, [True, True, False, True])],  # the mean of the first sequence is 0.25, and inside
)
@pytest.mark.parametrize("name", ["opsm", "opsm_old"])
def test_opsm_rejects_negative_advantages_of_sequences_beyond_the_threshold_only(name, threshold, kept):
    anchor = CORRECTIONS[name].anchor
    other = {"rollout_logprobs": "old_logprobs", "old_logprobs": "rollout_logprobs"}[anchor]
    fields = TokenFields(
        targets=torch.zeros(4, dtype=torch.int64),
        mask=torch.ones(4, dtype=torch.bool),
        **{anchor: torch.full((4,), -1.0), other: torch.full((4,), -2.0)},
        advantages=torch.tensor([1.0, 0.0, -1.0, -1.0]),
        weights=torch.ones(4),
        sequences=Sequences(
            slots=torch.tensor([0, 0, 0, 1]),
            order=torch.arange(4),
            lengths=torch.tensor([3, 1, 0]),
            counts=torch.tensor([3.0, 1.0], dtype=torch.float64),
        ),
    )
    terms = dataclasses.replace(simulation.GRPO, opsm_anchor=anchor, opsm_threshold=threshold)
    logprobs = torch.tensor([-1.0, -1.25, -1.5, -1.0])  # of anchor - new: 0, 0.25, 0.5, and 0
    assert PolicyLoss(terms, fields)(logprobs).kept.tolist() == kept


def test_masked_tokens_are_in_no_product_and_samples_stay_apart():
    a, b = sample([LN2, 99.0, LN2], [1, 0, 1]), sample([-LN2])
    assert factors("seq_tis", 0.0, 100.0, a, b)[0] == pytest.approx([4, 1, 4, 0.5])
    assert factors("mis", 0.0, 1.0, a, b)[1] == [False, False, False, True]


def test_a_fully_masked_sample_and_an_empty_micro_batch_have_factors():
    assert factors("mis", 0.0, 3.0, sample([math.nan], [0])) == ([1.0], [False])
    assert factors("mis", 0.0, 3.0) == ([], [])


def test_an_extreme_mismatch_stays_finite():
    assert factors("seq_mask_tis", 0.0, 1e300, sample([800.0, 1.0]))[0] == pytest.approx([math.exp(20), math.e])
    assert factors("tis", 0.0, 2.0, sample([-800.0, 800.0], anchor=-900.0))[0] == pytest.approx([math.exp(-20), 2.0])


def test_what_data_decide_and_what_the_model_decides():
    by_data = {name for name, declared in CORRECTIONS.items() if declared.load() is not None}
    by_step = {name for name, declared in CORRECTIONS.items() if declared.selection}
    by_model = {name for name, declared in CORRECTIONS.items() if declared.anchor}
    assert sorted(CORRECTIONS) == sorted(["none", *by_data, *by_step, *by_model])
    weigh = {"tis", "seq_tis", "kl_cov"}
    assert {name for name, declared in CORRECTIONS.items() if declared.rejects == "data"} == (by_data | by_step) - weigh
    assert {name for name, declared in CORRECTIONS.items() if declared.rejects == "model"} == by_model


def test_an_anchor_that_is_the_rollout_engine_is_refused():
    with pytest.raises(ValueError, match="old_logprobs equal rollout_logprobs in all 16 trained tokens"):
        factors("tis", 0.0, 2.0, sample([0.0] * 7), sample([0.0] * 9))
    factors("tis", 0.0, 2.0, sample([0.0] * 7), sample([0.0] * 8 + [1e-9]))
    factors("tis", 0.0, 2.0, sample([0.0] * 15))  # may be an accident
    factors("tis", 0.0, 2.0, sample([0.0] * 99, anchor=0.0))  # certain tokens under both


BY_KL = dataclasses.replace(simulation.GRPO, further=kl_and_entropy(kl_coef=0.1, kl_estimator="k3"))
LACKING = {  # the field, and what needs it
    "--pg-correction tis": ("rollout_logprobs", {"correction": Correction(name="tis", low=0.0, high=2.0)}),
    "--pg-correction opsm": ("rollout_logprobs", {"correction": Correction(name="opsm", high=0.1)}),
    "--pg-kl-coef 0.1": ("ref_logprobs", {"terms": BY_KL}),
}


def factors_of(settings: dict, mask: list[int], **changes) -> None:
    """The factors of a batch of one sample."""
    sample = make_sample(prompt_length=1, mask=mask, rng=random.Random(0), sample_id="s")
    batch = pack([dataclasses.replace(sample, **changes)], qkv_format="thd")
    token_factors(batch, simulation.settings("sample_mean", per_token=False, **settings))


@pytest.mark.parametrize("reader", LACKING)
def test_a_field_that_the_batch_lacks_is_a_named_error_before_the_step(reader):
    field, settings = LACKING[reader]
    with pytest.raises(ValueError, match=f"sample s has no {field}, which {reader} needs"):
        factors_of(settings, [1, 1])


def refused_with(message: str | None):
    return contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message)


UNEVEN = "weighs the tokens of sample s unevenly"


@pytest.mark.parametrize(
    ("name", "difference", "refused"),
    [("gspo", 1.0, UNEVEN), ("gspo", 1e-4, UNEVEN), ("gspo", 2e-7, None), ("gspo_token", 1.0, None)],
)
def test_a_reducer_that_weighs_a_sequence_unevenly_is_refused_under_gspo(name, difference, refused):
    """By more than float32 rounds, in which a reducer may compute."""

    def uneven(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
        return lambda x: (x * torch.tensor([1.0, 1.0 + difference], dtype=torch.float64)).sum()

    terms = dataclasses.replace(simulation.GRPO, objective=build(name))
    with refused_with(refused):
        factors_of({"reducer": uneven, "terms": terms}, [1, 1])


@pytest.mark.parametrize(
    ("name", "advantages", "refused"),
    [
        ("gmpo", [0.5, 0.5, math.nan], None),  # the third token is not trained
        ("gmpo", [0.5, 0.500001, 0.5], "the advantages of sample s go from 0.5 to 0.500001 in one sample, and gmpo"),
        ("gspo", [0.5, -0.5, 0.5], None),
    ],
)
def test_advantages_that_differ_in_a_sample_are_refused_under_gmpo(name, advantages, refused):
    terms = dataclasses.replace(simulation.GRPO, objective=build(name))
    with refused_with(refused):
        factors_of({"terms": terms}, [1, 1, 0], advantages=torch.tensor(advantages, dtype=torch.float64))


# --- denominators ---

# rollouts a (2 samples), b, c, d of prompts A = {a, b}, B = {c}, C = {d}: trained and kept tokens of each sample
TRAINED, KEPT = [2, 4, 3, 0, 5], [2, 1, 0, 0, 5]
ROLLOUTS, PROMPTS = ["a", "a", "b", "c", "d"], ["A", "A", "A", "B", "C"]
INF = math.inf


@pytest.mark.parametrize(
    ("aggregation", "denominator", "expected", "auxiliary"),
    [
        ("sample_mean", "scheduled", [24, 24, 12, 4, 20], [24, 24, 12, 4, 20]),
        ("sample_mean", "live", [18, 18, 9, INF, 15], [18, 18, 9, INF, 15]),
        ("sample_mean", "kept", [6, 6, INF, INF, 10], [18, 18, 9, INF, 15]),
        ("prompt_mean", "scheduled", [27, 27, 27, 3, 15], [24, 24, 12, 4, 20]),
        ("prompt_mean", "live", [18, 18, 18, INF, 10], [18, 18, 9, INF, 15]),
        ("prompt_mean", "kept", [6, 6, 6, INF, 10], [18, 18, 9, INF, 15]),
        ("token_mean", "scheduled", [14] * 5, [24, 24, 12, 4, 20]),
        ("token_mean", "kept", [8] * 5, [18, 18, 9, INF, 15]),
        ("constant", "scheduled", [40] * 5, [24, 24, 12, 4, 20]),
        ("constant", "live", [30, 30, 30, INF, 30], [18, 18, 9, INF, 15]),
        ("constant", "kept", [20, 20, INF, INF, 20], [18, 18, 9, INF, 15]),
    ],
)
def test_hand_worked_denominators(aggregation, denominator, expected, auxiliary):
    plan = planned(TRAINED, KEPT, aggregation, denominator)
    assert plan.denominators.tolist() == expected
    assert plan.terms["kl"].denominators.tolist() == auxiliary
    assert (plan.num_tokens, plan.num_rollouts, plan.num_prompts) == (14, 4, 3)


def planned(trained, kept, aggregation, denominator):
    samples = [
        make_sample(prompt_length=1, mask=[1] * n or [0], rng=random.Random(0), rollout_id=r, prompt_id=p)
        for n, r, p in zip(trained, ROLLOUTS, PROMPTS, strict=True)
    ]
    rule = PlanRule(
        aggregation=aggregation,
        divisor=10.0 if aggregation == "constant" else None,
        denominator=denominator,
        terms=(OBJECTIVE, *kl_and_entropy(kl_coef=0.1, kl_estimator="k3", aggregation="sample_mean")),
    )
    masks = [torch.arange(s.response_length) < n for s, n in zip(samples, kept, strict=True)]
    table = local_table_of([pack(samples, qkv_format="thd")], rule, None, [torch.cat(masks)])
    return plan_from_table(table, rule, error=None, group=None)


def test_a_step_of_rejected_tokens_is_refused_under_kept():
    with pytest.raises(StepPlanError, match="--pg-correction rejects every trained token of the step"):
        planned(TRAINED, [0] * 5, "sample_mean", "kept")


@pytest.mark.parametrize("correction", ["icepop", "mis", "seq_mean_k3", "token_k1"])
def test_rejected_tokens_have_no_gradient_and_are_counted_in_the_metrics(correction):
    rng = random.Random(correction)
    optional = ("rollout_logprobs", "ref_logprobs")
    samples = [
        make_sample(prompt_length=2, mask=[1, 1, 0, 1], rng=rng, sample_id=str(i), optional=optional, poison=True)
        for i in range(6)
    ]
    logits = [torch.randn(len(s.tokens), 12, dtype=torch.float64) for s in samples]
    bounds = correction_of(correction, None if correction in REJECTIONS else 0.6, 1.2)
    loss = simulation.settings("sample_mean", per_token=False, correction=bounds)
    found = simulation.run_step(samples, logits, Layout(context=2, microbatches=2), loss, rng)
    wanted, kept = correction_factors(samples, bounds)
    masks = torch.cat([s.loss_mask for s in samples])
    per_sample = [float((k[m] == 0).double().mean()) for k, m in zip(kept.split(4), masks.split(4), strict=True)]
    assert found.metrics["rejected_fraction"] == pytest.approx(sum(per_sample) / 6)
    assert 0 < found.metrics["rejected_fraction"] < 1
    for gradient, keep in zip(found.gradients, kept.split(4), strict=True):
        rows = gradient[1:5]  # the rows that predict the four response tokens
        assert not rows[~keep].any()
    assert wanted[~kept & masks].eq(0).all()
