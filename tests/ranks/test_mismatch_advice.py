"""The example with its own rollout engine: one at the trainer's temperature gives no advice, another one does."""

from functools import partial

import example_runs
import launches
import pytest
from processes import beside_each_other, records

FLAGS = example_runs.words_of(example_runs.FLAGS | {"train-iters": 8})  # five steps of it imitate, without an engine
TEMPERATURES = {"equal": "1.0", "hot": "1.4"}


@launches.launch
def runs(folder, full):
    """By the engine, what two ranks printed, and their steps."""
    found = {}

    def run(name: str, *flags: str, temperature: str) -> None:
        script = {"script": "mismatched_example.py", "ENGINE_TEMPERATURE": temperature}
        done = example_runs.launch(folder / name, *FLAGS, *flags, ranks=2, **script)
        found[name] = done.stdout, records(folder / name / "metrics.jsonl")

    beside_each_other(*(partial(run, name, temperature=value) for name, value in TEMPERATURES.items()))
    run("silent", "--pg-no-mismatch-advice", temperature=TEMPERATURES["hot"])
    return found


def test_equal_sides_give_no_advice(runs):
    printed, steps = runs["equal"]
    assert "advice:" not in printed
    assert max(step["mismatch/spread"] for step in steps[5:]) < 1e-5  # of float32
    assert not any("mismatch/temperature" in step and abs(step["mismatch/temperature"] - 1) > 0.01 for step in steps)


def test_another_temperature_is_estimated_and_said_once(runs):
    printed, steps = runs["hot"]
    estimates = [step["mismatch/temperature"] for step in steps[5:]]
    assert estimates == pytest.approx([1 / 1.4] * len(estimates), rel=0.1)
    (line,) = [line for line in printed.splitlines() if "advice:" in line]
    assert ". Likely: the temperatures differ. Run megatron-pg mismatch" in line
    assert {step["mismatch/rank"] for step in steps[5:]} <= {0, 1}
    assert not any(name.startswith("mismatch/") for step in steps[:5] for name in step)  # no rollouts yet


def test_the_flag_takes_the_advice_away_and_nothing_else(runs):
    printed, steps = runs["silent"]
    assert "advice:" not in printed
    assert steps == runs["hot"][1]
