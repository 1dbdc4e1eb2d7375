"""Open steps: rollouts in any order, split and number of adds give the gradient and metrics of the closed step."""

import random
import re
from argparse import ArgumentParser
from contextlib import nullcontext
from dataclasses import replace

import open_oracle
import open_simulation
import pytest
import simulation
import step_cases
import term_cases
import threads
import torch
from compare import gradient_error
from open_simulation import Arrivals, arrivals_of
from samples import divisor_of, make_sample, plain_sample
from simulation import LAYOUTS, Layout
from step_cases import CONTRACTS, StepCase
from step_oracle import Settings, Term

from megatron_pg.args import ArgumentError, add_arguments, validate_args
from megatron_pg.batch import pack
from megatron_pg.declarations.loss_terms import LossTerm
from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.objectives.corrections.correction import Correction
from megatron_pg.plan.errors import ScheduleError, StepPlanError
from megatron_pg.plan.open_plan import OpenPlan
from megatron_pg.plan.planned_step import PlannedStep
from megatron_pg.plan.settings import LossSettings
from megatron_pg.rollouts.sample import Sample

SFT = LossTerm(name="sft", kind="ce", weight=0.3, aggregation="token_mean")
LIMIT = 1e-12
EVERY = [*LAYOUTS, Layout(data=3, microbatches=2), Layout(data=4, microbatches=3, qkv_format="bshd")]
FULL = {1: 160, 2: 110, 3: 80, 4: 70, 8: 50}  # cases of a layout, by the size of its world: about 1,000


def expected_of(case: StepCase, rng: random.Random) -> int:
    """A guess of N: right, too small or too large."""
    return rng.choice([open_oracle.number(case.documents, case.asked) or 1, 1, 64, rng.randint(1, 300)])


def errors_of(steps: list[Arrivals], layout: Layout) -> float:
    """Worst error of gradient, losses and metrics, against the oracle of the closed step and that of open steps."""
    worst = 0.0
    for number, (step, found) in enumerate(zip(steps, open_simulation.run_steps(steps, layout), strict=True)):
        errors = step.case.errors(found) | {"open": gradient_error(found.gradients, open_gradients(step))}
        assert all(error <= LIMIT for error in errors.values()), (layout, number, step.case.asked, errors)
        worst = max(worst, *errors.values())
    return worst


def open_gradients(step: Arrivals) -> list[torch.Tensor]:
    """[n, V] of every sample by `open_oracle`."""
    case = step.case
    adds = [[i for cell in cells for i in cell] for of_rank in step.adds for cells in of_rank]
    rest = [i for cells in step.rest for cell in cells for i in cell]
    documents = [[case.documents[i] for i in add] for add in adds], [case.documents[i] for i in rest]
    order = [i for add in adds for i in add] + rest
    found = dict(zip(order, open_oracle.gradients(*documents, case.asked, step.expected), strict=True))
    tables = []
    for i, (sample, table) in enumerate(zip(case.samples, case.logits, strict=True)):
        first = step_cases.first_row(sample)
        whole = torch.zeros_like(table, dtype=torch.float64)
        whole[first : first + len(found[i])] = torch.from_numpy(found[i])
        tables.append(whole)
    return tables


@pytest.mark.proof("Open steps over layouts, both loss scalings, float64: gradient and every metric within 1e-12")
@pytest.mark.parametrize("layout", EVERY, ids=lambda layout: layout.name)
def test_an_open_step_has_the_gradient_and_metrics_of_the_closed_one(layout, full, evidence):
    rng = random.Random(f"open {layout}")
    contracts = (
        CONTRACTS * (FULL[layout.world_size] // len(CONTRACTS)) if full else CONTRACTS[EVERY.index(layout) % 3 :: 3]
    )
    drawn = [step_cases.random_case(rng, aggregation, per_token=flag) for aggregation, flag in contracts]
    cases = [case.with_versions(number) for number, case in enumerate(drawn)]
    steps = [arrivals_of(case, layout, rng, expected_of(case, rng)) for case in cases]
    evidence(cases=len(steps), worst=errors_of(steps, layout), tolerance=LIMIT)


def random_open_case(rng: random.Random) -> StepCase:
    """Objectives with corrections, KL and entropy terms, live and kept denominators, as an open step takes them."""
    objective = rng.choice(list(OBJECTIVES))
    case = step_cases.random_objective_case(rng, objective)
    if rng.random() < 0.3:
        case = StepCase.of(case.samples, case.logits, with_opsm(case.asked, rng))
    try:
        OpenPlan(case.loss, 1)
    except ScheduleError:
        case = StepCase.of(case.samples, case.logits, replace(case.asked, aux_aggregation="policy"))
    if not case.loss.counts_after_forward or case.asked.aggregation == "token_mean":
        return case
    alone = [rejected_whole(sample, number) for number, sample in enumerate(case.samples)]
    return StepCase.of(alone, case.logits, case.asked)


def with_opsm(asked: Settings, rng: random.Random) -> Settings:
    """The settings with denominators that count what the model keeps."""
    aggregation = rng.choice(["sample_mean", "token_mean", "constant"])
    without_terms = {} if aggregation == "token_mean" else {"kl_coef": 0.0, "entropy_coef": 0.0}
    return replace(
        asked,
        **without_terms,
        aggregation=aggregation,
        divisor=divisor_of(aggregation),
        correction="opsm",
        correction_low=None,
        correction_high=rng.uniform(-0.5, 0.5),
        denominator="kept",
    )


def rejected_whole(sample: Sample, number: int) -> Sample:
    """A rollout of one sample, with advantages of one sign."""
    sign = 1 if number % 3 == 0 else -1
    return replace(sample, rollout_id=f"alone {number}", advantages=sign * sample.advantages.abs())


@pytest.mark.proof("Open steps: every objective, correction, term and denominator over layouts: within 1e-12")
@pytest.mark.parametrize("layout", EVERY, ids=lambda layout: layout.name)
def test_every_loss_of_an_open_step_equals_the_closed_one(layout, full, evidence):
    rng = random.Random(f"open objectives {layout}")
    cases = []
    while len(cases) < (FULL[layout.world_size] if full else 3):
        case = random_open_case(rng)
        if case.asked.denominator != "kept" or step_cases.keeps_some(case):
            cases.append(case)
    steps = [arrivals_of(case, layout, rng, expected_of(case, rng)) for case in cases]
    evidence(cases=len(steps), worst=errors_of(steps, layout), tolerance=LIMIT)


def test_denominators_that_the_model_decides_occur():
    rng, seen = random.Random(0), set()
    for _ in range(80):
        case = random_open_case(rng)
        if case.loss.counts_after_forward and step_cases.keeps_some(case):
            counts = open_oracle.number(case.documents, case.asked)
            scheduled = open_oracle.number(case.documents, replace(case.asked, denominator="scheduled"))
            seen.add((case.asked.aggregation, counts < scheduled))
    assert {(name, True) for name in ("sample_mean", "token_mean", "constant")} <= seen


def supervised(case: StepCase, rng: random.Random) -> StepCase:
    """The case with demonstrations of a term with its own denominators."""
    aggregation = rng.choice(["token_mean", "sample_mean", "constant"])
    asked = replace(case.asked, terms=[Term("sft", "ce", 0.3, aggregation, divisor_of(aggregation, 7.0))])
    samples = [
        replace(
            sample, term="sft", rollout_id=f"demonstration {number}", old_logprobs=None, advantages=None, reward=None
        )
        for number, sample in enumerate(case.samples)
    ]
    return term_cases.case_of([*case.samples, *samples], [*case.logits, *case.logits], asked)


@pytest.mark.proof("Open steps: supervised micro-batches of close, with their own denominators: within 1e-12")
@pytest.mark.parametrize("layout", EVERY[::2], ids=lambda layout: layout.name)
def test_micro_batches_given_to_close_have_denominators_of_their_own(layout, full, evidence):
    rng = random.Random(f"open rest {layout}")
    cases = []
    for _ in range(40 if full else 2):
        case = step_cases.random_objective_case(rng, "grpo")
        plain = replace(
            case.asked,
            correction="none",
            correction_low=None,
            correction_high=None,
            denominator="scheduled",
            aux_aggregation="policy",
            entropy_coef=0.2,
            per_token=case.asked.aggregation == "token_mean",
        )
        cases.append(supervised(StepCase.of(case.samples, case.logits, plain), rng))
    steps = [arrivals_of(case, layout, rng, expected_of(case, rng)) for case in cases]
    evidence(cases=len(steps), worst=errors_of(steps, layout), tolerance=LIMIT)


@pytest.mark.proof("Open steps: powers of two, float32: gradient and metrics of any guess and split bit for bit")
@pytest.mark.parametrize(("aggregation", "per_token"), [c for c in CONTRACTS if c[0] not in (step_cases.CUSTOM,)])
def test_a_dyadic_open_step_has_the_bits_of_the_closed_one(aggregation, per_token, full, evidence):
    """N = 4 rollouts, 2 prompts or 16 tokens; the closed step of one process is the reference."""
    rng = random.Random(f"{aggregation}{per_token}")
    for _ in range(20 if full else 3):
        samples = dyadic_samples(rng)
        logits = [torch.randn(len(sample.tokens), step_cases.VOCABULARY, generator=seeded(rng)) for sample in samples]
        case = step_cases.plain_case(
            samples, logits, aggregation, per_token=per_token, divisor=divisor_of(aggregation, 16.0)
        )
        closed = simulation.run_step(samples, logits, Layout(), case.loss, rng)
        layout = rng.choice([Layout(microbatches=2), Layout(data=2, microbatches=2), Layout(data=4)])
        step = arrivals_of(case, layout, rng, rng.choice([1, 2, 16, 1024]))
        (found,) = open_simulation.run_steps([step], layout)
        assert all(map(torch.equal, found.gradients, closed.gradients))
        evidence(cases=1)


def dyadic_samples(rng: random.Random) -> list[Sample]:
    return [
        make_sample(
            prompt_length=2,
            mask=[1] * 4,
            rng=rng,
            vocabulary=step_cases.VOCABULARY,
            rollout_id=f"rollout {number}",
            prompt_id=number // 2,
            sample_id=str(number),
        )
        for number in range(4)
    ]


def seeded(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(60))


# ---- Refusals ----

WITH_TERM = {
    "policy": None,
    "sample_mean": None,  # of sample_mean: the same number
    "constant": None,
    "token_mean": "--pg-term extra:entropy with aggregation token_mean, which counts something else",
    "prompt_mean": "--pg-term extra:entropy with aggregation prompt_mean, which counts something else",
}


@pytest.mark.parametrize("aggregation", WITH_TERM)
def test_a_term_with_a_second_number_is_refused_by_name(aggregation):
    divisor = 9.0 if aggregation == "constant" else None
    term = LossTerm(name="extra", kind="entropy", weight=0.1, aggregation=aggregation, divisor=divisor, on="rl")
    loss = simulation.settings("sample_mean", per_token=False, terms=replace(simulation.GRPO, further=(term,)))
    with expected_refusal(WITH_TERM[aggregation]):
        OpenPlan(loss, 4)


REFUSED = {
    "--pg-correction m2po, which selects tokens": {"correction": Correction(name="m2po", high=0.04)},
    "--mtp-num-layers, unless --pg-mtp-aggregation policy": {"mtp_depths": 1},
    "--pg-denominator kept with prompt_mean": {
        "aggregation": "prompt_mean", "denominator": "kept", "correction": Correction(name="opsm", high=0.1),
    },
    "a loss without the objective": {"terms": replace(simulation.GRPO, has_objective=False, further=(SFT,))},
    "--loss-aggregation turn_mean, whose turns": {"aggregation": "turn_mean"},
    "--pg-weight-denominator weights, whose sums": {"sums_weights": True},
    "--pg-denominator varied, which leaves groups out": {"denominator": "varied"},
    "expected=0 is not a whole number of rollouts": {"expected": 0},
    "expected=2.5 is not a whole number of tokens": {"expected": 2.5, "aggregation": "token_mean"},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_needs_the_whole_step_is_refused_by_name(message):
    given = {"aggregation": "sample_mean", "expected": 4, "per_token": False} | REFUSED[message]
    expected = given.pop("expected")
    with expected_refusal(message):
        OpenPlan(
            replace(simulation.settings(given.pop("aggregation"), per_token=given.pop("per_token")), **given), expected
        )


def test_multi_token_prediction_with_the_number_of_the_objective_is_taken():
    OpenPlan(replace(simulation.settings("sample_mean", per_token=False), mtp_depths=2, mtp_aggregation="policy"), 4)


def expected_refusal(message: str | None):
    return nullcontext() if message is None else pytest.raises(ScheduleError, match=re.escape(message))


def added(*parts: list[Sample], loss: LossSettings | None = None) -> OpenPlan:
    plan = OpenPlan(loss or simulation.settings("sample_mean", per_token=False), 4)
    for samples in parts:
        plan.add([pack(samples, qkv_format="thd")], lambda batches: None)
    return plan


def test_a_rollout_in_two_adds_is_refused():
    first, second = plain_sample(2, rollout_id="r", sample_id="a"), plain_sample(3, rollout_id="r", sample_id="b")
    with pytest.raises(StepPlanError, match="rollout_id 'r' has samples in two adds of an open step"):
        added([first], [second])
    plan = added([first])
    with pytest.raises(StepPlanError, match="rollout_id 'r' has samples in two adds"):
        plan.close(lambda: [pack([second], qkv_format="thd")], lambda batches: None, None)


def test_a_group_in_two_adds_is_refused_where_it_is_counted():
    first, second = (plain_sample(2, rollout_id=f"r{n}", prompt_id="p") for n in range(2))
    added([first], [second])
    with pytest.raises(StepPlanError, match="prompt_id 'p' has samples in two adds of an open step"):
        added([first], [second], loss=simulation.settings("prompt_mean", per_token=False))


def test_a_rollout_on_two_ranks_is_refused_on_every_rank():
    errors = []

    def work(rank: int) -> None:
        plan = added([plain_sample(2 + rank, rollout_id="r", sample_id=str(rank))])
        try:
            plan.close(list, lambda batches: None, torch.distributed.group.WORLD)
        except StepPlanError as error:
            errors.append(str(error))

    threads.run(2, work)
    assert (
        errors == ["rollout_id 'r' has samples on data-parallel ranks 0 and 1. Give all its samples to one rank."] * 2
    )


def test_ranks_with_different_guesses_are_refused():
    def work(rank: int) -> None:
        plan = OpenPlan(simulation.settings("sample_mean", per_token=False), 4 + rank)
        plan.close(list, lambda batches: None, torch.distributed.group.WORLD)

    with pytest.raises(StepPlanError, match="disagree on expected: rank 0 has 4, rank 1 has 5"):
        threads.run(2, work)


def test_samples_without_a_rollout_and_tokens_of_other_terms_are_refused():
    with pytest.raises(StepPlanError, match="sample 7 has no rollout_id"):
        added([plain_sample(2, sample_id="7")])
    terms = replace(simulation.GRPO, further=(SFT,))
    loss = simulation.settings("sample_mean", per_token=False, terms=terms, terms_of_samples=frozenset({"rl", "sft"}))
    with pytest.raises(StepPlanError, match="sample 7 has tokens of the loss term sft"):
        added([plain_sample(2, sample_id="7", rollout_id="r", term="sft")], loss=loss)


OPSM = {"denominator": "kept", "correction": Correction(name="opsm", high=0.1)}


def test_denominators_of_the_model_need_rollouts_that_are_rejected_whole():
    terms = replace(simulation.GRPO, opsm_anchor="rollout_logprobs", opsm_threshold=0.1)
    loss = replace(simulation.settings("sample_mean", per_token=False, terms=terms), **OPSM)
    one = {"rollout_id": "r", "rollout_logprobs": [-1.0, -2.0]}
    mixed = plain_sample(2, **one | {"advantage": [1.0, -1.0]})
    several = [plain_sample(2, **one, sample_id=name, prompt_id=0) for name in "ab"]
    for samples in ([mixed], several):
        with pytest.raises(StepPlanError, match="a part of rollout 'r' may be rejected"):
            added(samples, loss=loss)
    with pytest.raises(StepPlanError, match=r"close\(\) has rollouts in its micro-batches"):
        added(loss=loss).close(lambda: [pack([mixed], qkv_format="thd")], lambda batches: None, None)


def test_a_closed_step_cannot_count_what_the_forward_keeps():
    terms = replace(simulation.GRPO, opsm_anchor="rollout_logprobs", opsm_threshold=0.1)
    loss = replace(simulation.settings("token_mean", per_token=True, terms=terms), **OPSM)
    batch = pack([plain_sample(2, rollout_logprobs=[-1.0, -2.0])], qkv_format="thd")
    with pytest.raises(StepPlanError, match="counts what the forward keeps, so it needs an open step"):
        PlannedStep.of(lambda: [batch], loss, group=None)


def test_denominators_of_the_model_are_a_valid_argument_of_loops_with_open_steps_alone():
    words = ["--pg-correction", "opsm,high=0.1", "--pg-denominator", "kept"]
    args = add_arguments(ArgumentParser()).parse_args(words)
    with pytest.raises(ArgumentError, match=r"E43.*known only after the forward\. Use live, or open steps"):
        validate_args(args)
    args.open_steps = True
    assert LossSettings.from_args(validate_args(args)).counts_after_forward


def test_adds_with_and_without_prompts_are_refused():
    plan = added([plain_sample(2, rollout_id=1, prompt_id=1)], [plain_sample(2, rollout_id=2)])
    with pytest.raises(StepPlanError, match="a prompt_id is in some adds of an open step and not in others"):
        plan.close(list, lambda batches: None, None)
