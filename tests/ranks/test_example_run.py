"""The main job in short form, through Megatron's pretrain(), as a user starts it: files, writers, determinism."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import HANG

ROOT = Path(__file__).parents[2]
SHORT = [
    "--warm-up-iters",
    "1",
    "--train-iters",
    "5",
    "--exact-match-interval",
    "2",
    "--progress-interval",
    "1",
    "--lr-warmup-iters",
    "1",
]


def launch(run: Path, *flags: str) -> str:
    """Output of one run of the launch script."""
    environment = os.environ | {"PYTHON": sys.executable, "RUN_DIR": str(run), "WANDB_MODE": "offline"}
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / "launch_cpu.sh"), *SHORT, *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """A run that samples, with both writers, and what it printed."""
    run = tmp_path_factory.mktemp("sampled")
    writers = ["--wandb-project", "pg", "--wandb-exp-name", "test", "--wandb-save-dir", str(run / "wandb")]
    return run, launch(run, *writers)


def test_the_run_folder_is_complete(sampled):
    run, _ = sampled
    assert [r["iteration"] for r in records(run)] == [1, 2, 3, 4, 5]
    assert [r["phase"] for r in records(run)] == ["warm-up", "grpo", "grpo", "grpo", "grpo"]
    assert json.loads((run / "arguments.json").read_text())["loss_aggregation"] == "sample_mean"
    assert (run / "curves.png").stat().st_size > 10_000
    assert len((run / "rollouts.jsonl").read_text().splitlines()) == 1 + 4 * 128


def test_the_terminal_shows_the_objective_the_sign_and_the_time_left(sampled):
    _, output = sampled
    assert "(1/N_r) Σ_rollouts (Σ m·ℓ)/M_rollout  (--loss-aggregation sample_mean)" in output
    assert "pg_loss -1.0000" in output
    assert "left" in output
    assert "metrics kl_new_ref, ratio_new_ref are absent: the samples have no ref_logprobs" in output


def test_tensorboard_holds_the_same_values_under_the_same_names(sampled):
    from tensorboard.backend.event_processing import event_accumulator

    run, _ = sampled
    events = event_accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for name in ("pg_loss", "kl_new_old", "ess", "min_advantage", "num_tokens"):
        shown = [(e.step, e.value) for e in events.Scalars(name)]
        rounding = 1e-7 if name == "pg_loss" else 1e-30  # Megatron writes that one, summed in float32
        assert shown == [(r["iteration"], pytest.approx(r[name], rel=1e-6, abs=rounding)) for r in records(run)], name
    assert min(e.value for e in events.Scalars("pg_loss")) < 0


def test_wandb_holds_the_same_names(sampled):
    run, _ = sampled
    (file,) = (run / "wandb").rglob("*.wandb")
    content = file.read_bytes()
    assert all(name.encode() in content for name in ("pg_loss", "kl_new_old", "aggregation_ess", "max_advantage"))


def test_the_same_seed_twice_gives_the_same_metrics(sampled, tmp_path):
    run, _ = sampled
    launch(tmp_path)
    assert records(tmp_path) == records(run)


def test_training_from_a_file_scales_with_the_divisor_and_changes_nothing_else(sampled, tmp_path):
    run, _ = sampled
    found = []
    for divisor in (6, 12):
        where = tmp_path / str(divisor)
        constant = ["--loss-aggregation", "constant", "--loss-aggregation-divisor", str(divisor)]
        launch(
            where, "--rollouts", str(run / "rollouts.jsonl"), "--train-iters", "1", "--lr-warmup-iters", "0", *constant
        )
        found.append(records(where)[0])
    assert found[0]["kl_new_old"] > 0  # off-policy: another model sampled
    assert found[0]["pg_loss"] == 2 * found[1]["pg_loss"] != 0
    scaled = {"pg_loss", "grad_norm"}
    assert {k: v for k, v in found[0].items() if k not in scaled} == {
        k: v for k, v in found[1].items() if k not in scaled
    }


def test_a_sampler_of_two_stages_has_the_float32_logits_of_the_loss(tmp_path):
    """bfloat16 stages, and logits in float32 on the last: what is sent has one dtype, and the first ratio is 1."""
    flags = ["--pipeline-model-parallel-size", "2", "--num-layers", "2", "--bf16", "--pg-fused-head"]
    launch(tmp_path, *flags, "--warm-up-iters", "0", "--train-iters", "2")
    assert records(tmp_path)[0]["mean_abs_log_ratio"] < 1e-6


def test_ranks_that_share_their_experts_sample_for_the_same_number_of_tokens(tmp_path):
    """Without it the ranks wait for each other for ever: one has a response that the other's prompts do not need."""
    experts = ["--num-experts", "4", "--moe-aux-loss-coeff", "0", "--moe-token-dispatcher-type", "alltoall"]
    sharing = ["--disable-bias-linear", "--expert-model-parallel-size", "2"]
    launch(tmp_path, *experts, *sharing, "--warm-up-iters", "0", "--train-iters", "2")
    assert records(tmp_path)[0]["mean_abs_log_ratio"] < 1e-6
    assert records(tmp_path)[1]["exact_match"] >= 0
