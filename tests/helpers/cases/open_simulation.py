"""An open step over D x C x TP ranks in one process: `simulation` with rollouts that are added part by part.

Every data-parallel rank has its own adds, in its own numbers, each of several micro-batches, and micro-batches that it
gives to close. What DDP, the division at close and finalize do to gradients is applied by formula.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import simulation
import threads
import torch
from simulation import Layout, Outcome
from step_cases import StepCase

from megatron_pg.plan.open_plan import OpenPlan
from megatron_pg.plan.planned_step import PlannedStep

Cells = list[list[int]]  # samples of each micro-batch


@dataclass(frozen=True)
class Arrivals:
    """A case, and when its samples come."""

    case: StepCase
    adds: list[list[Cells]]  # of each data-parallel rank
    rest: list[Cells]  # of each data-parallel rank
    expected: int  # c


def units_of(case: StepCase) -> list[list[int]]:
    """The samples that are added together: of a rollout, or of a prompt group where that is counted."""
    by_prompt, units = case.loss.plan_rule.needs_prompt_ids, {}
    for i, sample in enumerate(case.samples):
        units.setdefault(sample.prompt_id if by_prompt else sample.rollout_id, []).append(i)
    return list(units.values())


def arrivals_of(case: StepCase, layout: Layout, rng: random.Random, expected: int) -> Arrivals:
    """A random order and split; tokens of other terms than the objective wait for close, and some rollouts too."""
    adds = [
        [[[] for _ in range(rng.randint(1, layout.microbatches))] for _ in range(rng.randint(0, 3))]
        for _ in range(layout.data)
    ]
    rest = [[[] for _ in range(rng.randint(0, 2))] for _ in range(layout.data)]
    units = units_of(case)
    rng.shuffle(units)
    for unit in units:
        waits = any(case.samples[i].term != "rl" or case.samples[i].masks for i in unit)
        waits |= not case.loss.counts_after_forward and rng.random() < 0.15
        places = [cells for of_rank in ([rest] if waits else adds) for cells in of_rank if cells]
        if not places:  # one rank adds it alone
            own = rng.choice(range(layout.data))
            (rest[own] if waits else adds[own]).append([] if waits else [[]])
            places = [rest[own] if waits else adds[own][-1]]
        cells = rng.choice(places)
        for i in unit:
            rng.choice(cells).append(i)
    return Arrivals(case, adds, rest, expected)


def run_steps(steps: Sequence[Arrivals], layout: Layout) -> list[Outcome]:
    """Independent steps, one after the other, in one world."""
    ranks = threads.run(layout.world_size, lambda rank: _run_rank(rank, steps, layout))
    return [_finalize(results, step, layout) for step, *results in zip(steps, *ranks, strict=True)]


def _run_rank(rank: int, steps: Sequence[Arrivals], layout: Layout) -> list[SimpleNamespace]:
    groups = simulation.groups_of(rank, layout)
    return [_run_rank_step(rank, step, layout, groups) for step in steps]


def _run_rank_step(rank: int, step: Arrivals, layout: Layout, groups) -> SimpleNamespace:
    d, case, loss = layout.coordinates(rank)[0], step.case, step.case.loss
    plan, added = OpenPlan(loss, step.expected, case.asked.weight_version), []
    provisional = [torch.zeros(0, dtype=torch.float64)]

    def train(planned: PlannedStep, cells: Cells) -> SimpleNamespace:
        return simulation.train(planned, case.logits, cells, loss, layout, rank, groups, is_open=True)

    for cells in step.adds[d]:
        planned = plan.add(simulation.pack_cells(case.samples, cells, layout), lambda batches: None)
        provisional.append(planned.plan.denominators)
        added.append(train(planned, cells))
    if loss.counts_after_forward:
        plan.count_kept(torch.cat([torch.zeros(0), *(own for found in added for own in found.kept)]).long())
    rest = step.rest[d]
    batches = simulation.pack_cells(case.samples, rest, layout)
    planned = plan.close(lambda: batches, lambda batches: None, groups[0])
    number = planned.plan.number
    factor = step.expected / number if number else 0.0
    _check_denominators(torch.cat(provisional), planned, factor)
    pieces = [(sample, where, rows * factor) for found in added for sample, where, rows in found.pieces]
    partials = [torch.tensor([loss.metrics.identity()], dtype=torch.float64), *(found.partials for found in added)]
    partial = loss.metrics.rescaled(loss.metrics.combine(torch.cat(partials)), factor)
    if rest:
        added.append(train(planned, rest))
        pieces += added[-1].pieces
        partial = loss.metrics.combine(torch.cat([partial[None], added[-1].partials]))
    num_nonfinite = sum(found.num_nonfinite for found in added)
    return SimpleNamespace(rank=rank, pieces=pieces, partial=partial, num_nonfinite=num_nonfinite, plan=planned.plan)


def _check_denominators(provisional, planned: PlannedStep, factor: float) -> None:
    """The exchange finds N times what the adds have divided by, but for units that count nothing."""
    final = planned.plan.denominators[: len(provisional)]
    counts = torch.isfinite(final)
    torch.testing.assert_close(provisional[counts], final[counts] * factor, rtol=1e-14, atol=0)


def _finalize(results, step: Arrivals, layout: Layout) -> Outcome:
    case = step.case
    reduced = 1.0 if case.loss.per_token else 1.0 / (layout.data * layout.context)
    first = [result for result in results if layout.coordinates(result.rank)[2] == 0]
    partials = torch.stack([result.partial for result in first])
    metrics = case.loss.metrics.finish(case.loss.metrics.combine(partials).tolist(), results[0].plan)
    reported = metrics.get("pg_loss", 0.0)  # Megatron's own report is of one call of the schedule
    gradients = simulation.gradients_of(results, case.logits, layout, reduced)
    return Outcome(gradients, reported, metrics, sum(result.num_nonfinite for result in first))
