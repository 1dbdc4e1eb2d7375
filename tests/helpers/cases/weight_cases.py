"""Random steps whose tokens have weights and whose responses have turns, as cases of `step_cases` and `term_cases`.

Weights are 0, powers of two, tiny, large or anything; NaN where no term trains the token. Turns have any length, may be
fully masked, and some samples have one turn.
"""

import math
import random
from dataclasses import replace

import step_cases
import term_cases
import torch
from step_cases import StepCase, keeps_some

from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.rollouts.sample import Sample

DENOMINATORS = ("tokens", "weights")
OF_SEQUENCES = ("gspo", "gspo_token")  # objectives of `term_cases` that read sequences


def random_term_case(rng: random.Random) -> StepCase:
    """A step with further loss terms, some of them averaged by turn, through its flags."""
    while True:
        level = rng.choice(["sample", "turn"])
        chosen = rng.choice(OF_SEQUENCES) if level == "turn" else None
        given = {"weight_denominator": rng.choice(DENOMINATORS), "sequence_level": level}
        given |= {"has_policy": True} if level == "turn" else {}
        if rng.random() < 0.4:
            given |= {"aggregation": "turn_mean", "divisor": None, "per_token": False, "denominator": "scheduled"}
        asked = term_cases.random_settings(rng, chosen, **given)
        terms = tuple(_by_turn(term) if rng.random() < 0.3 else term for term in asked.terms)
        asked = replace(asked, terms=terms)
        if asked.has_policy and asked.aggregation != step_cases.CUSTOM and rng.random() < 0.25:
            asked = replace(asked, denominator="varied")
        samples = [with_weights_and_turns(sample, rng, p_none=0.0) for sample in term_cases.random_samples(rng, asked)]
        if asked.denominator == "varied":
            samples = [with_reward(sample) for sample in samples]
        if not any(term_cases.live_rows(asked, sample) for sample in samples):
            continue
        case = term_cases.case_of(samples, term_cases.poisoned_logits(rng, asked, samples), asked)
        if _has_a_weight(case):
            return case


def _by_turn(term):
    return term if term.aggregation == "policy" else replace(term, aggregation="turn_mean", divisor=None)


def random_objective_case(rng: random.Random, objective: str) -> StepCase:
    """A case of any objective with corrections, by sample or by turn."""
    while True:
        base = step_cases.random_objective_case(rng, objective)
        asked = replace(
            base.asked,
            weight_denominator=rng.choice(DENOMINATORS),
            sequence_level=rng.choice(["sample", "turn", "turn"]),
        )
        if rng.random() < 0.4:
            denominator = "scheduled" if asked.denominator == "live" else asked.denominator
            asked = replace(asked, aggregation="turn_mean", divisor=None, denominator=denominator)
        asked = replace(asked, denominator="varied") if rng.random() < 0.25 else asked
        samples = [with_weights_and_turns(sample, rng, p_none=0.0) for sample in base.samples]
        if OBJECTIVES[objective].has_one_advantage_per_sequence and asked.sequence_level == "turn":
            samples = [_with_one_advantage_per_turn(sample, rng) for sample in samples]
        case = StepCase.of(samples, base.logits, asked)
        if _has_a_weight(case) and (asked.denominator != "kept" or keeps_some(case)):
            return case


def _has_a_weight(case: StepCase) -> bool:
    """Whether every loss with tokens has one with a weight and a factor: errors are relative to it."""
    return all(result.magnitude > 0 and result.weight > 0 for result in case.wanted.terms.values() if result.num_tokens)


def with_weights_and_turns(sample: Sample, rng: random.Random, p_none: float = 0.3) -> Sample:
    size, trained = sample.response_length, sample.trained.tolist()
    weights = [random_weight(rng) if own else rng.choice([math.nan, -1.0]) for own in trained]
    has_weights = rng.random() < 0.8
    return replace(
        sample,
        token_weights=torch.tensor(weights, dtype=torch.float64) if has_weights else None,
        turns=None if rng.random() < p_none else random_turns(rng, size),
    )


def with_reward(sample: Sample) -> Sample:
    """The reward that `term_cases.random_reward` gives to samples of its rollout, if it has none."""
    own = random.Random(sample.rollout_id or sample.sample_id).choice([0.0, 1.0, 2.5])
    return replace(sample, reward=own if sample.reward is None else sample.reward)


def random_weight(rng: random.Random) -> float:
    kind = rng.random()
    if kind < 0.15:
        return 0.0
    return (
        rng.choice([1.0, 0.5, 2.0]) if kind < 0.4 else rng.choice([1e-8, 1e6]) if kind < 0.42 else rng.uniform(0.01, 3)
    )


def random_turns(rng: random.Random, size: int) -> list[int]:
    cuts = sorted({cut for cut in range(1, size) if rng.random() < rng.choice([0.1, 0.5, 0.9])})
    return [b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True)]


def _with_one_advantage_per_turn(sample: Sample, rng: random.Random) -> Sample:
    own = torch.tensor([rng.uniform(-2, 2) for _ in sample.turns], dtype=torch.float64)
    values = own.repeat_interleave(torch.tensor(sample.turns))
    return replace(sample, advantages=torch.where(sample.loss_mask, values, sample.advantages))
