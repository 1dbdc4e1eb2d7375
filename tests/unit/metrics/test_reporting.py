"""The metrics file, which a killed run may leave torn, and the console line."""

import json
import math

import pytest

from megatron_pg.metrics.reporting import MetricsFile, console_line, nonfinite_entries


def test_the_metrics_file_survives_a_torn_line_and_continues_without_duplicates(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    file = MetricsFile(path)
    for i in range(1, 6):
        file.write({"iteration": i, "pg_loss": -float(i)})
    file.close()
    with path.open("a", encoding="utf-8") as torn:
        torn.write('{"iteration": 6, "pg_lo')
    resumed = MetricsFile(path, after=3)  # the last checkpoint was at step 3
    for i in range(4, 7):
        resumed.write({"iteration": i, "pg_loss": -10.0 * i})
    resumed.close()
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [r["iteration"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert [r["pg_loss"] for r in records] == [-1.0, -2.0, -3.0, -40.0, -50.0, -60.0]


def test_a_new_run_starts_a_new_metrics_file(tmp_path):
    for _ in range(2):
        file = MetricsFile(tmp_path / "m.jsonl")
        file.write({"iteration": 1})
        file.close()
    assert (tmp_path / "m.jsonl").read_text() == '{"iteration": 1}\n'


@pytest.mark.parametrize("after", [0, 1])
def test_a_file_of_something_else_is_neither_continued_nor_overwritten(tmp_path, after):
    path = tmp_path / "m.jsonl"
    path.write_text("hello\n")
    with pytest.raises(ValueError, match=r"m.jsonl:1 is no line of a metrics file"):
        MetricsFile(path, after=after)
    assert path.read_text() == "hello\n"


def test_values_that_are_not_finite_are_null_with_the_ranks(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl")
    file.write(
        {"iteration": 1, "entropy": math.nan, "kl_new_old": math.inf, "nonfinite": nonfinite_entries({"entropy": [2]})}
    )
    file.close()
    record = json.loads((tmp_path / "m.jsonl").read_text())
    assert record["entropy"] is None
    assert record["kl_new_old"] is None
    assert record["nonfinite"] == [{"metric": "entropy", "ranks": [2]}, {"metric": "kl_new_old"}]


def test_the_console_line_shows_negative_values():
    line = console_line(12, {"pg_loss": -0.0123, "grad_norm": 0.5, "num_tokens": 7})
    assert line == "pg     12 | pg_loss -0.0123 | grad_norm +0.5"
