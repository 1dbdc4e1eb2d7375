"""`megatron-pg mismatch`: why log-probabilities of trainer and rollout engine differ, from rollout files alone."""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_pg.cli.rollouts.compare import read_samples
from megatron_pg.cli.runs.pictures import add_picture_options, check_picture, picture
from megatron_pg.cli.terminal import InputError, say, show_json, show_path
from megatron_pg.mismatch.causes import CAUSES, Answer
from megatron_pg.mismatch.diagnosis import LEVEL, Diagnosis, diagnose
from megatron_pg.mismatch.gap import Gap, gap_of
from megatron_pg.mismatch.noise import EDGES, bins_of, noise_of
from megatron_pg.mismatch.settings import Settings
from megatron_pg.rollouts.fields import POLICY

if TYPE_CHECKING:
    from megatron_pg.rollouts.sample import Sample

_VERDICTS = {
    "found": "{number} found",
    "noise": "no cause found: the difference has the size of rounding to bfloat16",
    "unexplained": "the difference is larger than the noise of bfloat16, and no tested cause explains it",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `mismatch`."""
    files = (
        "rollout files with rollout_logprobs (docs/rollout_file.md); several files are also compared with each other"
    )
    parser.add_argument("rollouts", nargs="+", metavar="ROLLOUTS", help=files)
    level = f"probability of a false alarm over all tests together, in rollouts without a fault (default {LEVEL:g})"
    parser.add_argument("--level", type=float, default=LEVEL, metavar="P", help=level)
    by = "custom field (x_…) whose groups are compared, in addition to worker, data_parallel_rank and file; repeatable"
    parser.add_argument("--by", action="append", metavar="FIELD", help=by)
    engine = "sampling settings of the engine: temperature, top_p, top_k; such as temperature=0.7,top_p=0.95"
    parser.add_argument("--engine", metavar="NAME=VALUE[,...]", help=engine)
    trainer = "temperature of the trainer's log-probabilities (--pg-temperature); needs --engine temperature=…"
    parser.add_argument("--trainer-temperature", type=float, metavar="T", help=trainer)
    add_picture_options(parser)


def run(options: argparse.Namespace) -> int:
    """Print the diagnosis and draw it."""
    if not 0 < options.level < 1:
        raise InputError(f"--level {options.level:g} is not a probability. Give more than 0 and less than 1.")
    check_picture(options)
    try:
        settings = Settings.parse(options.engine, options.trainer_temperature)
    except ValueError as error:
        raise InputError(f"{error}.") from error
    gap = read_gap(options.rollouts, options.by or ())
    diagnosis = diagnose(gap, options.level, settings)
    if options.output:
        _draw(options, gap)
    if options.json:
        counts = {"documents": len(np.unique(gap.document)), "tokens": len(gap.engine), "level": options.level}
        show_json({"rollouts": list(map(str, options.rollouts))} | counts | diagnosis.document())
    else:
        _show(options.rollouts, gap, diagnosis)
    return 0


def read_gap(paths: Sequence[str], by: Sequence[str] = ()) -> Gap:
    """The trained tokens of all files; `by` names further fields that divide them into groups."""
    absolute = [Path(path).absolute() for path in paths]
    if again := [path for i, path in enumerate(paths) if absolute[i] in absolute[:i]]:
        raise InputError(f"{show_path(again[0])}: is given twice. Give every file once.")
    samples, files = itertools.tee(_samples(paths))  # read together, so one sample is in memory
    try:
        return gap_of((sample for sample, _ in samples), (name for _, name in files) if paths[1:] else None, by)
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise InputError(f"{', '.join(map(show_path, paths))}: {error}") from error


def _samples(paths: Sequence[str]) -> Iterator[tuple["Sample", str]]:
    """The objective's samples, which the engine has sampled, each with its file."""
    for path in paths:
        for sample in read_samples(path):
            if sample.term == POLICY:
                yield sample, show_path(path)


# --- output ---


def _show(paths: Sequence[str], gap: Gap, diagnosis: Diagnosis) -> None:
    summary = diagnosis.summary
    count = f"{len(np.unique(gap.document))} samples, {len(gap.engine)} trained tokens"
    say(f"{', '.join(map(show_path, paths))}: {count}; d = log π (trainer) - log q (engine)")
    say(f"  mean d {summary['mean']:+.2e}, mean |d| {summary['mean_abs']:.2e}, k3 {summary['k3']:.2e} nats")
    untested = sum(test.outcome == "cannot tell" for test in diagnosis.tests)
    rest = f"; {untested} of {len(diagnosis.tests)} causes cannot be tested with these data" if untested else ""
    say(_VERDICTS[diagnosis.verdict].format(number=len(diagnosis.found)) + rest)
    for test in diagnosis.found:
        say(f"  {test.cause}: {CAUSES[test.cause].title}{_estimate(test)}")
        say(f"    {test.evidence}{'' if test.p is None else f' (p {_p(test.p)})'}")
        say(f"    → {CAUSES[test.cause].advice}")
    for outcome in ("not found", "cannot tell"):
        if tests := [test for test in diagnosis.tests if test.outcome == outcome]:
            say(outcome)
            for test in tests:
                say(f"  {test.cause:<15} {test.evidence}{'' if test.p is None else f' (p {_p(test.p)})'}")


def _estimate(test: Answer) -> str:
    texts = {
        "temperature": "; trainer's = engine's × {trainer_over_engine:.3f}",
        "sampling": "; kept mass {kept:.3f}, temperature × {temperature:.3f}",
        "truncation": "; kept mass {kept:.3f}",
        "padding": "; {missing:.2%} of the probability",
        "shift": "; by {lag:+d}, in {share:.0%} of the blocks",
    }
    return "" if test.p is None else texts.get(test.cause, "").format(**test.estimate)


def _p(p: float) -> str:
    return f"{p:.1g}" if p >= 1e-12 else "< 1e-12"


def _draw(options: argparse.Namespace, gap: Gap) -> None:
    """d over the engine's log-probability, its scale over the surprise, its size along and between samples."""
    d, size = gap.difference, np.abs(gap.difference)
    shown = np.random.default_rng(0).permutation(len(d))[:20_000]
    limit = max(float(np.quantile(size, 0.999)), 1e-6)
    with picture(options, 2, 2, (11, 7.5)) as (figure, ((left, right), (below, last))):
        left.plot(gap.engine[shown], d[shown], ".", markersize=1.5, alpha=0.4)
        left.set(
            xlabel="log q, nats", ylabel="d = log π - log q, nats", ylim=(-limit, limit), title="tokens, one point each"
        )
        noise, used = noise_of(gap), np.unique(bins_of(gap))
        at = np.append(EDGES[1:-1], EDGES[-2] * 1.3)[used]
        right.loglog(at, np.maximum(noise.scale[used], 1e-8), "o-")
        right.set(xlabel="surprise -(log π + log q)/2, nats", ylabel="scale of d, nats", title="size of d by surprise")
        edges = np.unique(np.geomspace(1, gap.position.max() + 2, 24).astype(int)) - 1
        where = np.searchsorted(edges, gap.position, side="right") - 1
        means = np.bincount(where, weights=size) / np.maximum(np.bincount(where), 1)
        below.plot(edges[: len(means)] + 1, means, "o-")
        below.set(xscale="log", xlabel="token of the response", ylabel="mean |d|, nats", title="along the response")
        numbers, index = np.unique(gap.document, return_inverse=True)
        last.plot(gap.step[numbers], np.bincount(index, weights=size) / np.bincount(index), ".", alpha=0.6)
        last.set(yscale="log", xlabel="optimizer step", ylabel="mean |d|, nats", title="samples, one point each")
        last.xaxis.get_major_locator().set_params(integer=True)
        for axes in (left, right, below, last):
            axes.grid(alpha=0.3)
        figure.suptitle(", ".join(Path(path).name for path in options.rollouts[:3]), fontsize=11)
