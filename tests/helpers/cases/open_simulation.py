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
from megatron_pg.step.loss_scaling import LossScaling

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
    kept = ((1, 2), (0, 1), (0, 2))  # coordinates that the members of a group share: data, tensor, context groups
    groups = [
        threads.subgroup(lambda r, kept=kept: tuple(layout.coordinates(r)[k] for k in kept), layout.world_size, rank)
        for kept in kept
    ]
    return [_Rank(rank, step, layout, *groups).run() for step in steps]


class _Rank:
    """One rank's open step."""

    def __init__(self, rank, step: Arrivals, layout: Layout, data_group, tensor_group, context_group):
        self.rank, self.step, self.layout = rank, step, layout
        self.data_group, self.context_group = data_group, context_group
        self.tensor_group = tensor_group if layout.tensor > 1 else None
        self.loss = step.case.loss
        self.kept, self.num_nonfinite = [torch.zeros(0)], 0

    def run(self) -> SimpleNamespace:
        d, _, _ = self.layout.coordinates(self.rank)
        plan, metrics = OpenPlan(self.loss, self.step.expected), self.loss.metrics
        pieces, partial = [], torch.tensor(metrics.identity(), dtype=torch.float64)
        provisional = [torch.zeros(0, dtype=torch.float64)]
        for cells in self.step.adds[d]:
            planned = plan.add(self._pack(cells), lambda batches: None)
            provisional.append(planned.plan.denominators)
            more, own = self._train(planned, cells)
            pieces, partial = pieces + more, metrics.combine(torch.stack([partial, own]))
        if self.loss.counts_after_forward:
            plan.count_kept(torch.cat(self.kept).long())
        cells = self.step.rest[d]
        planned = plan.close(lambda: self._pack(cells), lambda batches: None, self.data_group)
        number = planned.plan.number
        factor = self.step.expected / number if number else 0.0
        self._check_denominators(torch.cat(provisional), planned, factor)
        pieces = [(sample, positions, rows * factor) for sample, positions, rows in pieces]
        partial = metrics.rescaled(partial, factor)
        if cells:
            more, own = self._train(planned, cells)
            pieces, partial = pieces + more, metrics.combine(torch.stack([partial, own]))
        return SimpleNamespace(
            rank=self.rank, pieces=pieces, partial=partial, num_nonfinite=self.num_nonfinite, plan=planned.plan
        )

    def _check_denominators(self, provisional, planned: PlannedStep, factor: float) -> None:
        """The exchange finds N times what the adds have divided by, but for units that count nothing."""
        final = planned.plan.denominators[: len(provisional)]
        counts = torch.isfinite(final)
        torch.testing.assert_close(provisional[counts], final[counts] * factor, rtol=1e-14, atol=0)

    def _pack(self, cells: Cells):
        return [simulation._pack([self.step.case.samples[i] for i in cell], self.layout) for cell in cells]

    def _train(self, planned: PlannedStep, cells: Cells):
        layout, logits = self.layout, self.step.case.logits
        locals_ = planned.slices(lambda _: self.context_group)
        tensor_rank = layout.coordinates(self.rank)[2]
        leaves = [
            simulation._leaf(local, [logits[i] for i in cell], tensor_rank, layout.tensor, torch.nan)
            for local, cell in zip(locals_, cells, strict=True)
        ]
        scaling = LossScaling(
            per_token=self.loss.per_token,
            num_microbatches=len(cells),
            data_parallel_size=layout.data,
            context_parallel_size=layout.context,
            is_open=True,
        )
        outputs, _, _ = simulation._schedule(locals_, leaves, scaling, self.loss, layout, self.tensor_group)
        self.num_nonfinite += sum(int(output.nonfinite[0]) for output in outputs)
        self.kept += [output.kept for output in outputs if output.kept is not None]
        rows = zip(locals_, leaves, cells, strict=True)
        pieces = [piece for each in rows for piece in simulation._sample_rows(*each)]
        return pieces, self.loss.metrics.combine(torch.stack([output.partial for output in outputs]))


def _finalize(results, step: Arrivals, layout: Layout) -> Outcome:
    case = step.case
    gradients = [torch.zeros_like(table) for table in case.logits]
    reduced = 1.0 if case.loss.per_token else 1.0 / (layout.data * layout.context)
    for result in results:
        tensor_rank = layout.coordinates(result.rank)[2]
        for sample, positions, rows in result.pieces:
            columns = slice(tensor_rank * rows.shape[1], (tensor_rank + 1) * rows.shape[1])
            gradients[sample][positions, columns] += rows * reduced
    first = [result for result in results if layout.coordinates(result.rank)[2] == 0]
    partials = torch.stack([result.partial for result in first])
    metrics = case.loss.metrics.finish(case.loss.metrics.combine(partials).tolist(), results[0].plan)
    reported = metrics.get("pg_loss", 0.0)  # Megatron's own report is of one call of the schedule
    return Outcome(gradients, reported, metrics, sum(result.num_nonfinite for result in first))
