"""What a run writes and shows: metrics.jsonl, rollouts.jsonl, arguments.json, curves.png, a progress line."""

import json
import math
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

from megatron_pg import RolloutWriter, Sample, read_rollouts
from megatron_pg.metrics.file import MetricsFile, free_name

MEAN_OF = 10  # steps, of the thick lines
_FEW = 20  # a curve with fewer steps has no thick line


class RunFolder:
    """The run's files, written by one rank. Every line is flushed, so a run that dies leaves complete steps.

    Args:
        path: the folder.
        train_iters: for the progress line.
        sampled: optimizer steps that the run had samples for then: those of an open rollout batch are kept. None: no
            rollouts.jsonl; every rank writes its own file (`rollout_documents`).
        version: of the rollout file.
    """

    def __init__(self, path: str, *, train_iters: int, sampled: int | None = 0, version: int = 1):
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.metrics = MetricsFile(self.path / "metrics.jsonl")
        self.rollouts = None
        if sampled is not None:
            self.rollouts = continue_rollouts(self.path / "rollouts.jsonl", sampled, version)
        self._train_iters = train_iters
        self._first: tuple[int, float] | None = None
        self._exact_match: float | None = None  # the last one: it is not measured at every step

    def write_arguments(self, args) -> None:
        """The resolved arguments."""
        text = json.dumps(vars(args), indent=1, sort_keys=True, default=str)
        (self.path / "arguments.json").write_text(text, encoding="utf-8")

    def show(self, record: dict[str, object], *, every: int) -> None:
        """The progress line, with the time left; signs are always printed."""
        self._exact_match = record.get("exact_match", self._exact_match)
        record = record | {"exact_match": self._exact_match}
        iteration, now = record["iteration"], time.monotonic()
        if self._first is None:
            self._first = (iteration, now)
        if iteration % every and iteration != self._train_iters:
            return
        done = iteration - self._first[0]
        left = (now - self._first[1]) / done * (self._train_iters - iteration) if done else math.nan
        parts = [f"{record['phase']:<7} {iteration:>4}/{self._train_iters}"]
        means = {name: ".4f" for name in record if name.endswith("/mean")}  # of loss terms
        for name, style in (_SHOWN | means).items():
            if record.get(name) is not None:
                parts.append(f"{name} {record[name]:{style}}")
        say(" | ".join([*parts, f"{_clock(left)} left"]))

    @property
    def files(self) -> str:
        """The files' names."""
        lines = sorted(path.name for path in self.path.glob("*.jsonl"))
        return ", ".join([*lines, "arguments.json", "curves.png"])

    def close(self) -> None:
        """Close the files and draw the curves."""
        self.metrics.close()
        if self.metrics.num_missing:
            say(f"{self.metrics.path} lacks the last {self.metrics.num_missing} steps: it could not be written")
        if self.rollouts is not None:
            self.rollouts.close()
        if self.metrics.path.exists():  # a step has been trained
            draw(self.path)


def continue_rollouts(path: Path, sampled: int, version: int = 1) -> RolloutWriter:
    """A writer that continues `path` after the samples of the first `sampled` steps.

    Later ones will be sampled again; an earlier run's, too, stay in a copy next to it (rollouts.jsonl.1 and so on).
    """
    scratch, samples = path.with_suffix(".part"), []
    if path.exists():
        whole, end, _ = path.read_bytes().rpartition(b"\n")  # a last line without its end was cut by a kill
        if b"\n" in whole:  # more than the header
            scratch.write_bytes(whole + end)
            samples = read_rollouts(scratch)
    kept = [sample for sample in samples if sample.step < sampled]
    if len(kept) < len(samples):
        shutil.copyfile(path, free_name(path))
    writer = RolloutWriter(scratch, if_exists="replace", version=version)  # a run that was killed may have left one
    writer.write(kept)
    os.replace(scratch, path)  # never half a file
    return writer


_SHOWN = {
    "pg_loss": "+.4f",
    "exact_match": ".3f",
    "reward": ".3f",
    "response_length": ".2f",
    "kl_new_old": ".1e",
    "clipped_ratio_fraction": ".3f",
    "grad_norm": ".3g",
    "step_seconds": ".1f",
}


def recorded_metrics(samples: list[Sample]) -> dict[str, float]:
    """Means over the rollouts of a recorded step, without samples that have no reward, such as demonstrations."""
    sampled = [sample for sample in samples if sample.reward is not None]
    rewards = {sample.rollout_id: sample.reward for sample in sampled}
    if not rewards:
        return {}
    lengths = sum(sample.response_length for sample in sampled)
    return {"reward": sum(rewards.values()) / len(rewards), "response_length": lengths / len(rewards)}


def say(text: str) -> None:
    """Print to the terminal, also while the standard output is redirected."""
    print(text, file=sys.__stdout__, flush=True)


def _clock(seconds: float) -> str:
    return "--:--" if math.isnan(seconds) else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def draw(path: Path) -> None:
    """curves.png from metrics.jsonl: reward, exact match, response length, and pg_loss or the distance from the
    teacher."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    grpo = [record for record in records if record["phase"] != "warm-up"]
    panels = {
        "reward": "mean reward of the rollouts",
        "exact_match": "exact match, held-out prompts",
        "response_length": "response length, tokens",
        "pg_loss": "pg_loss",
    }
    if any("teacher/mean" in record for record in grpo):
        del panels["pg_loss"]
        panels["teacher/mean"] = "KL to the teacher, nats per token"
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), sharex=True)
    has_means = False
    for axis, (name, title) in zip(axes.flat, panels.items(), strict=True):
        points = [(r["iteration"], r[name]) for r in grpo if r.get(name) is not None]
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
        has_means |= _draw_points(axis, points)
        if name in ("reward", "exact_match"):
            axis.set_ylim(0, 1)
        if name in ("pg_loss", "teacher/mean"):
            axis.axhline(0, color="grey", linewidth=0.8)
    for axis in axes[1]:
        axis.set_xlabel("optimizer step")
    arguments = json.loads((path / "arguments.json").read_text(encoding="utf-8"))
    loss = f"GRPO, --loss-aggregation {arguments['loss_aggregation']}"
    if arguments.get("pg_term"):
        loss = " ".join(f"--pg-term {term}" for term in arguments["pg_term"])
    lines = f"\nthin: each step, thick: mean of {MEAN_OF} steps" if has_means else ""
    figure.suptitle(f"--task {arguments.get('task', 'digit_sort')}; {loss}{lines}", fontsize=11)
    figure.tight_layout()
    figure.savefig(path / "curves.png", dpi=110)
    plt.close(figure)


def _draw_points(axis, points: list[tuple[int, float]]) -> bool:
    """Few points are marked. Many are a thin line and a thick one, the mean of the last MEAN_OF; then true."""
    if not points:
        return False
    steps, values = zip(*points, strict=True)
    if len(points) < _FEW:
        axis.plot(steps, values, marker="o", markersize=4, linewidth=1.5)
        return False
    axis.plot(steps, values, color="tab:blue", linewidth=0.8, alpha=0.4)
    means = [statistics.fmean(values[max(k - MEAN_OF + 1, 0) : k + 1]) for k in range(len(values))]
    axis.plot(steps, means, color="tab:blue", linewidth=1.8)
    return True
