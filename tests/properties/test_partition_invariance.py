"""Loss, gradient and metrics do not depend on how the step is cut, and equal an independent oracle in float64."""

import functools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

import pytest
import simulation
import step_cases
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from samples import divisor_of, make_sample
from simulation import Layout, Step
from step_cases import BOUNDS, CONTRACTS, StepCase, random_case

LAYOUTS = [
    Layout(),
    Layout(microbatches=3, qkv_format="bshd"),
    Layout(microbatches=4),
    Layout(data=2, microbatches=2),
    Layout(data=2, microbatches=3, qkv_format="bshd"),
    Layout(data=3, microbatches=2, qkv_format="bshd"),
    Layout(data=4, microbatches=2),
    Layout(context=2, microbatches=2),
    Layout(context=4, qkv_format="bshd"),
    Layout(context=4, microbatches=2),
    Layout(tensor=2, microbatches=2),
    Layout(tensor=4),
    Layout(data=2, context=2, microbatches=3, pipeline=3),
    Layout(data=2, context=2, microbatches=2, qkv_format="bshd"),
    Layout(data=2, tensor=2, microbatches=2, pipeline=2),
    Layout(data=2, context=2, tensor=2, microbatches=2),
    Layout(data=2, context=4, microbatches=2, qkv_format="bshd"),
]
BATCH = 50  # steps that one world of threads runs, one after the other


def numbered_case(layout: Layout, dtype: torch.dtype, number: int) -> tuple[StepCase, Step]:
    """Case `number` of a layout: aggregations and contracts take turns."""
    rng = random.Random(f"{layout}{dtype}{number}")
    aggregation, per_token = CONTRACTS[number % len(CONTRACTS)]
    case = random_case(rng, aggregation, per_token=per_token, dtype=dtype).with_versions(number)
    return case, case.step(layout, rng)


def what_occurs(step: Step, layout: Layout) -> Iterator[str]:
    """The unusual things in a step, by the names that `must_occur` asks for."""
    rank_of = {i: rank for rank, row in enumerate(step.cells) for cell in row for i in cell}
    prompts = {(sample.prompt_id, rank_of[i]) for i, sample in enumerate(step.samples)}
    if any(not cell for row in step.cells for cell in row):
        yield "empty micro-batch"
    if any(not any(row) for row in step.cells):
        yield "empty rank"
    if len(prompts) > len({prompt for prompt, _ in prompts}):
        yield "prompt on two ranks"
    if any(len(sample.tokens) < 2 * layout.context for sample in step.samples):
        yield "sample shorter than 2C"
    trained = {sample.num_trained for sample in step.samples}
    yield from (name for count, name in ((0, "fully masked sample"), (1, "one trained token")) if count in trained)


def must_occur(layout: Layout) -> set[str]:
    names = {"fully masked sample", "one trained token"}
    names |= {"empty micro-batch"} if layout.data * layout.microbatches > 1 else set()
    names |= {"empty rank", "prompt on two ranks"} if layout.data > 1 else set()
    return names | ({"sample shorter than 2C"} if layout.context > 1 else set())


@dataclass(frozen=True)
class Trial:
    """What one layout has shown: the errors of its cases by number, and how often what occurred in them."""

    dtype: torch.dtype
    errors: dict[int, dict[str, float]]
    seen: Counter

    def check(self, kind: str, evidence) -> None:
        bound = BOUNDS[self.dtype][kind]
        found = {number: error[kind] for number, error in self.errors.items()}
        bad = {f"numbered_case(..., {n})": error for n, error in found.items() if not error <= bound}
        assert not bad, f"{kind} out of bounds: {bad}"
        evidence(cases=len(found), worst=max(found.values()), tolerance=bound)


@functools.cache
def trial(layout: Layout, dtype: torch.dtype, full: bool) -> Trial:
    """The trial of a layout, run once for all the tests that look at it."""
    errors, seen, every = {}, Counter(), numbers_of_cases(layout, dtype, full)
    for first in range(0, len(every), BATCH):
        numbers = every[first : first + BATCH]
        numbered = [numbered_case(layout, dtype, number) for number in numbers]
        outcomes = simulation.run_steps([step for _, step in numbered], layout)
        for number, (case, step), found in zip(numbers, numbered, outcomes, strict=True):
            errors[number] = case.errors(found)
            seen.update(what_occurs(step, layout))
    return Trial(dtype, errors, seen)


@pytest.fixture(params=LAYOUTS, ids=attrgetter("name"))
def layout(request):
    return request.param


def numbers_of_cases(layout: Layout, dtype: torch.dtype, full: bool) -> range:
    """One of each aggregation and contract. The default tier has half of them in float64, a quarter in float32, and all
    of them in float64 on eight ranks."""
    if full:
        return range(830 // layout.world_size)  # large worlds cost more
    if dtype == torch.float64 and layout.world_size == 8:
        return range(len(CONTRACTS))
    step = 2 if dtype == torch.float64 else 4
    return range((LAYOUTS.index(layout) + step // 2) % step, len(CONTRACTS), step)


def shown(dtype: torch.dtype, kind: str, what: str):
    name = str(dtype).removeprefix("torch.")
    return pytest.param(dtype, kind, id=f"{name}-{kind}", marks=pytest.mark.proof(f"partitions, {name}: {what}"))


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        shown(torch.float64, "loss", "losses within 1e-12"),
        shown(torch.float64, "gradient", "gradients within 1e-12"),
        shown(torch.float64, "metrics", "metrics within 1e-12"),
        shown(torch.float32, "loss", "losses within 1e-5"),
        shown(torch.float32, "gradient", "gradients within 2e-6"),
        shown(torch.float32, "metrics", "metrics within 1e-5"),
    ],
)
def test_every_layout_equals_the_oracle(layout, dtype, kind, full, evidence):
    trial(layout, dtype, full).check(kind, evidence)


@pytest.mark.proof("partitions: empty, masked, short and split units among them")
def test_the_cases_of_every_layout_hold_what_breaks_such_code(layout, full, evidence):
    trials = [trial(layout, dtype, full) for dtype in BOUNDS]
    seen = sum((each.seen for each in trials), Counter())
    assert must_occur(layout) - seen.keys() == set()
    evidence(cases=seen.total())


@st.composite
def drawn_cases(draw) -> tuple[StepCase, Layout, Step]:
    """A small case, its layout and cut, all drawn, so that a failure shrinks to few samples and few ranks."""
    aggregation, per_token = draw(st.sampled_from(CONTRACTS))
    mask = st.lists(st.integers(0, 1), min_size=1, max_size=6)
    shape = st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(1, 5), mask)
    shapes = draw(st.lists(shape, min_size=1, max_size=5).filter(lambda found: any(sum(m) for *_, m in found)))
    rng = random.Random(draw(st.integers(0, 2**16)))
    samples = [
        make_sample(
            prompt_length=length,
            mask=mask,
            rng=rng,
            vocabulary=step_cases.VOCABULARY,
            rollout_id=f"{prompt}/{rollout}",
            prompt_id=prompt,
            poison=True,
        )
        for prompt, rollout, length, mask in shapes
    ]
    settings = {"per_token": per_token, "divisor": divisor_of(aggregation, rng.uniform(1, 5000)), "temperature": 0.7}
    case = step_cases.plain_case(samples, step_cases.poisoned_logits(samples, rng), aggregation, **settings)
    assume(step_cases.is_well_conditioned(case))
    case = case.with_versions(rng.random())
    layout = draw(
        st.builds(
            Layout,
            data=st.integers(1, 3),
            context=st.sampled_from([1, 2, 4]),
            tensor=st.sampled_from([1, 2]),
            microbatches=st.integers(1, 3),
            qkv_format=st.sampled_from(["thd", "bshd"]),
        ).filter(lambda layout: layout.world_size <= 6)
    )
    cells = [[[] for _ in range(layout.microbatches)] for _ in range(layout.data)]
    for i in range(len(samples)):
        draw(st.sampled_from(draw(st.sampled_from(cells)))).append(i)
    return case, layout, Step(case.samples, case.logits, case.loss, cells, weight_version=case.asked.weight_version)


def is_exact(drawn: tuple[StepCase, Layout, Step]) -> bool:
    case, layout, step = drawn
    errors = case.errors(simulation.run_steps([step], layout)[0])
    return all(errors[kind] <= bound for kind, bound in BOUNDS[torch.float64].items())


@pytest.mark.proof("partitions: hypothesis finds no counterexample")
def test_no_drawn_partition_changes_the_step(full, evidence):
    tried = []

    @settings(
        max_examples=400 if full else 15,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(drawn_cases())
    def check(drawn):
        assert is_exact(drawn)
        tried.append(drawn)

    check()
    evidence(cases=len(tried))
