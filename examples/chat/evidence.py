"""Does it change a run? Experiments with the chat example, on one GPU or on a CPU.

    python -m chat.evidence start word_problems --model FOLDER --runs runs/chat_evidence   # a supervised start, once
    python -m chat.evidence run quantized --model FOLDER --runs runs/chat_evidence --minutes 9
    python -m chat.evidence show quantized --runs runs/chat_evidence

`run` trains what is missing, `--jobs` at a time, and can be started again: a run that has ended has summary.json, and
one that was cut begins again. `show` prints means over the last steps and writes EXPERIMENT.json with the curves.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
CORRECTIONS = {
    "none": "none",
    "tis": "tis,high=2",
    "mis": "mis,high=3",
    "icepop": "icepop,low=0.5,high=2",
    "rejection": "rejection,level=seq_mean,estimator=k3,high=0.05",
}
WORD_PROBLEMS = "--task word_problems --train-iters 60"
EXPERIMENTS = {  # the flags of each arm
    "head": {
        "bfloat16": "",
        "float32 trainer": "--fp32-lm-head",
        "float32 engine": "--engine-fp32-head",
        "float32 both": "--fp32-lm-head --engine-fp32-head",
    },
    "quantized": {
        f"{bits}, {name}": f"--engine-weights {bits} --pg-correction {shlex.quote(correction)}"
        for bits in ("int8", "int4")
        for name, correction in CORRECTIONS.items()
    },
    "aggregation": {
        "sample_mean": f"{WORD_PROBLEMS} --loss-aggregation sample_mean",
        "prompt_mean": f"{WORD_PROBLEMS} --loss-aggregation prompt_mean",
        "token_mean": f"{WORD_PROBLEMS} --loss-aggregation token_mean",
        "constant, L=160": f"{WORD_PROBLEMS} --loss-aggregation constant --loss-aggregation-divisor 160",
        "constant, L=40": f"{WORD_PROBLEMS} --loss-aggregation constant --loss-aggregation-divisor 40",
    },
}
FROM_START = {"aggregation": "word_problems"}  # experiments that go on from the supervised start of a task
START = "--imitate --train-iters 40 --lr 1e-4"
KEPT = (  # metrics of summary.json
    *("reward", "exact_match", "response_length", "length_of_right", "length_of_wrong", "truncated_fraction"),
    *("entropy", "grad_norm", "clipped_ratio_fraction", "ess", "mismatch_kl", "mismatch_max", "correction_factor"),
    *("rejected_fraction", "mismatch/difference", "mismatch/spread", "sampling_seconds", "step_seconds"),
)
LAST = 5  # steps that the means of a table are over


def log_ratios(path: Path) -> list[dict[str, float]]:
    """Of every step of a rollout file: log π (trainer) - log q (engine) at the trained tokens, on equal weights."""
    steps: dict[int, list[np.ndarray]] = {}
    with open(path, encoding="utf-8") as lines:
        next(lines)  # the header
        for sample in map(json.loads, lines):
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
        flags: further flags of every run.
        keep_rollouts: keep rollouts.jsonl of runs that have ended.
    """

    def __init__(self, folder: Path, minutes: float, flags: str, *, keep_rollouts: bool):
        self.folder, self._flags, self._keep_rollouts = folder, shlex.split(flags), keep_rollouts
        self._end = time.monotonic() + 60 * minutes

    def of(self, experiment: str, arm: str, seed: int) -> Path:
        """The folder of a run."""
        return self.folder / experiment / f"{arm.replace(', ', '-').replace(' ', '-')}-{seed}"

    def train(self, folder: Path, model: Path, flags: str) -> str:
        """Train a run that is missing; how it ended."""
        if (folder / "summary.json").exists():
            return "done before"
        if time.monotonic() > self._end:
            return "not begun"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        started = time.monotonic()
        words = ["bash", str(ROOT / "examples/chat/launch.sh"), *shlex.split(flags), *self._flags]
        environment = {"PYTHON": sys.executable} | os.environ | {"MODEL": str(model), "RUN_DIR": str(folder)}
        with (folder / "output.txt").open("w") as output:
            process = subprocess.Popen(words, env=environment, stdout=output, stderr=output, start_new_session=True)
            try:
                code = process.wait(max(self._end - time.monotonic(), 1))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
                return "stopped"
        if code:
            return f"exit code {code}, see {folder / 'output.txt'}"
        self._summarize(folder, flags, time.monotonic() - started)
        return "done"

    def _summarize(self, folder: Path, flags: str, seconds: float) -> None:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        curves = {name: [record.get(name) for record in records] for name in KEPT}
        summary = {
            "flags": [*shlex.split(flags), *self._flags],
            "seconds": round(seconds),
            "nonfinite_steps": [record["iteration"] for record in records if "nonfinite" in record],
            "curves": {name: curve for name, curve in curves.items() if any(value is not None for value in curve)},
        }
        if "--imitate" not in flags:
            summary["log_ratios"] = log_ratios(folder / "rollouts.jsonl")
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
    (runs.folder / f"{experiment}.json").write_text(json.dumps(found), encoding="utf-8")
    names = [n for n in KEPT if any(n in run["curves"] for of_seeds in found.values() for run in of_seeds.values())]
    lines = [f"| {experiment} | seeds | {' | '.join(names)} | mean abs. log-ratio | p99 | max |"]
    lines.append("|---|---:|" + "---:|" * (len(names) + 3))
    for arm, of_seeds in found.items():
        cells = [_cell([_last(run["curves"].get(name, [])) for run in of_seeds.values()]) for name in names]
        for name in ("mean_abs", "p99", "max"):
            cells.append(_cell([_last([s[name] for s in run.get("log_ratios", [])]) for run in of_seeds.values()]))
        lines.append(f"| {arm} | {len(of_seeds)} | {' | '.join(cells)} |")
    return "\n".join(lines)


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
    parser.add_argument("name", help=f"start: the task; else the experiment: {', '.join(EXPERIMENTS)}")
    parser.add_argument("--model", type=Path, help="folder or GGUF file of the pretrained model")
    parser.add_argument("--runs", type=Path, default=Path("runs/chat_evidence"), help="folder of the runs")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", help="only these arms of the experiment")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=9, help="what has not ended then is stopped")
    parser.add_argument("--flags", default="", help='further flags of every run: --flags="…"')
    parser.add_argument("--keep-rollouts", action="store_true", help="keep rollouts.jsonl, for megatron-pg mismatch")
    args = parser.parse_args()
    runs = Runs(args.runs.resolve(), args.minutes, args.flags, keep_rollouts=args.keep_rollouts)
    if args.what == "show":
        print(shown(runs, args.name))
        return
    if args.model is None or not args.model.exists():
        parser.error(f"--model {args.model} does not exist. Give the folder or the GGUF file of the pretrained model.")
    start = runs.folder / "start"
    if args.what == "start":
        folder = start / args.name
        print(runs.train(folder, args.model.resolve(), f"--task {args.name} {START} --export {folder / 'model'}"))
        return
    model = start / FROM_START[args.name] / "model" if args.name in FROM_START else args.model.resolve()
    arms = {arm: flags for arm, flags in EXPERIMENTS[args.name].items() if arm in (args.arms or EXPERIMENTS[args.name])}
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = {
            (arm, seed): pool.submit(runs.train, runs.of(args.name, arm, seed), model, f"{flags} --seed {seed}")
            for seed in args.seeds
            for arm, flags in arms.items()
        }
        endings = {}
        for (arm, seed), job in jobs.items():
            endings[arm, seed] = job.result()
            print(f"{args.name}, {arm}, seed {seed}: {endings[arm, seed]}", flush=True)
    if not all(ending.startswith("done") for ending in endings.values()):
        sys.exit("not all runs have ended: start the same command again")


if __name__ == "__main__":
    main()
