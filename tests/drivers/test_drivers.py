"""The hosts' own drivers, from the command line to the weights, with their loss and with ours.

`make drivers` runs verl's `main_ppo` from its wheel. The `train.py` of slime and miles and NeMo-RL's `run_grpo.py` need
checkouts, which are folders of HOSTS named slime, miles and nemo_rl. Further versions are folders like slime@v0.3.1,
verl's too. Every run has two ranks, gloo, Ray, Megatron's DDP and optimizer, and four steps.
"""

import functools
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import drive
import driver_oracle
import numpy as np
import processes
import pytest
import torch
from driver_oracle import Step


def _host(version: str) -> str:
    """The host of `host@version`."""
    return version.partition("@")[0]


DEFAULTS = {  # of each host: the mean over the step, and the numbers of the objective
    "verl": (driver_oracle.token_mean, {"low": 0.2, "high": 0.2, "cap": 3.0}),
    "slime": (driver_oracle.sample_mean, {"low": 0.2, "high": 0.28}),
    "miles": (driver_oracle.sample_mean, {"low": 0.2, "high": 0.28}),
    "nemo_rl": (driver_oracle.token_mean, {"low": 0.2, "high": 0.2}),
}
FOLDER = os.environ.get("HOSTS")
CHECKOUTS = dict.fromkeys(DEFAULTS) | {  # by host or host@version; verl alone needs none
    path.name: path for path in sorted(Path(FOLDER).iterdir() if FOLDER else []) if _host(path.name) in DEFAULTS
}
LAYOUTS = {  # that a driver runs on a CPU, in addition to two data-parallel ranks
    "verl": ("tensor", "context", "pipeline"),
    "slime": ("tensor", "context", "pipeline"),
    "miles": ("tensor", "context", "pipeline"),
    "nemo_rl": ("tensor", "context"),
}
LOSS = 1e-6  # absolute; advantages are about 1
NORM = {"bfloat16": 3e-3, "float32": 1e-5}  # relative; the oracle rounds logits to bfloat16, but not their gradients


@dataclass(frozen=True)
class Run:
    """What a host trains, and what the oracle needs to know about it."""

    ours: dict | None  # options of our loss; None: the host's own loss
    oracle: dict = field(default_factory=dict)
    layout: dict = field(default_factory=dict)
    is_fused: bool = False  # NeMo-RL's logits are made outside our loss
    more: dict = field(default_factory=dict)  # options of verl


OF_64 = {"loss_aggregation": "constant", "loss_aggregation_divisor": 64}
PADDED = {  # padded rows and a model from mbridge, as verl's scripts for Qwen3.5 have them
    "actor_rollout_ref.model.use_remove_padding": False,
    "actor_rollout_ref.actor.megatron.vanilla_mbridge": True,
}
RUNS = {
    "own": Run(None),
    "ours": Run({}),
    "all": Run(OF_64 | {"pg_correction": "tis"}, {"weigh": driver_oracle.constant(64), "tis": 2.0}, is_fused=True),
    "reducer": Run(
        {"custom_pg_loss_reducer_function_path": "driver_reducers:sums_over_64"}, {"weigh": driver_oracle.constant(64)}
    ),
    "padded": Run({}, more=PADDED),
    **{name: Run({}, layout={name: 2}) for name in ("tensor", "context", "pipeline")},
    **{f"own_{name}": Run(None, layout={name: 2}) for name in ("tensor", "context", "pipeline")},
}
FULL = ("reducer", "padded", "tensor", "context", "pipeline")  # in the full tier only
OF_VERL = "+critic.megatron.override_mcore_model_config.megatron_pg"
CRITICS = {  # of a host: options, those of ours, and what its log says of a step or batch of the critic
    "verl": (
        {
            "algorithm.adv_estimator": "gae",
            "critic": {
                "model": {"path": "${actor_rollout_ref.model.path}"},
                "optim.lr": 1e-2,
                "ppo_mini_batch_size": drive.PROMPTS // drive.STEPS_PER_ROLLOUT,
                "use_dynamic_bsz": True,
                "ppo_max_token_len_per_gpu": 64,
            },
        },
        {"critic.model.external_lib": "megatron_pg.verl", f"{OF_VERL}.pg_metrics_file": "metrics_critic.jsonl"},
        r"critic/grad_norm:([\d.e-]+)",
    ),
    "miles": ({"advantage_estimator": "ppo", "no_offload_train": None}, {}, r"'train/critic-grad_norm': ([\d.e-]+)"),
}
CASES = [
    (version, name)
    for version in CHECKOUTS
    for name, run in RUNS.items()
    if run.ours is not None and (not run.layout or name in LAYOUTS[_host(version)])
    if _host(version) == "verl" or not run.more
]
PAIRS = [(version, "own", "ours") for version in CHECKOUTS] + [  # of the host's own loss and ours
    (version, f"own_{name}", name)
    for version in CHECKOUTS
    for name in LAYOUTS[_host(version)]
    if _host(version) in ("slime", "miles")
]


@pytest.fixture(scope="module")
def begin(tmp_path_factory):
    """Starts a run of a host."""
    if not drive.PYTHON.exists():
        pytest.skip("needs .venv/drivers: make drivers")
    inputs = drive.write_inputs(tmp_path_factory.mktemp("inputs"))

    def begin(version: str, name: str, **more: object):
        host, checkout, run = _host(version), CHECKOUTS[version], RUNS[name]
        if checkout is None and host != "verl":
            pytest.skip(f"needs a checkout of {host}: HOSTS=FOLDER")
        folder = tmp_path_factory.mktemp(f"{version}_{name}")
        given = {"checkout": checkout, "ours": run.ours, "layout": run.layout} | more
        if host == "nemo_rl":
            return drive.begin_nemo_rl(folder, inputs, **given), folder
        given["is_fused"] = run.is_fused
        if host == "verl":
            return drive.begin_verl(folder, inputs, **({"more": run.more} | given)), folder
        return drive.begin_rollout_host(host, folder, inputs, **given), folder

    return begin


@pytest.fixture(scope="module")
def steps_of(begin):
    """The optimizer steps of a run, which has ended, and the losses that ours has logged."""

    @functools.cache
    def steps_of(version: str, name: str) -> tuple[list[Step], list[float]]:
        process, folder = begin(version, name)
        drive.wait_for(process, folder)
        steps = [Step(folder / "steps", number) for number in range(drive.STEPS)]
        if RUNS[name].ours is None:
            return steps, []
        if _host(version) == "nemo_rl":
            return steps, [line["pg/pg_loss"] for line in processes.records(folder / "train.jsonl")]
        return steps, [line["pg_loss"] for line in processes.records(folder / "metrics.jsonl")]

    return steps_of


@pytest.mark.proof("Drivers: four steps of a host's own driver, own loss against ours: samples, norms, weights")
@pytest.mark.parametrize(("version", "own", "ours"), PAIRS)
def test_our_loss_trains_as_the_hosts_own(steps_of, version, own, ours, full, evidence):
    if ours in FULL and not full:
        pytest.skip("in the full tier")
    (own, _), (ours, _) = steps_of(version, own), steps_of(version, ours)
    worst = 0.0
    for theirs, step in zip(own, ours, strict=True):
        for sample, expected in zip(step.samples, theirs.samples, strict=True):
            assert {name: sample[name] for name in ("tokens", "mask")} == {n: expected[n] for n in ("tokens", "mask")}
            for name in ("advantages", "old", "rollout"):
                assert sample[name] == pytest.approx(expected[name], abs=1e-5)
        worst = max(worst, abs(step.grad_norm / theirs.grad_norm - 1))
    after, expected = ours[-1].weights("after"), own[-1].weights("after")
    for name, weights in expected.items():
        assert np.abs(weights - own[0].weights("before")[name]).max() > 0.02  # four steps of Adam with 0.01
        worst = max(worst, np.abs(after[name] - weights).max() / np.abs(weights).max())
    evidence(cases=len(ours), worst=worst, tolerance=1e-6)


@pytest.mark.proof("Drivers: every step of a host's driver with our loss equals the float64 oracle")
@pytest.mark.parametrize(("version", "name"), CASES)
def test_every_step_equals_the_oracle(steps_of, version, name, full, evidence):
    host = _host(version)
    if name in FULL and not full:
        pytest.skip("in the full tier")
    steps, logged = steps_of(version, name)
    weigh, numbers = DEFAULTS[host]
    is_rounded = host != "nemo_rl" and not RUNS[name].is_fused
    options = {"weigh": weigh, **numbers, "logits": torch.bfloat16 if is_rounded else torch.float32}
    found = [driver_oracle.loss_and_norm(step, **options | RUNS[name].oracle) for step in steps]
    losses = torch.tensor([loss for loss, _ in found]).view(len(logged), -1).mean(dim=1)
    assert (torch.tensor(logged) - losses).abs().max() < LOSS
    for number, step in enumerate(steps if host != "nemo_rl" and RUNS[name].is_fused else ()):
        first = steps[number - number % drive.STEPS_PER_ROLLOUT]  # the fused head has made its samples' old ones
        assert driver_oracle.error_of_old(step, first) < LOSS
    worst = max(abs(step.grad_norm / norm - 1) for step, (_, norm) in zip(steps, found, strict=True))
    evidence(cases=len(steps), worst=worst, tolerance=NORM["float32" if host == "nemo_rl" else "bfloat16"])


@pytest.mark.proof("Drivers: a critic with its actor, own loss against ours: gradient norms of every step")
@pytest.mark.parametrize("version", [version for version in CHECKOUTS if _host(version) in CRITICS])
def test_a_critic_trains_as_the_hosts_own(begin, version, full, evidence):
    if not full:
        pytest.skip("in the full tier")
    theirs, ours, pattern = CRITICS[_host(version)]
    norms = {}
    for name in ("own", "ours"):
        more = theirs | (ours if name == "ours" else {})
        process, folder = begin(version, name, more=more, DRIVER_QUIET="1")
        drive.wait_for(process, folder)
        log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        norms[name] = [float(norm) for norm in re.findall(pattern, log)]
    lines = processes.records(folder / "metrics_critic.jsonl")
    assert [line["iteration"] for line in lines] == [*range(1, drive.STEPS + 1)]
    pairs = list(zip(norms["ours"], norms["own"], strict=True))
    evidence(cases=len(pairs), worst=max(abs(mine / norm - 1) for mine, norm in pairs), tolerance=1e-6)


@pytest.mark.proof("Drivers: a killed worker ends a host's job with an error and leaves whole lines")
@pytest.mark.parametrize("version", CHECKOUTS)
def test_a_killed_worker_ends_the_job(begin, version, full, evidence):
    if not full:
        pytest.skip("in the full tier")
    process, folder = begin(version, "ours", rollouts=1000)
    second = folder / "steps" / "1_1.json"  # of rank 1
    while not second.exists():
        assert process.poll() is None, (folder / "log.txt").read_text(encoding="utf-8", errors="replace")[-3000:]
        time.sleep(0.1)
    os.kill(driver_oracle.pid_of(second), signal.SIGKILL)
    try:
        assert process.wait(processes.HANG) != 0
    finally:
        processes.end(process)
    if _host(version) != "nemo_rl":  # whose loss writes no file
        assert len(processes.records(folder / "metrics.jsonl")) > 0
    evidence(cases=1)


@pytest.mark.proof("Drivers: a run that its host has resumed continues metrics.jsonl without a line twice")
@pytest.mark.parametrize("version", [version for version in CHECKOUTS if _host(version) != "nemo_rl"])
def test_a_resumed_run_continues_its_file(begin, version, full, tmp_path, evidence):
    if not full:
        pytest.skip("in the full tier")
    """NeMo-RL's loss writes no file."""
    ours, checkpoints = {"pg_metrics_file": tmp_path / "metrics.jsonl"}, {"checkpoints": tmp_path / "checkpoints"}
    if _host(version) == "verl":
        of_trainer = {"default_local_dir": checkpoints["checkpoints"], "save_freq": 1}
        of_actor = {"actor_rollout_ref.actor.checkpoint.save_contents": "[model]"}
        checkpoints = {"more": {"trainer": of_trainer} | of_actor}
    weights = None
    for rollouts in (1, 2):
        process, folder = begin(version, "ours", ours=ours, rollouts=rollouts, **checkpoints)
        drive.wait_for(process, folder)
        lines = processes.records(tmp_path / "metrics.jsonl")
        assert [line["iteration"] for line in lines] == [*range(1, rollouts * drive.STEPS_PER_ROLLOUT + 1)]
        before = Step(folder / "steps", 0).weights("before")
        for name in weights or ():
            assert np.array_equal(before[name], weights[name])  # the host has continued from its checkpoint
        weights = Step(folder / "steps", drive.STEPS_PER_ROLLOUT - 1).weights("after")
    evidence(cases=1)
