"""Steps with loss terms: every further loss has its own tokens and denominators, in every layout.

Loss, the gradient of every logit and what every loss term reports equal an independent oracle in float64; and a loss
term is nothing to the others: neither their denominators nor their weights know whether it is there.
"""

import dataclasses
import functools
import random
from collections import Counter

import pytest
import simulation
import term_cases
import torch
from compare import metrics_error, same_bits
from head_simulation import through_the_fused_head  # noqa: F401, a fixture
from simulation import LAYOUTS, Layout
from step_cases import CUSTOM, StepCase, worst_of
from step_oracle import Settings, Term
from term_cases import live_rows

from megatron_pg.batch import pack
from megatron_pg.plan.plan import StepPlan, plan_step
from megatron_pg.plan.planned_step import PlannedStep
from megatron_pg.plan.settings import LossSettings
from megatron_pg.rollouts.sample import Sample

FULL = {1: 1200, 2: 700, 4: 500, 8: 300}  # cases of a layout, by the size of its world: 6,000
LIMIT = 1e-12
pytestmark = pytest.mark.usefixtures("rank_zero")


@functools.cache
def drawn(layout: Layout, block: int) -> list[StepCase]:
    """20 cases for a layout."""
    rng = random.Random(f"loss terms {layout} {block}")
    return [term_cases.random_case(rng) for _ in range(20)]


@pytest.mark.proof(
    "Loss terms over layouts, float64: loss, gradient and every loss term's sums within 1e-12 of the oracle"
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_loss_gradients_and_sums_of_every_term_equal_the_oracle(layout, full, evidence):
    for block in range(FULL[layout.world_size] // 20 if full else 1):
        found = drawn(layout, block)[: 20 if full else 8]
        evidence(cases=len(found), worst=worst_of(found, layout, random.Random(block), LIMIT), tolerance=LIMIT)


@pytest.mark.proof("Fused head: loss terms over layouts, float64: within 1e-12 of the oracle")
@pytest.mark.parametrize("layout", LAYOUTS[2::2], ids=str)
@pytest.mark.usefixtures("through_the_fused_head")
def test_the_fused_head_equals_the_oracle(layout, full, evidence):
    for block in range(5 if full else 1):
        found = drawn(layout, block)[: 20 if full else 3]
        evidence(cases=len(found), worst=worst_of(found, layout, random.Random(block), LIMIT), tolerance=LIMIT)


@pytest.mark.proof(
    "A teacher's whole vocabulary over layouts, float64: loss, gradient and sums within 1e-12 of the oracle"
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.usefixtures("through_the_fused_head")
def test_a_teachers_whole_vocabulary_equals_the_oracle(layout, full, evidence):
    """1,000 of them in the full tier."""
    for block in range(25 if full else 1):
        rng = random.Random(f"whole {layout} {block}")
        found = [term_cases.random_case(rng, terms=term_cases.full_terms(rng)) for _ in range(5 if full else 2)]
        evidence(cases=len(found), worst=worst_of(found, layout, rng, LIMIT), tolerance=LIMIT)


def with_softcap(rng: random.Random, case: StepCase) -> StepCase:
    """The case with a softcap that some logits are beyond; its teacher has one, or 0."""
    of_teacher = rng.choice([0.0, 1.5, 4.0]) if any(term.kind in term_cases.FULL for term in case.asked.terms) else None
    asked = dataclasses.replace(case.asked, softcap=rng.choice([1.0, 2.0, 30.0]), teacher_softcap=of_teacher)
    loss = term_cases.loss_of(asked, case.keeps_entropy)
    return dataclasses.replace(case, asked=asked, loss=loss)


# stored logits and the fused head, sampling masks and teachers
SOFTCAP = "Logit softcap over layouts, float64: loss, gradient and sums of any terms within 1e-12 of the oracle"


@pytest.mark.proof(SOFTCAP)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_softcap_equals_the_oracle(layout, full, evidence):
    """1,000 steps in the full tier."""
    for block in range(7 if full else 1):
        rng = random.Random(f"softcap {layout} {block}")
        found = [with_softcap(rng, case) for case in drawn(layout, block)[: 18 if full else 3]]
        evidence(cases=len(found), worst=worst_of(found, layout, rng, LIMIT), tolerance=LIMIT)


@pytest.mark.proof(SOFTCAP)
@pytest.mark.parametrize("layout", LAYOUTS[::3], ids=str)
def test_a_softcap_with_a_sampling_mask_equals_the_oracle(layout, full, evidence):
    for block in range(5 if full else 1):
        rng = random.Random(f"masked softcap {layout} {block}")
        found = [with_softcap(rng, term_cases.random_masked_case(rng)) for _ in range(10 if full else 2)]
        evidence(cases=len(found), worst=worst_of(found, layout, rng, LIMIT), tolerance=LIMIT)


@pytest.mark.proof(SOFTCAP)
@pytest.mark.parametrize("layout", LAYOUTS[2::2], ids=str)
@pytest.mark.usefixtures("through_the_fused_head")
def test_the_fused_head_with_a_softcap_equals_the_oracle(layout, full, evidence):
    for block in range(10 if full else 1):
        rng = random.Random(f"fused softcap {layout} {block}")
        found = [with_softcap(rng, case) for case in drawn(layout, block)[:3]]
        full_terms = [term_cases.random_case(rng, terms=term_cases.full_terms(rng)) for _ in range(2)]
        found += [with_softcap(rng, case) for case in full_terms]
        evidence(cases=len(found), worst=worst_of(found, layout, rng, LIMIT), tolerance=LIMIT)


def what_occurs(case: StepCase) -> set[str]:
    asked, wanted = case.asked, case.wanted.terms
    masks = [
        {name: mask for name in term_cases.names_of_tokens(asked) if (mask := s.mask_of(name)) is not None}
        for s in case.samples
    ]
    rollouts = Counter(rollout for rollout, _ in {(s.rollout_id, s.term) for s in case.samples})
    of_policy = wanted.get("rl")
    is_kept = asked.denominator == "kept"
    found = {
        "no objective": not asked.has_policy,
        "no token of the objective": of_policy is not None and not of_policy.num_tokens,
        "no token of a loss term": any(not own.num_tokens for own in wanted.values()),
        "a token of two loss terms": any(sum(m.int() for m in own.values()).max() > 1 for own in masks if own),
        "a loss term trains what the mask of the sample masks": any(
            (mask & ~s.loss_mask).any() for s, own in zip(case.samples, masks, strict=True) for mask in own.values()
        ),
        "a member without a token": any(
            not mask.any() for own in masks for name, mask in own.items() if name != "rl" and len(own) == 1
        ),
        "a rollout in two loss terms": any(n > 1 and rollout is not None for rollout, n in rollouts.items()),
        "a sample without advantages": any(s.advantages is None for s in case.samples),
        "a loss term of weight 0": any(term.weight == 0 for term in asked.terms),
        "live": asked.denominator == "live" and any(t.tokens == "rl" for t in asked.terms),
        "kept, with rejections": is_kept and any(t.tokens == "rl" for t in asked.terms),
        "kept, with other tokens": is_kept and any(t.tokens != "rl" for t in asked.terms),
        "the weights of the objective": any(t.aggregation == "policy" for t in asked.terms),
        "a custom reducer": asked.aggregation == CUSTOM and asked.has_policy,
        "its weights": asked.aggregation == CUSTOM and any(t.aggregation == "policy" for t in asked.terms),
        "one loss per sequence": asked.objective == "gspo" and asked.has_policy,
        "KL and entropy terms": {"kl", "entropy"} <= wanted.keys(),
        "per token": asked.per_token,
        "not per token": not asked.per_token,
    }  # fmt: skip
    return {name for name, occurs in found.items() if occurs}


def test_the_cases_hold_what_breaks_such_code():
    seen = Counter(name for case in many(1) for name in what_occurs(case))
    assert len(seen) == 19, sorted(seen)


# ---- What a loss term is to the others: nothing ----


def planned(samples: list[Sample], loss: LossSettings) -> tuple[StepPlan, dict]:
    """Plan and weights of the samples as one micro-batch of one process."""
    step = PlannedStep.of(lambda: [pack(samples, qkv_format="thd")], loss, group=None)
    return step.plan, step.fields[0]


def of_policy(case: StepCase) -> tuple[list[Sample], list[int]]:
    indices = [i for i, sample in enumerate(case.samples) if sample.term == "rl"]
    return [case.samples[i] for i in indices], indices


def many(blocks: int) -> list[StepCase]:
    return [case for layout in LAYOUTS for block in range(blocks) for case in drawn(layout, block)]


@pytest.mark.proof("Loss terms: the objective's denominators are, bit for bit, those of its samples alone")
def test_the_objective_counts_its_own_samples_as_if_there_were_no_others(full, evidence):
    seen = cases = 0
    for case in many(8) if full else many(1)[::2]:
        samples, indices = of_policy(case)
        if not case.asked.has_policy or not any(sample.num_trained for sample in samples):
            continue
        seen += 1
        loss = case.loss
        alone = dataclasses.replace(loss, terms=dataclasses.replace(loss.terms, further=()))
        plan, _ = planned(case.samples, loss)
        found, wanted = plan.denominators[indices], planned(samples, alone)[0]
        assert found.numpy().tobytes() == wanted.denominators.numpy().tobytes()
        totals = ("num_rollouts", "num_prompts", "num_tokens")
        assert [getattr(plan, name) for name in totals[::2]] == [getattr(wanted, name) for name in totals[::2]]
        if loss.denominator != "scheduled":
            continue
        ids, prompts = [s.rollout_id for s in samples], [s.prompt_id for s in samples]
        by_hand = plan_step(
            [sample.num_trained for sample in samples],
            aggregation=loss.plan_rule.aggregation,
            divisor=loss.plan_rule.divisor,
            rollout_ids=None if None in ids else ids,
            prompt_ids=None if None in prompts else prompts,
        )
        assert found.numpy().tobytes() == by_hand.denominators.numpy().tobytes()
        assert [getattr(plan, name) for name in totals] == [getattr(by_hand, name) for name in totals]
        cases += 1
    evidence(cases=seen)
    assert cases > seen / 4


@pytest.mark.proof("Loss terms: without one of them the others weigh the same, bit for bit")
def test_a_term_that_is_removed_changes_no_bit_of_what_the_others_weigh(full, evidence):
    rng, seen = random.Random("removed"), 0
    for case in many(8) if full else many(1)[::2]:
        removed = rng.choice([term for term in case.asked.terms if term.weight])
        asked = without(case.asked, removed)
        rest = [i for i, s in enumerate(case.samples) if s.term != removed.name or s.masks]
        samples = [strip(case.samples[i], removed.name) for i in rest]
        if any(t.on == removed.name for t in asked.terms) or not any(live_rows(asked, s) for s in samples):
            continue
        seen += 1
        _, before = planned(case.samples, case.loss)
        loss = term_cases.loss_of(asked)
        _, dropped = planned(case.samples, loss)
        _, away = planned(samples, loss)
        lengths, names = [s.response_length for s in case.samples], [t.name for t in asked.terms if t.weight]
        for name in ["weights", *(f"{n}.{kind}" for n in names for kind in ("weights", "mask"))]:
            assert (name in before) == (name in dropped) == (name in away), name
            if before.get(name) is None:
                continue
            parts = before[name].split(lengths)
            assert before[name].numpy().tobytes() == dropped[name].numpy().tobytes(), name
            assert torch.cat([parts[i] for i in rest]).numpy().tobytes() == away[name].numpy().tobytes(), name
    evidence(cases=seen)


def without(asked: Settings, removed: Term) -> Settings:
    """The settings with the term's weight at 0, so that samples may still name it."""
    terms = [term for term in asked.terms if term != removed]
    terms += [dataclasses.replace(removed, weight=0.0)] if removed.on is None else []
    floor = asked.tail_floor if term_cases.have_tail([t for t in terms if t.weight]) else term_cases.USUAL_FLOOR
    return dataclasses.replace(asked, terms=tuple(terms), tail_floor=floor)


def strip(sample: Sample, term: str) -> Sample:
    return dataclasses.replace(sample, masks={name: mask for name, mask in sample.masks.items() if name != term})


def silenced(sample: Sample, term: str) -> Sample:
    """The sample, of whose tokens the loss term trains none."""
    nothing = torch.zeros_like(sample.loss_mask)
    masks = {name: nothing if name == term else mask for name, mask in sample.masks.items()}
    return dataclasses.replace(sample, masks=masks, loss_mask=nothing if sample.term == term else sample.loss_mask)


@pytest.mark.proof("Loss terms: weight 0 is, bit for bit, the same micro-batches without its tokens")
@pytest.mark.parametrize("layout", LAYOUTS[1::3], ids=str)
def test_weight_0_changes_no_bit_of_a_step_whose_mask_is_0(layout, full, evidence):
    rng = random.Random(f"weight 0 {layout}")
    off = Term("off", "ce", 0.0)
    cases = []
    while len(cases) < (60 if full else 3):
        terms = term_cases.random_terms(rng, has_policy=True)
        cases.append(term_cases.random_case(rng, terms=(*terms, off), has_policy=True))
    steps = []
    for case in cases:
        terms = (*case.asked.terms[:-1], dataclasses.replace(off, weight=rng.choice([0.5, 1e6])))
        with_weight = term_cases.loss_of(dataclasses.replace(case.asked, terms=terms))
        step = case.step(layout, rng)
        masked = dataclasses.replace(step, samples=[silenced(sample, "off") for sample in case.samples])
        steps += [step, masked, dataclasses.replace(masked, loss=with_weight)]
    found = simulation.run_steps(steps, layout)
    for dropped, masked, weighted in zip(found[::3], found[1::3], found[2::3], strict=True):
        for other in (masked, weighted):
            assert same_bits(dropped.gradients, other.gradients)
        assert dropped.metrics == masked.metrics
        assert dropped.reported == masked.reported
        # tables of another height are summed in another order
        assert metrics_error(weighted.metrics, dropped.metrics) <= 1e-14
    evidence(cases=len(cases))


# ---- What is read must be there ----


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.nan, "is nan at response token .*, which --pg-term t:opd reads"),
        (-torch.inf, "is -inf at response token .*, which --pg-term t:opd reads"),
        (1.5, "teacher_logprobs of sample .* reach 1.5. Log-probabilities are at most 0"),
        (None, "has no teacher_logprobs, which --pg-term t:opd needs"),
    ],
)
def test_what_a_term_reads_of_a_member_must_be_there(value, message):
    """At tokens that the sample's own mask leaves out, so that the sample by itself may hold anything there."""
    rng = random.Random(7)
    while True:
        case = term_cases.random_case(rng, terms=(Term("t", "opd", 0.5),))
        found = [i for i, s in enumerate(case.samples) if "t" in s.masks and (s.masks["t"] & ~s.loss_mask).any()]
        if found:
            break
    sample, samples = case.samples[found[0]], list(case.samples)
    further = sample.masks["t"] & ~sample.loss_mask
    values = None if value is None else torch.where(further, value, sample.teacher_logprobs)
    samples[found[0]] = dataclasses.replace(sample, teacher_logprobs=values)
    with pytest.raises(ValueError, match=message):
        planned(samples, case.loss)


@pytest.mark.parametrize("kind", ["ce", "entropy", "opd"])
def test_a_loss_of_a_term_that_is_not_finite_stops_the_step(kind):
    """The check that looks at tokens of the objective looks at those of loss terms too."""
    rng = random.Random(kind)
    while True:
        case = term_cases.random_case(rng, terms=(Term("t", kind),))
        of_term = [i for i, s in enumerate(case.samples) if s.term == "t" and s.num_trained]
        if of_term:
            break
    sample, logits = case.samples[of_term[0]], list(case.logits)
    position = len(sample.tokens) - sample.response_length - 1 + int(sample.loss_mask.nonzero()[0])
    logits[of_term[0]] = logits[of_term[0]].clone()
    logits[of_term[0]][position] = torch.nan
    found = simulation.run_step(case.samples, logits, LAYOUTS[-1], case.loss, rng)
    assert found.num_nonfinite == 1


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(microbatches=4)], ids=str)
def test_a_micro_batch_without_a_token_of_a_term_needs_none_of_its_fields(layout):
    """Here every sample has its own micro-batch or rank."""
    rng, cases = random.Random(f"fields {layout}"), []
    while len(cases) < 4:
        case = term_cases.random_case(rng, terms=(Term("t", "opd", 0.5),))
        lacks = {sample.teacher_logprobs is None for sample in case.samples if live_rows(case.asked, sample)}
        if lacks == {True, False}:
            cases.append(case)
    steps = []
    for case in cases:
        cells = [[[] for _ in range(layout.microbatches)] for _ in range(layout.data)]
        for i, sample in enumerate(case.samples):
            lacks = sample.teacher_logprobs is None
            cells[lacks % layout.data][lacks % layout.microbatches].append(i)
        steps.append(dataclasses.replace(case.step(layout, rng), cells=cells))
    for case, found in zip(cases, simulation.run_steps(steps, layout), strict=True):
        assert max(case.errors(found).values()) <= LIMIT


def test_a_micro_batch_of_another_term_needs_nothing_of_the_correction():
    """opsm reads the engine's log-probabilities inside the loss; the samples of cross-entropy have none."""
    rng, layout = random.Random("opsm"), Layout(microbatches=2)
    while True:
        case = term_cases.random_case(rng, terms=(Term("sft", "ce", 0.5),), has_policy=True)
        lacks = [sample.rollout_logprobs is None for sample in case.samples]
        if case.asked.correction == "opsm" and {*lacks} == {True, False}:
            break
    cells = [[[i for i, each in enumerate(lacks) if each == lacking] for lacking in (True, False)]]
    (found,) = simulation.run_steps([dataclasses.replace(case.step(layout, rng), cells=cells)], layout)
    assert max(case.errors(found).values()) <= LIMIT
