"""docs/proof.md: a row for every test marked as proof, figures as recorded, and the command that makes them."""

import datetime
import json
import re
import subprocess

import launches
import proof
import pytest
from processes import environment, with_warm_python

RECORD = json.loads(proof.RECORD.read_text(encoding="utf-8"))
STAMP = {"date": "2026-01-01", "machine": "2 CPU cores"}


@launches.launch
def collected(folder, full):
    """The rows of all tests that are marked as proof."""
    return proof.collected(with_warm_python(environment()))


def test_the_page_has_a_row_for_every_test_marked_as_proof_and_no_other(collected):
    command = "run .venv/bin/python tests/helpers/proof.py none"
    assert [row for row in collected if row not in RECORD["rows"]] == [], f"rows without an entry: {command}"
    assert [row for row in RECORD["rows"] if row not in collected] == [], f"rows that no test has: {command}"
    assert {row: entry["part"] for row, entry in RECORD["rows"].items()} == {
        row: entry["part"] for row, entry in collected.items()
    }


def test_the_page_is_written_from_the_record():
    assert proof.PAGE.read_text(encoding="utf-8") == proof.page(RECORD)
    assert proof.RECORD.read_text(encoding="utf-8") == proof.dumped(RECORD)
    for row in RECORD["rows"]:
        assert f"\n| {row}" in proof.page(RECORD)


def test_every_file_with_a_test_marked_as_proof_is_in_one_part():
    assert proof.part_of("unit/kernels/test_topk.py") == "kernels"
    assert proof.part_of("unit/test_cp_utils.py") == "units"
    assert proof.part_of("compiled/test_compile.py") == "kernels"
    assert proof.part_of("properties/test_dyadic.py") == "properties"
    assert "--ignore=tests/fuzz/test_soak.py" in proof.selection("fuzz")
    for paths in proof.PARTS.values():
        assert all((proof.TESTS / path).exists() for path in paths)
    with pytest.raises(ValueError, match=r"docs/test_pages\.py is marked as proof and in no part"):
        proof.part_of("docs/test_pages.py")


def test_the_makefile_runs_parts_and_installs_what_they_need():
    root = proof.TESTS.parent
    variables = ["PYTHON=false", "RELEASES=0.16.1", "TRITONS=3.9.0"]

    def steps(*words: str) -> str:
        command = ["make", "--dry-run", "--no-print-directory", "--always-make", "--file", str(root / "Makefile")]
        return subprocess.run([*command, "prove", *variables, *words], cwd=root, capture_output=True, text=True).stdout

    assert "tests/helpers/proof.py ranks" in steps("PART=ranks")
    assert not re.search("triton-3.9.0|megatron-core-0.16.1|verl-0.9.1", steps("PART=ranks"))
    assert ".venv/triton-3.9.0" in steps("PART=kernels")
    assert ".venv/megatron-core-0.16.1" in steps("PART=releases")
    assert ".venv/verl-0.9.1" in steps("PART=hosts")
    assert "tests/helpers/proof.py units -- -k exchange" in steps("PART=units", "ARGS=-k exchange")
    whole = steps()
    assert all(each in whole for each in ("triton-3.9.0", "megatron-core-0.16.1", "verl-0.9.1"))


# --- rows ---


@pytest.fixture
def evidence_of():
    found = proof.Evidence()
    found.expect("a", "unit/test_args.py")
    return found


def test_a_row_has_an_error_and_the_tolerance_that_it_was_compared_with(evidence_of):
    evidence_of.add("a", cases=2, worst=1e-9, tolerance=1e-6)
    evidence_of.add("a", cases=3, worst=1e-8, tolerance=1e-7, slowest=4.0)
    evidence_of.finish("a", passed=True, seconds=1.5)
    row = evidence_of.rows["a"]
    assert (row.part, row.cases, row.failures, row.error, row.tolerance) == ("units", 5, 0, 1e-8, 1e-6)
    assert (row.slowest, row.seconds) == (4.0, 1.5)
    for worst in (2e-6, float("nan")):
        with pytest.raises(AssertionError, match="tolerance 1e-06"):
            evidence_of.add("a", cases=1, worst=worst, tolerance=1e-6)
    for figures in ({"cases": 0}, {"cases": 1, "worst": 0.0}, {"cases": 1, "tolerance": 1e-6}):
        with pytest.raises(ValueError, match="give cases, both or none"):
            evidence_of.add("a", **figures)
    assert row.cases == 5


def test_a_row_whose_tests_are_in_two_parts_is_an_error(evidence_of):
    with pytest.raises(ValueError, match="'a' has tests in the parts units and ranks"):
        evidence_of.expect("a", "ranks/test_forward_step.py")


def row(**changes) -> dict:
    return {"part": "units", "cases": 0, "failures": 0, "missing": None, "seconds": 1.0} | changes


def test_a_row_holds_with_cases_or_with_the_reason_why_none_could_run():
    assert proof.holds(row(cases=3))
    assert proof.holds(row(missing="needs a checkout"))
    assert not proof.holds(row())  # no case
    assert not proof.holds(row(cases=3, failures=1))
    assert not proof.holds(row(cases=3, missing="half of it did not run"))


def test_rows_are_merged(monkeypatch):
    monkeypatch.setattr(proof, "machine", lambda: "4 CPU cores")
    names = ("kept", "replaced", "not run now", "new", "absent")
    before = {name: row(cases=1) | STAMP for name in ("kept", "replaced", "not run now", "dropped")}
    found = {
        "replaced": row(cases=2, error=1e-9, tolerance=1e-6),
        "not run now": row(missing="needs a checkout"),
        "absent": row(missing="needs a checkout"),
    }
    record = {"parts": {}, "rows": before}
    rows = proof.merged(record, dict.fromkeys(names, row()), found)["rows"]
    assert rows["kept"] == rows["not run now"] == row(cases=1) | STAMP  # with the date of its figures
    assert (rows["replaced"]["cases"], rows["replaced"]["machine"]) == (2, "4 CPU cores")
    assert rows["new"] == {"part": "units"}
    assert "dropped" not in rows
    page = proof.page(
        {"parts": {"units": {"date": "2026-01-01", "seconds": 90, "machine": "2 CPU cores"}}, "rows": rows}
    )
    assert "| Check | Cases | Failures | Relative error | Tolerance | Slowest case, s | Seconds |" in page
    assert "| kept | 1 | 0 |  |  |  | 1 |" in page
    assert f"| replaced ({datetime.date.today()}, 4 CPU cores) | 2 | 0 | 1.0e-09 | 1.0e-06 |  | 1 |" in page
    assert "| new. **Not run**: new |" in page
    assert "| absent. **Not run**: needs a checkout |" in page
    assert "| **units**, 2 minutes |" in page
    assert "2026-01-01, 2 CPU cores, unless a row names others." in page


@pytest.fixture
def empty_record(monkeypatch, tmp_path):
    record = tmp_path / "proof.json"
    record.write_text('{"parts": {}, "rows": {}}', encoding="utf-8")
    monkeypatch.setattr(proof, "RECORD", record)
    return record


@pytest.mark.parametrize(
    ("status", "arguments", "has_time"), [(0, [], True), (1, [], False), (-15, [], False), (0, ["-k", "a"], False)]
)
def test_a_part_that_passed_as_a_whole_has_its_time(status, arguments, has_time, empty_record, monkeypatch):
    monkeypatch.setattr(proof, "rows_of", lambda _: ({"a": row(cases=1)}, status))
    record, bad = proof.prove("units", {"a": row()}, arguments)
    assert record["rows"]["a"]["cases"] == 1
    assert ("seconds" in record["parts"]["units"]) == has_time
    assert bad == ([f"units: pytest ended with {status}"] if status else [])


def test_what_another_part_has_written_meanwhile_is_kept(empty_record, monkeypatch):
    def run(_) -> tuple[dict, int]:
        of_another = {"parts": {"ranks": {"seconds": 7}}, "rows": {"b": row(cases=3)}}
        empty_record.write_text(json.dumps(of_another), encoding="utf-8")
        return {"a": row(cases=1)}, 0

    monkeypatch.setattr(proof, "rows_of", run)
    record, _ = proof.prove("units", {"a": row(), "b": row()}, [])
    assert {name: entry["cases"] for name, entry in record["rows"].items()} == {"a": 1, "b": 3}
    assert record["parts"]["ranks"] == {"seconds": 7}


def test_a_row_without_a_case_is_what_the_run_fails_for(empty_record, monkeypatch):
    monkeypatch.setattr(proof, "rows_of", lambda _: ({"a": row(), "b": row(missing="needs a checkout")}, 0))
    _, bad = proof.prove("units", {"a": row(), "b": row()}, [])
    assert len(bad) == 1
    assert bad[0].startswith("units: a: ")


def test_the_fixture_and_the_marks_write_the_rows(tmp_path):
    test = "tests/unit/test_cp_utils.py::test_labels_are_the_next_token_of_the_same_document_on_whichever_rank_that_is"
    found, status = proof.rows_of([test, "-k", "3"], with_warm_python(environment()))
    assert status == 0
    assert list(found) == ["context-parallel slices, exact"]
    (shown,) = found.values()
    assert (shown["part"], shown["cases"], shown["failures"], shown["missing"]) == ("units", 10, 0, None)
