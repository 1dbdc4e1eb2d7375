"""What the tests start imports the package that they import, a mutated copy of it too."""

import re
import shutil
import subprocess
import sys

import processes

STARTED = """
import sys
import processes
command = [sys.executable, sys.argv[1]]
print(processes.run(command, processes.environment()).stdout.splitlines()[-1])
"""


def test_a_started_process_imports_the_copy_that_the_tests_import(tmp_path):
    shutil.copytree(processes.PACKAGE / "megatron_pg", tmp_path / "megatron_pg")
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "rank.py").write_text("import megatron_pg\nprint(megatron_pg.__file__)\n")
    support = processes.TESTS / "helpers/runs"
    environment = processes.ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}:{support}"}
    command = [sys.executable, "-c", STARTED, str(tmp_path / "ranks" / "rank.py")]
    done = subprocess.run(command, env=environment, cwd=support, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "megatron_pg" / "__init__.py")


def test_no_test_starts_a_process_on_the_repository_whatever_it_imports_itself():
    """A working folder or a path of PYTHONPATH: those of the imported package are `processes.PACKAGE` and
    `environment()`."""
    sources = {path: path.read_text(encoding="utf-8") for path in processes.TESTS.rglob("*.py")}
    found = re.compile(r"cwd=(processes\.)?ROOT\b|\"PYTHONPATH\": str\((processes\.)?ROOT\)")
    assert [path.name for path, text in sources.items() if found.search(text)] == []
