"""Corrections that choose tokens of the whole step: one set, bit for bit, however the step is cut, and its gradient.

The set is compared with an oracle that loops over the whole step, the gradient with closed forms in float64.
"""

import dataclasses
import random

import numpy as np
import pytest
import selection_oracle
import simulation
import step_cases
import threads
import torch
from head_simulation import through_the_fused_head  # noqa: F401, a fixture
from samples import random_step
from selection_oracle import Rule
from simulation import Layout
from step_cases import SELECTIONS, random_objective_case, random_selection_case, rows_of, with_keys, with_rule, worst_of

from megatron_pg.batch import ContextRanks, pack
from megatron_pg.declarations.corrections import PENALTY
from megatron_pg.declarations.loss_terms import LossTerm
from megatron_pg.plan.planned_step import PlannedStep
from megatron_pg.plan.settings import LossSettings
from megatron_pg.plan.table import SelectionFacts
from megatron_pg.rollouts.sample import Sample

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


@pytest.mark.proof("Corrections of the whole step over layouts, float64: loss and gradient within 1e-12 of the oracle")
@pytest.mark.parametrize("name", SELECTIONS)
def test_loss_and_gradient_equal_the_oracle_in_every_layout(name, full, evidence):
    number, worst = 30 if full else 2, 0.0
    for layout in LAYOUTS:
        rng = random.Random(f"{name}{layout}")
        cases = [random_selection_case(rng, name, OBJECTIVES[i % len(OBJECTIVES)]) for i in range(number)]
        worst = max(worst, worst_of(cases, layout, rng, LIMIT))
    evidence(cases=number * len(LAYOUTS), worst=worst, tolerance=LIMIT)


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.usefixtures("through_the_fused_head")
def test_the_fused_head_equals_the_oracle(name):
    rng, layout = random.Random(f"{name} fused"), Layout(data=2, context=2, microbatches=2)
    worst_of([random_selection_case(rng, name, OBJECTIVES[SELECTIONS.index(name)])], layout, rng, LIMIT)


# --- sets ---


@dataclasses.dataclass(frozen=True)
class Cut:
    """Samples by [rank][micro-batch]; a micro-batch that is cut over its own ranks stands under each of them."""

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


@dataclasses.dataclass(frozen=True)
class Selection:
    """A step, and what the oracle chooses of it."""

    samples: list[Sample]
    loss: LossSettings
    wanted: list[np.ndarray]


def random_selection(rng: random.Random, name: str) -> Selection:
    """Under `kept` where something is left."""
    samples = with_keys(random_step(rng, vocabulary=3, most_tokens=24), rng)[0]
    rule = step_cases.random_rule(rng, name)
    wanted = selection_oracle.select(rows_of(samples), rule)
    keeps = sum(s.num_trained for s in samples) > sum(int(each.sum()) for each in wanted)
    denominator = "kept" if keeps and name != PENALTY else "scheduled"
    loss = simulation.settings("sample_mean", per_token=False, denominator=denominator)
    return Selection(samples, with_rule(loss, rule), wanted)


def chosen_in(
    cut: Cut, step: Selection, rank: int, group
) -> tuple[SelectionFacts, list[tuple[int, torch.Tensor, float]]]:
    """Of each sample here its number, the bits of its factors and its denominator."""
    batches = [
        pack([step.samples[i] for i in cell], qkv_format="thd", **({} if run is None else {"cp_ranks": run}))
        for cell, run in zip(cut.cells[rank], cut.runs[rank], strict=True)
    ]
    rule = dataclasses.replace(step.loss.plan_rule, numbers_may_repeat=False)
    planned = PlannedStep.of(lambda: batches, step.loss, group=group, rule=rule)
    plan = planned.plan
    numbers = [i for cell in cut.cells[rank] for i in cell]
    whole = [own.penalised if step.loss.correction.name == PENALTY else own.corrections for own in planned.factors]
    lengths = [step.samples[i].response_length for i in numbers]
    # a rank's plan has the denominators of what it holds
    return plan.selection, list(zip(numbers, torch.cat(whole).split(lengths), plan.denominators.tolist(), strict=True))


def check_choice(name: str, step: Selection, of_ranks: list) -> None:
    facts, num_chosen = of_ranks[0][0], sum(int(each.sum()) for each in step.wanted)
    assert {each for each, _ in of_ranks} == {facts}
    assert (facts.num_selected, facts.num_tokens) == (num_chosen, sum(s.num_trained for s in step.samples))
    found = [each for _, samples in of_ranks for each in samples]
    assert {i for i, *_ in found} == set(range(len(step.samples)))
    denominators: dict[int, float] = {}
    for i, part, denominator in found:
        chosen = torch.from_numpy(step.wanted[i])
        assert torch.equal(part, chosen if name == PENALTY else torch.where(chosen, 0.0, 1.0).double())
        assert denominators.setdefault(i, denominator) == denominator


@pytest.mark.proof("Corrections of the whole step in random cuts over 1 to 4 ranks: the oracle's tokens, bit for bit")
@pytest.mark.parametrize("name", SELECTIONS)
def test_the_chosen_tokens_are_the_same_in_every_cut(name, full, evidence):
    number = 50 if full else 2  # of steps, 5 cuts each
    for ranks in RANKS:
        rng = random.Random(f"{name}{ranks}")
        steps = [random_selection(rng, name) for _ in range(number)]
        cuts = [(step, random_cut(rng, len(step.samples), ranks)) for step in steps for _ in range(5)]

        def on_rank(rank: int, cuts=cuts, ranks=ranks) -> list:
            group = threads.subgroup(lambda r: 0, ranks, rank)
            return [chosen_in(cut, step, rank, group) for step, cut in cuts]

        for (step, _), *of_ranks in zip(cuts, *threads.run(ranks, on_rank), strict=True):
            check_choice(name, step, of_ranks)
    evidence(cases=len(RANKS) * number * 5)


def test_a_step_without_a_token_of_the_objective_trains_its_other_terms():
    """Nothing is there to be chosen, and the supervised tokens are trained as without the correction."""
    rng, layout = random.Random(5), Layout(data=2, microbatches=2)
    made = random_objective_case(rng, "reinforce_is")
    samples = [dataclasses.replace(s, term="sft", old_logprobs=None, advantages=None) for s in made.samples]
    sft = LossTerm(name="sft", kind="ce", aggregation="token_mean")
    terms = dataclasses.replace(simulation.GRPO, further=(sft,))
    plain = simulation.settings("token_mean", per_token=True, terms=terms, terms_of_samples=frozenset({"rl", "sft"}))
    cells = simulation.scatter_samples(samples, layout, rng)
    for rule in (
        Rule("m2po", high=0.1),
        Rule("clip_cov", 0.0, 1.0, "0.5"),
        Rule("kl_cov", fraction="0.5"),
        Rule("top_entropy", fraction="0.5"),
    ):
        losses = (plain, with_rule(plain, rule))
        steps = [simulation.Step(samples, made.logits, loss, cells) for loss in losses]
        before, after = simulation.run_steps(steps, layout)
        assert "selected_fraction" not in after.metrics
        assert all(torch.equal(a, b) for a, b in zip(before.gradients, after.gradients, strict=True))


def test_the_penalised_tokens_of_one_micro_batch_are_those_of_verl():
    """Its `topk` of cov at the moving policy, which is π_old here, of max(1, int(f·T)) tokens."""
    rng = random.Random(3)
    samples = [s for _ in range(4) for s in random_step(rng, vocabulary=9)]
    samples = [step_cases.with_fields(s, rng, is_coarse=False) for s in samples]
    masks = torch.cat([s.loss_mask for s in samples])
    advantages, old = (torch.cat([getattr(s, name) for s in samples])[masks] for name in ("advantages", "old_logprobs"))
    cov = (advantages - advantages.mean()) * (old - old.mean())
    theirs = set(cov.topk(max(1, int(len(cov) * 0.1))).indices.tolist())
    loss = with_rule(simulation.settings("token_mean", per_token=True), Rule("kl_cov", fraction="0.1"))
    (factors,) = PlannedStep.of(lambda: [pack(samples, qkv_format="thd")], loss, group=None).factors
    assert set(factors.penalised[masks].nonzero().flatten().tolist()) == theirs
