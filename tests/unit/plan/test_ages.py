"""Ages of the weights that sampled the tokens. Values over layouts: test_partition_invariance and test_open_steps."""

import dataclasses
import math
import random
import re
from types import SimpleNamespace

import metric_oracle
import pytest
import simulation
import step_cases
import threads
import torch
import torch.distributed as dist
from compare import metrics_error
from samples import plain_sample
from simulation import LAYOUTS

from megatron_pg import Sample, StepPlanError, pack
from megatron_pg.metrics import METRICS
from megatron_pg.metrics.ages import BINS
from megatron_pg.plan.open_plan import OpenPlan
from megatron_pg.plan.planned_step import PlannedStep
from megatron_pg.plan.settings import LossSettings, metrics_of
from megatron_pg.step import forward_step
from megatron_pg.step.loss import microbatch_logprobs_loss

SETTINGS = simulation.settings("sample_mean", per_token=False)
BIG = 2**61  # a float64 has no number between this and the next 512


def planned(samples: list[Sample], version: object, settings: LossSettings = SETTINGS, group=None) -> PlannedStep:
    rule = dataclasses.replace(settings.plan_rule, weight_version=version, numbers_may_repeat=False)
    return PlannedStep.of(lambda: [pack(samples, qkv_format="thd")], settings, group=group, rule=rule)


def staleness(step: PlannedStep, log_ratio: float = 0.0) -> dict[str, float]:
    """The metrics of a step on one rank, with the same log-ratio at every token."""
    (local,) = step.slices(lambda _: None)
    old = torch.where(local.fields.mask, local.fields.old_logprobs, 0.0)
    _, found = microbatch_logprobs_loss(old + log_ratio, torch.zeros_like(old), local.fields, step.settings)
    values = step.settings.metrics.finish(found.partial.tolist(), step.plan)
    return {name.removeprefix("staleness/"): v for name, v in values.items() if name.startswith("staleness/")}


@pytest.mark.parametrize("newest", [40, BIG])
def test_a_step_worked_by_hand(newest):
    """Ages 0, 3, 4 and 9 of trained tokens, among which one sample has no version and one token is masked."""
    by_token = plain_sample(4, loss_mask=[1, 1, 0, 1], weight_version=[newest, newest - 3, newest - 2, newest - 9])
    found = staleness(planned([by_token, plain_sample(3), plain_sample(1, weight_version=newest - 4)], newest), 0.5)
    ages = {"age_0": 1 / 4, "age_3_to_4": 2 / 4, "age_9_or_more": 1 / 4}
    ratios = {f"ratio_new_old_{age}": pytest.approx(math.exp(0.5)) for age in ages}
    sizes = {f"abs_log_ratio_{age}": pytest.approx(0.5) for age in ages}
    assert found == {"mean_age": 4.0, "max_age": 9.0} | ages | ratios | sizes


@pytest.mark.parametrize("age", [0, 1, 2, 3, 4, 5, 8, 9, 10, 1000])
def test_every_age_is_in_one_bin(age):
    (name,) = [name for name, first, last in metric_oracle.AGES if first <= age <= last]
    found = staleness(planned([plain_sample(2, weight_version=5)], 5 + age))
    assert {key for key in found if key.startswith("age_")} == {name}
    assert found["mean_age"] == found["max_age"] == age


def test_the_tokens_are_those_of_the_objective_after_masking():
    """Not a token outside its sampling mask, and none of another loss term."""
    terms = frozenset({"rl", "sft"})
    settings = dataclasses.replace(SETTINGS, sampling_mask_missing="mask", terms_of_samples=terms)
    sets = [[5], [1], []]  # the second token is not in its set
    one = plain_sample(3, tokens=[1, 5, 6, 7], sampling_mask=sets, old_logprobs=[0, 0, -1], weight_version=[7, 6, 5])
    shown = plain_sample(2, term="sft", old_logprobs=None, advantage=None, weight_version=1)
    found = staleness(planned([one, shown], 7, settings))
    assert [found[name] for name in ("mean_age", "max_age", "age_0", "age_2")] == [1.0, 2.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("samples", "version"),
    [
        ([plain_sample(2)], 3),
        ([plain_sample(2, weight_version=1)], None),
        ([plain_sample(2), plain_sample(2, loss_mask=[0, 0], weight_version=1)], 3),
    ],
    ids=["no sample has a version", "the trainer's is not known", "a masked sample alone has one"],
)
def test_without_an_age_of_a_trained_token_there_are_no_metrics(samples, version):
    assert staleness(planned(samples, version)) == {}


def test_nothing_is_computed_where_no_metric_reads_it():
    none = dataclasses.replace(SETTINGS, metrics=metrics_of("none", SETTINGS.terms, SETTINGS.correction))
    samples = [plain_sample(2, weight_version=1)]
    assert "ages" in planned(samples, 3).fields[0]
    for step in (planned(samples, 3, none), planned(samples, None), planned([plain_sample(2)], 3)):
        assert "ages" not in step.fields[0]
    with pytest.raises(StepPlanError, match="newer than the trainer's"):  # a mistake is one without metrics too
        planned(samples, 0, none)


NEWER = (
    "weight_version of sample b is 5, newer than the trainer's weights, which have seen 4 optimizer steps. Record the "
    "steps of this run, or leave it out."
)


@pytest.mark.parametrize(
    ("versions", "of_trainer", "message"),
    [
        ([[4, 4], [4, 5]], [4, 4], f"data-parallel rank 1: {NEWER}"),
        ([[4, 4], 5], [4, 4], f"data-parallel rank 1: {NEWER}"),
        ([3, 3], [4, 5], "disagree on weight_version: rank 0 has 4, rank 1 has 5. Give all the same."),
        ([None, None], [4, None], "disagree on weight_version: rank 0 has 4, rank 1 has None."),
        ([3, 3], [-1, -1], "weight_version=-1 is not a number of optimizer steps. Give the trainer's."),
        ([None, None], [True, True], "weight_version=True is not a number of optimizer steps"),
        ([3, 3], [4, 1.5], "data-parallel rank 1: weight_version=1.5 is not a number of optimizer steps"),
    ],
)
def test_a_mistake_is_the_same_error_on_every_rank(versions, of_trainer, message):
    errors = []

    def work(rank: int) -> None:
        sample = plain_sample(2, sample_id="ab"[rank], weight_version=versions[rank])
        with pytest.raises(StepPlanError, match=re.escape(message)) as error:
            planned([sample], of_trainer[rank], group=dist.group.WORLD)
        errors.append(str(error.value))

    threads.run(2, work)
    assert errors[0] == errors[1]


def test_an_add_of_an_open_step_is_refused_too():
    plan, sample = OpenPlan(SETTINGS, 2, 4), plain_sample(2, sample_id="b", rollout_id="r", weight_version=5)
    with pytest.raises(StepPlanError, match=re.escape(NEWER)):
        plan.add([pack([sample], qkv_format="thd")], lambda batches: None)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_loop_gives_the_version_with_each_step(monkeypatch, is_open):
    step = forward_step.PolicyGradientStep(SETTINGS)
    model = SimpleNamespace(config=None, parameters=lambda: iter([torch.zeros(())]))
    seen, given = [], {"data_iterator": None, "num_microbatches": 1, "seq_length": 1, "micro_batch_size": 1}
    monkeypatch.setattr(step, "_run", lambda function, call: seen.append(call))
    for name in ("check_model", "check_open"):
        monkeypatch.setattr(forward_step.checks, name, lambda *rest, **named: None)
    monkeypatch.setattr(step._loss, "check_layer", lambda device: None)
    monkeypatch.setattr(forward_step.PolicyGradientStep, "_counting_group", None)
    monkeypatch.setattr(forward_step, "get_forward_backward_func", lambda: None)
    monkeypatch.setattr(forward_step, "OpenStep", lambda parts, call, expected: seen.append(call))
    if is_open:
        step.open_step(model, expected=1, weight_version=7, seq_length=1, micro_batch_size=1)
    else:
        step.forward_backward(print, weight_version=7, model=model, **given)
    assert seen[0].weight_version == 7
    assert "weight_version" not in seen[0].over([])  # Megatron's function would not take it


def test_the_table_has_a_row_for_every_bin():
    names = [metric.name for metric in METRICS if metric.is_reported]
    for age in BINS:
        assert {f"staleness/{kind}age_{age}" for kind in ("", "ratio_new_old_", "abs_log_ratio_")} <= {*names}


@pytest.mark.proof("Staleness over layouts, float64: ages and histogram equal counts, ratios within 1e-12")
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=lambda layout: layout.name)
def test_staleness_equals_loops_over_tokens_under_every_objective(layout, full, evidence):
    rng, worst = random.Random(f"ages {layout}"), 0.0
    names = list(step_cases.OBJECTIVES) * (8 if full else 1)
    cases = [step_cases.random_objective_case(rng, name).with_versions(n) for n, name in enumerate(names)]
    outcomes = simulation.run_steps([case.step(layout, rng) for case in cases], layout)
    for case, outcome in zip(cases, outcomes, strict=True):
        found, wanted = outcome.metrics, metric_oracle.staleness_metrics(case.documents, case.asked)
        found = {name: value for name, value in found.items() if name.startswith("staleness/")}
        worst = max(worst, metrics_error(found, wanted) if wanted or found else 0.0)
    assert worst <= 1e-12
    evidence(cases=len(cases), worst=worst, tolerance=1e-12)


def test_the_ages_of_masked_tokens_may_be_anything():
    """Nothing of a token that is not trained reaches a sum."""
    values = [
        staleness(planned([plain_sample(2, loss_mask=[1, 0], weight_version=[3, masked])], 3)) for masked in (0, 3)
    ]
    assert values[0] == values[1]
