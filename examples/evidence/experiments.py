"""Does the choice of a loss change a run? The experiments of docs/evidence.md, on one GPU or on a CPU.

    python examples/evidence/experiments.py run aggregation microbatches     # trains the missing runs
    python examples/evidence/experiments.py show --json docs/evidence        # a table, picture and JSON file of each

A run is examples/train_grpo.py from its seed's warm start, whose weights it takes, with the flags of its arm. `run` can
be stopped and started again: a run that has ended is kept, one that was cut goes on from its last checkpoint. An arm
that is in two experiments is trained once.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOKEN_MEAN = "--loss-aggregation token_mean"
FOUR_STEPS = f"{TOKEN_MEAN} --prompts-per-rollout 64"
TOP_P = f"{TOKEN_MEAN} --top-p 0.9"


@dataclass(frozen=True)
class Arm:
    """The flags that a run has in addition to the common ones, and what it starts from."""

    flags: str
    start: str = "start"
    teacher: str | None = None  # the run whose policy it is distilled from
    processes: int = 1  # GPUs, or processes over gloo
    cached: bool = True  # whether the sampler can keep keys and values


ARMS = {
    "constant": Arm("--loss-aggregation constant --loss-aggregation-divisor 24"),
    "token_mean": Arm(TOKEN_MEAN),
    "prompt_mean": Arm("--loss-aggregation prompt_mean"),
    "sample_mean": Arm("--loss-aggregation sample_mean"),
    "token_mean-32-rows": Arm(f"{TOKEN_MEAN} --micro-batch-size 32"),
    "token_mean-whole-step": Arm(f"{TOKEN_MEAN} --micro-batch-size {{step}}"),
    "dp4": Arm(f"{TOKEN_MEAN} --micro-batch-size 32", processes=4),
    "tp2-dp2": Arm(f"{TOKEN_MEAN} --micro-batch-size 32 --tensor-model-parallel-size 2", processes=4),
    "cp2": Arm(f"{TOKEN_MEAN} --context-parallel-size 2", processes=2, cached=False),
    "means-of-4": Arm(f"{TOKEN_MEAN} --microbatch-means 4"),
    "means-of-32": Arm(f"{TOKEN_MEAN} --microbatch-means 32"),
    "float32-head": Arm(f"{TOKEN_MEAN} --fp32-lm-head"),
    "grpo-4-steps": Arm(FOUR_STEPS),
    "gspo-4-steps": Arm(f"{FOUR_STEPS} --pg-objective gspo --pg-clip-eps-low 3e-4 --pg-clip-eps-high 4e-4"),
    "cispo-4-steps": Arm(f"{FOUR_STEPS} --pg-objective cispo,cap=1.28 --pg-clip-eps-low 1"),
    "top-p-replayed": Arm(TOP_P),
    "top-p-engine": Arm(f"{TOP_P} --top-p-logprobs engine"),
    "top-p-recomputed": Arm(f"{TOP_P} --top-p-logprobs recomputed"),
    "student-reward": Arm(TOKEN_MEAN, "student"),
    "student-teacher": Arm(f"{TOKEN_MEAN} --pg-term rl:rl,weight=0 --pg-term teacher:opd,on=rl", "student", "constant"),
    "student-both": Arm(f"{TOKEN_MEAN} --pg-term teacher:opd,on=rl,weight=0.2", "student", "constant"),
}
EXPERIMENTS = {
    "aggregation": ("constant", "token_mean", "prompt_mean", "sample_mean"),
    "microbatches": ("token_mean", "token_mean-32-rows", "token_mean-whole-step", "means-of-32", "means-of-4"),
    "layouts": ("token_mean", "dp4", "tp2-dp2", "cp2"),
    "head": ("token_mean", "float32-head"),
    "objectives": ("grpo-4-steps", "gspo-4-steps", "cispo-4-steps"),
    "top_p": ("top-p-replayed", "top-p-engine", "top-p-recomputed"),
    "distillation": ("student-reward", "student-teacher", "student-both"),
}
STARTS = ("start", "student")


@dataclass(frozen=True)
class Scale:
    """A machine's sizes: the launcher and the flags of every run, of warm starts and of what goes on from them."""

    launcher: str
    flags: str
    step: int  # samples of an optimizer step
    cached: str  # where the launcher does not decide by CACHED
    start: str
    arms: str
    student: str  # its sizes, and those of its teacher if it has one
    teacher: str


SCALES = {
    "gpu": Scale(
        launcher="launch_gpu.sh",
        step=256,
        cached="",
        flags="--exact-match-interval 25 --exact-match-prompts 256",
        start="--warm-up-iters 600 --train-iters 600 --lr 6e-4 --min-lr 6e-5 --lr-warmup-iters 30",
        arms=(
            "--warm-up-iters 600 --train-iters 800 --lr 5e-5 --min-lr 5e-5 --lr-decay-style constant "
            "--lr-warmup-iters 0"
        ),
        student="--num-layers 2 --hidden-size 160 --num-attention-heads 2",
        teacher="--teacher-num-layers 4 --teacher-hidden-size 800",
    ),
    "cpu": Scale(
        launcher="launch_cpu.sh",
        step=128,
        cached="--cached-sampling",
        flags="--task list_programs --seq-length 48 --max-position-embeddings 48 --vocab-size 20 "
        "--prompts-per-rollout 16 --global-batch-size 128 --exact-match-interval 50 --exact-match-prompts 512",
        start="--warm-up-iters 700 --train-iters 700 --lr 2e-3 --min-lr 2e-4 --lr-warmup-iters 20",
        arms=(
            "--warm-up-iters 700 --train-iters 950 --lr 2e-4 --min-lr 2e-4 --lr-decay-style constant "
            "--lr-warmup-iters 0"
        ),
        student="--num-layers 2 --hidden-size 48 --num-attention-heads 2",
        teacher="--teacher-num-layers 3 --teacher-hidden-size 96",
    ),
}


class Runs:
    """The folder of all runs.

    Args:
        folder: where they are.
        scale: of the machine.
        start_flags: further flags of warm starts.
        arm_flags: further flags of arms.
    """

    def __init__(self, folder: Path, scale: Scale, *, start_flags: str = "", arm_flags: str = ""):
        self.folder, self.scale = folder, scale
        self._start_flags, self._arm_flags = start_flags, arm_flags
        self._processes: set[subprocess.Popen] = set()
        self._is_over = threading.Event()

    def of(self, name: str, seed: int) -> Path:
        """The folder of a run."""
        return self.folder / f"{name}-{seed}"

    def is_done(self, name: str, seed: int) -> bool:
        """Whether the run has ended as it should."""
        return (self.of(name, seed) / "done").exists()

    def train(self, name: str, seed: int) -> str | None:
        """Run a warm start or an arm, from its last checkpoint if it has one.

        Returns:
            How it ended. None: nothing ran, because it had ended before or the runs are being stopped.
        """
        if self.is_done(name, seed) or self._is_over.is_set():
            return None
        folder = self.of(name, seed)
        folder.mkdir(parents=True, exist_ok=True)
        code = self.launch(folder, self.flags(name, seed, folder / "saved"), arm_of(name))
        if code == 0:
            if name in ARMS and name not in {arm.teacher for arm in ARMS.values()}:
                shutil.rmtree(folder / "saved")
            (folder / "done").touch()
        return "done" if code == 0 else f"exit code {code}"

    def stop(self) -> None:
        """Ends what runs; nothing further starts."""
        self._is_over.set()
        for process in list(self._processes):
            os.killpg(process.pid, signal.SIGTERM)

    def flags(self, name: str, seed: int, saved: Path) -> list[str]:
        """Of a run whose checkpoints are in `saved`."""
        arm, scale = arm_of(name), self.scale
        flags = (
            f"{scale.flags} --seed {seed} --save {shlex.quote(str(saved))} --ckpt-format torch_dist --discard-rollouts"
        )
        flags += f" {scale.cached if arm.cached else ''} {scale.student if arm.start == 'student' else ''}"
        if name in STARTS:
            return shlex.split(f"{flags} {scale.start} {arm.flags} --save-interval 1000 {self._start_flags}")
        begun = (saved / "latest_checkpointed_iteration.txt").exists()
        load = saved if begun else self.of(arm.start, seed) / "saved"
        flags += f" {scale.arms} {arm.flags.format(step=scale.step)} --save-interval 100 --override-opt_param-scheduler"
        flags += f" --load {shlex.quote(str(load))} {'' if begun else '--no-load-optim'}"
        if arm.teacher is not None:
            flags += f" --teacher {shlex.quote(str(self.of(arm.teacher, seed) / 'saved'))} {scale.teacher}"
        return shlex.split(f"{flags} {self._arm_flags}")

    def launch(self, folder: Path, flags: list[str], arm: Arm) -> int:
        """Runs it; the exit code."""
        environment = {"PYTHON": sys.executable} | os.environ | {"RUN_DIR": str(folder)}
        environment |= {"PROCESSES": str(arm.processes), "CACHED": "1" if arm.cached else ""}
        command = ["bash", str(ROOT / "examples" / self.scale.launcher), *flags]
        with (folder / "output.txt").open("a") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
            self._processes.add(process)
            code = process.wait()
            self._processes.discard(process)
        return code


def run(runs: Runs, experiments: list[str], seeds: list[int], jobs: int, minutes: float) -> bool:
    """Trains what these experiments need, `jobs` at a time; whether all of it is there after at most `minutes`."""
    names = list(dict.fromkeys(name for experiment in experiments for name in EXPERIMENTS[experiment]))
    teachers = list(dict.fromkeys(ARMS[name].teacher for name in names if ARMS[name].teacher))
    names = [*teachers, *(name for name in names if name not in teachers)]
    starts = list(dict.fromkeys(ARMS[name].start for name in names))
    limit = threading.Timer(min(60 * minutes, threading.TIMEOUT_MAX), runs.stop)
    limit.daemon = True
    limit.start()
    with ThreadPoolExecutor(jobs) as pool:  # a run begins when what it needs has ended
        begun = {}
        for name in [*starts, *names]:
            for seed in seeds:
                before = [begun[need, seed] for need in needs_of(name)]
                begun[name, seed] = pool.submit(_after, before, runs, name, seed)
    limit.cancel()
    return all(runs.is_done(name, seed) for name in names for seed in seeds)


def _after(before: list, runs: Runs, name: str, seed: int) -> None:
    for job in before:
        job.result()
    if all(runs.is_done(need, seed) for need in needs_of(name)) and (ending := runs.train(name, seed)):
        print(f"{name}-{seed}: {ending}", flush=True)


def arm_of(name: str) -> Arm:
    """A run's; a warm start is one that starts from nothing."""
    return Arm(TOKEN_MEAN, start=name) if name in STARTS else ARMS[name]


def needs_of(name: str) -> list[str]:
    """The runs that a run goes on from."""
    return [] if name in STARTS else [ARMS[name].start, *filter(None, [ARMS[name].teacher])]


# --- what came of it ---

COLUMNS = {  # metric: its name in a table, its style
    "exact_match": ("held-out programs right", "{:.3f}"),
    "reward": ("reward", "{:.3f}"),
    "length_of_right": ("tokens of a right answer", "{:.1f}"),
    "length_of_wrong": ("tokens of a wrong answer", "{:.1f}"),
    "mean_abs_log_ratio": ("mean absolute log-ratio", "{:.1e}"),
    "clipped_ratio_fraction": ("clipped", "{:.4f}"),
    "grad_norm": ("gradient's norm", "{:.3f}"),
    "entropy": ("entropy, nats", "{:.3f}"),
    "teacher/mean": ("KL to the teacher", "{:.3f}"),
}
PANELS = ("reward", "exact_match", "length_of_right", "length_of_wrong")
FURTHER_PANELS = {
    "layouts": ("reward", "exact_match", "response_length", "grad_norm"),
    "head": ("reward", "exact_match", "mean_abs_log_ratio", "clipped_ratio_fraction"),
    "objectives": ("reward", "exact_match", "response_length", "clipped_ratio_fraction"),
    "top_p": ("reward", "exact_match", "response_length", "entropy"),
    "distillation": ("reward", "exact_match", "response_length", "teacher/mean"),
}
LAST = 20  # steps that a table's means are over
EVERY = 5  # steps of which a JSON file keeps the mean


Curves = dict[str, dict[str, dict[str, list[float | None]]]]  # arm, seed, metric


def records_of(folder: Path) -> list[dict[str, object]]:
    """The steps of a run after its warm start."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["phase"] != "warm-up"]


def means(records: list[dict[str, object]], name: str, every: int) -> list[float | None]:
    """Means of the metric over `every` steps at a time, of the records that have it."""
    curve = []
    for first in range(0, len(records), every):
        values = [record[name] for record in records[first : first + every] if record.get(name) is not None]
        curve.append(float(f"{sum(values) / len(values):.4g}") if values else None)
    return curve


def curves_of(runs: Runs, experiment: str, seeds: list[int]) -> Curves:
    """Of an experiment's runs that have ended."""
    names = (*COLUMNS, "response_length")
    curves_of_runs = {}
    for name in EXPERIMENTS[experiment]:
        for seed in seeds:
            if runs.is_done(name, seed):
                records = records_of(runs.of(name, seed))
                curves = {metric: means(records, metric, EVERY) for metric in names}
                kept = {metric: curve for metric, curve in curves.items() if any(value is not None for value in curve)}
                curves_of_runs.setdefault(name, {})[str(seed)] = kept
    return curves_of_runs


def table_of(curves: Curves) -> str:
    """Means over the last steps, and how far the seeds are apart from their mean at most."""
    shown = {n: c for n, c in COLUMNS.items() if any(n in curve for arm in curves.values() for curve in arm.values())}
    lines = ["| | seeds | " + " | ".join(title for title, _ in shown.values()) + " |"]
    lines.append("|---|---:|" + "---:|" * len(shown))
    for arm, of_seeds in curves.items():
        cells = [f"`{arm}`", str(len(of_seeds))]
        for name, (_, style) in shown.items():
            ends = [_mean(curve[name][-LAST // EVERY :]) for curve in of_seeds.values() if name in curve]
            ends = [end for end in ends if not math.isnan(end)]
            middle = _mean(ends)
            spread = max((abs(end - middle) for end in ends), default=math.nan)
            cells.append(f"{style.format(middle)} ± {style.format(spread)}" if ends else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(values: list[float | None]) -> float:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else math.nan


def agreement_of(runs: Runs, experiment: str, seeds: list[int]) -> str:
    """Compared with the first arm, from the same weights: difference of the first gradient norm, and steps of equal
    reward."""
    first, *others = EXPERIMENTS[experiment]
    lines = [
        f"| compared with `{first}` | seed | gradient's norm, first step | equal rewards, steps |",
        "|---|---:|---:|---:|",
    ]
    for name in others:
        for seed in seeds:
            if runs.is_done(first, seed) and runs.is_done(name, seed):
                pairs = list(zip(records_of(runs.of(first, seed)), records_of(runs.of(name, seed)), strict=True))
                same = next((k for k, (a, b) in enumerate(pairs) if a["reward"] != b["reward"]), len(pairs))
                apart = pairs[0][1]["grad_norm"] / pairs[0][0]["grad_norm"] - 1
                lines.append(f"| `{name}` | {seed} | {apart:+.1e} | {same} of {len(pairs)} |")
    return "\n".join(lines)


def draw(curves: Curves, experiment: str, path: Path) -> None:
    """One line per arm, the mean over seeds, between the least and the largest."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), sharex=True)
    for axis, name in zip(axes.flat, FURTHER_PANELS.get(experiment, PANELS), strict=True):
        for color, (arm, of_seeds) in zip(plt.cm.tab10.colors, curves.items(), strict=False):
            lines = [curve[name] for curve in of_seeds.values() if name in curve]
            points = [
                (EVERY * (k + 1), [v for v in at if v is not None]) for k, at in enumerate(zip(*lines, strict=True))
            ]
            points = [(step, values) for step, values in points if values]
            if points:
                x = [step for step, _ in points]
                axis.plot(x, [sum(v) / len(v) for _, v in points], color=color, linewidth=1.5, label=arm)
                axis.fill_between(x, [min(v) for _, v in points], [max(v) for _, v in points], color=color, alpha=0.15)
        axis.set_title(COLUMNS.get(name, ("tokens of a response",))[0], fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("optimizer steps after the warm start")
    seeds = max(map(len, curves.values()))
    figure.suptitle(f"{experiment}: mean of {seeds} seeds, bands from the least to the largest", fontsize=11)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, ncols=4, loc="lower center", frameon=False)
    figure.tight_layout(rect=(0, 0.03 + 0.03 * (len(labels) > 4), 1, 1))
    figure.savefig(path, dpi=85)
    plt.close(figure)


def show(runs: Runs, experiments: list[str], seeds: list[int], folder: Path) -> None:
    """Prints the tables, writes a JSON file and a picture of each experiment."""
    folder.mkdir(parents=True, exist_ok=True)
    for experiment in experiments:
        curves = curves_of(runs, experiment, seeds)
        print(f"## {experiment}\n\n{table_of(curves)}\n")
        if experiment in ("layouts", "microbatches"):
            print(f"{agreement_of(runs, experiment, seeds)}\n")
        if curves:
            (folder / f"{experiment}.json").write_text(json.dumps({"every": EVERY, "curves": curves}), encoding="utf-8")
            draw(curves, experiment, folder / f"{experiment}.png")


def main() -> None:
    """Runs or shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "show"))
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=f"of {', '.join(EXPERIMENTS)}; all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--scale", choices=SCALES, default="gpu")
    parser.add_argument("--runs", type=Path, default=Path("runs/evidence"), help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=6, help="runs at a time, on one GPU or the cores")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop what is not ready then")
    parser.add_argument("--start-flags", default="", help='further flags of the warm starts: --start-flags="…"')
    parser.add_argument("--arm-flags", default="", help="further flags of the arms, as one string")
    parser.add_argument("--json", type=Path, default=Path("runs/evidence/shown"), help="folder of files and pictures")
    args = parser.parse_args()
    if unknown := [name for name in args.experiments if name not in EXPERIMENTS]:
        parser.error(
            f"{', '.join(unknown)} is none of {', '.join(EXPERIMENTS)}, so nothing is run. Choose some of them."
        )
    runs = Runs(args.runs.resolve(), SCALES[args.scale], start_flags=args.start_flags, arm_flags=args.arm_flags)
    experiments = args.experiments or list(EXPERIMENTS)
    if args.what == "show":
        show(runs, experiments, args.seeds, args.json)
    elif not run(runs, experiments, args.seeds, args.jobs, args.minutes):
        sys.exit("not all runs have ended: see output.txt in their folders, and start the same command again")


if __name__ == "__main__":
    main()
