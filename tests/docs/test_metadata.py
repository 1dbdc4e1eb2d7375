"""What setup.py says of the project: one version, links that lead somewhere outside of the repository too, dated
changes."""

import ast
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import megatron_pg

ROOT = Path(__file__).parents[2]
HOME = "https://host/owner/name"
NEWER = re.compile(  # names that `typing` got after Python 3.10
    "Self|Never|LiteralString|Required|NotRequired|Unpack|TypeVarTuple|assert_never|assert_type|reveal_type|override|"
    "dataclass_transform|get_overloads|clear_overloads|TypeAliasType|ReadOnly|TypeIs|NoDefault|get_protocol_members"
)


@pytest.fixture
def said(monkeypatch):
    """What setup.py calls `setup` with, without setuptools, for a project that has a URL or has none."""

    def said(url: str) -> dict:
        found = {}
        monkeypatch.setitem(
            sys.modules, "setuptools", SimpleNamespace(setup=found.update, find_packages=lambda **_: [])
        )
        source = re.sub(r'^URL = ".*"', f'URL = "{url}"', (ROOT / "setup.py").read_text("utf-8"), flags=re.MULTILINE)
        exec(compile(source, "setup.py", "exec"), {"__file__": str(ROOT / "setup.py")})
        return found

    return said


def test_the_version_is_the_packages_and_the_newest_of_the_changes(said):
    changes = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert said("")["version"] == megatron_pg.__version__ == changes[0].split()[0]
    dates = [re.fullmatch(r"\d+\.\d+\.\d+ \((\d{4}-\d\d-\d\d)\)", change)[1] for change in changes[1:]]
    assert dates == sorted(dates, reverse=True)


def test_the_readme_is_the_long_description_with_absolute_links(said):
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]*)\)", said(HOME)["long_description"])
    assert len(links) > 10
    for picture, target in links:
        base = f"{HOME}/{'raw' if picture else 'blob'}/v{megatron_pg.__version__}/"
        assert target.startswith(base), target
        assert (ROOT / target.removeprefix(base).partition("#")[0]).is_file(), target
    assert all(link.startswith(f"{HOME}/") for link in said(HOME)["project_urls"].values())


def test_a_project_without_a_url_links_to_none(said):
    assert said("")["long_description"] == (ROOT / "README.md").read_text(encoding="utf-8")
    assert not said("")["project_urls"]


def test_every_extra_of_the_makefile_exists(said):
    used = re.findall(r'--editable "\.\[(\w+)\]"', (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert used
    assert set(used) <= said("")["extras_require"].keys()


def test_the_package_takes_from_typing_what_the_oldest_python_has_there(said):
    assert said("")["python_requires"] == ">=3.10"
    assert "typing-extensions" in said("")["install_requires"]
    for path in (ROOT / "megatron_pg").rglob("*.py"):
        imports = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
        taken = [each.name for node in imports if node.module == "typing" for each in node.names]
        assert not [name for name in taken if NEWER.fullmatch(name)], path
