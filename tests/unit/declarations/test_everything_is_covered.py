"""Everything that is declared has an independent expected value, a value worked by hand and its row of a page.

A new entry of a table fails `test_everything_declared_has_its_oracle_its_hand_worked_value_and_its_page` alone for want
of these, with the files that are missing.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import launches
import processes

from megatron_pg.declarations.aggregations import AGGREGATIONS
from megatron_pg.declarations.corrections import CORRECTIONS, KL_ESTIMATORS
from megatron_pg.declarations.loss_terms import KINDS
from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.metrics.table import METRICS


class Place(NamedTuple):
    """Where a name must occur: as a word in one of the files that the patterns name."""

    what: str
    files: tuple[str, ...]  # glob patterns below the repository
    not_for: str = "^$"  # names that need none

    def lacks(self, name: str) -> bool:
        if re.search(self.not_for, name):
            return False
        found = re.compile(rf"(?<![\w/]){re.escape(name)}(?![\w/])")
        files = [path for pattern in self.files for path in processes.ROOT.glob(pattern)]
        return not any(found.search(path.read_text(encoding="utf-8")) for path in files)


# which the declaration gives a reason for
WITHOUT_TOKEN_KERNEL = "|".join(["^$", *(f"^{name}$" for name, each in OBJECTIVES.items() if each.no_token_kernel)])
EXPECTED_METRICS = (
    *("tests/oracles/*.py", "tests/helpers/cases/*.py", "tests/properties/*.py"),
    *("tests/unit/metrics/*.py", "tests/unit/step/*.py", "tests/unit/plan/*.py"),
)
REQUIRED = {
    "objective": (
        OBJECTIVES,
        Place("an oracle", ("tests/oracles/token_oracle.py",)),
        Place("a hand-worked value", ("tests/unit/objectives/test_formulas.py",)),
        Place("a row (make docs)", ("docs/objectives.md",)),
        Place("a word among the objectives", ("docs/flags.md",)),
        Place("a token kernel", ("megatron_pg/kernels/triton/token_kernels.py",), not_for=WITHOUT_TOKEN_KERNEL),
    ),
    "aggregation": (
        AGGREGATIONS,
        Place("an oracle", ("tests/oracles/step_oracle.py",)),
        Place("hand-worked denominators", ("tests/helpers/samples.py",)),
        Place("a row (make docs)", ("docs/aggregation.md",)),
    ),
    "correction": (
        [name for name in CORRECTIONS if name != "none"],
        Place("a hand-worked value", ("tests/unit/objectives/corrections/*.py",)),
        # a rejection is a level and a divergence: each pair is worked by hand
        Place("an oracle", ("tests/oracles/*.py", "tests/properties/test_peers.py"), not_for="_k[123]$"),
        Place("a row (make docs)", ("docs/corrections.md",)),
    ),
    "KL estimator": (
        KL_ESTIMATORS,
        Place("an oracle", ("tests/oracles/token_oracle.py",)),
        Place("a hand-worked value", ("tests/unit/objectives/terms/test_kl.py",)),
        Place("a row", ("docs/loss_terms.md",)),
    ),
    "loss term kind": (
        KINDS,
        Place("an oracle", ("tests/oracles/*.py",)),
        Place("a hand-worked value", ("tests/unit/objectives/terms/*.py", "tests/unit/lm_head/test_teacher.py")),
        Place("a row", ("docs/loss_terms.md", "docs/corrections.md")),
    ),
    "metric": (
        [metric.name for metric in METRICS if metric.kind != "part"],
        # kl_cov_loss is compared as any NAME_loss of step_cases.py
        Place("an expected value", EXPECTED_METRICS, not_for="^kl_cov_loss$"),
        Place("a row (make docs)", ("docs/metrics.md",)),
    ),
}  # fmt: skip


def missing() -> list[str]:
    return [
        f"{kind} {name} lacks {place.what} in {' or '.join(place.files)}"
        for kind, (names, *places) in REQUIRED.items()
        for name in names
        for place in places
        if place.lacks(name)
    ]


def test_everything_declared_has_its_oracle_its_hand_worked_value_and_its_page():
    found = missing()
    assert not found, "\n".join(["docs/design.md says how:", *found])


NEW = {  # lines at the end of a file of the copy
    "declarations/objectives.py": 'OBJECTIVES["new_objective"] = OBJECTIVES["grpo"]',
    "declarations/aggregations.py": 'AGGREGATIONS["new_mean"] = AGGREGATIONS["sample_mean"]',
    "declarations/corrections.py": 'CORRECTIONS["new_correction"] = CORRECTIONS["tis"]\n'
    'KL_ESTIMATORS["new_estimator"] = KL_ESTIMATORS["k3"]',
    "declarations/loss_terms.py": 'KINDS["new_kind"] = KINDS["ce"]',
    "metrics/table.py": "import dataclasses\nMETRICS = (*METRICS, dataclasses.replace(METRICS[0], name='new_metric'))",
}


@launches.launch
def of_a_copy(folder, full) -> str:
    """What the test says of a copy of the package with one new entry of every kind."""
    shutil.copytree(processes.PACKAGE / "megatron_pg", folder / "megatron_pg")
    for path, lines in NEW.items():
        file = folder / "megatron_pg" / path
        with file.open("a", encoding="utf-8") as end:
            end.write(f"{lines}\n")
    path = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    code = f"{path}import test_everything_is_covered as test\ntest.{NAME}()"
    env = processes.environment(folder)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=folder, capture_output=True, text=True, check=False
    )
    return done.stderr


NAME = test_everything_declared_has_its_oracle_its_hand_worked_value_and_its_page.__name__


def test_a_new_entry_of_every_kind_is_named_with_the_files_that_it_lacks(of_a_copy):
    _, _, message = of_a_copy.partition("AssertionError: docs/design.md says how:\n")
    names = {
        "objective": "new_objective",
        "aggregation": "new_mean",
        "correction": "new_correction",
        "KL estimator": "new_estimator",
        "loss term kind": "new_kind",
        "metric": "new_metric",
    }
    expected = [
        f"{kind} {name} lacks {place.what} in {' or '.join(place.files)}"
        for kind, name in names.items()
        for place in REQUIRED[kind][1:]
    ]
    assert message.splitlines() == expected


def test_a_part_of_a_longer_name_is_no_mention():
    assert Place("an oracle", ("tests/oracles/step_oracle.py",)).lacks("sample_mea")
    assert not Place("an oracle", ("tests/oracles/step_oracle.py",)).lacks("sample_mean")
