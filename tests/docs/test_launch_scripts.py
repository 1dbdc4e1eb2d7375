"""The launch scripts of examples/: one run folder, short runs, and --help with every flag."""

import itertools
import os
import subprocess
from pathlib import Path

import launches
import processes
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = ["launch_cpu.sh", "launch_gpu.sh"]


def started(script: str, *flags: str, **environment: str) -> tuple[dict[str, str], str]:
    """What the script gives to Python: the last value of each flag. And what it says on standard error."""
    env = {name: value for name, value in os.environ.items() if name not in ("RUN_DIR", "NODES")}
    env |= {"PYTHON": "echo", "PROCESSES": "1"} | environment
    done = subprocess.run(["bash", EXAMPLES / script, *flags], env=env, capture_output=True, text=True, check=True)
    words = done.stdout.split()
    return {name: value for name, value in itertools.pairwise(words) if name.startswith("--")}, done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("flags", "environment", "folder"),
    [
        ([], {}, "runs/grpo"),
        ([], {"RUN_DIR": "runs/a"}, "runs/a"),
        (["--run-dir", "runs/b"], {"RUN_DIR": "runs/a"}, "runs/b"),
        (["--run-dir", "runs/c", "--seed", "1", "--run-dir", "runs/b"], {}, "runs/b"),
    ],
)
def test_everything_that_a_run_leaves_is_in_one_folder(script, flags, environment, folder):
    found, _ = started(script, *flags, **environment)
    assert found["--run-dir"] == folder
    assert found["--megatron-log"] == f"{folder}/megatron.log"
    assert found["--tensorboard-dir"] == f"{folder}/tensorboard"


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_equals_sign_is_read_and_folders_that_are_given_win(script):
    found, _ = started(script, "--run-dir=runs/b", "--tensorboard-dir", "elsewhere")
    assert (found["--megatron-log"], found["--tensorboard-dir"]) == ("runs/b/megatron.log", "elsewhere")


@pytest.mark.parametrize(
    ("script", "flags", "warm_up", "is_said"),
    [
        ("launch_cpu.sh", [], 10, False),
        ("launch_cpu.sh", ["--train-iters", "11"], 10, False),
        ("launch_cpu.sh", ["--train-iters", "10"], 5, True),
        ("launch_cpu.sh", ["--train-iters=8"], 4, True),
        ("launch_cpu.sh", ["--train-iters", "1"], 0, True),
        ("launch_cpu.sh", ["--train-iters", "8", "--lr-decay-iters", "20"], 10, False),
        ("launch_cpu.sh", ["--train-iters", "8", "--lr-warmup-iters", "9"], 9, False),  # Python refuses it by name
        ("launch_gpu.sh", ["--train-iters", "50"], 25, True),
    ],
)
def test_the_warm_up_is_shorter_than_a_short_run(script, flags, warm_up, is_said):
    found, said = started(script, *flags)
    assert found["--lr-warmup-iters"] == str(warm_up)
    assert ("--lr-warmup-iters is" in said) == is_said


@launches.launch
def shown_help(folder, full):
    """What the launch script prints for --help, with the exit code of the example."""
    command = ["bash", str(EXAMPLES / "launch_cpu.sh"), "--pg-temperature", "1", "--help"]
    return processes.run(command, processes.with_warm_python(processes.environment())).stdout


@pytest.mark.parametrize(
    "flag", ["--loss-aggregation", "--pg-objective", "--docs-per-step", "--warm-up-iters", "--run-dir", "--train-iters"]
)
def test_help_shows_the_flags_of_megatron_the_plugin_and_the_script(shown_help, flag):
    assert f"\n  {flag} " in shown_help
