"""Everything that is declared has an independent expected value, a value worked by hand and its row of a page.

A new entry of a table fails `test_everything_declared_has_its_oracle_its_hand_worked_value_and_its_page` alone, which
names the files that lack it.
"""

import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

import processes
import pytest

from megatron_pg.declarations.aggregations import AGGREGATIONS
from megatron_pg.declarations.corrections import CORRECTIONS, KL_ESTIMATORS
from megatron_pg.declarations.loss_terms import KINDS
from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.metrics.table import METRICS


@functools.cache
def text_of(pattern: str) -> str:
    """The texts of the files that a glob pattern below the repository names."""
    return "\n".join(path.read_text(encoding="utf-8") for path in processes.ROOT.glob(pattern))


class Place(NamedTuple):
    """Where a name must occur: as a word in one of the files that the patterns name."""

    what: str
    files: tuple[str, ...]  # glob patterns below the repository
    not_for: str = "^$"  # names that need none

    def lacks(self, name: str) -> bool:
        if re.search(self.not_for, name):
            return False
        found = re.compile(rf"(?<![\w/]){re.escape(name)}(?![\w/])")
        return not any(found.search(text_of(pattern)) for pattern in self.files)


# which the declaration gives a reason for
WITHOUT_TOKEN_KERNEL = "|".join(["^$", *(f"^{name}$" for name, each in OBJECTIVES.items() if each.no_token_kernel)])
EXPECTED_METRICS = (
    *("tests/oracles/*.py", "tests/helpers/cases/*.py", "tests/properties/*.py"),
    *("tests/unit/metrics/*.py", "tests/unit/step/*.py", "tests/unit/plan/*.py"),
)
REQUIRED = {
    "objective": (
        Place("an oracle", ("tests/oracles/token_oracle.py",)),
        Place("a hand-worked value", ("tests/unit/objectives/test_formulas.py",)),
        Place("a row (make docs)", ("docs/objectives.md",)),
        Place("a word among the objectives", ("docs/flags.md",)),
        Place("a token kernel", ("megatron_pg/kernels/triton/token_kernels.py",), not_for=WITHOUT_TOKEN_KERNEL),
    ),
    "aggregation": (
        Place("an oracle", ("tests/oracles/step_oracle.py",)),
        Place("hand-worked denominators", ("tests/helpers/samples.py",)),
        Place("a row (make docs)", ("docs/aggregation.md",)),
    ),
    "correction": (
        Place("a hand-worked value", ("tests/unit/objectives/corrections/*.py",)),
        # a rejection is a level and a divergence: each pair is worked by hand
        Place("an oracle", ("tests/oracles/*.py", "tests/properties/test_peers.py"), not_for="_k[123]$"),
        Place("a row (make docs)", ("docs/corrections.md",)),
    ),
    "KL estimator": (
        Place("an oracle", ("tests/oracles/token_oracle.py",)),
        Place("a hand-worked value", ("tests/unit/objectives/terms/test_kl.py",)),
        Place("a row", ("docs/loss_terms.md",)),
    ),
    "loss term kind": (
        Place("an oracle", ("tests/oracles/*.py",)),
        Place("a hand-worked value", ("tests/unit/objectives/terms/*.py", "tests/unit/lm_head/test_teacher.py")),
        Place("a row", ("docs/loss_terms.md", "docs/corrections.md")),
    ),
    "metric": (
        # kl_cov_loss is compared as any NAME_loss of step_cases.py, staleness of an age as any of the oracle's AGES
        Place("an expected value", EXPECTED_METRICS, not_for="^kl_cov_loss$|^staleness/.*age_"),
        Place("a row (make docs)", ("docs/metrics.md",)),
    ),
}  # fmt: skip


DECLARED = {
    "objective": OBJECTIVES,
    "aggregation": AGGREGATIONS,
    "correction": [name for name in CORRECTIONS if name != "none"],
    "KL estimator": KL_ESTIMATORS,
    "loss term kind": KINDS,
    "metric": [metric.name for metric in METRICS if metric.is_reported],
}


def missing(kind: str, names: Iterable[str]) -> list[str]:
    return [
        f"{kind} {name} lacks {place.what} in {' or '.join(place.files)}"
        for name in names
        for place in REQUIRED[kind]
        if place.lacks(name)
    ]


@pytest.mark.parametrize("kind", REQUIRED)
def test_everything_declared_has_its_oracle_its_hand_worked_value_and_its_page(kind):
    found = missing(kind, DECLARED[kind])
    assert not found, "\n".join(["docs/design.md says how:", *found])


@pytest.mark.parametrize("kind", REQUIRED)
def test_a_new_entry_lacks_every_place(kind):
    assert len(missing(kind, ["new_entry"])) == len(REQUIRED[kind])


def test_a_part_of_a_longer_name_is_no_mention():
    assert Place("an oracle", ("tests/oracles/step_oracle.py",)).lacks("sample_mea")
    assert not Place("an oracle", ("tests/oracles/step_oracle.py",)).lacks("sample_mean")
