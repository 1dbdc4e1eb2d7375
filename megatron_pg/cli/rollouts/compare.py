"""`megatron-pg compare`: one rollout file under every aggregation, at the first step over it (new policy = old).

There the ratio is 1, so a trained token's loss is -A and its gradient coefficient is -A under every objective with a
ratio: the gradient mass of a token is w·|A|. Weights come from `plan_step`, as in training.
"""

import argparse
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from megatron_pg.cli.runs.pictures import add_picture_options, check_picture, picture
from megatron_pg.cli.terminal import InputError, progress, say, show_json, show_path, table
from megatron_pg.declarations.aggregations import AGGREGATIONS, is_by_turn
from megatron_pg.flags.aggregation import is_usable_divisor
from megatron_pg.rollouts.fields import POLICY, Id
from megatron_pg.rollouts.printable import printable

if TYPE_CHECKING:
    from megatron_pg.rollouts.sample import Sample


class Row(NamedTuple):
    """One sample of the objective: its ids, its lengths, and the sums of the advantages A over its trained tokens."""

    step: int
    prompt_id: Id
    rollout_id: Id
    length: int  # response tokens
    trained: int  # trained tokens
    advantage: float  # Σ A
    magnitude: float  # Σ |A|


class Comparison(NamedTuple):
    """The file under one aggregation."""

    facts: dict[str, float | None]  # what is printed; loss and gradient mass are None if their scale is not given
    masses: list[float]  # Σ w·|A| of each sample


_MODES = tuple(name for name in AGGREGATIONS if not is_by_turn(name))
_LARGEST = 2.0**128 - 2.0**104  # float32
Comparisons = Mapping[str, Comparison]  # by aggregation
Tallies = dict[str, dict[str, Any]]  # by loss term: its samples, rollouts and trained tokens
Unit = dict[str, Any]  # a part of the file: its name, samples, trained tokens, and share of every aggregation's mass


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `compare`."""
    parser.add_argument(
        "rollouts", metavar="ROLLOUTS", help="a rollout file (docs/rollout_file.md); megatron-pg convert writes them"
    )
    scale = "divisor L of the aggregation constant; without it, its loss is not shown"
    parser.add_argument("--divisor", type=float, metavar="L", help=scale)
    top = "number of prompts to list, largest share first (default 5)"
    parser.add_argument("--top", type=int, default=5, metavar="N", help=top)
    add_picture_options(parser)


def run(options: argparse.Namespace) -> int:
    """Print the comparison and draw it."""
    if options.top < 0:
        raise InputError(f"--top {options.top} is negative. Give 0 or more.")
    if options.divisor is not None and not is_usable_divisor(options.divisor):
        raise InputError(
            f"--divisor {options.divisor:g} is not finite and > 0, or 1/L is not a normal float32. Give a number of "
            "tokens."
        )
    check_picture(options)
    rows, tallies = digest_rollouts(options.rollouts)
    if not rows:
        raise InputError(
            f"{show_path(options.rollouts)}: no sample is of the objective's loss term {POLICY}, only of "
            f"{', '.join(sorted(tallies))}. Give a file with samples of the objective."
        )
    comparisons = compare(rows, options.divisor, show_path(options.rollouts))
    lengths, prompts = by_length(rows, comparisons), by_prompt(rows, comparisons)
    if options.output:
        _draw(options, lengths, prompts)
    document = _document(options, rows, comparisons, lengths, prompts) | {"terms": by_term(tallies)}
    if options.json:
        show_json(document)
    else:
        _show(document)
    return 0


def digest_rollouts(path: str | Path) -> tuple[list[Row], Tallies]:
    """The objective's samples of a rollout file, and tallies of each loss term; one sample at a time is in memory."""
    tallies: Tallies = {}
    rows = []
    for sample in read_samples(path):
        ids = cast(tuple[int, Id, Id], (sample.step, sample.prompt_id, sample.rollout_id))  # never None in a file
        for term, mask in {sample.term: sample.loss_mask, **sample.masks}.items():
            tally = tallies.setdefault(term, {"samples": 0, "rollouts": set(), "trained_tokens": 0})
            tally["samples"] += 1
            tally["rollouts"].add((sample.step, sample.rollout_id))
            tally["trained_tokens"] += int(mask.sum())
        if sample.term != POLICY:
            continue
        where = f"{show_path(path)}: sample {sample.sample_id}"
        if sample.advantages is None:  # of a critic
            raise InputError(f"{where} has no advantage, and gradient mass is w·|A|. Give samples of a policy.")
        if sample.token_weights is not None:
            raise InputError(f"{where} has token_weights, and the comparison counts tokens. Remove the field.")
        advantages = sample.advantages[sample.loss_mask]
        sums = float(advantages.sum()), float(advantages.abs().sum())
        rows.append(Row(*ids, sample.response_length, len(advantages), *sums))
    return rows, tallies


def read_samples(path: str | Path) -> Iterator["Sample"]:
    """The samples of a rollout file one by one, with progress."""
    from megatron_pg.rollouts.file import iterate_rollouts  # imports torch

    with progress(f"reading {show_path(path)}", Path(path).stat().st_size if Path(path).is_file() else 0) as update:
        yield from iterate_rollouts(path, update=update)


def compare(rows: Sequence[Row], divisor: float | None, path: str) -> dict[str, Comparison]:
    """Every aggregation on the file's steps, which must be whole."""
    from megatron_pg.batch import check_boundaries  # imports torch

    if large := next((row for row in rows if not row.magnitude <= _LARGEST), None):
        raise InputError(
            f"{path}: the advantages of rollout {large.rollout_id} in step {large.step} add up to {large.magnitude:.4g}"
            f", more than the largest float32, {_LARGEST:.4g}. Correct them."
        )
    steps: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        steps.setdefault(row.step, []).append(i)
    try:
        check_boundaries([[rows[i] for i in step] for step in steps.values()])
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    return {mode: _compare_one(rows, steps, mode, divisor, path) for mode in _MODES}


def _compare_one(
    rows: Sequence[Row], steps: Mapping[int, list[int]], mode: str, divisor: float | None, path: str
) -> Comparison:
    masses, losses, ess, heaviest = [0.0] * len(rows), [], [], []
    for step, indices in steps.items():
        inside = [rows[i] for i in indices]
        weights = _weights(inside, mode, divisor, f"{path}: step {step}")
        trained = [(w, row.trained) for w, row in zip(weights, inside, strict=True) if row.trained]
        total, tokens = math.fsum(w * n for w, n in trained), sum(n for _, n in trained)
        losses.append(math.fsum(-w * row.advantage for w, row in zip(weights, inside, strict=True)))
        ess.append(total * total / (math.fsum(w * w * n for w, n in trained) * tokens))
        heaviest.append(tokens * max(w for w, _ in trained) / total)
        for i, w in zip(indices, weights, strict=True):
            masses[i] = w * rows[i].magnitude
    has_scale = mode != "constant" or divisor is not None
    facts = {
        "loss": fmean(losses) if has_scale else None,  # mean over the steps of Σ w·(-A)
        "gradient_mass": math.fsum(masses) if has_scale else None,
        "aggregation_ess": fmean(ess),  # mean over the steps of (Σ w)² / (T·Σ w²)
        "heaviest_token": max(heaviest),  # T·max w / Σ w
    }
    return Comparison(facts, masses)


def _weights(rows: Sequence[Row], mode: str, divisor: float | None, where: str) -> list[float]:
    from megatron_pg.plan.plan import plan_step  # imports torch

    try:
        plan = plan_step(
            [row.trained for row in rows],
            aggregation=mode,
            divisor=(divisor or 1.0) if mode == "constant" else None,
            rollout_ids=[row.rollout_id for row in rows],
            prompt_ids=[row.prompt_id for row in rows],
        )
    except ValueError as error:
        raise InputError(f"{where}: {error}") from error
    return [1 / d for d in plan.denominators.tolist()]


# --- shares ---


def by_term(tallies: Tallies) -> list[dict[str, Any]]:
    """Counts of each loss term, the objective first; empty without further terms."""
    if len(tallies) < 2:
        return []
    total = sum(tally["trained_tokens"] for tally in tallies.values())
    return [
        {"term": name}
        | tallies[name]
        | {"rollouts": len(tallies[name]["rollouts"])}
        | {"share": tallies[name]["trained_tokens"] / total if total else None}
        for name in sorted(tallies, key=lambda name: (name != POLICY, name))
    ]


def by_length(rows: Sequence[Row], comparisons: Comparisons) -> list[Unit]:
    """By response length, in powers of two."""
    exponents = [row.length.bit_length() - 1 for row in rows]  # 2^e <= length < 2^(e+1)
    units = _units(rows, comparisons, exponents)
    names = {e: f"{2**e}-{2 ** (e + 1) - 1}" if e else "1" for e in sorted(units)}
    return [{"length": name} | units[e] for e, name in names.items()]


def by_prompt(rows: Sequence[Row], comparisons: Comparisons) -> list[Unit]:
    """By prompt, in the order of the file."""
    units = _units(rows, comparisons, [row.prompt_id for row in rows])
    return [{"prompt_id": str(prompt)} | unit for prompt, unit in units.items()]


def _units(rows: Sequence[Row], comparisons: Comparisons, keys: Sequence[Hashable]) -> dict[Any, Unit]:
    """The rows of each key, as one unit without a name."""
    members: dict[Any, list[int]] = {}
    for i, key in enumerate(keys):
        members.setdefault(key, []).append(i)
    totals = {mode: math.fsum(comparison.masses) for mode, comparison in comparisons.items()}  # 0 if all advantages are
    return {
        key: {
            "samples": len(inside),
            "trained_tokens": sum(rows[i].trained for i in inside),
            "share": {
                mode: math.fsum(comparisons[mode].masses[i] for i in inside) / total if total else None
                for mode, total in totals.items()
            },
        }
        for key, inside in members.items()
    }


def _effective(shares: Sequence[float | None]) -> float | None:
    """Effective number of shares: (Σ s)² / Σ s²."""
    known = [share for share in shares if share is not None]
    return sum(known) ** 2 / sum(share * share for share in known) if any(known) else None


# --- output ---


def _document(
    options: argparse.Namespace, rows: Sequence[Row], comparisons: Comparisons, lengths: list[Unit], prompts: list[Unit]
) -> dict[str, object]:
    heaviest = sorted(prompts, key=lambda unit: -max(share or 0.0 for share in unit["share"].values()))
    return {
        "rollouts": str(options.rollouts),
        "samples": len(rows),
        "steps": len({row.step for row in rows}),
        "prompts": len(prompts),
        "trained_tokens": sum(row.trained for row in rows),
        "divisor": options.divisor,
        "aggregations": {
            mode: comparison.facts | {"effective_prompts": _effective([unit["share"][mode] for unit in prompts])}
            for mode, comparison in comparisons.items()
        },
        "by_length": lengths,
        "by_prompt": heaviest[: options.top],
    }


def _show(document: Mapping) -> None:
    samples = f"{document['samples']} samples{' of the objective' if document['terms'] else ''}"
    counts = "{steps} steps, {prompts} prompts, {trained_tokens} trained tokens".format_map(document)
    say(f"{show_path(document['rollouts'])}: {samples}, {counts}; on-policy (r = 1)")
    rows = [
        (
            mode,
            "needs --divisor" if facts["loss"] is None else f"{facts['loss']:+.4g}",
            f"{facts['aggregation_ess']:.3f}",
            f"{facts['heaviest_token']:.1f}",
            _text(facts["effective_prompts"], ".1f"),
        )
        for mode, facts in document["aggregations"].items()
    ]
    say(table(("aggregation", "loss", "aggregation ESS", "heaviest token", "effective prompts"), rows))
    say("  ESS: (Σw)²/(T·Σw²), 1 if all tokens have the same weight; heaviest token: T·max w/Σw")
    if document["terms"]:
        _show_terms(document["terms"])
    say("share of the gradient mass Σ w·|A| by response length")
    say(_share_table("tokens", document["by_length"]))
    if document["by_prompt"]:
        say("share of the gradient mass by prompt, largest first")
        say(_share_table("prompt", document["by_prompt"]))


def _show_terms(terms: Sequence[Mapping[str, Any]]) -> None:
    rows = [(*(str(value) for value in list(term.values())[:-1]), _text(term["share"], ".1%")) for term in terms]
    say("loss terms of the file; the aggregations above count only the objective's tokens")
    say(table(("term", "samples", "rollouts", "trained tokens", "share of all"), rows))
    say(f"  a trainer that divides all of them by one token count scales the objective by its share, {rows[0][-1]}")


def _share_table(head: str, units: Sequence[Unit]) -> str:
    rows = []
    for name, samples, tokens, shares in (unit.values() for unit in units):
        percentages = [_text(share, ".1%") for share in shares.values()]
        rows.append((printable(name, limit=32), str(samples), str(tokens), *percentages))
    return table((head, "samples", "trained tokens", *_MODES), rows)


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _draw(options: argparse.Namespace, lengths: Sequence[Unit], prompts: Sequence[Unit]) -> None:
    width, last = 0.8 / len(_MODES), len(_MODES) - 1
    with picture(options, 1, 2, (11, 4.2)) as (figure, ((left, right),)):
        for n, mode in enumerate(_MODES):
            at = [i + (n - last / 2) * width for i in range(len(lengths))]
            left.bar(at, [100 * (unit["share"][mode] or 0) for unit in lengths], width, label=mode)
            heights = sorted((100 * (unit["share"][mode] or 0) for unit in prompts), reverse=True)
            style = {"linewidth": 1.8 + 1.4 * (last - n), "linestyle": ("-", "--")[n % 2]}  # seen where they coincide
            right.plot(range(len(heights) + 1), [0, *accumulate(heights)], label=mode, **style)
        left.set_xticks(range(len(lengths)), [unit["length"] for unit in lengths], rotation=30, ha="right")
        left.set(xlabel="response length, tokens", ylabel="share of the gradient mass, %", title="by response length")
        right.set(xlabel="prompts, heaviest first", ylabel="cumulated share, %", title="by prompt", ylim=(0, 102))
        right.xaxis.get_major_locator().set_params(integer=True)
        for axes in (left, right):
            axes.legend(fontsize=8)
            axes.grid(alpha=0.3)
            axes.set_axisbelow(True)
        figure.suptitle(printable(Path(options.rollouts).name), fontsize=11)
