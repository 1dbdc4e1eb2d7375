"""The supported megatron-core releases: Megatron's scaling of the loss, gradients on real ranks, recipes.

The installed release runs with every test. The others run in the full tier, from .venv/megatron-core-<version>, where
`make prove` puts those that RELEASES names.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import processes
import pytest
import rank_cases as cases_of
import recipe_runs
from packaging.version import Version
from rank_cases import ALIKE, BALANCED, FAST, FAULTS, LIMIT, REPLAYED, hybrid, in_pieces

INSTALLED = metadata.version("megatron-core")
OTHERS = ["0.16.1", "0.18.2", "0.19.2"]  # in addition to 0.17.1, which the Makefile installs
CONTRACT_LIMIT = 1e-14
TRAINING = [v for v in OTHERS if Version(v) >= Version("0.17")]  # whose wheel carries megatron.training
LACKING = {"0.16.1": {"experts", "hybrid"}}  # its router needs Transformer Engine
HYBRID = [v for v in OTHERS if Version(v) >= Version("0.17")]  # the others' takes no pattern of layers
SOME_FAULTS = ["dp2-constant-nan", "pp2-token_mean-raises", "tp2-constant-peers"]


def named(row: str, releases: list[str] = OTHERS) -> list:
    """One parameter per other release, each with its own row in docs/proof.md."""
    alone = pytest.mark.full_tier("other releases run in `make prove`, which installs them")
    return [pytest.param(v, marks=[alone, pytest.mark.proof(f"megatron-core {v}: {row}")]) for v in releases]


@pytest.fixture
def folder(request) -> Path:
    """Where the release lies."""
    path = processes.ROOT / ".venv" / f"megatron-core-{request.param}"
    if not path.is_dir():
        pytest.skip(f'needs megatron-core {request.param}: make prove RELEASES="{request.param}"')
    return path


def known(release: str, cases: list[str]) -> list[str]:
    """Those that the release can run."""
    return [case for case in cases if not LACKING.get(release, set()).intersection(case.split("-"))]


def check_contract(release: str, cases: int, evidence, *first: Path) -> None:
    script = str(processes.TESTS / "helpers/runs/contract.py")
    environment = processes.environment(*first)
    python = sys.executable if first else processes.with_warm_python(environment)["PYTHON"]
    done = processes.run([python, script, str(cases)], environment)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["release"] == release
    assert all(lucky <= 0.1 * figures["cases"] for lucky in figures["lucky"])  # the refused pairs of tuple and flag
    assert not any(error <= CONTRACT_LIMIT for error in figures["seeded"])
    evidence(cases=figures["cases"], worst=figures["worst"], tolerance=CONTRACT_LIMIT)


@pytest.mark.proof("megatron-core, installed release: both contracts exact through forward_step_calc_loss")
def test_both_contracts_are_exact(full, evidence):
    check_contract(INSTALLED, 750 if full else 25, evidence)


@pytest.mark.parametrize("folder", named("both contracts exact through forward_step_calc_loss"), indirect=True)
def test_both_contracts_are_exact_in_other_releases(folder, evidence):
    check_contract(folder.name.removeprefix("megatron-core-"), 750, evidence, folder)


@pytest.mark.parametrize("folder", named("gradients on 2 real ranks equal one process"), indirect=True)
def test_gradients_on_real_ranks_in_other_releases(folder, tmp_path, evidence):
    release = folder.name.removeprefix("megatron-core-")
    is_later = Version(release) >= Version("0.19.2")
    pieces = known(release, cases_of.PIECES)
    cases = known(release, [*FAST, *cases_of.MTP, *cases_of.DYNAMIC, *(cases_of.MTP_LATER if is_later else [])])
    cases = list(dict.fromkeys([*cases, *pieces, *in_pieces(pieces)]))
    oracles = known(release, [*cases_of.MTP_ORACLES, *(cases_of.MTP_LATER_ORACLES if is_later else [])])
    balanced, replayed = (BALANCED, REPLAYED) if pieces else ([], [])
    references = [*cases_of.references_of([*cases, *replayed], oracles), *cases_of.parts_of(balanced)]
    wanted = [*cases, *balanced, *replayed, *SOME_FAULTS], references
    with both(tmp_path, *wanted, folder) as (two, one):
        for case in SOME_FAULTS:
            assert all(FAULTS[case] in error["message"] for error in processes.errors(two, case, ranks=2)), case
        found = {processes.report(two, case, rank)["release"] for case in cases for rank in (0, 1)}
        assert {f"megatron-core-{release}" for release in found} == {folder.name}
        cases_of.compare_pieces(two, pieces)
        cases_of.compare_oracles(one, oracles)
        worst = [cases_of.compare(two, one, [*cases, *replayed])]
        worst += [cases_of.compare_balanced(two, one, balanced)] if balanced else []
        count = len(cases) + len(oracles) + len(balanced) + len(replayed)
        evidence(cases=count, worst=max(worst), tolerance=LIMIT)


@contextmanager
def both(folder: Path, cases: list[str], references: list[str], release: Path) -> Iterator[tuple[Path, Path]]:
    """The folders of two ranks and of one."""
    two, one = folder / "two", folder / "one"
    runs = [processes.start(2, two, cases, release), processes.start(1, one, references, release)]
    with processes.finished(runs):
        yield two, one


@pytest.mark.parametrize(
    "folder", named("HybridModel, gradients on 2 real ranks equal a GPTModel's", HYBRID), indirect=True
)
def test_a_hybrid_models_gradients_in_other_releases(folder, tmp_path, evidence):
    alone = {*cases_of.references_of(FAST), *ALIKE, *hybrid(ALIKE)}
    with both(tmp_path, hybrid(FAST), sorted(alone), folder) as (two, one):
        cases_of.compare_alike(one, ALIKE)
        evidence(cases=len(FAST), worst=cases_of.compare(two, one, hybrid(FAST)), tolerance=LIMIT)


@pytest.mark.parametrize("folder", named("FSDP, gradients on 2 real ranks equal one process"), indirect=True)
def test_gradients_under_fsdp_in_other_releases(folder, tmp_path, evidence):
    release = folder.name.removeprefix("megatron-core-")
    later = cases_of.FSDP_LATER if Version(release) >= Version("0.19.2") else []
    cases = known(release, [*cases_of.FSDP, *later])
    with both(tmp_path, cases, cases_of.references_of(cases), folder) as (two, one):
        evidence(cases=len(cases), worst=cases_of.compare(two, one, cases), tolerance=LIMIT)


@pytest.mark.parametrize("folder", named("recipes, gradients on 2 real ranks equal plain loops"), indirect=True)
def test_recipes_on_real_ranks_in_other_releases(folder, tmp_path, evidence):
    found = recipe_runs.launch_ranks(tmp_path, folder)
    assert {f"megatron-core-{figures['release']}" for figures in found.values()} == {folder.name}
    reducers = found["slime_recipe"]
    errors = recipe_runs.errors_in_train_rl(found["rl_recipe"])
    errors += recipe_runs.errors_in_their_trainer(reducers) + recipe_runs.errors_in_ours(reducers)
    evidence(cases=len(errors), worst=max(errors), tolerance=recipe_runs.LIMIT)


@pytest.mark.parametrize(
    "folder", named("the plain script prints what the installed release prints", TRAINING), indirect=True
)
def test_the_plain_script_in_other_releases(folder, evidence):
    if sys.version_info < (3, 12) and Version(folder.name.rpartition("-")[2]) >= Version("0.18"):
        pytest.skip("its megatron.training needs Python 3.12")
    here, there = (
        recipe_runs.steps_of(recipe_runs.launch(*recipe_runs.CONSTANT, first=first)) for first in ([], [folder])
    )
    assert here
    assert there == here
    evidence(cases=recipe_runs.numbers_of(there))
