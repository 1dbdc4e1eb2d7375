"""The loops of examples/own_loop.py and examples/plain_torch.py: every number of ranks trains the same."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import launches
import numpy as np
import plain_torch
import pytest
import torch
from processes import ROOT, TESTS, environment, on_ranks, records, wait_for, with_warm_python

from megatron_pg import RolloutWriter, read_steps

# --- around Megatron-Core ---


def run_own_loop(ranks: int, metrics_file: Path, *flags: str) -> list[dict]:
    """The lines of its metrics file."""
    words = ["--loss-aggregation", "prompt_mean", "--backend", "gloo", "--metrics-file", str(metrics_file), *flags]
    script = str(ROOT / "examples" / "own_loop.py")
    wait_for(on_ranks(ranks, with_warm_python(environment()), script, *words))
    return records(metrics_file)


@launches.launch
def one_rank(folder, full):
    """Two steps on one rank."""
    return run_own_loop(1, folder / "metrics.jsonl")


@launches.launch
def two_ranks(folder, full):
    """The same two steps on two ranks."""
    return run_own_loop(2, folder / "metrics.jsonl")


@launches.launch
def repeated(folder, full):
    """The same samples in two steps, which change no weight."""
    first = read_steps(plain_torch.ROLLOUTS)[0]
    with RolloutWriter(folder / "rollouts.jsonl") as writer:
        for step in range(2):
            names = [{name: f"{getattr(s, name)}-{step}" for name in ("prompt_id", "rollout_id")} for s in first]
            writer.write([replace(s, step=step, weight_version=0, **ids) for s, ids in zip(first, names, strict=True)])
    return run_own_loop(1, folder / "metrics.jsonl", "--lr", "0", "--rollouts", str(folder / "rollouts.jsonl"))


@launches.launch
def critics(folder, full):
    """A critic's two steps, on one rank and on two; its samples have values and returns instead of advantages."""
    path, of_policy = folder / "rollouts.jsonl", {"old_logprobs": None, "advantages": None}
    with RolloutWriter(path, version=3) as writer:
        for sample in (sample for step in read_steps(plain_torch.ROLLOUTS) for sample in step):
            own = {"values": 0 * sample.old_logprobs, "returns": torch.full_like(sample.old_logprobs, sample.reward)}
            writer.write([replace(sample, **own, **of_policy)])
    flags = ("--pg-role", "critic", "--pg-value-clip", "0.05", "--rollouts", str(path))
    return [run_own_loop(ranks, folder / f"{ranks}.jsonl", *flags) for ranks in (1, 2)]


@launches.launch
def without_torchrun(folder, full):
    """Exit code and last line of a loop that no launcher starts."""
    command = [sys.executable, str(ROOT / "examples" / "own_loop.py"), "--loss-aggregation", "prompt_mean"]
    variables = {name: value for name, value in environment().items() if name != "LOCAL_RANK"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    return [done.returncode, done.stderr.splitlines()[-1]]


def test_an_own_loop_names_the_launcher_that_it_needs(without_torchrun):
    text = "LOCAL_RANK is not set. Start this script with torchrun, as its --help shows."
    assert without_torchrun == [2, f"own_loop.py: error: {text}"]


def test_an_own_loop_trains_a_critic_from_a_file(critics):
    assert "--pg-role critic" in critics[0][0]["objective"]["objective"]
    for alone, shared in zip(*critics, strict=True):
        assert shared.pop("objective", None) == alone.pop("objective", None)
        assert shared == pytest.approx(alone, rel=1e-4, abs=1e-7)
        assert alone["value_loss"] > 0
        assert alone["grad_norm"] > 0.01
        assert "pg_loss" not in alone
    first, second = critics[0]
    assert first["value_mean"] == 0 != second["value_mean"]  # the head begins at 0


def test_an_own_loop_on_two_ranks_logs_what_it_logs_on_one(one_rank, two_ranks):
    assert [record["iteration"] for record in one_rank] == [1, 2]
    assert one_rank[0]["objective"]["pg_loss"].endswith("(--loss-aggregation prompt_mean)")
    for alone, shared in zip(one_rank, two_ranks, strict=True):
        assert shared.pop("objective", None) == alone.pop("objective", None)
        assert shared == pytest.approx(alone, rel=1e-5, abs=1e-9)  # float32, and Adam's division by small gradients
        assert alone["grad_norm"] > 0.01
        assert not alone["skipped"]


def test_a_step_of_an_own_loop_has_no_gradient_of_the_step_before(repeated):
    first, second = repeated
    assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-6)
    assert (first["staleness/max_age"], second["staleness/max_age"]) == (0, 1)  # of samples that the first weights drew


# --- plain PyTorch ---

NUM_SAMPLES = 9  # with rows of 4, the last micro-batch of the second rank is empty
LIMIT = 1e-6  # of gradients in float32 against float64, relative to the largest
WRAPPED = [(wrap, head) for wrap in plain_torch.WRAPPERS for head in plain_torch.LOSSES]


@launches.launch
def plain(folder, full):
    """What two ranks without Megatron print, and their gradients by wrapper and head."""
    # The ranks import everything themselves, and no two of them may share a GPU.
    env = with_warm_python(environment()) | {"PYTHON_EXEC": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    script = str(TESTS / "ranks/programs/plain_torch_ranks.py")
    done = wait_for(on_ranks(2, env, script, str(folder), "prompt_mean", str(NUM_SAMPLES)))
    gradients = {pair: dict(np.load(folder / f"{'_'.join(pair)}.npz")) for pair in WRAPPED}
    return SimpleNamespace(objectives=re.findall(r"^step \d: pg_loss (.*)$", done.stdout, re.M), gradients=gradients)


def expected() -> tuple[float, dict[str, np.ndarray]]:
    """The objective of the step and its gradient: one process, one sample at a time, float64, no package.

    Σ_groups 1/P · 1/M_group · Σ_t -min(r A, clip(r, 0.8, 1.28) A)
    """
    torch.manual_seed(1)
    policy = plain_torch.Policy(loss=None).double()
    samples = read_steps(plain_torch.ROLLOUTS)[0][:NUM_SAMPLES]
    counts: dict[str, int] = {}
    for sample in samples:
        counts[sample.prompt_id] = counts.get(sample.prompt_id, 0) + sum(sample.loss_mask.tolist())
    objective = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        length, size = len(sample.tokens), len(sample.loss_mask)
        row = torch.nn.functional.pad(sample.tokens, (0, plain_torch.LENGTH - length))[None]
        logits = policy.hidden_states(row)[0] @ policy.output.weight.T
        logprobs = logits.log_softmax(-1)[torch.arange(length - 1), sample.tokens[1:]][-size:]
        ratio, advantages = (logprobs - sample.old_logprobs).exp(), sample.advantages
        losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
        objective = objective + losses[sample.loss_mask].sum() / (len(counts) * counts[sample.prompt_id])
    objective.backward()
    return objective.item(), {name: value.grad.numpy() for name, value in policy.named_parameters()}


@pytest.mark.parametrize(("wrap", "head"), WRAPPED)
def test_two_ranks_in_plain_torch_have_the_gradient_of_one_process(plain, wrap, head):
    objective, gradient = expected()
    found = plain.gradients[wrap, head]
    assert found.pop("objective") == pytest.approx(objective, rel=LIMIT)
    assert found.keys() == gradient.keys()
    largest = max(np.abs(values).max() for values in gradient.values())
    for name, values in gradient.items():
        assert np.abs(found[name] - values).max() <= LIMIT * largest, name


def test_plain_torch_trains_the_same_with_every_wrapper_and_head_and_without_megatron(plain):
    assert len(plain.objectives) == 2 * len(WRAPPED)
    first, second = plain.objectives[:2]
    assert plain.objectives == [first, second] * len(WRAPPED)
    assert float(first) != float(second)
