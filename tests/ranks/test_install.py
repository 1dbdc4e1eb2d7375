"""docs/install.md: the example that it copies into an empty folder trains there."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import launches
import processes
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
MINIMAL = ROOT / "examples" / "minimal"


@launches.launch
def metrics(folder, full):
    """The lines of metrics.jsonl that the example leaves."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(processes.PACKAGE)}
    copied = shutil.copytree(MINIMAL, folder / "my_run")
    for name in re.findall(r"^cp (?!-r)(.*) my_run$", PAGE, re.MULTILINE)[0].split():
        shutil.copy(ROOT / name, copied)
    processes.run(["bash", str(copied / "launch.sh")], environment)
    return [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.full_tier("a further launch belongs to `make prove`")
def test_the_script_trains_as_it_stands(metrics):
    assert [line["iteration"] for line in metrics] == [1, 2]
    assert all(line["grad_norm"] > 0 for line in metrics)


def test_the_launch_names_what_a_cpu_needs():
    """As the example's own launch does."""
    launches_of = (MINIMAL / "launch.sh", ROOT / "examples" / "launch_cpu.sh")
    of_page, of_example = (
        re.search(r"CPU_ARGS=\((.*?)\)", path.read_text(encoding="utf-8"), re.DOTALL).group(1) for path in launches_of
    )
    assert of_page.split() == of_example.split()
