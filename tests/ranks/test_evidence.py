"""The experiments of docs/evidence.md, each with a few steps: they run, go on where they were cut, and are shown."""

import argparse
import json
import os
import subprocess
from pathlib import Path

import launches
import processes
import pytest
from evidence import experiments as evidence

from megatron_pg.args import add_arguments, validate_args

ROOT = Path(__file__).parent.parent.parent
SMALL = (
    "--prompts-per-rollout 4 --global-batch-size 32 --micro-batch-size 8 --exact-match-prompts 8 --lr-warmup-iters 0"
)
START = f"{SMALL} --warm-up-iters 2 --train-iters 2"
ARMS = f"{SMALL} --warm-up-iters 2 --save-interval 2 --train-iters"


# An arm that ends after step 3, as if it had been cut.
CUT = """\
import sys
from pathlib import Path
from evidence import experiments

folder, start_flags, arm_flags = sys.argv[1:]
runs = experiments.Runs(Path(folder), experiments.SCALES["cpu"], start_flags=start_flags, arm_flags=arm_flags)
runs.train("start", 1)
cut = runs.of("float32-head", 1)
cut.mkdir()
sys.exit(runs.launch(cut, runs.flags("float32-head", 1, cut / "saved"), experiments.ARMS["float32-head"]))
"""


def program(folder: Path, what: str, *flags: str, check: bool = True) -> subprocess.CompletedProcess:
    script = str(ROOT / "examples/evidence/experiments.py")
    given = ["--scale", "cpu", "--seeds", "1", "--runs", str(folder)]
    return processes.run_warm(script, what, *flags, *given, check=check)


@pytest.mark.filterwarnings(
    "ignore::megatron_pg.flags.errors.ArgumentNotice", "ignore::megatron_pg.flags.errors.ArgumentWarning"
)
@pytest.mark.parametrize("scale", evidence.SCALES)
def test_the_flags_of_every_arm_are_accepted(scale, tmp_path):
    """With those that its launcher gives: what a run would be refused for at once."""
    python = tmp_path / "python"
    python.write_text("#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    runs = evidence.Runs(tmp_path, evidence.SCALES[scale])
    command = ["bash", str(ROOT / "examples" / evidence.SCALES[scale].launcher)]
    for name in (*evidence.STARTS, *evidence.ARMS):
        environment = os.environ | {"PYTHON": str(python), "PROCESSES": "1"}
        flags = runs.flags(name, 1, tmp_path / "saved")
        done = subprocess.run([*command, *flags], capture_output=True, text=True, check=True, env=environment)
        words = done.stdout.splitlines()
        assert words[-len(flags) :] == flags
        args, _ = add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_known_args(words)
        assert validate_args(args) is args


@launches.launch
def shown(folder, full):
    """Arms of two steps, of which the command finds the warm start and one step of one."""
    experiments = [*evidence.EXPERIMENTS] if full else ["head"]
    saved = "" if full else "--ckpt-format torch"  # in one layout; the usual format starts processes for every file
    processes.run_warm("-c", CUT, str(folder), f"{saved} {START}", f"{saved} {ARMS} 3")
    flags = f"--start-flags={saved} {START}", f"--arm-flags={saved} {ARMS} 4"
    done = program(folder, "run", *experiments, "--jobs", "1", *flags)
    assert "start-1" not in done.stdout
    printed = program(folder, "show", *experiments, "--json", str(folder / "shown"))
    return folder, experiments, printed.stdout


def test_every_arm_is_trained_once_and_shown(shown):
    folder, experiments, printed = shown
    for experiment in experiments:
        assert f"## {experiment}" in printed
        assert (folder / "shown" / f"{experiment}.png").stat().st_size > 10_000
        curves = json.loads((folder / "shown" / f"{experiment}.json").read_text())["curves"]
        assert [*curves] == [*evidence.EXPERIMENTS[experiment]]
        assert all(curve["1"]["reward"] for curve in curves.values())
        for arm in curves:
            assert f"| `{arm}` | 1 |" in printed
    assert not (folder / "token_mean-1" / "saved").exists()
    assert (folder / "start-1" / "saved").exists()


def test_a_run_that_was_cut_goes_on_from_its_checkpoint(shown):
    cut = shown[0] / "float32-head-1"
    assert [record["iteration"] for record in processes.records(cut / "metrics.jsonl")] == [3, 4]
    assert "at iteration 3" in (cut / "megatron.log").read_text()


def test_an_experiment_that_is_none_is_named(tmp_path):
    found = program(tmp_path, "run", "heads", check=False)
    assert found.returncode == 2
    assert "heads is none of aggregation, microbatches" in found.stderr
    assert not list(tmp_path.iterdir())
