"""An installation that lacks what `megatron_pg.pretrain` needs says what, and how to add it."""

import importlib
import re
import sys
from importlib import metadata
from pathlib import Path

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
def test_the_import_names_the_missing_piece_and_the_command_that_adds_it(missing, said, monkeypatch):
    """The import runs again without the module, with the version that has no megatron.training."""
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.16.1" if name == "megatron-core" else version(name))
    importlib.import_module("megatron_pg.pretrain")  # so that everything below it is imported, once
    for name in [*sys.modules]:
        if name.startswith(("megatron.training", "megatron_pg.pretrain")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError) as refused:
        importlib.import_module("megatron_pg.pretrain")
    text = str(refused.value)
    assert text.startswith("megatron_pg.pretrain needs megatron.training, which")
    assert said in text
    assert re.search(r"pip install |Use Python 3\.11", text)


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
