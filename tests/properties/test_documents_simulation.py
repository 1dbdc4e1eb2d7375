"""A dynamic step, cut by its number of documents, equals the oracle on the same documents in float64."""

import math
import random
from collections.abc import Iterator, Sequence

import pytest
import simulation
from document_streams import Taken, take_all
from samples import divisor_of, random_step
from simulation import Layout, Step
from step_cases import CONTRACTS, VOCABULARY, StepCase, is_well_conditioned, plain_case, poisoned_logits

from megatron_pg.plan.documents import Packing, StepRule
from megatron_pg.rollouts.sample import Sample

LAYOUTS = [
    Layout(data=2),
    Layout(data=3, qkv_format="bshd"),
    Layout(data=4),
    Layout(context=2),
    Layout(tensor=2),
    Layout(data=2, context=2),
    Layout(data=2, context=2, qkv_format="bshd"),
    Layout(data=2, tensor=2),
    Layout(data=2, context=2, tensor=2),
]
LIMIT = 1e-12
STEPS = 5  # about that many of every stream


def packing(layout: Layout, rng: random.Random) -> Packing:
    unit = 2 * layout.context * layout.tensor
    width = unit * math.ceil(rng.choice([24, 40, 90]) / unit)
    rows = 3 if layout.qkv_format == "bshd" else 1
    multiple_of = layout.tensor * layout.context if layout.qkv_format == "thd" else 1
    return Packing(
        qkv_format=layout.qkv_format,
        seq_length=width,
        micro_batch_size=rows,
        cp_size=layout.context,
        multiple_of=multiple_of,
    )


def random_groups(rng: random.Random, rank: int) -> Iterator[list[Sample]]:
    """Prompt groups of uneven sizes: rollouts of several samples, holes in masks, fully masked samples."""
    for draw in range(rng.randint(1, 2 * STEPS)):
        by_prompt: dict[int, list[Sample]] = {}
        for sample in random_step(rng, vocabulary=VOCABULARY):
            by_prompt.setdefault(sample.prompt_id, []).append(sample)
        for prompt, group in by_prompt.items():
            for sample in group:
                object.__setattr__(sample, "prompt_id", f"{rank}/{draw}/{prompt}")
                object.__setattr__(sample, "rollout_id", f"{rank}/{draw}/{sample.rollout_id}")
            yield group


def dynamic_steps(layout: Layout, rng: random.Random) -> list[Sequence[Taken]]:
    """Every rank's part of the steps that random streams are cut into."""
    streams = [list(random_groups(rng, rank)) for rank in range(layout.data)]
    total = sum(len(group) for stream in streams for group in stream)
    rule = StepRule(num_documents=max(total // STEPS, 1), policy="at_least", end="partial")
    runs = take_all(streams, rule, packing(layout, rng), undivided=("rollout_id", "prompt_id"))
    return [taken for taken in zip(*(run.steps for run in runs), strict=True) if any_trained(taken)]


def any_trained(taken: Sequence[Taken]) -> bool:
    return any(sample.num_trained for rank in taken for batch in rank.batches for sample in batch.samples)


def case_of(taken: Sequence[Taken], number: int, rng: random.Random) -> tuple[StepCase, Step]:
    """The step as the simulation runs it, and as the oracle knows it: its documents alone."""
    samples = [sample for rank in taken for batch in rank.batches for sample in batch.samples]
    indices = iter(range(len(samples)))
    cells = [[[next(indices) for _ in batch.samples] for batch in rank.batches] for rank in taken]
    aggregation, per_token = CONTRACTS[number % len(CONTRACTS)]
    while True:
        case = plain_case(
            samples,
            poisoned_logits(samples, rng),
            aggregation,
            per_token=per_token,
            divisor=divisor_of(aggregation, rng.uniform(1, 5000)),
            temperature=rng.choice([1.0, 0.7]),
        )
        if is_well_conditioned(case):
            return case, Step(samples, case.logits, case.loss, cells, batches=[rank.batches for rank in taken])


@pytest.mark.proof("Documents per step: loss, gradient and metrics of dynamic steps equal the oracle, float64 (steps)")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_dynamic_step_equals_one_process_on_the_same_documents(layout, full, evidence):
    rng = random.Random(f"{layout}")
    wanted, worst, done, empty = (230 if full else 4), 0.0, 0, 0
    while done < wanted:
        taken = dynamic_steps(layout, rng)
        numbered = [case_of(parts, done + i, rng) for i, parts in enumerate(taken)]
        for (case, step), found in zip(numbered, simulation.run_steps([s for _, s in numbered], layout), strict=True):
            errors = case.errors(found)
            assert max(errors.values()) <= LIMIT, (case.asked, errors)
            worst = max(worst, *errors.values())
            empty += any(not cell for row in step.cells for cell in row)
        done += len(numbered)
    assert empty or layout.data == 1, "no rank was filled up with empty micro-batches"
    evidence(cases=done, worst=worst, tolerance=LIMIT)
