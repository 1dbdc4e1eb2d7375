"""A run that lasts: steps of documents leave nothing behind in their process (programs/soak.py)."""

import json

import launches
import processes
import pytest
import soak

MOST = {"memory": 10e6, "objects": 1000}  # of growth: what allocators keep, and where in a cycle a step ends; else 0


@launches.launch
def steps(folder, full):
    """What the program printed."""
    size = ("1_000_000", "4") if full else ("1_200", "1")
    done = processes.run_warm(str(processes.TESTS / "fuzz/programs/soak.py"), *size)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.proof(
    "Documents per step: soak: no memory, object, descriptor, thread, hook or wrapper is left (micro-batches)"
)
def test_steps_leave_nothing_behind(steps, evidence):
    grown = steps["grown"]
    assert {name: size for name, size in grown.items() if size > MOST.get(name, 0)} == {}, steps
    assert steps["is_finite"]
    evidence(cases=steps["microbatches"])


def test_what_a_step_leaves_is_seen():
    """Control: hooks and wrappers are counted."""
    model = soak.Table()
    before, inside = soak.traces(model), model.config.finalize_model_grads_func
    model.config.finalize_model_grads_func = lambda *given: inside(*given)
    model.register_forward_hook(print)
    model.logits.register_hook(print)
    after = soak.traces(model)
    assert (after["hooks"], after["wrappers of finalize"]) == (before["hooks"] + 2, before["wrappers of finalize"] + 1)
