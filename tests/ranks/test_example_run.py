"""The main job in short form, through Megatron's pretrain(), as a user starts it: files, writers, determinism."""

import json
from functools import partial
from pathlib import Path

import example_runs
import launches
import pytest
import torch
from processes import beside_each_other, records

from megatron_pg import read_rollouts
from megatron_pg.cli import main
from megatron_pg.cli.command_line import read_command_line

SHORT = example_runs.words_of(
    {
        "warm-up-iters": 1,
        "train-iters": 5,
        "exact-match-interval": 2,
        "exact-match-prompts": 16,
        "progress-interval": 1,
        "lr-warmup-iters": 1,
    }
)

# a quarter of the rollouts
FEW = ("--prompts-per-rollout", "8", "--global-batch-size", "64", "--micro-batch-size", "32")
DIVISORS = (6, 12)


def launch(run: Path, *flags: str, ranks: int = 2) -> Path:
    """One run; what it printed is in its folder too."""
    done = example_runs.launch(run, *SHORT, *flags, ranks=ranks, WANDB_MODE="offline")
    (run / "printed").write_text(done.stdout, encoding="utf-8")
    return run


@launches.launch
def sampled(folder, full):
    """A run that samples, with both writers. In addition, first steps on its samples, by the divisor of the
    constant."""
    run = folder / "sampled"
    launch(run, "--wandb-project", "pg", "--wandb-exp-name", "test", "--wandb-save-dir", str(run / "wandb"))

    def from_its_file(divisor: int) -> None:
        constant = ["--loss-aggregation", "constant", "--loss-aggregation-divisor", str(divisor)]
        samples = ["--rollouts", str(run / "rollouts.jsonl"), "--train-iters", "1", "--lr-warmup-iters", "0"]
        launch(folder / str(divisor), *samples, *constant, ranks=1)

    beside_each_other(*(partial(from_its_file, divisor) for divisor in DIVISORS))
    return run


@launches.launch
def of_two_stages(folder, full):
    """bfloat16 stages, and logits in float32 on the last: what is sent has one dtype. The model is a HybridModel with
    tied embeddings and two virtual stages per rank."""
    stages = ["--pipeline-model-parallel-size", "2", "--hybrid-layer-pattern", "*|-|*|-", "--micro-batch-size", "4"]
    return launch(folder, *FEW, *stages, "--bf16", "--pg-fused-head", "--warm-up-iters", "0", "--train-iters", "2")


@launches.launch
def of_shared_experts(folder, full):
    """Two ranks with two experts each."""
    experts = ["--num-experts", "4", "--moe-aux-loss-coeff", "0", "--moe-token-dispatcher-type", "alltoall"]
    sharing = ["--disable-bias-linear", "--expert-model-parallel-size", "2"]
    return launch(folder, *FEW, *experts, *sharing, "--warm-up-iters", "0", "--train-iters", "2")


@launches.launch
def taught(folder, full):
    """A run that saves its policy, and one that begins with it and has it as its teacher; in bfloat16, which no module
    is built in."""
    saved = str(folder / "teacher" / "saved")
    small = [*FEW, "--bf16"]
    launch(folder / "teacher", *small, "--save", saved, "--save-interval", "2", "--train-iters", "2", ranks=1)
    begins = ["--load", saved, "--finetune", "--no-load-optim", "--no-load-rng", *small]
    begins += ["--warm-up-iters", "0", "--train-iters", "2"]
    terms = ["--pg-term", "teacher:opd,on=rl,weight=0.5,aggregation=token_mean", "--lr-warmup-iters", "0"]
    return launch(folder / "student", *begins, *terms, "--teacher", saved, ranks=1)


@launches.launch
def of_sharp_tokens(folder, full):
    """A run that trains the fifth of the tokens where its policy was least sure."""
    return launch(folder, *FEW, "--pg-correction", "top_entropy", "--train-iters", "3", "--warm-up-iters", "1")


@launches.launch
def mixed(folder, full):
    """Runs of the same rollouts, alone and with right answers, which fill their own micro-batches."""
    steps = ["--micro-batch-size", "16", "--train-iters", "2"]
    more = ["--global-batch-size", "160", "--demonstrations-per-step", "32", "--pg-term", "sft:ce,weight=0.1"]
    launch(folder / "alone", *steps, ranks=1)
    launch(folder / "mixed", *steps, *more, ranks=1)
    return folder


@launches.launch
def kept(folder, full):
    """Runs of rollouts by top-p, one update each, by logits and by the fused head that recomputes, on two ranks.

    In the full tier there are the other head's too, and all of them on one rank.
    """
    flags = [*FEW, "--top-p", "0.95", "--train-iters", "2", "--pg-metrics", "with_entropy"]
    two = ["--tensor-model-parallel-size", "2"]
    layouts = {"logits": [], "recompute": ["--pg-fused-head", "recompute"]}
    layouts |= {"fused": ["--pg-fused-head"]} if full else {}
    for name, head in layouts.items():
        if full:
            launch(folder / f"{name}1", *flags, *head, ranks=1)
        launch(folder / f"{name}2", *flags, *head, *two)
    return folder


@launches.launch
def programs(folder, full):
    """The second task, whose sampler keeps keys and values; two ranks hold parts of every layer."""
    task = ["--task", "list_programs", "--seq-length", "48", "--max-position-embeddings", "48", "--vocab-size", "20"]
    sharded = ["--tensor-model-parallel-size", "2", "--cached-sampling"]
    return launch(folder, *FEW, *task, *sharded, "--exact-match-prompts", "8", "--train-iters", "2")


@launches.launch
def dry(folder, full):
    """Runs that stop before the model is built: asked for by the flag, by the environment, and unclearly."""
    flag = example_runs.launch(folder / "flag", *SHORT, "--pg-dry-run", "--loss-aggregation", "token_mean", ranks=2)
    environment = example_runs.launch(folder / "environment", *SHORT, ranks=1, MEGATRON_PG_DRY_RUN="1")
    unclear = example_runs.launch(folder / "unclear", *SHORT, ranks=1, check=False, MEGATRON_PG_DRY_RUN="yes")
    return folder, flag, environment, unclear


def test_on_the_policy_that_sampled_with_top_p_the_ratio_is_1(kept, full):
    found = {run.name: records(run / "metrics.jsonl") for run in kept.iterdir()}
    assert len(found) == (6 if full else 2)
    for name, steps in found.items():
        for step in steps[1:]:  # after the warm-up each batch is trained once
            assert step["num_tokens_masked"] == 0
            assert abs(step["ratio_new_old"] - 1) <= 2e-5, name
            assert step["mean_abs_log_ratio"] <= 2e-5, name
            assert step["kl_new_old"] <= 1e-10, name
        by_logits = found[f"logits{name[-1]}"]
        assert [step["entropy"] for step in steps] == pytest.approx([step["entropy"] for step in by_logits], abs=1e-4)
    rollouts = [sample for sample in read_rollouts(kept / "recompute2" / "rollouts.jsonl") if sample.step > 0]
    sizes = torch.cat([sample.sampling_mask.counts for sample in rollouts])
    assert sizes.min() >= 1
    assert 1 < sizes.double().mean() < 12


def test_supervised_samples_leave_the_objective_as_it_is_bit_for_bit(mixed):
    alone, both = (records(mixed / name / "metrics.jsonl")[1] for name in ("alone", "mixed"))
    of_the_step = {"num_samples", "grad_norm", "learning_rate", "step_time"}
    assert {name: both[name] for name in alone if name not in of_the_step} == {
        name: value for name, value in alone.items() if name not in of_the_step
    }
    assert (alone["num_samples"], both["num_samples"], both["sft/num_rollouts"]) == (128, 160, 32)
    assert both["sft/weight"] == pytest.approx(1.0)
    assert both["loss"] == pytest.approx(both["pg_loss"] + 0.1 * both["sft/loss"], rel=1e-6)
    assert both["grad_norm"] != alone["grad_norm"]
    written = read_rollouts(mixed / "mixed" / "rollouts.jsonl")
    assert [sample.term for sample in written[:160]] == ["rl"] * 128 + ["sft"] * 32


def test_what_a_cached_sampler_draws_has_the_probabilities_that_training_gives_it(programs):
    _, first = records(programs / "metrics.jsonl")
    assert first["ratio_new_old"] == pytest.approx(1.0, abs=1e-6)
    assert first["kl_new_old"] < 1e-11
    assert first["mean_abs_log_ratio"] < 2e-6
    lengths = {sample.response_length for sample in read_rollouts(programs / "rollouts.jsonl")}
    assert len(lengths) > 5


def test_a_student_that_begins_as_its_teacher_leaves_it_by_the_objective(taught):
    first, second = records(taught / "metrics.jsonl")
    assert first["teacher/num_tokens"] == first["num_tokens"]
    assert first["teacher/weight"] == pytest.approx(1.0)
    assert abs(first["teacher/mean"]) < 1e-9  # e^-x - 1 + x of roundings
    assert first["loss"] == pytest.approx(first["pg_loss"] + 0.5 * first["teacher/loss"])
    assert second["teacher/mean"] > 1e-6
    rollouts = read_rollouts(taught / "rollouts.jsonl")
    assert all(sample.teacher_logprobs is not None for sample in rollouts)
    gaps = [(sample.teacher_logprobs - sample.old_logprobs).abs().max() for sample in rollouts if sample.step == 0]
    assert max(gaps) < 1e-5
    assert "teacher       + 0.5 Σ v·(KL(π‖π_teacher)) by k3_weighted" in (taught / "printed").read_text(
        encoding="utf-8"
    )


def test_a_run_trains_the_tokens_of_the_highest_entropy(of_sharp_tokens):
    steps = {step["iteration"]: step for step in records(of_sharp_tokens / "metrics.jsonl")}
    assert list(steps) == [1, 2, 3]
    assert all(0.7 < step["selected_fraction"] <= 0.8 for step in steps.values())
    rollouts = read_rollouts(of_sharp_tokens / "rollouts.jsonl")
    for number in sorted({sample.step for sample in rollouts}):
        step = steps[number + 1]
        entropies = torch.cat([sample.old_entropies for sample in rollouts if sample.step == number])
        assert len(entropies) == step["num_tokens"]
        below = int((entropies < step["selection_threshold"]).sum())
        assert below == round(step["selected_fraction"] * len(entropies))
    assert "correction" in (of_sharp_tokens / "printed").read_text(encoding="utf-8")


def test_a_dry_run_says_what_is_in_force_and_builds_nothing(dry):
    folder, flag, environment, unclear = dry
    for done, ranks, added in ((flag, 2, ("--pg-dry-run", "--loss-aggregation", "token_mean")), (environment, 1, ())):
        assert done.returncode == 0
        assert "effective policy-gradient objective" in done.stdout
        assert f"dry run: {ranks} ranks agree on valid arguments; no model was built" in done.stdout
        (folder / "log").write_text(done.stdout)
        line = read_command_line(str(folder / "log"))
        assert tuple(line.words[-len((*SHORT, *added)) :]) == (*SHORT, *added)
        assert main(["validate", "--args-file", str(folder / "log"), "--world-size", str(ranks)]) == 0
    assert "--loss-aggregation token_mean" in flag.stdout
    assert unclear.returncode != 0
    assert "MEGATRON_PG_DRY_RUN=yes is neither 0 nor 1" in unclear.stdout + unclear.stderr
    assert not list(folder.rglob("metrics.jsonl"))


def steps_of(run: Path) -> list[dict]:
    return records(run / "metrics.jsonl")


def test_the_run_folder_is_complete(sampled):
    assert [r["iteration"] for r in steps_of(sampled)] == [1, 2, 3, 4, 5]
    assert [r["phase"] for r in steps_of(sampled)] == ["warm-up", "grpo", "grpo", "grpo", "grpo"]
    assert json.loads((sampled / "arguments.json").read_text())["loss_aggregation"] == "sample_mean"
    assert (sampled / "curves.png").stat().st_size > 10_000
    assert len((sampled / "rollouts.jsonl").read_text().splitlines()) == 1 + 4 * 128


def test_the_terminal_shows_the_objective_the_sign_and_the_time_left(sampled):
    output = (sampled / "printed").read_text(encoding="utf-8")
    assert "(1/N_r) Σ_rollouts (Σ m·ℓ)/M_rollout  (--loss-aggregation sample_mean)" in output
    assert "pg_loss -1.0000" in output
    assert "left" in output
    assert "not logged, because the samples have no ref_logprobs: kl_new_ref, ratio_new_ref" in output


def test_tensorboard_holds_the_same_values_under_the_same_names(sampled):
    from tensorboard.backend.event_processing import event_accumulator

    events = event_accumulator.EventAccumulator(str(sampled / "tensorboard"))
    events.Reload()
    for name in ("pg_loss", "kl_new_old", "ess", "min_advantage", "num_tokens", "reward", "zero_variance_fraction"):
        shown = [(e.step, e.value) for e in events.Scalars(f"pg/{name}")]
        known = [r for r in steps_of(sampled) if name in r]
        assert shown == [(r["iteration"], pytest.approx(r[name], rel=1e-6, abs=1e-30)) for r in known], name
    assert min(e.value for e in events.Scalars("pg/pg_loss")) < 0
    assert min(e.value for e in events.Scalars("pg_loss")) < 0  # Megatron's own


def test_wandb_holds_the_same_names(sampled):
    (file,) = (sampled / "wandb").rglob("*.wandb")
    content = file.read_bytes()
    assert all(name.encode() in content for name in ("pg/pg_loss", "pg/kl_new_old", "pg/aggregation_ess", "pg/reward"))


@pytest.mark.full_tier("a further launch belongs to `make prove`")
@pytest.mark.proof("Determinism: the example on 2 ranks prints the same metrics with the same seed (steps)")
def test_the_same_seed_twice_gives_the_same_metrics(sampled, tmp_path, evidence):
    assert steps_of(launch(tmp_path)) == steps_of(sampled)
    evidence(cases=5)


def test_training_from_a_file_scales_with_the_divisor_and_changes_nothing_else(sampled):
    six, twelve = (steps_of(sampled.parent / str(divisor))[0] for divisor in DIVISORS)
    assert six["kl_new_old"] > 0  # off-policy: another model sampled
    assert six["pg_loss"] == 2 * twelve["pg_loss"] != 0
    scaled = {"pg_loss", "grad_norm", "objective"}
    assert {k: v for k, v in six.items() if k not in scaled} == {k: v for k, v in twelve.items() if k not in scaled}


def test_a_sampler_of_two_stages_has_the_float32_logits_of_the_loss(of_two_stages):
    """The first ratio is 1."""
    assert steps_of(of_two_stages)[0]["mean_abs_log_ratio"] < 1e-6


def test_ranks_that_share_their_experts_sample_for_the_same_number_of_tokens(of_shared_experts):
    """Without it the ranks wait for each other without end: one has a response that the other's prompts do not need."""
    assert steps_of(of_shared_experts)[0]["mean_abs_log_ratio"] < 1e-6
    assert steps_of(of_shared_experts)[1]["exact_match"] >= 0
