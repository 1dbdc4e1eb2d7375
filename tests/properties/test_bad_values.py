"""Bad values where nothing is trained change no bit; bad values where something is trained are never silent."""

import dataclasses
import math
import random
from collections.abc import Sequence

import metric_oracle
import numpy as np
import pytest
import simulation
import step_cases
import torch
from compare import gradient_error, same_bits, scalar_error
from samples import make_sample
from simulation import EPS_HIGH, EPS_LOW, Layout, Outcome, Step
from step_cases import BAD, CONTRACTS, VOCABULARY, StepCase, plain_case, random_case
from token_oracle import MAX_LOG_RATIO, Tokens, log_softmax
from torch import Tensor

from megatron_pg import StepPlanError
from megatron_pg.rollouts.sample import Sample

POISON = [*BAD, -1e30]
LAYOUTS = [
    Layout(data=2, microbatches=2),
    Layout(context=2, tensor=2, microbatches=2),
    Layout(data=2, microbatches=2, qkv_format="bshd", padding=2),
]


def with_masked_values(case: StepCase, value) -> StepCase:
    """The case with `value()` in every slot that nothing trained reads."""
    samples = [_refill(sample, value) for sample in case.samples]
    tables = [table.clone() for table in case.logits]
    for sample, table in zip(samples, tables, strict=True):
        for position in step_cases.silent_positions(sample):
            table[position] = torch.tensor([value() for _ in range(VOCABULARY)])
    return dataclasses.replace(case, samples=samples, logits=tables)


def _refill(sample: Sample, value) -> Sample:
    names = ("old_logprobs", "advantages", "ref_logprobs", "rollout_logprobs")
    fields = {name: getattr(sample, name) for name in names if getattr(sample, name) is not None}
    other = torch.tensor([value() for _ in range(sample.response_length)], dtype=torch.float64)
    return dataclasses.replace(
        sample, **{name: torch.where(sample.loss_mask, values, other) for name, values in fields.items()}
    )


def is_same(found: Outcome, expected: Outcome) -> bool:
    return (
        same_bits(found.gradients, expected.gradients)
        and math.isfinite(expected.reported)
        and found.reported == expected.reported
        and found.metrics == expected.metrics
        and found.num_nonfinite == 0
    )


@pytest.mark.proof("poison in masked slots changes no bit")
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_stands_in_masked_slots_and_padding_changes_no_bit_of_the_step(layout, dtype, full, evidence):
    rng = random.Random(f"{layout}{dtype}")
    count, clean, poisoned = 170 if full else 6, [], []
    for number in range(count):
        aggregation, per_token = CONTRACTS[number % len(CONTRACTS)]
        case = with_masked_values(random_case(rng, aggregation, per_token=per_token, dtype=dtype), lambda: 0.0)
        bad = with_masked_values(case, lambda: rng.choice(POISON))
        cells = simulation.scatter_samples(case.samples, layout, rng)
        clean.append(Step(case.samples, case.logits, case.loss, cells, filling=0.0))
        poisoned.append(Step(bad.samples, bad.logits, bad.loss, cells, filling=rng.choice(POISON)))
    pairs = zip(simulation.run_steps(poisoned, layout), simulation.run_steps(clean, layout), strict=True)
    assert all(is_same(found, expected) for found, expected in pairs)
    evidence(cases=count)


# --- bad or extreme values at trained tokens ---

LOG_RATIOS = [0.1, 19.9, -19.9, 20.1, -20.1, 88.0, -88.0, 200.0, -200.0, 1e4, -1e4]
ADVANTAGES = [0.0, 1.0, -1.0, 1e4, -1e4]
FATAL_ADVANTAGES = [math.inf, -math.inf, math.nan]
FATAL_ROWS = ["nan", "inf", "-inf", "-inf target"]
ROWS = ["plain", "plain", "-inf prefix", "-inf shard", "1e4"]


def extreme_row(kind: str, target: int, rng: random.Random) -> list[float]:
    """A row of logits of one kind."""
    row = [rng.gauss(0, 1.5) * (1e4 if kind == "1e4" else 1.0) for _ in range(VOCABULARY)]
    if kind in ("nan", "inf"):
        row[rng.randrange(VOCABULARY)] = float(kind)
    silent = {
        "-inf": range(VOCABULARY),
        "-inf target": [target],
        "-inf prefix": range(rng.randint(1, VOCABULARY - 1)),
        "-inf shard": range(3 * (s := rng.randrange(4)), 3 * s + 3),  # one shard of four
    }
    for v in silent.get(kind, []):
        if kind.startswith("-inf ") and kind != "-inf target" and v == target:
            continue
        row[v] = -math.inf
    return row


def extreme_case(rng: random.Random, dtype: torch.dtype, *, fatal: bool) -> StepCase:
    """A step of one to four samples of extreme tokens; with `fatal` one trained token has no finite loss."""
    samples = [
        make_sample(
            prompt_length=1, mask=[1] * rng.choice([1, 1, 3]), rng=rng, vocabulary=VOCABULARY, rollout_id=i, prompt_id=0
        )
        for i in range(rng.randint(1, 4))
    ]
    tables = []
    for sample in samples:
        rows = [extreme_row(rng.choice(ROWS), int(target), rng) for target in sample.tokens[1:]]
        tables.append(torch.tensor([*rows, [math.nan] * VOCABULARY], dtype=dtype))
        set_tokens(sample, tables[-1], rng)
    if fatal:
        spoil(samples[-1], tables[-1], rng)
    return plain_case(samples, tables, "token_mean", per_token=True)


def set_tokens(sample: Sample, table: Tensor, rng: random.Random) -> None:
    """Written in place, past the checks of `Sample`: the checks after them must hold too."""
    for k, target in enumerate(sample.tokens[1:].tolist()):
        logprob = float(log_softmax(table[k].double().numpy(), 1.0)[target])
        sample.old_logprobs[k] = logprob - rng.choice(LOG_RATIOS)
        sample.advantages[k] = rng.choice(ADVANTAGES)


def spoil(sample: Sample, table: Tensor, rng: random.Random) -> None:
    k = rng.randrange(sample.response_length)
    kind = rng.choice([*FATAL_ROWS, "advantage", "old_logprob"])
    if kind == "advantage":
        sample.advantages[k] = rng.choice(FATAL_ADVANTAGES)
    elif kind == "old_logprob":
        sample.old_logprobs[k] = rng.choice([math.nan, math.inf, -math.inf])
    else:
        table[k] = torch.tensor(extreme_row(kind, int(sample.tokens[k + 1]), rng))


def tokens_of(case: StepCase) -> list[Tokens]:
    return metric_oracle.policy_tokens(case.documents, 1.0)


def rounding_of(case: StepCase) -> float:
    """How far log-ratios may be off: the largest numbers that are subtracted, in units of the last place."""
    finite = [float(table[table.isfinite()].abs().max()) for table in case.logits]
    largest = max(*finite, 0.0, *(float(np.abs(own.old).max()) for own in tokens_of(case)))
    return 16 * torch.finfo(case.dtype).eps * (1 + largest)


def is_decidable(case: StepCase) -> bool:
    """Whether every token is farther from a clip or clamp bound than rounding reaches."""
    margin = 4 * rounding_of(case)
    bounds = [math.log(1 - EPS_LOW), math.log(1 + EPS_HIGH), -MAX_LOG_RATIO, MAX_LOG_RATIO]
    return all((np.abs(own.log_ratio - bound) > margin).all() for own in tokens_of(case) for bound in bounds)


def extreme_cases(count: int, dtype: torch.dtype, seed: str, *, fatal: bool) -> tuple[list[StepCase], random.Random]:
    rng, found = random.Random(seed), []
    while len(found) < count:
        case = extreme_case(rng, dtype, fatal=fatal)
        if fatal or is_decidable(case):
            found.append(case)
    return found, rng


def check_extreme(case: StepCase, found: Outcome) -> None:
    bound = rounding_of(case)
    assert found.num_nonfinite == 0
    assert scalar_error(found.reported, case.wanted.loss, case.wanted.magnitude) <= bound
    assert gradient_error(found.gradients, case.gradients) <= bound
    clamped = not all(own.moves.all() for own in tokens_of(case))  # a gradient of 0 that is reported
    assert (found.metrics["clamped_log_ratio_fraction"] > 0) == clamped


EXTREME_LAYOUTS: Sequence[Layout] = [Layout(), Layout(tensor=2), Layout(tensor=4), Layout(context=2)]


@pytest.mark.proof("extreme values: finite and right, or reported")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layout", EXTREME_LAYOUTS, ids=str)
def test_extreme_values_give_the_oracles_finite_loss_and_gradient(layout, dtype, full, evidence):
    found, rng = extreme_cases(40 if full else 4, dtype, f"{layout}{dtype}", fatal=False)
    for case, outcome in zip(found, simulation.run_steps([c.step(layout, rng) for c in found], layout), strict=True):
        check_extreme(case, outcome)
    evidence(cases=len(found))


@pytest.mark.proof("extreme values: finite and right, or reported")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layout", EXTREME_LAYOUTS, ids=str)
def test_a_trained_token_without_a_finite_loss_is_always_reported(layout, dtype, full, evidence):
    found, rng = extreme_cases(40 if full else 4, dtype, f"{layout}{dtype}", fatal=True)
    outcomes = simulation.run_steps([case.step(layout, rng) for case in found], layout)
    assert [outcome.num_nonfinite for outcome in outcomes] == [1] * len(found)
    evidence(cases=len(found))


@pytest.mark.proof("extreme values: finite and right, or reported")
@pytest.mark.parametrize("field", ["old_logprobs", "advantages"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_same_values_are_refused_at_the_door(field, value, evidence):
    sample = make_sample(prompt_length=1, mask=[1, 1], rng=random.Random(0))
    with pytest.raises(ValueError, match=rf"{field} of sample .* at response token 1, which is trained"):
        dataclasses.replace(sample, **{field: torch.tensor([-1.0, value], dtype=torch.float64)})
    evidence(cases=1)


@pytest.mark.parametrize("aggregation", step_cases.AGGREGATIONS)
def test_a_step_without_a_trained_token_or_without_a_sample_is_refused_by_name(aggregation):
    masked = make_sample(prompt_length=1, mask=[0, 0], rng=random.Random(0), rollout_id=0, prompt_id=0)
    for samples, cells in (([masked], [[[0]]]), ([], [[[]]])):
        tables = [torch.zeros(3, VOCABULARY, dtype=torch.float64) for _ in samples]
        settings = random_case(random.Random(0), aggregation, per_token=False).loss
        with pytest.raises(StepPlanError, match="the step has no trained token"):
            simulation.run_steps([Step(samples, tables, settings, cells)], Layout())
