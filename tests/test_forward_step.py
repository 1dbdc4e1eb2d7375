"""The whole step through Megatron's schedules, DDP and finalize, on real ranks over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from compare import gradient_error_by_name, metrics_error

HERE = Path(__file__).parent
MODES = ["sample_mean", "prompt_mean", "token_mean", "constant"]
LAYOUTS = {
    "dp2": MODES,
    "tp2": ["constant", "token_mean"],
    "pp2": ["prompt_mean", "token_mean"],
    "cp2": MODES,  # padded rows
    "cp2t": ["sample_mean", "token_mean"],  # packed rows
    "dp2t": ["constant"],
}
FAULTS = {
    "dp2-constant-nan": "NonFiniteLossError: non-finite loss at rank 1, sample",
    "pp2-token_mean-nan": "NonFiniteLossError: non-finite loss at rank 1, sample",
    "tp2-constant-peers": "ContractError: step plan differs between ranks 0 and 1",
    "dp2-constant-ended": "rank 1: the data ended after 1 of the 2 micro-batches of this step",
    "tp2-constant-ended": "the data ended after 1 of the 2 micro-batches of this step",
    "pp2-token_mean-raises": "RuntimeError: the sampler broke",
    "dp2-token_mean-masked": "the step has no trained token",
    "dp2-constant-detached": "call PolicyGradientStep.attach",
    "pp2-token_mean-detached": "call PolicyGradientStep.attach",
    "dp2-sample_mean-reducer": "rank 1: RuntimeError: my reducer broke",
    "tp2-constant-advantages": "ContractError: step plan differs between ranks 0 and 1",
    "tp2-constant-vocabulary": "holds token id 16, the vocabulary has 16",
    "dp2-constant-positions": "holds a document of 25 positions, the model has 24",
    "dp2-constant-unreduced": "config.finalize_model_grads_func is None",
    "pp2-token_mean-shape": "pipeline parallelism sends (",
    "dp2-token_mean-flag": "built with calculate_per_token_loss=True, the arguments say False",
}
EVALUATION = "dp2-constant-evaluate"


def launch(processes: int, out: Path, cases: list[str]) -> subprocess.Popen:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [str(HERE), str(HERE.parent / "examples"), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        ),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    runner = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.Popen(
        [*runner, str(HERE / "ranks.py"), str(out), *cases],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Folders of one launch of two ranks and one of a single rank, which run beside each other."""
    two, one = tmp_path_factory.mktemp("two"), tmp_path_factory.mktemp("one")
    cases = [f"{layout}-{mode}" for layout, modes in LAYOUTS.items() for mode in modes]
    started = {
        two: launch(2, two, [*cases, EVALUATION, *FAULTS]),
        one: launch(1, one, [f"dp1-{mode}" for mode in MODES]),
    }
    try:
        for process in started.values():
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, output[-4000:]
    finally:
        for process in started.values():
            process.kill()
            process.wait()
            process.stdout.close()
    return two, one


def gradients(folder: Path, case: str) -> dict[str, torch.Tensor]:
    """Whole gradients by global name, from the ranks' parts."""
    parts: dict[str, dict[int, np.ndarray]] = {}
    for path in sorted(folder.glob(f"{case}.*.npz")):
        for key, value in np.load(path).items():
            name, axis, tp_rank = key.split("|")
            parts.setdefault(f"{name}|{axis}", {})[int(tp_rank)] = value
    whole = {}
    for key, shards in parts.items():
        name, axis = key.split("|")
        pieces = [torch.from_numpy(shards[r]) for r in sorted(shards)]
        whole[name] = pieces[0] if int(axis) < 0 else torch.cat(pieces, dim=int(axis))
    return whole


def read(folder: Path, case: str, rank: int) -> dict:
    return json.loads((folder / f"{case}.{rank}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("layout", "mode"), [(layout, mode) for layout, modes in LAYOUTS.items() for mode in modes])
def test_every_parameters_gradient_equals_that_of_one_process(results, layout, mode):
    two, one = results
    expected, found = gradients(one, f"dp1-{mode}"), gradients(two, f"{layout}-{mode}")
    assert any(gradient.any() for gradient in expected.values())
    assert gradient_error_by_name(found, expected) <= 2e-6


@pytest.mark.parametrize(("layout", "mode"), [(layout, mode) for layout, modes in LAYOUTS.items() for mode in modes])
def test_every_rank_reports_the_metrics_of_one_process(results, layout, mode):
    two, one = results
    expected = read(one, f"dp1-{mode}", 0)
    first = read(two, f"{layout}-{mode}", 0)
    assert first["metrics"] == read(two, f"{layout}-{mode}", 1)["metrics"]
    assert first["num_tokens"] == expected["num_tokens"]
    assert metrics_error(first["metrics"], expected["metrics"]) <= 2e-5


@pytest.mark.parametrize("mode", MODES)
def test_megatrons_own_average_of_the_report_is_the_objective(results, mode):
    two, _ = results
    reported = [pair for rank in (0, 1) for pair in read(two, f"dp2-{mode}", rank)["reported"]]
    value = sum(a for a, _ in reported) / sum(b for _, b in reported)
    assert value == pytest.approx(read(two, f"dp2-{mode}", 0)["metrics"]["pg_loss"], rel=1e-5, abs=1e-7)


def test_evaluation_reports_the_same_metrics_and_leaves_no_gradient(results):
    two, _ = results
    assert read(two, EVALUATION, 0)["metrics"] == read(two, "dp2-constant", 0)["metrics"]
    assert all(not g.any() for g in gradients(two, EVALUATION).values())


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_on_one_rank_is_a_named_error_on_every_rank(results, case):
    two, _ = results
    messages = [(two / f"{case}.{rank}.error").read_text(encoding="utf-8") for rank in (0, 1)]
    for message in messages:
        assert FAULTS[case] in message
