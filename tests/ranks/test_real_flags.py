"""Megatron's flags of real launch scripts, through the example: those that may change no number, and those of the
model."""

import json
import random
from pathlib import Path

import example_runs
import launches
import pytest
from processes import records

from megatron_pg import RolloutWriter, Sample

STEPS, SAMPLES = 3, 32
SIZES = example_runs.words_of(
    {
        "train-iters": STEPS,
        "lr-warmup-iters": 0,
        "lr": 0.01,
        "global-batch-size": SAMPLES,
        "micro-batch-size": 8,  # two micro-batches on each of two ranks
        "prompts-per-rollout": 4,
        "progress-interval": 1,
        "exact-match-prompts": 2,
    }
)

RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
DISTRIBUTED = "--use-distributed-optimizer"
OVERLAP = f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather"
OFFLOAD = f"{DISTRIBUTED} --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer"
EXPERTS = "--num-experts 4 --disable-bias-linear --moe-aux-loss-coeff 0 --moe-token-dispatcher-type"
SHARED = "--expert-model-parallel-size 2 --num-experts 4 --disable-bias-linear --moe-token-dispatcher-type"
BIAS = (
    "--num-experts 4 --disable-bias-linear --moe-router-load-balancing-type none --moe-router-enable-expert-bias "
    "--moe-router-score-function sigmoid"
)
EXACT = 0.0
SUMMED = 2e-7  # the distributed optimizer adds the squares of the gradient norm in another order
NOISE = 1e-4  # of float32, which the optimizer's divisions make larger
# flags, the flags of the run that they are compared with, and how far they may be from it
SAME = {
    f"{RECOMPUTE} --accumulate-allreduce-grads-in-fp32 {OVERLAP}": ("", SUMMED),
    RECOMPUTE: ("", EXACT),
    "--recompute-granularity selective": ("", EXACT),
    f"{RECOMPUTE} --pg-fused-head": ("--pg-fused-head", EXACT),
    f"{RECOMPUTE} --loss-aggregation token_mean": ("--loss-aggregation token_mean", EXACT),
    "--accumulate-allreduce-grads-in-fp32": ("", EXACT),
    "--bf16 --accumulate-allreduce-grads-in-fp32": ("--bf16", EXACT),
    "--overlap-grad-reduce": ("", EXACT),
    DISTRIBUTED: ("", SUMMED),
    OVERLAP: (DISTRIBUTED, EXACT),
    f"{OVERLAP} --loss-aggregation token_mean": ("--loss-aggregation token_mean", SUMMED),
    f"--bf16 {OVERLAP}": (f"--bf16 {DISTRIBUTED}", EXACT),
    f"{EXPERTS} allgather": (f"{EXPERTS} alltoall", EXACT),
    f"{EXPERTS} alltoall {RECOMPUTE}": (f"{EXPERTS} alltoall", EXACT),
    f"{EXPERTS} alltoall --recompute-granularity selective --recompute-modules moe": (f"{EXPERTS} alltoall", EXACT),
    f"{SHARED} allgather": (f"{SHARED} alltoall", EXACT),
}
# Flags of another model: two data-parallel ranks are compared with one on the same samples.
MODELS = (
    "--qk-layernorm",
    "--window-size 3,0",
    "--position-embedding-type rope --use-rope-scaling",
    f"{EXPERTS} alltoall",
    BIAS,
)
# Flags that Megatron, or the example, cannot run here, and what it says.
REFUSED = {
    f"{DISTRIBUTED} --use-precision-aware-optimizer": "requires FusedAdam from TransformerEngine",
    f"{DISTRIBUTED} --optimizer-cpu-offload": "must be used in conjunction with `--use-precision-aware-optimizer`",
    f"--bf16 {OFFLOAD}": "KeyError: tensor(",
    f"{EXPERTS} alltoall --moe-permute-fusion": "fused permutation is not available",
    f"{EXPERTS} alltoall --moe-grouped-gemm": "Unsupported compute capability for GroupedGEMM kernels",
    f"{SHARED} flex --moe-flex-dispatcher-backend deepep": "DeepEP is not installed",
    "--recompute-granularity selective --recompute-modules layernorm": "name 'FP8GlobalStateManager' is not defined",
    "--position-embedding-type rope --rope-type yarn": "Common attention only support rope_type",
    "--position-embedding-type yarn": "invalid choice: 'yarn'",
    "--bf16 --fp8-format hybrid": "has no effect on the layers of --transformer-impl local",
    "--hybrid-layer-pattern *-*-*- --position-embedding-type rope --use-rope-scaling": "which takes no scaling",
}
FAST = next(iter(SAME))


def same_of(full: bool) -> dict[str, tuple[str, float]]:
    return SAME if full else {FAST: SAME[FAST]}


@launches.launch
def runs(folder, full):
    """A folder for every run, by its flags and number of ranks."""
    same = same_of(full)
    wanted = [(flags, 2) for flags in {*same, *(base for base, _ in same.values())}]
    if full:
        wanted += [(flags, ranks) for flags in MODELS for ranks in (1, 2)] + [(flags, 2) for flags in REFUSED]
    names = {run: str(number) for number, run in enumerate(dict.fromkeys(wanted))}
    write_rollouts(folder / "rollouts.jsonl")
    cases = {name: [ranks, *flags.split()] for (flags, ranks), name in names.items()}
    from_file = ["--rollouts", str(folder / "rollouts.jsonl")]
    example_runs.launch(folder, *SIZES, *from_file, ranks=1, script="flag_runs.py", CASES=json.dumps(cases))
    return {run: folder / name for run, name in names.items()}


def write_rollouts(path: Path) -> None:
    """Random answers with advantages of both signs."""
    draw = random.Random(3)
    with RolloutWriter(path) as file:
        for step in range(STEPS):
            file.write([sample(draw, step, number) for number in range(SAMPLES)])


def sample(draw: random.Random, step: int, number: int) -> Sample:
    response = draw.randint(1, 6)
    return Sample.build(
        tokens=[draw.randrange(12) for _ in range(draw.randint(2, 6) + response)],
        response_length=response,
        loss_mask=[1] * response,
        old_logprobs=[-2.5 + draw.uniform(-0.2, 0.2) for _ in range(response)],
        advantage=draw.uniform(-1, 1),
        prompt_id=f"{step}-{number // 8}",
        rollout_id=f"{step}-{number}",
        step=step,
        reward=draw.random(),
    )


def difference(found: Path, expected: Path) -> float:
    """Largest relative difference of loss and gradient norm in any step."""
    pairs = zip(*(records(run / "metrics.jsonl") for run in (found, expected)), strict=True)
    values = [(a[name], b[name]) for a, b in pairs for name in ("pg_loss", "grad_norm")]
    assert len(values) == 2 * STEPS
    assert all(abs(b) > 0.01 for _, b in values)
    return max(abs(a - b) / abs(b) for a, b in values)


def codes(run: Path) -> set[int]:
    return set(json.loads((run / "exit_codes").read_text()))


@pytest.mark.proof(
    "Flags of real scripts: recompute, overlap, offload and dispatchers leave loss and gradient norm of three steps as "
    "they are"
)
def test_flags_of_memory_and_speed_change_no_number(runs, full, evidence):
    for flags, (base, limit) in same_of(full).items():
        assert codes(runs[flags, 2]) == {0}, flags
        worst = difference(runs[flags, 2], runs[base, 2])
        assert worst <= limit, (flags, worst)
        evidence(cases=1, worst=worst, tolerance=limit)


@pytest.mark.full_tier("further runs belong to `make prove`")
@pytest.mark.proof("Flags of real scripts: two data-parallel ranks train another model as one does (three steps)")
def test_flags_of_the_model_train_the_same_on_two_ranks_as_on_one(runs, evidence):
    for flags in MODELS:
        assert codes(runs[flags, 2]) == codes(runs[flags, 1]) == {0}, flags
        assert difference(runs[flags, 2], runs["", 2]) > 1e-3, flags  # it is another model
        worst = difference(runs[flags, 2], runs[flags, 1])
        assert worst < NOISE, (flags, worst)
        evidence(cases=1, worst=worst, tolerance=NOISE)


@pytest.mark.full_tier("further runs belong to `make prove`")
@pytest.mark.proof("Flags of real scripts: what cannot run on a CPU ends with a message, as the page has it")
def test_flags_that_need_a_gpu_end_with_the_message_of_the_page(runs, evidence):
    for flags, message in REFUSED.items():
        assert 0 not in codes(runs[flags, 2]), flags
        assert message in (runs[flags, 2] / "0.err").read_text(encoding="utf-8"), flags
        evidence(cases=1)
