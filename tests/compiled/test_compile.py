"""Every kernel compiled without a GPU: no spills, wide accesses, and the launched programs fit on a multiprocessor.

The default tier compiles each kernel for sm_90 at its smallest configuration, the full tier all of `builds` and other
chips and, in .venv/triton-RELEASE, other releases of Triton.
"""

import functools
import itertools
import sys
from importlib import metadata
from pathlib import Path

import builds
import launches
import processes
import pytest

INSTALLED = "installed Triton"
TUNED = ("3.6.0", "3.7.1")  # the single-pass kernel's shapes of rows were chosen with these: no spills
FEW = 20  # spills of it with another Triton
CHIPS = (80, 90, 100, 120)  # compute capabilities
TRITONS = ("3.6.0", "3.8.0", "3.9.0")  # in addition to the installed one


@functools.cache
def compiled(chip: int, *names: str, triton: Path | None = None) -> list[dict]:
    """The figures of `builds`, once in a session; names are those of builds or of groups."""
    first = () if triton is None else (triton,)
    return processes.compiled_by(builds.__file__, str(chip), *names, first=first, TRITON_DEFAULT_FP_FUSION="1")


@launches.launch
def of_default_tier(folder, full):
    """Name and kernel of every build, and figures of the smallest configurations for sm_90."""
    return compiled(90)


def most_spills(release: str) -> int:
    """Of the single-pass kernel, compiled with the installed Triton or with "Triton" and a version."""
    version = metadata.version("triton") if release == INSTALLED else release.split()[1]
    return 0 if version in TUNED else FEW


def group(name: str) -> object:
    row = f"Kernels compiled for sm_90, {name.replace('_', ' ')}: no spills, wide accesses, they fit"
    return pytest.param(name, marks=pytest.mark.proof(row), id=name)


@pytest.mark.parametrize("name", [group(name) for name in builds.GROUPS])
def test_kernels_fit_without_spills(name, of_default_tier, full, evidence):
    of_default = [each for each in of_default_tier if each["name"].split()[0] == name and "flaws" in each]
    found = compiled(90, name) if full else of_default
    assert found
    for each in found:
        assert each["spills"] <= (most_spills(INSTALLED) if name == "single_pass" else 0), each
        assert each["flaws"] == [], each
    evidence(cases=len(found))


def test_the_default_tier_compiles_every_kernel(of_default_tier):
    every = {each["kernel"] for each in of_default_tier}
    assert {each["kernel"] for each in of_default_tier if "flaws" in each} == every
    assert len(every) < len(of_default_tier)  # which names the others too


def release(name: str) -> object:
    row = f"Single-pass kernel compiled for sm_80, sm_90, sm_100 and sm_120, {name}: 16-byte accesses, few spills"
    return pytest.param(name, marks=pytest.mark.proof(row))


@pytest.mark.parametrize("release", [release(INSTALLED), *(release(f"Triton {each}") for each in TRITONS)])
def test_the_single_pass_kernel_compiles_for_other_chips_and_with_other_releases(release, full, evidence):
    path = None if release == INSTALLED else Path(sys.prefix) / release.lower().replace(" ", "-")
    if not full or (path is not None and not path.is_dir()):
        pytest.skip(f'needs the full tier and {release}: make prove TRITONS="{release.split()[1]}"')
    shapes = itertools.product((19008, 37984, 151936), ("grpo", "dppo_kl+k3_weighted"))
    names = [f"single_pass {columns} bf16 {loss}" for columns, loss in shapes]
    for chip in CHIPS:
        for each in compiled(chip, *names, triton=path):
            assert each["spills"] <= most_spills(release), (chip, each)
            asked_on_the_chip = {"registers", "shared memory"}
            assert not {*each["flaws"]} - asked_on_the_chip, (chip, each)
    evidence(cases=len(CHIPS) * len(names))
