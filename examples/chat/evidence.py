"""Does it change a run? Experiments with the chat example, on GPUs or on a CPU.

    python -m chat.evidence start word_problems times_table calculator --model FOLDER   # once: where other runs begin
    python -m chat.evidence run head quantized --model FOLDER --minutes 9 --jobs 8
    python -m chat.evidence show head quantized

`run` trains what is missing, `--jobs` at a time over all GPUs, and can be started again: a run that has ended has
summary.json, and one that was cut begins again. With --published docs/evidence/chat, the page's runs count as done.
`show` prints means over the last steps and writes EXPERIMENT.json and EXPERIMENT.png with the curves.
PYTHONPATH is examples/ and what launch.sh needs.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Arm:
    """One of the choices that an experiment compares."""

    flags: str  # {NAME}: the folder of that start's model
    start: str | None = None  # whose model it begins with; None: the pretrained one
    environment: dict[str, str] = field(default_factory=dict)


STARTS = {
    "times_table": Arm("--task times_table --train-iters 25"),
    "word_problems": Arm("--task word_problems --imitate --train-iters 40 --lr 1e-4"),
    "calculator": Arm("--task calculator --imitate --train-iters 20 --lr 1e-4"),
}
CORRECTIONS = {
    "none": "none",
    "tis": "tis,high=2",
    "mis": "mis,high=3",
    "icepop": "icepop,low=0.5,high=2",
    "rejection": "rejection,level=seq_mean,estimator=k3,high=0.05",
}
WORD_PROBLEMS = "--task word_problems --max-new-tokens 96 --global-batch-size 256 --micro-batch-size 64"
TOKEN_MEAN = "--train-iters 30 --loss-aggregation token_mean"
FLOAT32 = {"DTYPE": "fp32"}
SFT = "--pg-term sft:ce,weight=0.2,aggregation=token_mean"


def of_word_problems(steps: int, flags_of: dict[str, str]) -> dict[str, Arm]:
    """Arms that differ in their flags, all from the supervised start."""
    return {
        name: Arm(f"{WORD_PROBLEMS} --train-iters {steps} {flags}", "word_problems") for name, flags in flags_of.items()
    }


EXPERIMENTS = {
    "head": {
        "bfloat16": Arm(""),
        "float32 trainer": Arm("--fp32-lm-head"),
        "float32 engine": Arm("--engine-fp32-head"),
        "float32 both": Arm("--fp32-lm-head --engine-fp32-head"),
    },
    "quantized": {
        f"{bits}, {name}": Arm(f"--train-iters 40 --engine-weights {bits} --pg-correction {shlex.quote(correction)}")
        for bits in ("int8", "int4")
        for name, correction in CORRECTIONS.items()
    },
    "aggregation": of_word_problems(
        50,
        {
            "sample_mean": "--loss-aggregation sample_mean",
            "prompt_mean": "--loss-aggregation prompt_mean",
            "token_mean": "--loss-aggregation token_mean",
            "constant, L=96": "--loss-aggregation constant --loss-aggregation-divisor 96",
            "constant, L=24": "--loss-aggregation constant --loss-aggregation-divisor 24",
        },
    ),
    "sampling": of_word_problems(
        40,
        {
            "top-p, mask": "--top-p 0.9",
            "top-p, no mask": "--top-p 0.9 --no-sampling-mask",
            "top-p, tis": "--top-p 0.9 --no-sampling-mask --pg-correction tis,high=2",
            "top-k, mask": "--top-k 8",
            "top-k, no mask": "--top-k 8 --no-sampling-mask",
        },
    ),
    "microbatches": {
        "exact, 96 rows": Arm(TOKEN_MEAN, environment=FLOAT32),
        "exact, 32 rows": Arm(f"{TOKEN_MEAN} --micro-batch-size 32", environment=FLOAT32),
        "means of 32": Arm(f"{TOKEN_MEAN} --microbatch-means 32", environment=FLOAT32),
        "means of 4": Arm(f"{TOKEN_MEAN} --microbatch-means 4", environment=FLOAT32),
    },
    "distillation": {
        "reward": Arm(""),
        "teacher": Arm("--teacher {times_table} --pg-term opd:opd,on=rl --pg-term rl:rl,weight=0"),
        "both": Arm("--teacher {times_table} --pg-term opd:opd,on=rl,weight=0.2"),
    },
    "sft": {
        "rl": Arm(f"{WORD_PROBLEMS} --train-iters 40"),
        "sft": Arm(f"{WORD_PROBLEMS} --train-iters 40 --demonstrations 64 {SFT} --pg-term rl:rl,weight=0"),
        "sft + rl": Arm(f"{WORD_PROBLEMS} --train-iters 40 --demonstrations 64 {SFT}"),
    },
    "tasks": {
        "word_count": Arm("--task word_count --train-iters 40"),
        "calculator": Arm("--task calculator --train-iters 30", "calculator"),
    },
}
KEPT = (  # metrics of summary.json
    *("reward", "exact_match", "response_length", "length_of_right", "length_of_wrong", "truncated_fraction"),
    *("entropy", "grad_norm", "clipped_ratio_fraction", "ess", "mismatch_kl", "mismatch_max", "correction_factor"),
    *("rejected_fraction", "mismatch/difference", "mismatch/spread", "sft/mean", "opd/mean"),
    *("sampling_seconds", "step_seconds"),
)
LAST = 5  # steps that the means of a table are over


def log_ratios(path: Path) -> list[dict[str, float]]:
    """Of every step of a rollout file: log π (trainer) - log q (engine) at the trained tokens, on equal weights."""
    steps: dict[int, list[np.ndarray]] = {}
    with open(path, encoding="utf-8") as lines:
        next(lines)  # the header
        for sample in map(json.loads, lines):
            if sample.get("rollout_logprobs") is None:  # a demonstration
                continue
            d = np.subtract(sample["old_logprobs"], sample["rollout_logprobs"])
            steps.setdefault(sample["step"], []).append(d[np.array(sample["loss_mask"], bool)])
    return [_tail(np.concatenate(steps[step])) for step in sorted(steps)]


def _tail(d: np.ndarray) -> dict[str, float]:
    size = np.abs(d)
    p50, p99, p999 = np.quantile(size, (0.5, 0.99, 0.999))
    values = {"mean": d.mean(), "mean_abs": size.mean(), "p50": p50, "p99": p99, "p99.9": p999, "max": size.max()}
    return {name: float(f"{value:.4g}") for name, value in (values | {"tokens": len(d)}).items()}


class Runs:
    """The runs of a folder.

    Args:
        folder: where they are.
        minutes: what has not ended then is stopped.
        jobs: runs at a time, spread over the GPUs.
        flags: further flags of every run.
        keep_rollouts: keep rollouts.jsonl of runs that have ended.
    """

    def __init__(self, folder: Path, minutes: float, jobs: int, flags: str, *, keep_rollouts: bool):
        self.folder, self._flags, self._keep_rollouts = folder, shlex.split(flags), keep_rollouts
        self._end = time.monotonic() + 60 * minutes
        self._longest = 0.0  # seconds of a run
        self._devices: SimpleQueue[dict[str, str]] = SimpleQueue()
        gpus = torch.cuda.device_count()
        for job in range(jobs):
            self._devices.put({"CUDA_VISIBLE_DEVICES": str(job % gpus), "PROCESSES": "1"} if gpus else {})

    def of(self, experiment: str, arm: str, seed: int) -> Path:
        """The folder of a run."""
        return self.folder / experiment / f"{arm.replace(', ', '-').replace(' ', '-')}-{seed}"

    def start(self, name: str) -> Path:
        """The model of a start."""
        return self.folder / "start" / name / "model"

    def take(self, published: Path) -> None:
        """Count the runs of a folder that `show` wrote as done, for instance those of another machine."""
        for path in published.glob("*.json"):
            for arm, of_seeds in json.loads(path.read_text(encoding="utf-8")).items():
                for seed, summary in of_seeds.items():
                    folder = self.of(path.stem, arm, int(seed))
                    if not folder.exists():
                        folder.mkdir(parents=True)
                        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")

    def train(self, folder: Path, model: Path, arm: Arm, further: str) -> str:
        """Train a run that is missing; how it ended."""
        if (folder / "summary.json").exists():
            return "done before"
        with self._device() as device:
            if self._end - time.monotonic() < self._longest:
                return "not begun"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            started = time.monotonic()
            starts = {name: self.start(name) for name in STARTS}
            environment = {"PYTHON": sys.executable} | os.environ | device | arm.environment
            environment |= {"MODEL": str(starts[arm.start] if arm.start else model), "RUN_DIR": str(folder)}
            code = self._run(folder, f"{arm.flags.format(**starts)} {further}", environment)
            seconds = time.monotonic() - started
        if code is None:
            return "stopped"
        if code:
            return f"exit code {code}, see {folder / 'output.txt'}"
        self._longest = max(self._longest, seconds)
        self._summarize(folder, f"{arm.flags} {further}", seconds)  # after the GPU has been given to the next run
        return "done"

    @contextmanager
    def _device(self) -> Iterator[dict[str, str]]:
        """The environment of a free place on a GPU."""
        device = self._devices.get()
        try:
            yield device
        finally:
            self._devices.put(device)

    def _run(self, folder: Path, flags: str, environment: dict[str, str]) -> int | None:
        """The exit code of launch.sh; None if it was stopped."""
        words = ["bash", str(ROOT / "examples/chat/launch.sh"), *shlex.split(flags), *self._flags]
        with (folder / "output.txt").open("w") as output:
            process = subprocess.Popen(words, env=environment, stdout=output, stderr=output, start_new_session=True)
            try:
                return process.wait(max(self._end - time.monotonic(), 1))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
                return None

    def _summarize(self, folder: Path, flags: str, seconds: float) -> None:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        curves = {name: [record.get(name) for record in records] for name in KEPT}
        summary = {
            "flags": [*shlex.split(flags), *self._flags],
            "seconds": round(seconds),
            "final": json.loads((folder / "final.json").read_text(encoding="utf-8")),
            "nonfinite_steps": [record["iteration"] for record in records if "nonfinite" in record],
            "curves": {name: curve for name, curve in curves.items() if any(value is not None for value in curve)},
        }
        if "--imitate" not in flags:
            summary["log_ratios"] = log_ratios(folder / "rollouts.jsonl")
            words = [sys.executable, "-m", "megatron_pg", "mismatch", str(folder / "rollouts.jsonl")]
            told = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
            (folder / "mismatch.txt").write_text(told.stdout + told.stderr, encoding="utf-8")
        if not self._keep_rollouts:
            (folder / "rollouts.jsonl").unlink()
        scratch = folder / "summary.part"
        scratch.write_text(json.dumps(summary), encoding="utf-8")
        scratch.rename(folder / "summary.json")


def shown(runs: Runs, experiment: str) -> str:
    """A table of means over the last steps and over seeds, and how far the seeds are apart at most."""
    found = {}
    for arm in EXPERIMENTS[experiment]:
        paths = sorted(runs.folder.glob(f"{experiment}/{runs.of(experiment, arm, 0).name[:-1]}[0-9]*/summary.json"))
        found[arm] = {path.parent.name.rpartition("-")[2]: json.loads(path.read_text("utf-8")) for path in paths}
    (runs.folder / f"{experiment}.json").write_text(json.dumps(rounded(found)), encoding="utf-8")
    draw(found, experiment, runs.folder / f"{experiment}.png")
    names = [n for n in KEPT if any(n in run["curves"] for of_seeds in found.values() for run in of_seeds.values())]
    heads = [*names, "mean abs. log-ratio", "p99", "max", "first step with other answers"]
    lines = [f"| {experiment} | seeds | {' | '.join(heads)} |", "|---|---:|" + "---:|" * len(heads)]
    first = next(iter(found.values()))
    for arm, of_seeds in found.items():
        cells = [_cell([_last(run["curves"].get(name, [])) for run in of_seeds.values()]) for name in names]
        for name in ("mean_abs", "p99", "max"):
            cells.append(_cell([_last([s[name] for s in run.get("log_ratios", [])]) for run in of_seeds.values()]))
        parts = [_first_difference(run, first[seed]) for seed, run in of_seeds.items() if seed in first]
        lines.append(f"| {arm} | {len(of_seeds)} | {' | '.join(cells)} | {', '.join(map(str, parts))} |")
    return "\n".join(lines)


def rounded(value: Any) -> Any:
    """The floats in a JSON value to four digits."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def draw(found: dict[str, dict[str, dict]], experiment: str, path: Path) -> None:
    """The mean reward of every arm: a line for the mean over seeds, thin ones for the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 3.8))
    for color, (arm, of_seeds) in zip(plt.cm.tab10.colors, found.items(), strict=False):
        curves = [run["curves"]["reward"] for run in of_seeds.values()]
        for curve in curves:
            axis.plot(range(1, len(curve) + 1), curve, color=color, linewidth=0.6, alpha=0.6)
        if curves:
            mean = [sum(at) / len(at) for at in zip(*curves, strict=True)]
            axis.plot(range(1, len(mean) + 1), mean, color=color, linewidth=1.8, label=f"{arm} ({len(curves)} seeds)")
    axis.set(xlabel="optimizer step", ylabel="mean reward of the rollouts", ylim=(-0.02, 1.02))
    axis.set_title(f"{experiment}: mean over seeds (thick), each seed (thin)", fontsize=11)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=85)
    plt.close(figure)


def _first_difference(run: dict, other: dict) -> int | str:
    """The first step, from 1, in which the answers of two runs have other lengths or rewards."""
    pairs = [zip(*(r["curves"][name] for name in ("response_length", "reward")), strict=True) for r in (run, other)]
    return next((k for k, (a, b) in enumerate(zip(*pairs, strict=False), 1) if a != b), "–")


def _last(curve: list[float | None]) -> float | None:
    values = [value for value in curve if value is not None][-LAST:]
    return sum(values) / len(values) if values else None


def _cell(values: list[float | None]) -> str:
    there = [value for value in values if value is not None]
    if not there:
        return ""
    middle = sum(there) / len(there)
    return f"{middle:.3g} ± {max(abs(value - middle) for value in there):.1g}"


def main() -> None:
    """Starts, runs or shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("start", "run", "show"))
    names = f"start: of {', '.join(STARTS)}; else experiments: {', '.join(EXPERIMENTS)}"
    parser.add_argument("names", nargs="+", choices=(*STARTS, *EXPERIMENTS), metavar="NAME", help=names)
    parser.add_argument("--model", type=Path, help="folder or GGUF file of the pretrained model")
    parser.add_argument("--runs", type=Path, default=Path("runs/chat_evidence"), help="folder of the runs")
    parser.add_argument("--published", type=Path, help="folder of EXPERIMENT.json files whose runs count as done")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", help="only these arms of the experiments")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, over all GPUs")
    parser.add_argument("--minutes", type=float, default=9, help="what has not ended then is stopped")
    parser.add_argument("--flags", default="", help='further flags of every run: --flags="…"')
    parser.add_argument("--keep-rollouts", action="store_true", help="keep rollouts.jsonl of every run")
    args = parser.parse_args()
    known = STARTS if args.what == "start" else EXPERIMENTS
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"{args.what} {unknown[0]} does not exist. Choose from {', '.join(known)}.")
    runs = Runs(args.runs.resolve(), args.minutes, args.jobs, args.flags, keep_rollouts=args.keep_rollouts)
    if args.published is not None:
        runs.take(args.published)
    if args.what == "show":
        print("\n\n".join(shown(runs, name) for name in args.names))
        return
    if args.model is None or not args.model.exists():
        parser.error(f"--model {args.model} does not exist. Give the folder or the GGUF file of the pretrained model.")
    if not train_all(runs, planned(runs, args), args.model.resolve(), args.jobs):
        sys.exit("not all runs have ended: start the same command again")


def planned(runs: Runs, args: argparse.Namespace) -> list[tuple[str, Path, Arm, str]]:
    """Name, folder, arm and further flags of each run, all arms of a seed before the next seed."""
    if args.what == "start":
        return [(n, runs.start(n).parent, STARTS[n], f"--export {runs.start(n)}") for n in args.names]
    return [
        (f"{experiment}, {name}, seed {seed}", runs.of(experiment, name, seed), arm, f"--seed {seed}")
        for seed in args.seeds
        for experiment in args.names
        for name, arm in EXPERIMENTS[experiment].items()
        if args.arms is None or name in args.arms
    ]


def train_all(runs: Runs, plan: list[tuple[str, Path, Arm, str]], model: Path, jobs: int) -> bool:
    """Train what is missing; whether all runs have ended."""
    with ThreadPoolExecutor(2 * jobs) as pool:  # runs that have ended are summarized while others train
        endings = [(name, pool.submit(runs.train, folder, model, *rest)) for name, folder, *rest in plan]
        for name, ending in endings:
            print(f"{name}: {ending.result()}", flush=True)
    return all(ending.result().startswith("done") for _, ending in endings)


if __name__ == "__main__":
    main()
