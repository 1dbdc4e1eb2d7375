"""NeMo-RL itself, unmodified, on two ranks: driver, sharding, packing and the worker's train, with our loss.

NEMO_RL, or a folder of HOSTS, is a checkout of commit 7ea279ab. Without it only the test of the harness runs.
"""

from pathlib import Path

import host_runs
import launches
import processes
import pytest
from host_runs import LIMIT

PACKED = ("dp2, packed", "cp2, packed", "tp2, packed")
LAYOUTS = ("dp2, padded rows", "dp2, dynamic batches", *PACKED)
CHECKOUT = host_runs.checkout("NEMO_RL")
needs_checkout = pytest.mark.skipif(
    CHECKOUT is None, reason="needs a checkout of NeMo-RL: make prove HOSTS=FOLDER, or NEMO_RL"
)


@launches.launch
def found(folder, full):
    """Figures of `nemo_recipe`."""
    return CHECKOUT and host_runs.figures(folder, "nemo_recipe", full=full, NEMO_RL=CHECKOUT)


@needs_checkout
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_hosts_loss_equals_its_formulas(found, layout):
    errors = found[f"theirs, {layout}"]
    assert len(errors) == 5
    assert max(errors.values()) < LIMIT


@needs_checkout
@pytest.mark.proof("Hosts: NeMo-RL's own code, from rows to gradients on 2 real ranks, equals plain loops")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_and_metrics_are_those_of_plain_loops(found, layout, steps, evidence):
    errors = found[f"ours, {layout}, steps {steps}"]
    assert len(errors) == 16  # aggregations and objectives
    evidence(cases=len(errors), worst=max(errors.values()), tolerance=LIMIT)
    assert found[f"metrics, {layout}, steps {steps}"] < 2 * LIMIT


@needs_checkout
@pytest.mark.parametrize("layout", LAYOUTS)
def test_their_options_alone_make_their_gradient(found, layout):
    errors = found[f"ours against theirs, {layout}"]
    assert len(errors) == 15 + (found["has fused linear"] and layout not in PACKED)
    assert max(errors.values()) < LIMIT


@needs_checkout
def test_a_draft_models_loss_is_added_as_to_theirs(found):
    assert found["draft"] < LIMIT


@needs_checkout
@pytest.mark.parametrize("layout", PACKED)
def test_kernels_may_write_over_packed_logits(found, layout):
    assert found[f"Triton, {layout}"] < LIMIT


def test_the_checkouts_harness_finds_modules_that_the_installed_megatron_lacks(tmp_path: Path):
    module = tmp_path / "nemo_rl" / "distributed" / "model_utils.py"
    module.parent.mkdir(parents=True)
    module.write_text("class AllGatherCPTensor:\n    backward = None\n", encoding="utf-8")
    script = (
        "import sys, nemo_trainer\n"
        "nemo_trainer.load(sys.argv[1])\n"
        "import megatron.bridge.training.utils.train_utils as train_utils\n"
        "print(train_utils.reduce_max_stat_across_model_parallel_group(3, mp_group=None))\n"
    )
    assert processes.run_warm("-c", script, str(tmp_path)).stdout.strip() == "3"
