"""Runs of examples/launch_cpu.sh, and what they leave behind."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import processes

# Warm-up to step 5, then rollout batches of 64 samples, and a checkpoint of every step.
FLAGS = {
    "warm-up-iters": 5,
    "train-iters": 14,
    "prompts-per-rollout": 8,
    "exact-match-interval": 4,
    "exact-match-prompts": 16,
    "progress-interval": 1,
    "lr-warmup-iters": 1,
    "lr": 0.01,  # so that warm-up of 5 steps is enough for rewards
    "global-batch-size": 16,
    "micro-batch-size": 8,
    "ckpt-format": "torch",  # Megatron's default format needs a further package on a CPU
    "save-interval": 1,
}


def words_of(flags: dict[str, object]) -> list[str]:
    """As on a command line."""
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def launch(
    run: Path, *flags: str, ranks: int, script: str = "", check: bool = True, **env: str
) -> subprocess.CompletedProcess:
    """One run of the launch script, from its begin to its end. With `check=False` it must fail."""
    return processes.wait_for(begin(run, *flags, ranks=ranks, script=script, **env), check=check)


def begin(run: Path, *flags: str, ranks: int, script: str = "", **env: str) -> subprocess.Popen:
    """The launch script; `script`, of tests/ranks, stands for the example."""
    run.mkdir(exist_ok=True, parents=True)
    environment = processes.with_warm_python(processes.environment())
    if script:
        environment["PYTHON"] = _python_for(script, run, environment["PYTHON"])
    environment |= {"RUN_DIR": str(run), "PROCESSES": str(ranks)} | env
    command = ["bash", str(processes.ROOT / "examples" / "launch_cpu.sh"), *flags]
    return processes.begin(command, environment)


def _python_for(script: str, folder: Path, interpreter: str) -> str:
    """An interpreter that starts the script for the example."""
    python, other = folder / f"python_{Path(script).stem}", processes.TESTS / "ranks/programs" / script
    python.write_text(f'#!/bin/bash\nexec "{interpreter}" "${{@/examples\\/train_grpo.py/{other}}}"\n')
    python.chmod(0o755)
    return str(python)


def saved_step(run: Path) -> int:
    """The step of the last whole checkpoint, 0 without one."""
    path = run / "saved" / "latest_checkpointed_iteration.txt"
    return int(path.read_text() or 0) if path.exists() else 0


def state(run: Path, step: int) -> dict[str, str]:
    """sha256 of every tensor in a checkpoint: weights, optimizer and random states; read from the archive, not
    unpickled."""
    found = {}
    for path in sorted((run / "saved" / f"iter_{step:07d}").rglob("*.pt")):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if "/data/" in name:
                    found[f"{path.parent.name}/{name}"] = hashlib.sha256(archive.read(name)).hexdigest()
    return found


def assert_same(found: Path, expected: Path, step: int, *files: str) -> int:
    """Number of tensors that were compared in the checkpoints of the step; the files are compared whole."""
    assert len(state(expected, step)) > 30
    assert state(found, step) == state(expected, step)
    for file in files:
        assert (found / file).read_bytes() == (expected / file).read_bytes(), file
    return len(state(expected, step))
