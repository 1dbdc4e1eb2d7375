"""Corrections that choose tokens of the whole step: one set, bit for bit, however the step is cut, and its gradient.

The set is compared with an oracle that loops over the whole step, the gradient with closed forms in float64.
"""

import dataclasses
import random

import cases
import objective_cases
import pytest
import selection_cases
import selection_oracle
import simulation
import threads
import torch
from head_simulation import through_the_fused_head  # noqa: F401, a fixture
from samples import random_step
from selection_cases import NAMES, Case
from simulation import Layout

from megatron_pg.batch import ContextRanks, pack
from megatron_pg.declarations.corrections import CORRECTIONS, PENALTY
from megatron_pg.step.microbatches import count
from megatron_pg.step.plan import plan_from_table
from megatron_pg.step.selection import select

LAYOUTS = [
    Layout(microbatches=3, qkv_format="bshd"),
    Layout(data=2, microbatches=2),
    Layout(data=2, context=2, microbatches=2),
    Layout(context=2, qkv_format="bshd"),
    Layout(data=3, microbatches=2, qkv_format="bshd"),
    Layout(data=2, context=2, tensor=2, microbatches=2),
]
OBJECTIVES = ("reinforce_is", "grpo", "gspo", "gspo_token", "dro")
RANKS = (1, 2, 3, 4)
LIMIT = 1e-12


def random_case(rng: random.Random, name: str, objective: str) -> Case:
    """A case of an objective without another correction; nothing but what the choice leaves is counted in some."""
    made = objective_cases.random_case(rng, objective)
    samples = selection_cases.with_keys(made.samples, rng)
    logits = [*made.logits, *(made.logits[_index(made.samples, s)] for s in samples[len(made.samples) :])]
    rule = selection_cases.random_rule(rng, name)
    expected = dataclasses.replace(
        made.expected, correction="none", penalty_coef=selection_cases.BETA * (name == PENALTY), denominator="scheduled"
    )
    case = Case(samples, logits, expected, rule)
    keeps = sum(s.num_trained for s in samples) > sum(int(each.sum()) for each in case.selected)
    if name == PENALTY or not keeps:
        return case
    denominators = ["scheduled", "kept", *(["live"] if expected.aggregation != "token_mean" else [])]
    return Case(samples, logits, dataclasses.replace(expected, denominator=rng.choice(denominators)), rule)


def _index(samples, twin) -> int:
    return next(i for i, s in enumerate(samples) if s.tokens is twin.tokens)


@pytest.mark.proof("Corrections of the whole step over layouts, float64: loss and gradient within 1e-12 of the oracle")
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradient_equal_the_oracle_in_every_layout(name, full, evidence):
    number, worst = 30 if full else 3, 0.0
    for layout in LAYOUTS:
        rng = random.Random(f"{name}{layout}")
        found = [random_case(rng, name, OBJECTIVES[i % len(OBJECTIVES)]) for i in range(number)]
        outcomes = simulation.run_steps([case.step(layout, rng) for case in found], layout)
        errors = [case.error(outcome) for case, outcome in zip(found, outcomes, strict=True)]
        bad = {
            f"{layout} case {i}: {found[i].rule}, {found[i].expected}": e
            for i, e in enumerate(errors)
            if not e <= LIMIT
        }
        assert not bad, bad
        worst = max(worst, *errors)
    evidence(cases=number * len(LAYOUTS), worst=worst)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("through_the_fused_head")
def test_the_fused_head_equals_the_oracle(name):
    rng, layout = random.Random(f"{name} fused"), Layout(data=2, context=2, microbatches=2)
    found = [random_case(rng, name, objective) for objective in OBJECTIVES[:3]]
    outcomes = simulation.run_steps([case.step(layout, rng) for case in found], layout)
    assert max(case.error(outcome) for case, outcome in zip(found, outcomes, strict=True)) <= LIMIT


# --- sets ---


@dataclasses.dataclass(frozen=True)
class Cut:
    """Samples by [rank][micro-batch]; a micro-batch that is cut over ranks of its own stands under each of them."""

    cells: list[list[list[int]]]
    runs: list[list[ContextRanks | None]]


def random_cut(rng: random.Random, count_of_samples: int, ranks: int) -> Cut:
    """Some micro-batches and ranks stay empty; in half of the cuts pairs of ranks share micro-batches (dynamic CP)."""
    layout = Layout(data=ranks, microbatches=rng.randint(1, 4))
    cells = simulation.scatter_samples(range(count_of_samples), layout, rng)
    runs = [[None] * layout.microbatches for _ in range(ranks)]
    if rng.random() < 0.5:
        for k in range(layout.microbatches):
            for first in range(0, ranks - 1, 2):
                if rng.random() < 0.5:
                    whole = cells[first][k] + cells[first + 1][k]
                    for rank in (first, first + 1):
                        cells[rank][k], runs[rank][k] = whole, ContextRanks(first, 2)
    return Cut(cells, runs)


def chosen_in(cut: Cut, samples, loss, rank: int, group) -> tuple[dict[int, list[torch.Tensor]], object]:
    """Of each sample here the bits of its factors, and the plan."""
    batches = [
        pack([samples[i] for i in cell], qkv_format="thd", **({} if run is None else {"cp_ranks": run}))
        for cell, run in zip(cut.cells[rank], cut.runs[rank], strict=True)
    ]
    table, factors = select(batches, count(batches, loss, group), loss, group)
    plan = plan_from_table(
        table, dataclasses.replace(loss.plan_rule, numbers_may_repeat=False), error=None, group=group
    )
    found: dict[int, list[torch.Tensor]] = {}
    for cell, batch, own in zip(cut.cells[rank], batches, factors, strict=True):
        parts = (own.penalised if own.penalised is not None else own.corrections).split(
            [s.response_length for s in batch.samples]
        )
        for i, part in zip(cell, parts, strict=True):
            found.setdefault(i, []).append(part)
    return found, plan


@pytest.mark.proof(
    "Corrections of the whole step: the same tokens as an oracle over the whole step, bit for bit, in random cuts"
)
@pytest.mark.parametrize("name", NAMES)
def test_the_chosen_tokens_are_the_same_in_every_cut(name, full, evidence):
    number = 300 if full else 35
    for ranks in RANKS:
        rng = random.Random(f"{name}{ranks}")
        steps = [random_selection(rng, name) for _ in range(number // 5)]
        cuts = [(i, random_cut(rng, len(steps[i][0]), ranks)) for i in range(len(steps)) for _ in range(5)]

        def on_rank(rank: int, cuts=cuts, steps=steps, ranks=ranks) -> list:
            group = threads.subgroup(lambda r: 0, ranks, rank)
            return [chosen_in(cut, *steps[i][:2], rank, group) for i, cut in cuts]

        results = threads.run(ranks, on_rank)
        for n, (i, _) in enumerate(cuts):
            samples, loss, wanted, denominators = steps[i]
            seen = set()
            for of_rank in results:
                found, plan = of_rank[n]
                assert plan.selection.num_selected == sum(int(each.sum()) for each in wanted)
                for k, parts in found.items():
                    seen.add(k)
                    chosen = torch.from_numpy(wanted[k])
                    expected = (
                        chosen if name == PENALTY else torch.where(samples[k].loss_mask & chosen, 0.0, 1.0).double()
                    )
                    assert all(torch.equal(part, expected) for part in parts), (name, ranks, n, k)
            assert seen == set(range(len(samples)))
    evidence(cases=len(RANKS) * (number // 5) * 5)


def random_selection(rng: random.Random, name: str):
    """Samples, settings and what the oracle chooses; under kept where something is left."""
    samples = selection_cases.with_keys(random_step(rng, vocabulary=3, most_tokens=24), rng)
    samples = samples if any(s.num_trained for s in samples) else random_selection(rng, name)[0]
    rule = selection_cases.random_rule(rng, name)
    wanted = selection_oracle.select(selection_cases.rows_of(samples), rule)
    keeps = sum(s.num_trained for s in samples) > sum(int(each.sum()) for each in wanted)
    denominator = "kept" if keeps and name != PENALTY else "scheduled"
    loss = simulation.settings("sample_mean", per_token=False, denominator=denominator)
    return samples, selection_cases.settings_of(loss, rule), wanted, None


def test_every_correction_of_the_whole_step_is_here():
    assert set(NAMES) == {name for name, declared in CORRECTIONS.items() if declared.selection}
    assert cases.VOCABULARY > 2
