"""An installation that lacks what `megatron_pg.pretrain` needs says what, and how to add it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import processes
import pytest

from megatron_pg.declarations import installation
from megatron_pg.declarations.installation import TRAINING, missing_piece

ROOT = Path(__file__).parents[3]
NO_DEPS = "pip install --no-deps --ignore-requires-python megatron-core==0.17.1"
SAID = [
    ("megatron.training", "needs megatron.training, which megatron-core 0.16.1 does not contain. "),
    ("yaml", "needs the module yaml. Install what it needs with: pip install pyyaml einops psutil"),
]


@pytest.mark.parametrize(("missing", "said"), SAID)
def test_the_import_names_the_missing_piece_and_the_command_that_adds_it(missing, said):
    """In its own process, in which the module is not there, with the version that has no megatron.training."""
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        if name == {missing!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent)\n"
        "from importlib import metadata\n"
        "version = metadata.version\n"
        "metadata.version = lambda name: '0.16.1' if name == 'megatron-core' else version(name)\n"
        "import megatron_pg.pretrain\n"
    )
    environment = os.environ | {"PYTHONPATH": str(processes.PACKAGE)}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ImportError: megatron_pg.pretrain needs megatron.training, which")
    assert said in last
    assert re.search(r"pip install |Use Python 3\.11", last)


@pytest.mark.parametrize(
    ("python", "fix"),
    [
        ((3, 10), "Use Python 3.11 or later: no release that contains it has a wheel for Python 3.10.0."),
        ((3, 11), f"Install it with: {NO_DEPS}"),
        ((3, 12), 'Install it with: pip install "megatron-core>=0.17.1"'),
        ((3, 13), 'Install it with: pip install "megatron-core>=0.17.1"'),
    ],
)
def test_the_command_is_one_that_works_on_the_python_at_hand(python, fix, monkeypatch):
    monkeypatch.setattr(installation.sys, "version_info", (*python, 0))
    monkeypatch.setattr(installation.platform, "python_version", lambda: f"{python[0]}.{python[1]}.0")
    assert missing_piece(ModuleNotFoundError("No module", name="megatron.training.arguments")).endswith(fix)
    assert missing_piece(ModuleNotFoundError("No module", name="megatron")).endswith(f"not installed. {fix}")


def test_a_release_that_needs_a_later_python_is_named():
    said = missing_piece(ImportError("cannot import name 'override' from 'typing'", name="typing"))
    assert "(cannot import name 'override' from 'typing'). Use Python 3.12 or later, or another release:" in said


def test_other_errors_are_shown_as_they_are():
    said = missing_piece(ImportError("cannot import name 'x'", name="megatron.core.x"))
    assert "cannot be imported: cannot import name 'x'" in said


def test_the_modules_are_those_of_the_extra_training():
    (declared,) = re.findall(r"^TRAINING = (\[.*?\])", (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert declared == str(list(TRAINING)).replace("'", '"')
