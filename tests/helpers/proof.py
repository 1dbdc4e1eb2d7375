"""`make prove`: runs the tests marked `proof("row")` part by part, and writes docs/proof.json and docs/proof.md.

    python tests/helpers/proof.py [PART ...] [-- arguments of pytest]

Without a part all of them run, one after another. A part writes its rows into docs/proof.json, and docs/proof.md is
written from it. With arguments of pytest only the rows of the selected tests are replaced. The part `none` runs no
test: it drops rows that no test has, and adds the missing ones as not run.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
RECORD = TESTS.parent / "docs" / "proof.json"
PAGE = RECORD.with_suffix(".md")
PACKAGES = ("megatron-core", "torch", "triton", "numpy")
PARTS = {  # the files and folders below tests/ that each part runs; a nested path belongs to the part that names it
    "units": ("unit", "cli"),
    "kernels": ("unit/kernels", "unit/lm_head", "compiled"),
    "properties": ("properties",),
    "fuzz": ("fuzz",),
    "soak": ("fuzz/test_soak.py",),
    "mutants": ("mutants",),
    "ranks": ("ranks",),
    "recipes": ("ranks/test_recipes.py", "ranks/test_real_flags.py"),
    "resume": ("ranks/test_documents_resume.py", "ranks/test_resume.py"),
    "faults": ("ranks/test_lost_ranks.py", "ranks/test_two_nodes.py"),
    "releases": ("ranks/test_releases.py",),
    "hosts": ("hosts",),
    "drivers": ("drivers",),
    "chat": ("chat",),
}


def part_of(test: str) -> str:
    """The part of a test, given by its path below tests/: the one that names the longest path above it."""
    above = [(len(path), part) for part, paths in PARTS.items() for path in paths if f"{test}/".startswith(f"{path}/")]
    if not above:
        raise ValueError(f"{test} is marked as proof and in no part of tests/helpers/proof.py; add it to PARTS")
    return max(above)[1]


def selection(part: str) -> list[str]:
    """The arguments of pytest that select the files of a part."""
    nested = [path for other, paths in PARTS.items() if other != part for path in paths]
    inside = [path for path in nested if any(path.startswith(f"{own}/") for own in PARTS[part])]
    return [f"tests/{path}" for path in PARTS[part]] + [f"--ignore=tests/{path}" for path in inside]


@dataclass
class Row:
    """What the tests of one row have shown."""

    part: str
    cases: int = 0
    failures: int = 0
    error: float | None = None  # relative
    tolerance: float | None = None  # that the error was compared with
    slowest: float | None = None  # seconds of one case, where the row is about them
    seconds: float = 0.0
    missing: str | None = None  # why no test of the row could run


class Evidence:
    """What the tests of one run have shown, by row."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def expect(self, row: str, test: str) -> None:
        """A row of which a test is going to run."""
        part = part_of(test)
        if self.rows.setdefault(row, Row(part)).part != part:
            raise ValueError(f"{row!r} has tests in the parts {self.rows[row].part} and {part}; move or rename one")

    def add(
        self,
        row: str,
        *,
        cases: int,
        worst: float | None = None,
        tolerance: float | None = None,
        slowest: float | None = None,
    ) -> None:
        """Counts `cases` cases, of which the worst relative error must be within the tolerance."""
        if cases < 1 or (worst is None) != (tolerance is None):
            raise ValueError(
                f"{row}: {cases} cases, worst error {worst}, tolerance {tolerance}; give cases, both or none"
            )
        entry = self.rows[row]
        if worst is not None:
            worst = float(worst)  # NumPy's numbers are not JSON
            assert worst <= tolerance, f"{row}: relative error {worst}, tolerance {tolerance}"  # NaN fails too
            entry.error = max(worst, entry.error or 0.0)
            entry.tolerance = max(tolerance, entry.tolerance or 0.0)
        if slowest is not None:
            assert math.isfinite(slowest)
            entry.slowest = max(float(slowest), entry.slowest or 0.0)
        entry.cases += cases

    def finish(self, row: str, *, passed: bool, seconds: float, skipped: str | None = None) -> None:
        """Adds one test's outcome."""
        entry = self.rows[row]
        entry.failures += not (passed or skipped)
        entry.seconds += seconds
        entry.missing = skipped or entry.missing

    def write(self, path: Path) -> None:
        """The rows as JSON."""
        path.write_text(json.dumps({name: dataclasses.asdict(row) for name, row in self.rows.items()}), "utf-8")


def holds(row: dict) -> bool:
    """True of a row whose tests passed and counted cases, or could not run, all of them."""
    return row["failures"] == 0 and (row["cases"] > 0) != bool(row["missing"])


# --- runs ---


def rows_of(arguments: list[str], environment: Mapping[str, str] | None = None) -> tuple[dict[str, dict], int]:
    """The rows of the selected tests and the exit status of pytest; an environment has its interpreter as PYTHON."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        python = environment["PYTHON"] if environment else sys.executable
        command = [python, "-m", "pytest", "-q", "-m", "proof", f"--proof-rows={out}", *arguments]
        done = subprocess.run(command, cwd=TESTS.parent, check=False, stdout=sys.__stderr__, env=environment)
        return json.loads(out.read_text("utf-8")) if out.exists() else {}, done.returncode


def collected(environment: Mapping[str, str] | None = None) -> dict[str, dict]:
    """The rows of all tests that are marked as proof, without figures."""
    marked = [path for path in TESTS.rglob("test_*.py") if "mark.proof(" in path.read_text("utf-8")]
    rows, status = rows_of(["-qq", "--collect-only", *sorted(map(str, marked))], environment)
    assert status == 0, "the tests marked as proof cannot be collected"
    return rows


def merged(record: dict, known: dict[str, dict], found: dict[str, dict]) -> dict:
    """The record with the rows that were found, without those that no test has; what could not run keeps its last
    figures."""
    stamp = {"date": str(datetime.date.today()), "machine": machine()}
    rows = {}
    for name, empty in sorted(known.items()):
        old, new = record["rows"].get(name, {}), found.get(name)
        if new is None or (new["missing"] and old.get("cases")):
            rows[name] = old | {"part": empty["part"]}
        else:
            rows[name] = {key: value for key, value in (new | stamp).items() if value is not None}
    return record | {"rows": rows, "parts": {name: record["parts"].get(name, {}) for name in PARTS}}


def machine() -> str:
    """Where the figures are from."""
    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    return f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, {versions}"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def prove(part: str, known: dict[str, dict], arguments: list[str]) -> tuple[dict, list[str]]:
    """The record after a part, and what is wrong with it.

    Another part may have written the record meanwhile, so it is read at the end.
    """
    started = time.monotonic()
    found, status = rows_of([*selection(part), "--tier=full", *arguments])
    bad = [f"{part}: {name}: {row}" for name, row in found.items() if not holds(row)]
    bad += [f"{part}: pytest ended with {status}"] if status else []
    record = merged(json.loads(RECORD.read_text("utf-8")), known, found)
    if not arguments and not bad:  # the seconds of a part that failed are not those of the whole part
        stamp = {"date": str(datetime.date.today()), "machine": machine()}
        record["parts"][part] = {"seconds": round(time.monotonic() - started)} | stamp
    return record, bad


def main(words: list[str]) -> int:
    """Runs the parts and writes record and page after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS, "none"], metavar="PART")
    own, rest = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parts, known, bad = parser.parse_args(own).parts or [*PARTS], collected(), []
    for part in parts:
        if part == "none":
            record = merged(json.loads(RECORD.read_text("utf-8")), known, {})
        else:
            record, wrong = prove(part, known, rest)
            bad += wrong
        RECORD.write_text(dumped(record), "utf-8")
        PAGE.write_text(page(record), "utf-8")
    print(*bad, sep="\n", end="\n" if bad else "")
    return 1 if bad else 0


def dumped(record: dict) -> str:
    """JSON with a line for each row and part."""
    kinds = []
    for kind, entries in record.items():
        lines = [
            f"  {json.dumps(k, ensure_ascii=False)}: {json.dumps(v, ensure_ascii=False)}" for k, v in entries.items()
        ]
        kinds.append(f' "{kind}": {{\n' + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(kinds) + "\n}\n"


# --- the page ---

HEAD = """# Proof

`make prove` runs all tests marked as proof and writes this page; `make prove PART=kernels` replaces one part. It fails
if a row has a failure or no case. A row that could not run keeps its earlier figures, with their date. A case is named
in brackets, or is a random step, layout or input. The relative error is the largest of all cases: relative to Σ|w·ℓ|
for losses and to the largest entry for gradients. The tolerance is the asserted bound; a check without one is exact.
[Aggregation](aggregation.md) says what is being proved.

"""
COLUMNS = {  # head and cell
    "cases": ("Cases", "{:,}"),
    "failures": ("Failures", "{}"),
    "error": ("Relative error", "{:.1e}"),
    "tolerance": ("Tolerance", "{:.1e}"),
    "slowest": ("Slowest case, s", "{:.1f}"),
    "seconds": ("Seconds", "{:.0f}"),
}


def page(record: dict) -> str:
    """docs/proof.md: one table, in which a bold row begins each part."""
    heads = [head for head, _ in COLUMNS.values()]
    lines = [f"| Check | {' | '.join(heads)} |", "|---" + "|---:" * len(heads) + "|"]
    usual = _usual(record)
    for part, run in record["parts"].items():
        rows = {name: row for name, row in record["rows"].items() if row["part"] == part}
        minutes = f"{run['seconds'] / 60:.0f} minutes" if run else "not run as a whole"
        lines.append(f"| **{part}**, {minutes} |" + " |" * len(heads))
        lines += [_line(name, row, usual) for name, row in rows.items()]
    return f"{HEAD}{', '.join(usual)}, unless a row names others.\n\n" + "\n".join(lines) + "\n"


def _usual(record: dict) -> tuple[str, str]:
    """Date and machine of most rows."""
    stamps = Counter((row["date"], row["machine"]) for row in record["rows"].values() if row.get("cases"))
    return stamps.most_common(1)[0][0] if stamps else ("never", "no machine")


def _line(name: str, row: dict, usual: tuple[str, str]) -> str:
    cells = [form.format(row[key]) if row.get(key) is not None else "" for key, (_, form) in COLUMNS.items()]
    if not row.get("cases"):
        name, cells = f"{name}. **Not run**: {row.get('missing', 'new')}", [""] * len(COLUMNS)
    elif differs := [text for text, most in zip((row["date"], row["machine"]), usual, strict=True) if text != most]:
        name = f"{name} ({', '.join(differs)})"
    return f"| {name.replace('|', chr(92) + '|')} | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
