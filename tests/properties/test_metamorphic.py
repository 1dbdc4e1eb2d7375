"""How the step must answer to a change of its input: no oracle, only before and after."""

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import simulation
from compare import gradient_error, same_bits, scalar_error
from simulation import Layout, Outcome, Step
from step_cases import CONTRACTS, CUSTOM, StepCase, random_case

from megatron_pg.declarations.choices import METRIC_LEVELS
from megatron_pg.metrics import Reduction
from megatron_pg.plan.settings import features_of

LAYOUTS = [
    Layout(data=2, microbatches=2),
    Layout(data=2, microbatches=2, qkv_format="bshd"),
    Layout(context=2, microbatches=2),
]


@dataclass(frozen=True)
class Change:
    """A case, two steps made of it, and what the second must be in terms of the first."""

    case: StepCase
    before: Step
    after: Step
    factor: float = 1.0  # loss and gradient afterwards over those before
    kept: Sequence[int] | None = None  # for every sample afterwards its number before; default: the same
    extra_padding: int = 0  # of the rows afterwards
    exact: bool = False  # to the last bit


RELATIONS: dict[str, Callable[[StepCase, Layout, random.Random], Change | None]] = {}


def relation(function):
    """Registers a relation; it returns None where the case has nothing to change."""
    RELATIONS[function.__name__] = function
    return function


def same_cut(case: StepCase, step: Step) -> Step:
    return Step(case.samples, case.logits, case.loss, step.cells)


@relation
def permuted_samples(case, layout, rng):
    before, kept = case.step(layout, rng), rng.sample(range(len(case.samples)), len(case.samples))
    moved = dataclasses.replace(case, samples=[case.samples[i] for i in kept], logits=[case.logits[i] for i in kept])
    return Change(case, before, moved.step(layout, rng), kept=kept)


@relation
def padded_more(case, layout, rng):
    before = case.step(layout, rng)
    return Change(case, before, before, extra_padding=rng.randint(1, 5))


@relation
def prompts_split_over_ranks(case, layout, rng):
    whole, split = ([[[] for _ in range(layout.microbatches)] for _ in range(layout.data)] for _ in range(2))
    for i, sample in enumerate(case.samples):
        rng.choice(whole[hash(sample.prompt_id) % layout.data]).append(i)
        rng.choice(split[i % layout.data]).append(i)
    steps = (Step(case.samples, case.logits, case.loss, cells) for cells in (whole, split))
    return Change(case, *steps)


@relation
def doubled_advantages(case, layout, rng):
    before = case.step(layout, rng)
    samples = [dataclasses.replace(sample, advantages=2 * sample.advantages) for sample in case.samples]
    return Change(case, before, same_cut(dataclasses.replace(case, samples=samples), before), factor=2.0, exact=True)


@relation
def doubled_divisor(case, layout, rng):
    if case.asked.aggregation != "constant":
        return None
    before = case.step(layout, rng)
    asked = dataclasses.replace(case.asked, divisor=2 * case.asked.divisor)
    doubled = StepCase.of(case.samples, case.logits, asked)
    return Change(case, before, same_cut(doubled, before), factor=0.5, exact=True)


@relation
def dropped_masked_sample(case, layout, rng):
    masked = [i for i, sample in enumerate(case.samples) if not sample.num_trained]
    if not masked:
        return None
    dropped = rng.choice(masked)
    kept = [i for i in range(len(case.samples)) if i != dropped]
    rest = dataclasses.replace(case, samples=[case.samples[i] for i in kept], logits=[case.logits[i] for i in kept])
    return Change(case, case.step(layout, rng), rest.step(layout, rng), factor=units(case) / units(rest), kept=kept)


def units(case: StepCase) -> int:
    """What the aggregation averages over, and so what dropping a sample may change."""
    if case.asked.aggregation == "token_mean" or (case.asked.aggregation == CUSTOM and case.asked.per_token):
        return 1
    kind = "prompt_id" if case.asked.aggregation == "prompt_mean" else "rollout_id"
    return len({getattr(sample, kind) for sample in case.samples})


def changes(name: str, layout: Layout, count: int, rng: random.Random) -> list[Change]:
    found = []
    while len(found) < count:
        aggregation, per_token = CONTRACTS[rng.randrange(len(CONTRACTS))]
        change = RELATIONS[name](random_case(rng, aggregation, per_token=per_token), layout, rng)
        found += [] if change is None else [change]
    return found


def check(change: Change, before: Outcome, after: Outcome) -> float:
    """The error of the gradient; asserts that loss and gradient answer as they must."""
    kept = range(len(change.case.samples)) if change.kept is None else change.kept
    expected = [change.factor * before.gradients[i] for i in kept]
    scale = change.factor * change.case.wanted.magnitude
    if change.exact:
        assert same_bits(after.gradients, expected)
        assert after.metrics["pg_loss"] == change.factor * before.metrics["pg_loss"]
        assert after.reported == change.factor * before.reported
    assert scalar_error(after.reported, change.factor * before.reported, scale) <= 1e-12
    assert scalar_error(after.metrics["pg_loss"], change.factor * before.metrics["pg_loss"], scale) <= 1e-12
    return gradient_error(after.gradients, expected)


@pytest.mark.proof("metamorphic relations: gradients within 1e-12")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", RELATIONS)
def test_loss_and_gradient_answer_to_the_change_as_they_must(name, layout, full, evidence):
    found = changes(name, layout, 96 if full else 2, random.Random(f"{name}{layout}"))
    befores = simulation.run_steps([change.before for change in found], layout)
    for padding in {change.extra_padding for change in found}:
        group = [
            (change, before) for change, before in zip(found, befores, strict=True) if change.extra_padding == padding
        ]
        afters = simulation.run_steps(
            [change.after for change, _ in group], dataclasses.replace(layout, padding=padding)
        )
        errors = [check(change, before, after) for (change, before), after in zip(group, afters, strict=True)]
        evidence(cases=len(errors), worst=max(errors), tolerance=1e-12)


def test_a_masked_sample_counts_in_the_means_that_count_rollouts_and_prompts():
    """Control: dropping one does change them, by the factor that `units` says."""
    found = changes("dropped_masked_sample", LAYOUTS[0], 60, random.Random(0))
    changed = {change.case.asked.aggregation for change in found if change.factor != 1.0}
    assert {"sample_mean", "prompt_mean", "constant"} <= changed
    assert "token_mean" not in changed


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_measured_beside_it_moves_no_bit_of_a_metric_or_gradient(layout):
    rng, contracts = random.Random(str(layout)), CONTRACTS[LAYOUTS.index(layout) :: len(LAYOUTS)]
    found = [random_case(rng, aggregation, per_token=per_token) for aggregation, per_token in contracts]
    steps = [case.step(layout, rng) for case in found]
    outcomes = {}
    for level in METRIC_LEVELS:
        at_level = [
            dataclasses.replace(s, loss=dataclasses.replace(s.loss, metrics=reduction(s, level))) for s in steps
        ]
        outcomes[level] = simulation.run_steps(at_level, layout)
    for level, names in (("none", 1), ("basic", 10)):
        for less, all_of_them in zip(outcomes[level], outcomes["with_entropy"], strict=True):
            assert len(less.metrics) >= names
            assert less.metrics == {name: all_of_them.metrics[name] for name in less.metrics}
            assert same_bits(less.gradients, all_of_them.gradients)


def reduction(step: Step, level: str) -> Reduction:
    return Reduction(level, features_of(step.loss.terms, step.loss.correction))
