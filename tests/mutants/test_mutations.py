"""The invariance check notices every seeded mistake, and nothing else."""

import contextlib
import random
import threading

import mutants
import objective_cases
import pytest
import simulation
import term_cases
import threads
import torch
from cases import BOUNDS, CONTRACTS, random_case
from mutants import LAYOUT, MUTANTS, OBJECTIVE_MUTANTS, TERM_MUTANTS

CASES = 20  # two of each aggregation and contract: a mistake of one mode shows in one case of five


def is_noticed(seed: int) -> bool:
    """Whether loss, gradient or a metric of one random step differs from the oracle."""
    rng = random.Random(seed)
    aggregation, per_token = CONTRACTS[seed % len(CONTRACTS)]
    case = random_case(rng, aggregation, per_token=per_token, temperature=0.7)
    found = simulation.run_step(case.samples, case.logits, LAYOUT, case.settings, rng)
    return not case.errors(found).within(BOUNDS[torch.float64])


@pytest.mark.proof("seeded bugs caught")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_seeded_mistake_is_noticed(name, evidence):
    for seed in range(CASES):
        with MUTANTS[name]():
            try:
                noticed = is_noticed(seed)
            except (RuntimeError, ValueError, AssertionError):
                noticed = True
        if noticed:
            evidence(cases=1)
            return
    pytest.fail(f"{name} went unnoticed in {CASES} cases")


def is_noticed_by_objectives(objective: str, seed: int) -> bool:
    """Whether loss, a term of it or the gradient of one random step of the objective differs from its oracle."""
    rng = random.Random(seed)
    case = objective_cases.random_case(rng, objective)
    return not case.error(simulation.run_steps([case.step(LAYOUT, rng)], LAYOUT)[0]) <= BOUNDS[torch.float64].gradient


@pytest.mark.proof("seeded bugs caught")
@pytest.mark.parametrize("name", OBJECTIVE_MUTANTS)
def test_a_seeded_mistake_of_the_objectives_is_noticed(name, evidence):
    objective, enter = OBJECTIVE_MUTANTS[name]
    assert not any(is_noticed_by_objectives(objective, seed) for seed in range(2))
    for seed in range(40):
        with enter():
            try:
                noticed = is_noticed_by_objectives(objective, seed)
            except (RuntimeError, ValueError, AssertionError):
                noticed = True
        if noticed:
            evidence(cases=1)
            return
    pytest.fail(f"{name} went unnoticed in 40 cases")


def is_noticed_by_terms(case: term_cases.Case, seed: int) -> bool:
    """Whether anything of a random step with loss terms differs from its oracle."""
    (found,) = simulation.run_steps([case.step(LAYOUT, random.Random(seed))], LAYOUT)
    return not max(case.errors(found).values()) <= BOUNDS[torch.float64].gradient


@pytest.mark.proof("seeded bugs caught")
@pytest.mark.parametrize("name", TERM_MUTANTS)
@pytest.mark.usefixtures("rank_zero")
def test_a_seeded_mistake_of_terms_is_noticed(name, evidence):
    (given, enter), rng = TERM_MUTANTS[name], random.Random(name)
    for seed in range(40):
        case = term_cases.random_case(rng, **given)
        with enter():
            try:
                noticed = is_noticed_by_terms(case, seed)
            except (RuntimeError, ValueError, AssertionError):
                noticed = True
        if noticed:
            assert not is_noticed_by_terms(case, seed)
            evidence(cases=1)
            return
    pytest.fail(f"{name} went unnoticed in 40 cases")


@pytest.mark.proof("false alarms without a seeded bug")
def test_without_a_mistake_nothing_is_noticed(full, evidence):
    seeds = range(120 if full else CASES)
    assert [seed for seed in seeds if is_noticed(seed)] == []
    evidence(cases=len(seeds))


def test_every_mutant_leaves_the_package_as_it_was():
    for enter in MUTANTS.values():
        with contextlib.suppress(RuntimeError), enter():
            pass
    assert not is_noticed(0)
    assert len(mutants.MUTANTS) >= 18


def test_a_rank_that_fails_is_the_only_error_of_its_world(monkeypatch):
    """While it ends the others, they begin and end collectives of their own."""
    escaped = []
    monkeypatch.setattr(threading, "excepthook", lambda hooked: escaped.append(hooked.exc_value))

    def work(rank: int) -> None:
        pairs = [threads.subgroup(lambda r: r // 2, 8, rank), threads.subgroup(lambda r: r % 4, 8, rank)]
        for number in range(50):
            if (rank, number) == (5, 7):
                raise ArithmeticError("seeded")
            for pair in pairs:
                torch.distributed.all_reduce(torch.ones(2), group=pair)

    for _ in range(10):
        with pytest.raises(ArithmeticError, match="seeded"):
            threads.run(8, work)
    assert escaped == []
