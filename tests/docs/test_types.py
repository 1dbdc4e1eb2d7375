"""py.typed means something: a type checker sees what a user's code calls, in the quickstart's blocks and by name."""

import re
from pathlib import Path

import pytest
from mypy import api

import megatron_pg

ROOT = Path(__file__).parents[2]


def checked(tmp_path: Path, source: str) -> list[str]:
    """What mypy says of a user's file, line by line."""
    file = tmp_path / "users.py"
    file.write_text(source, encoding="utf-8")
    cache = ["--cache-dir", str(ROOT / ".mypy_cache"), "--config-file", str(ROOT / "pyproject.toml")]
    said, errors, _ = api.run([*cache, "--check-untyped-defs", "--no-implicit-reexport", str(file)])
    assert not errors, errors
    return [line.partition("users.py:")[2] for line in said.splitlines() if "users.py:" in line]


@pytest.fixture(scope="module")
def quickstart() -> str:
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    return "\n".join(re.findall(r"```python(?: excerpt)?\n(.*?)```", page, re.DOTALL))


def test_the_quickstarts_code_has_no_type_error(tmp_path, quickstart):
    assert "Sample.build(" in quickstart
    names = "def my_rollouts(*a: Any, **k: Any) -> Any: ...\n"
    said = checked(tmp_path, f"from typing import Any\n{names}{quickstart}")
    assert [line for line in said if "name-defined" not in line] == []  # what the reader's own script defines


def test_every_public_name_has_its_own_type(tmp_path):
    names = [name for name in megatron_pg.__all__ if name != "__version__"]
    said = checked(tmp_path, "import megatron_pg\n" + "".join(f"reveal_type(megatron_pg.{name})\n" for name in names))
    assert len(said) == len(names)
    assert [
        line for line in said if 'Revealed type is "object"' in line or line[-4:-1] == "Any" or ": error:" in line
    ] == []


def test_a_wrong_call_is_a_type_error(tmp_path):
    said = checked(
        tmp_path, "from megatron_pg import pack, plan_step\npack('text', rows=1.5)\nplan_step([1], aggregation=3)\n"
    )
    assert [line.partition(":")[0] for line in said if "error:" in line] == ["2", "2", "2", "3"]
