"""Advice on trainer and rollout engine: when it is said, and that a run which goes on says what one run would."""

import itertools
import random

import pytest

from megatron_pg.metrics.advice import Advice
from megatron_pg.metrics.file import MetricsFile

FINE = {"mismatch/spread": 0.01, "mismatch/outlier_fraction": 0.0, "mismatch/rank": 0, "mismatch/rank_factor": 1.1}
HOT = FINE | {"mismatch/spread": 0.3, "mismatch/temperature": 1.25, "mismatch/outlier_fraction": 0.05}
WIDE = FINE | {"mismatch/spread": 0.3}
OTHER = {"mismatch/outlier_fraction": 1.0, "mismatch/missing_mass": 0.99}  # no token is near enough for a spread
KINDS = {"fine": FINE, "hot": HOT, "wide": WIDE, "other": OTHER, "bare": {"reward": 1.0}}
RANKS = {f"rank {n}": FINE | {"mismatch/rank": n, "mismatch/rank_factor": 3.0} for n in range(2)}


def said(*kinds: str, after: int = 0) -> list[str | None]:
    """What each step brings; the first `after` are history."""
    steps = [{"iteration": i, **(KINDS | RANKS)[kind]} for i, kind in enumerate(kinds, start=1)]
    advice = Advice(steps[:after])
    return [advice.of(step) for step in steps[after:]]


def test_three_steps_running_bring_one_line():
    *before, line, after = said("hot", "hot", "hot", "hot")
    assert before == [None, None]
    assert after is None
    assert line == (
        "advice: trainer and rollout engine have differed for 3 steps: mismatch/temperature 1.25. Likely: the "
        "temperatures differ. Run megatron-pg mismatch on these rollouts (docs/mismatch.md)."
    )


@pytest.mark.parametrize(
    "kinds", ["fine", "hot hot fine hot hot", "hot wide hot wide hot wide", "rank 0,rank 1,rank 0"]
)
def test_what_does_not_last_brings_none(kinds):
    assert not any(said(*(kinds.split(",") if "," in kinds else kinds.split())))


def test_steps_without_rollout_logprobs_are_not_counted():
    assert [line is not None for line in said("hot", "bare", "hot", "bare", "bare", "hot")] == [False] * 5 + [True]


def test_another_cause_is_said_too_and_each_once():
    lines = said(*["hot"] * 4, *["wide"] * 4, *["hot"] * 4)
    assert [i for i, line in enumerate(lines) if line] == [2, 6]
    assert "mismatch/spread 0.3. Likely: quantized or stale weights" in lines[6]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("other", "mismatch/outlier_fraction 1. Likely: other tokens"),
        ("rank 1", "mismatch/rank_factor 3 of data-parallel rank 1. Likely: one rank"),
    ],
)
def test_sides_without_anything_in_common_and_a_rank_are_named(kind, text):
    (line,) = filter(None, said(*[kind] * 3))
    assert text in line


def test_a_run_that_goes_on_says_what_one_run_would():
    rng = random.Random(1)
    for _ in range(30):
        kinds = list(itertools.chain(*([rng.choice([*KINDS, *RANKS])] * rng.randrange(1, 5) for _ in range(6))))
        whole = said(*kinds)
        assert all(said(*kinds, after=cut) == whole[cut:] for cut in range(len(kinds) + 1))


def test_history_is_read_from_the_file_and_ends_before_the_step_that_is_trained_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    for iteration in range(1, 6):
        first.write({"iteration": iteration, **HOT})
    first.close()
    second = MetricsFile(path)
    found = {going_on: Advice(second.before(going_on)).of({"iteration": going_on, **HOT}) for going_on in (2, 3, 4, 6)}
    second.close()
    assert {going_on for going_on, line in found.items() if line} == {3}  # as steps 1 to 3 of one run
