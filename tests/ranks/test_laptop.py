"""docs/laptop.md: its script and launch, written into an empty folder as the page says, train."""

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
PAGE = (ROOT / "docs" / "laptop.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(?:python excerpt|bash)\n(.*?)```", PAGE, re.DOTALL)


def block(name: str) -> str:
    (found,) = (text for text in BLOCKS if text.startswith(f"# {name}\n"))
    return found


@launches.launch
def metrics(folder, full):
    """The lines of metrics.jsonl that the page's script leaves; the full tier runs it."""
    if not full:
        return []
    for name in ("my_grpo.py", "launch.sh"):
        (folder / name).write_text(block(name), encoding="utf-8")
    for name in ("cpu/cpu_megatron.py", "recipes/rollouts.jsonl"):
        shutil.copy(ROOT / "examples" / name, folder)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(processes.PACKAGE)}
    processes.run(["bash", "-c", 'cd "$0" && bash launch.sh', str(folder)], environment)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_script_trains_as_it_stands(metrics, full):
    if not full:
        pytest.skip("a launch of two ranks more, in the full tier")
    assert [line["iteration"] for line in metrics] == [1, 2]
    assert all(line["grad_norm"] > 0 for line in metrics)


def test_the_launch_names_what_a_cpu_needs():
    """As the example's own launch does."""
    example = (ROOT / "examples" / "launch_cpu.sh").read_text(encoding="utf-8")
    of_page, of_example = (re.search(r"CPU_ARGS=\((.*?)\)", text, re.DOTALL).group(1) for text in (PAGE, example))
    assert of_page.split() == of_example.split()
