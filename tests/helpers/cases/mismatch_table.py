"""What `megatron-pg mismatch` makes of known faults: `python tests/helpers/cases/mismatch_table.py` prints them as
tables.

Every world has a sharpness, a noise level and its own number of documents; 48 faults (each cause four times) at three
strengths, 40 pairs of strong faults and 40 sets of rollouts without a fault. Pairs with a wrong vocabulary take it at
medium
strength: where all tokens are others, nothing else can be seen.
"""

import itertools
import multiprocessing
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from language import Parameters, Text, initial, read_text, train
from mismatch_cases import FAULTS, STRENGTHS, Drawn, World, clean, faulty

from megatron_pg import Sample
from megatron_pg.mismatch.diagnosis import diagnose
from megatron_pg.mismatch.gap import Gap, gap_of

SEEDED = (*FAULTS, "truncation", "sampling")


@dataclass(frozen=True)
class Outcome:
    """A case: what was seeded and what was found."""

    kind: str  # a strength, "pair" or "clean"
    seeded: tuple[str, ...]
    found: tuple[str, ...]
    cannot_tell: tuple[str, ...]


def language(*, vocabulary: int = 512, width: int = 64, layers: int = 2, steps: int = 250) -> tuple[Text, Parameters]:
    """The text and the parameters of a model trained on it."""
    text = read_text(vocabulary)
    return text, train(text, initial(text.vocabulary, width, layers, 0), steps)


def gap_of_drawn(drawn: Drawn) -> Gap:
    return gap_of(Sample.build(**record) for record in drawn.records())


def cases(repeats: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Kind and faults of every case: `repeats` of each cause and strength, ten times as many pairs, and as many
    without a fault."""
    for strength in STRENGTHS:
        yield from ((strength, {cause: strength}) for _ in range(repeats) for cause in SEEDED)
    pairs = list(itertools.combinations(SEEDED, 2))
    random.Random(0).shuffle(pairs)
    for pair in pairs[: 10 * repeats]:
        yield "pair", {cause: "medium" if cause == "vocabulary" else "strong" for cause in pair}
    yield from (("clean", {}) for _ in range(10 * repeats))


def outcomes(
    text: Text, parameters: Parameters, jobs: Iterable[tuple[str, dict[str, str]]], seed: int, processes: int = 2
) -> list[Outcome]:
    """Seed and diagnose every case."""
    numbered = [(text, parameters, kind, faults, 1000 * seed + n) for n, (kind, faults) in enumerate(jobs)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(outcome_of, numbered))


def outcome_of(job: tuple[Text, Parameters, str, dict[str, str], int]) -> Outcome:
    """One case, in its own world."""
    text, parameters, kind, faults, number = job
    torch.set_num_threads(1)
    rng = random.Random(number)
    sharpness, noise = rng.uniform(1.2, 2.8), rng.choice([0.5, 1.0, 1.5])
    sizes = {"documents": rng.choice([48, 96]), "length": rng.choice([64, 96, 128]), "group": rng.choice([1, 4])}
    world = World(text, parameters, sharpness, noise, seed=number, **sizes)
    with torch.no_grad():
        drawn = faulty(world, faults) if faults else clean(world)
    found = diagnose(gap_of_drawn(drawn))
    silent = tuple(test.cause for test in found.tests if test.outcome == "cannot tell")
    outcome = Outcome(kind, tuple(faults), tuple(test.cause for test in found.found), silent)
    if set(outcome.found) != set(faults):
        print(f"{kind:7} {'+'.join(faults):32} -> {', '.join(outcome.found) or '–'}", file=sys.stderr, flush=True)
    return outcome


# --- tables ---


def named(all_outcomes: list[Outcome], kind: str, cause: str | None = None) -> tuple[int, int]:
    """How many of the seeded causes were found, and how many were seeded."""
    seeded = [(each, c) for each in all_outcomes if each.kind == kind for c in each.seeded if cause in (None, c)]
    return sum(c in each.found for each, c in seeded), len(seeded)


def table(all_outcomes: list[Outcome]) -> str:
    """Causes by strength, and what else was found."""
    lines = [
        "| seeded | weak | medium | strong | in a pair | taken for (single faults) |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for cause in SEEDED:
        cells = ["{} of {}".format(*named(all_outcomes, kind, cause)) for kind in (*STRENGTHS, "pair")]
        others = Counter(c for each in all_outcomes if each.seeded == (cause,) for c in each.found if c != cause)
        confused = ", ".join(f"`{name}` {count}" for name, count in others.items()) or "–"
        lines.append(f"| `{cause}` | {' | '.join(cells)} | {confused} |")
    cells = ["{} of {}".format(*named(all_outcomes, kind)) for kind in (*STRENGTHS, "pair")]
    lines.append(f"| all | {' | '.join(cells)} | |")
    pairs = [each for each in all_outcomes if each.kind == "pair"]
    silent = sum(c in each.cannot_tell for each in pairs for c in each.seeded)
    extra = sum(len(set(each.found) - set(each.seeded)) for each in pairs)
    clean_ones = [each for each in all_outcomes if each.kind == "clean"]
    alarms = sum(bool(each.found) for each in clean_ones)
    lines += [
        "",
        f"Pairs: {silent} causes answered with *cannot tell*, {extra} causes that were not seeded.",
        f"Without a fault: {alarms} false alarms in {len(clean_ones)}.",
    ]
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)  # two processes of one thread each
    text, parameters = language(vocabulary=640, width=72, layers=3, steps=200)  # no test's model
    repeats, seed = int(sys.argv[1]) if len(sys.argv) > 1 else 4, int(sys.argv[2]) if len(sys.argv) > 2 else 0
    found = outcomes(text, parameters, cases(repeats), seed)
    print(table(found))


if __name__ == "__main__":
    main()
