"""py.typed means something: a type checker sees what a user's code calls, in the quickstart's blocks and by name."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import launches
from processes import PACKAGE

import megatron_pg

ROOT = Path(__file__).parents[2]


def checked(folder: Path, **sources: str) -> SimpleNamespace:
    """What mypy says of a user's files, line by line."""
    files = {name: folder / f"{name}.py" for name in sources}
    for name, file in files.items():
        file.write_text(sources[name], encoding="utf-8")
    cache = ["--cache-dir", str(ROOT / ".mypy_cache"), "--config-file", str(ROOT / "pyproject.toml")]
    command = [sys.executable, "-m", "mypy", *cache, "--check-untyped-defs", "--no-implicit-reexport"]
    command += map(str, files.values())
    done = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True, check=False)  # tests change the folder
    assert not done.stderr, done.stderr
    lines = [line.partition(".py:") for line in done.stdout.splitlines()]
    return SimpleNamespace(**{name: [said for of, _, said in lines if Path(of).name == name] for name in files})


NAMES = [name for name in megatron_pg.__all__ if name != "__version__"]


@launches.launch
def said(folder, full):
    """What mypy says of the quickstart's code, of every public name, and of wrong calls."""
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    quickstart = "\n".join(re.findall(r"```python(?: excerpt)?\n(.*?)```", page, re.DOTALL))
    assert "Sample.build(" in quickstart
    names = "def my_rollouts(*a: Any, **k: Any) -> Any: ...\n"
    revealed = "".join(f"reveal_type(megatron_pg.{name})\n" for name in NAMES)
    wrong = "from megatron_pg import pack, plan_step\npack('text', rows=1.5)\nplan_step([1], aggregation=3)\n"
    return checked(
        folder,
        of_quickstart=f"from typing import Any\n{names}{quickstart}",
        of_names=f"import megatron_pg\n{revealed}",
        of_wrong_calls=wrong,
    )


def test_the_quickstarts_code_has_no_type_error(said):
    # a name that is not defined is the reader's own
    assert [line for line in said.of_quickstart if "name-defined" not in line] == []


def test_every_public_name_has_its_own_type(said):
    lines = said.of_names
    assert len(lines) == len(NAMES)
    without = 'Revealed type is "object"'
    assert [line for line in lines if without in line or line[-4:-1] == "Any" or ": error:" in line] == []


def test_a_wrong_call_is_a_type_error(said):
    errors = [line.partition(":")[0] for line in said.of_wrong_calls if "error:" in line]
    assert errors == ["2", "2", "2", "3"]
