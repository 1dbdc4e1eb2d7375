"""NeMo-RL itself, unmodified, on two ranks: its driver, its sharding and packing, its worker's train, with our loss in its place.

NEMO_RL names a checkout of commit 7ea279ab; without it these tests are skipped.
"""

import json
import os
import sys

import launches
import pytest
from processes import ROOT, environment, run

LIMIT = 1e-6  # of gradients and metrics in float32 against float64
PACKED = ("dp2, packed", "cp2, packed", "tp2, packed")
LAYOUTS = ("dp2, padded rows", "dp2, dynamic batches", *PACKED)
pytestmark = pytest.mark.skipif("NEMO_RL" not in os.environ, reason="NEMO_RL names no checkout of NeMo-RL")


@launches.launch
def found(folder, full):
    """Figures of `nemo_recipe`."""
    if "NEMO_RL" not in os.environ:
        return None
    runner = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run([*runner, str(ROOT / "tests" / "ranks" / "recipe_ranks.py"), str(folder), "nemo_recipe"], environment())
    return json.loads((folder / "nemo_recipe.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_their_own_loss_is_what_its_formulas_say(found, layout):
    errors = found[f"theirs, {layout}"]
    assert len(errors) == 5
    assert max(errors.values()) < LIMIT


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_and_metrics_are_those_of_plain_loops(found, layout, steps):
    errors = found[f"ours, {layout}, steps {steps}"]
    assert len(errors) == 16  # aggregations and objectives
    assert max(errors.values()) < LIMIT
    assert found[f"metrics, {layout}, steps {steps}"] < 2 * LIMIT


@pytest.mark.parametrize("layout", LAYOUTS)
def test_their_options_alone_make_their_gradient(found, layout):
    errors = found[f"ours against theirs, {layout}"]
    assert len(errors) == 10
    assert max(errors.values()) < LIMIT


@pytest.mark.parametrize("layout", PACKED)
def test_kernels_may_write_over_packed_logits(found, layout):
    assert found[f"Triton, {layout}"] < LIMIT
