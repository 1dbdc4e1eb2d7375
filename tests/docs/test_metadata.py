"""What setup.py says of the project: one version, links that lead somewhere outside of the repository too, dated changes."""

import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import megatron_pg

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def setup(monkeypatch):
    """The names of setup.py, run without setuptools, and what it calls `setup` with."""
    said = {}
    monkeypatch.setitem(sys.modules, "setuptools", SimpleNamespace(setup=said.update, find_packages=lambda **_: []))
    return SimpleNamespace(**runpy.run_path(str(ROOT / "setup.py")), said=said)


def test_the_version_is_the_packages_and_the_newest_of_the_changes(setup):
    changes = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert setup.said["version"] == megatron_pg.__version__ == changes[0].split()[0]
    dates = [re.fullmatch(r"\d+\.\d+\.\d+ \((\d{4}-\d\d-\d\d)\)", change)[1] for change in changes[1:]]
    assert dates == sorted(dates, reverse=True)


def test_the_readme_is_the_long_description_with_absolute_links(setup):
    home = "https://host/owner/name"
    assert setup.said["long_description"] == (setup.absolute(README, setup.URL) if setup.URL else README)
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]*)\)", setup.absolute(README, home))
    assert len(links) > 10
    for picture, target in links:
        base = f"{home}/{'raw' if picture else 'blob'}/v{megatron_pg.__version__}/"
        assert target.startswith(base), target
        assert (ROOT / target.removeprefix(base).partition("#")[0]).is_file(), target
    assert setup.absolute("[a](https://x/y), [b](#c)", home) == "[a](https://x/y), [b](#c)"


def test_every_extra_of_the_makefile_exists(setup):
    used = re.findall(r'--editable "\.\[(\w+)\]"', (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert used
    assert set(used) <= setup.said["extras_require"].keys()
