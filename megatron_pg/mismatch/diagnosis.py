"""All tests, in an order in which an earlier cause explains a later one: tokens of a found cause are removed first."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from megatron_pg.mismatch import alignment, distribution, documents, spread, values
from megatron_pg.mismatch.causes import CAUSES, Answer, cannot_tell
from megatron_pg.mismatch.gap import Booleans, Floats, Gap
from megatron_pg.mismatch.noise import noise_of
from megatron_pg.mismatch.sampling import sampling
from megatron_pg.mismatch.settings import Settings, against

LEVEL = 0.01  # chance of a false alarm in a diagnosis of pure noise, divided among its tests
_TESTS = len(CAUSES)
_MOST_K3 = 0.01  # nats: rounding a model to bfloat16 stays below
_SPREADING = {"staleness", "temperature", "truncation", "padding"}  # causes that also spread unlikely tokens more


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The results of all tests of one set of rollouts."""

    tests: list[Answer]  # in the order in which they ran, one for each of CAUSES
    summary: dict[str, float]  # of d = log π - log q over all trained tokens
    has_scale_of_rounding: bool  # whether rounding a model to bfloat16 explains the scale of d

    @property
    def found(self) -> list[Answer]:
        """The tests that found their cause."""
        return [test for test in self.tests if test.outcome == "found"]

    @property
    def verdict(self) -> str:
        """`found`, `noise` (no more than rounding a model to bfloat16) or `unexplained`."""
        if self.found:
            return "found"
        is_small = self.summary["k3"] < _MOST_K3 and self.summary["outliers"] < distribution.MOST_OUTLIERS
        return "noise" if is_small and self.has_scale_of_rounding else "unexplained"

    def document(self) -> dict[str, Any]:
        """As a JSON object."""
        tests = {test.cause: asdict(test) | {"title": CAUSES[test.cause].title} for test in self.tests}
        findings = [tests[test.cause] | {"advice": CAUSES[test.cause].advice} for test in self.found]
        return {"verdict": self.verdict, "summary": self.summary, "findings": findings, "tests": list(tests.values())}


@dataclass
class _Course:
    """The tokens that remain, and the results so far."""

    gap: Gap
    level: float  # of each test
    tests: list[Answer] = field(default_factory=list)

    @property
    def found(self) -> set[str]:
        return {test.cause for test in self.tests if test.outcome == "found"}

    def add(self, test: Answer, kept: Booleans | None = None) -> None:
        """Add a result; if it found its cause, continue with the kept tokens."""
        self.tests.append(test)
        if test.outcome == "found" and kept is not None:
            self.gap = self.gap.where(kept)

    def give_up(self, why: str, *causes: str) -> None:
        self.tests += [cannot_tell(cause, why) for cause in causes]

    def give_up_rest(self, why: str) -> None:
        done = {test.cause for test in self.tests}
        self.give_up(why, *(cause for cause in CAUSES if cause not in done))


def diagnose(gap: Gap, level: float = LEVEL, settings: Settings | None = None) -> Diagnosis:
    """Test every cause, the simplest first; documents are assumed to be independent.

    Args:
        gap: the trained tokens of all rollouts.
        level: the chance of any finding where d is symmetric noise, at most; each test has its share (Bonferroni).
        settings: the settings of engine and trainer that the user gave.
    """
    course = _Course(gap, level / _TESTS)
    _test_values(course)
    if not len(course.gap.engine):
        course.give_up_rest("the sides are unrelated, so no other cause can be tested")
    elif why := alignment.doubt(course.gap, course.level):
        course.add(sampling(gap, course.level))  # uses the engine's values only
        course.give_up_rest(why)
    else:
        _test_distribution(course, _test_documents(course))
    tests = course.tests
    if settings is not None:
        tests = against(settings, tests, has_sampling_mask=gap.has_sampling_mask)
    return Diagnosis(tests, summarize(gap), spread.is_of_rounding(gap))


def _test_values(course: _Course) -> None:
    course.add(values.grid(course.gap, course.level))
    test, course.gap = values.shift(course.gap, course.level)
    course.add(test)
    test, course.gap = alignment.other_samples(course.gap, course.level)
    course.add(test)
    if len(course.gap.engine):
        course.add(*values.vocabulary(course.gap, course.level))


def _test_documents(course: _Course) -> Floats:
    """Run the tests; [D] by how much the age of its weights has multiplied a document's d."""
    test, lasts = documents.template(course.gap, course.level)
    late = course.gap.position >= lasts
    course.add(test, late if late.mean() > 0.1 else None)
    test, fine = documents.groups(course.gap, course.level)
    course.add(test, fine[course.gap.document])
    test, factors = documents.staleness(course.gap, course.level)
    course.add(test)
    return factors


def _test_distribution(course: _Course, factors: Floats) -> None:
    gap, level = course.gap, course.level
    course.add(sampling(gap, level))
    if "vocabulary" in course.found:
        why = "the contexts contain tokens that the trainer reads as other tokens"
        course.add(distribution.temperature(gap, level))
        course.give_up_rest(why)
        return
    if "sampling" in course.found:
        course.give_up("the tokens are not drawn from what the engine reports", "truncation", "padding")
    else:
        for test in distribution.missing_mass(gap, level):
            course.add(test)
    course.add(distribution.temperature(gap, level))
    even = gap.divided(factors)
    course.add(distribution.routing(even, level))
    course.add(spread.dropout(even, level, alone=not course.found & _SPREADING))
    if course.found & (_SPREADING | {"dropout"}):
        course.give_up("a cause found above also spreads unlikely tokens more", "head_precision")
    else:
        course.add(spread.head_precision(even, values.rounding_scale(gap), level))


def summarize(gap: Gap) -> dict[str, float]:
    """Mean of d and |d|, k3 estimate of KL(engine‖trainer) in nats, robust scale of uncertain tokens, share of
    outliers."""
    d = gap.difference
    return {
        "mean": float(d.mean()),
        "mean_abs": float(np.abs(d).mean()),
        "k3": float((np.expm1(np.minimum(d, 50.0)) - d).mean()),
        "scale": noise_of(gap).level,
        "outliers": float(distribution.is_outlier(gap).mean()),
    }
