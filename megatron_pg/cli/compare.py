"""`megatron-pg compare`: one rollout file under every aggregation, at the first step over it (new policy = old).

There the ratio is 1, so a trained token's loss is -A and its gradient coefficient is -A under every objective with a
ratio: the gradient mass of a token is w·|A|. Weights come from `plan_step`, as in training.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_pg.cli.digest import Digest, digest_rollouts
from megatron_pg.cli.pictures import check_picture, new_figure, save_figure
from megatron_pg.cli.terminal import InputError, say, show_json, show_path, table
from megatron_pg.declarations.aggregations import AGGREGATIONS
from megatron_pg.rollouts.lines import RolloutFileError
from megatron_pg.rollouts.printable import printable


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one aggregation makes of the file."""

    loss: float | None  # mean over the steps of Σ w·(-A); None where its scale is not given
    weights: np.ndarray  # [S] weight of a trained token of each sample
    masses: np.ndarray  # [S] Σ w·|A| of each sample
    ess: float  # (Σ w)² / (T·Σ w²), mean over the steps
    heaviest: float  # T·max w / Σ w, largest of the steps


@dataclass(frozen=True, slots=True)
class _Unit:
    """What the check of step boundaries reads of a sample."""

    prompt_id: int | str
    rollout_id: int | str


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `compare`."""
    parser.add_argument(
        "rollouts", metavar="ROLLOUTS", help="a rollout file (docs/rollout_file.md); megatron-pg convert makes them"
    )
    parser.add_argument(
        "--divisor",
        type=_divisor,
        metavar="L",
        help="L of constant, without which its loss has no scale and is not shown",
    )
    parser.add_argument(
        "--top", type=int, default=5, metavar="N", help="prompts to list, by their largest share (default 5)"
    )
    parser.add_argument("--output", metavar="FILE", help="a picture, .png, .svg or .pdf; needs matplotlib")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE where it exists")


def run(options: argparse.Namespace) -> int:
    """Print the comparison and draw it."""
    if options.top < 0:
        raise InputError(f"--top {options.top} is negative, so no number of prompts. Give 0 or more.")
    if options.output:
        check_picture(options.output, overwrite=options.overwrite)
    try:
        digest = digest_rollouts(options.rollouts)
    except RolloutFileError as error:
        raise InputError(str(error)) from error
    found = compare(digest, options.divisor, show_path(options.rollouts))
    lengths, prompts = by_length(digest, found), by_prompt(digest, found)
    if options.output:
        _draw(options, lengths, prompts)
    if options.json:
        show_json(_document(options, digest, found, lengths, prompts))
    else:
        _show(options, digest, found, lengths, prompts)
    return 0


def compare(digest: Digest, divisor: float | None, path: str) -> dict[str, Comparison]:
    """Every aggregation on the file's steps.

    Raises:
        InputError: a prompt group or rollout lies in two steps, or a step cannot be planned.
    """
    from megatron_pg.batch.pack import check_boundaries  # imports torch

    steps = _steps(digest)
    units = [_Unit(p, r) for p, r in zip(digest.prompt_ids, digest.rollout_ids, strict=True)]
    try:
        check_boundaries([[units[i] for i in rows] for rows in steps.values()])
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    return {mode: _compare_one(digest, steps, mode, divisor, path) for mode in AGGREGATIONS}


def _steps(digest: Digest) -> dict[int, np.ndarray]:
    """Rows of the samples of each step, in the order of the file."""
    rows: dict[int, list[int]] = {}
    for i, step in enumerate(digest.steps):
        rows.setdefault(step, []).append(i)
    return {step: np.array(found) for step, found in rows.items()}


def _compare_one(
    digest: Digest, steps: dict[int, np.ndarray], mode: str, divisor: float | None, path: str
) -> Comparison:
    trained, advantages = np.array(digest.trained), np.array(digest.advantages)
    weights, losses, ess, heaviest = np.zeros(len(trained)), [], [], []
    for step, rows in steps.items():
        w = weights[rows] = 1 / _denominators(digest, rows, mode, divisor, f"{path}: step {step}")
        tokens = trained[rows]
        total, squares = w @ tokens, (w * w) @ tokens
        losses.append(-(w @ advantages[rows]))
        ess.append(total * total / (squares * tokens.sum()))
        heaviest.append(tokens.sum() * w[tokens > 0].max() / total)
    has_scale = mode != "constant" or divisor is not None
    loss = float(np.mean(losses)) if has_scale else None
    masses = weights * np.array(digest.magnitudes)
    return Comparison(loss, weights, masses, float(np.mean(ess)), float(np.max(heaviest)))


def _denominators(digest: Digest, rows: np.ndarray, mode: str, divisor: float | None, where: str) -> np.ndarray:
    from megatron_pg.step.plan import plan_step  # imports torch

    try:
        plan = plan_step(
            [digest.trained[i] for i in rows],
            aggregation=mode,
            divisor=(divisor or 1.0) if mode == "constant" else None,
            rollout_ids=[digest.rollout_ids[i] for i in rows],
            prompt_ids=[digest.prompt_ids[i] for i in rows],
        )
    except ValueError as error:
        raise InputError(f"{where}: {error}") from error
    return plan.denominators.numpy()


# --- shares ---


@dataclass(frozen=True, slots=True)
class Shares:
    """The file cut into units: of each its samples, its trained tokens, and its share of every aggregation's mass."""

    names: list[str]
    samples: list[int]
    tokens: list[int]
    shares: dict[str, list[float | None]]  # None where all advantages are 0


def by_length(digest: Digest, found: dict[str, Comparison]) -> Shares:
    """By response length, in powers of two."""
    exponents = np.frexp(np.array(digest.lengths, dtype=np.float64))[1] - 1  # 2^e <= length < 2^(e+1)
    kinds, index = np.unique(exponents, return_inverse=True)
    names = [f"{2**e}" if e == 0 else f"{2**e}-{2 ** (e + 1) - 1}" for e in kinds.tolist()]
    return _shares(digest, found, names, index)


def by_prompt(digest: Digest, found: dict[str, Comparison]) -> Shares:
    """By prompt, in the order of the file."""
    order = {unit: i for i, unit in enumerate(dict.fromkeys(digest.prompt_ids))}
    index = np.array([order[unit] for unit in digest.prompt_ids])
    return _shares(digest, found, [str(unit) for unit in order], index)


def _shares(digest: Digest, found: dict[str, Comparison], names: list[str], index: np.ndarray) -> Shares:
    def sums(values: Sequence) -> list:
        return np.bincount(index, weights=np.asarray(values), minlength=len(names)).tolist()

    shares = {}
    for mode, comparison in found.items():
        total = comparison.masses.sum()
        shares[mode] = [mass / total if total else None for mass in sums(comparison.masses)]
    counts = [int(count) for count in sums(np.ones(len(index)))]
    return Shares(names, counts, [int(tokens) for tokens in sums(digest.trained)], shares)


def effective(shares: Sequence[float | None]) -> float | None:
    """Number of equal shares that are as uneven as these: (Σ s)² / Σ s²."""
    squares = sum(share * share for share in shares if share is not None)
    return sum(share for share in shares if share is not None) ** 2 / squares if squares else None


def _largest(prompts: Shares, count: int) -> list[int]:
    most = [max(column[i] or 0.0 for column in prompts.shares.values()) for i in range(len(prompts.names))]
    return sorted(range(len(most)), key=lambda i: -most[i])[:count]


# --- output ---


def _show(
    options: argparse.Namespace, digest: Digest, found: dict[str, Comparison], lengths: Shares, prompts: Shares
) -> None:
    say(
        f"{show_path(options.rollouts)}: {len(digest.steps)} samples, {len(set(digest.steps))} steps, {len(prompts.names)} prompts, "
        f"{sum(digest.trained)} trained tokens; at the first step over them (r = 1)"
    )
    rows = [
        (
            mode,
            "needs --divisor" if each.loss is None else f"{each.loss:+.4g}",
            f"{each.ess:.3f}",
            f"{each.heaviest:.1f}",
            _number(effective(prompts.shares[mode])),
        )
        for mode, each in found.items()
    ]
    say(table(("aggregation", "loss", "aggregation ESS", "heaviest token", "effective prompts"), rows))
    say("  ESS: (Σw)²/(T·Σw²), 1 when every token weighs the same; heaviest token: T·max w/Σw")
    say("share of the gradient mass Σ w·|A| by response length")
    say(_share_table("tokens", lengths, range(len(lengths.names))))
    if options.top:
        say("share of the gradient mass by prompt, largest first")
        say(_share_table("prompt", prompts, _largest(prompts, options.top)))


def _share_table(head: str, units: Shares, rows: Sequence[int]) -> str:
    cells = [
        [printable(units.names[i], limit=32), str(units.samples[i]), str(units.tokens[i])]
        + ["–" if column[i] is None else f"{column[i]:.1%}" for column in units.shares.values()]
        for i in rows
    ]
    return table((head, "samples", "trained tokens", *units.shares), cells)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _document(
    options, digest: Digest, found: dict[str, Comparison], lengths: Shares, prompts: Shares
) -> dict[str, object]:
    return {
        "rollouts": str(options.rollouts),
        "samples": len(digest.steps),
        "steps": len(set(digest.steps)),
        "prompts": len(prompts.names),
        "trained_tokens": sum(digest.trained),
        "divisor": options.divisor,
        "aggregations": {
            mode: {
                "loss": each.loss,
                "gradient_mass": float(each.masses.sum()) if each.loss is not None else None,
                "aggregation_ess": each.ess,
                "heaviest_token": each.heaviest,
                "effective_prompts": effective(prompts.shares[mode]),
            }
            for mode, each in found.items()
        },
        "by_length": _listed(lengths, range(len(lengths.names)), "length"),
        "by_prompt": _listed(prompts, _largest(prompts, options.top), "prompt_id"),
    }


def _listed(units: Shares, rows: Sequence[int], name: str) -> list[dict[str, object]]:
    return [
        {name: units.names[i], "samples": units.samples[i], "trained_tokens": units.tokens[i]}
        | {"share": {mode: column[i] for mode, column in units.shares.items()}}
        for i in rows
    ]


def _draw(options: argparse.Namespace, lengths: Shares, prompts: Shares) -> None:
    figure, ((left, right),) = new_figure(1, 2, width=11, height=4.2)
    at = np.arange(len(lengths.names))
    width = 0.8 / len(lengths.shares)
    for n, (mode, column) in enumerate(lengths.shares.items()):
        left.bar(at + (n - (len(lengths.shares) - 1) / 2) * width, [100 * (s or 0) for s in column], width, label=mode)
        ordered = np.sort(np.array([s or 0 for s in prompts.shares[mode]]))[::-1]
        right.plot(np.arange(1, len(ordered) + 1), 100 * np.cumsum(ordered), label=mode)
    left.set_xticks(at, lengths.names, rotation=30, ha="right")
    left.set(xlabel="response length, tokens", ylabel="share of the gradient mass, %", title="by response length")
    right.set(xlabel="prompts, heaviest first", ylabel="cumulated share, %", title="by prompt", ylim=(0, 102))
    left.legend(fontsize=8)
    right.grid(alpha=0.3)
    figure.suptitle(printable(Path(options.rollouts).name), fontsize=11)
    save_figure(figure, options.output, overwrite=options.overwrite)


def _divisor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not finite and > 0")
    return value
