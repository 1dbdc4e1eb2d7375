"""`megatron-pg mismatch`: what it reads, prints, draws and refuses; what it finds is in tests/unit/mismatch."""

import random
import re

import pytest
from rollout_files import HEADER, two_sides

from megatron_pg.mismatch.causes import CAUSES


@pytest.fixture
def write(lines):
    return lambda name, records: lines([HEADER | {"version": 3}, *records], name)


def test_a_temperature_is_named_with_its_estimate_and_what_to_do_in_both_forms(write, cli):
    path = write("r.jsonl", two_sides(random.Random(1), temperature=1.25))
    out = cli.done("mismatch", path)
    ratio = re.search(r"temperature: the temperatures differ; trainer's = engine's × ([\d.]+)", out)[1]
    assert float(ratio) == pytest.approx(1.25, rel=0.03)
    assert "→ Set --pg-temperature" in out
    assert "30 samples, 1200 trained tokens" in out
    said = cli.json("mismatch", path)
    assert (said["verdict"], said["documents"], said["tokens"]) == ("found", 30, 1200)
    assert [test["cause"] for test in said["findings"]] == ["temperature"]
    assert f"{said['findings'][0]['estimate']['trainer_over_engine']:.3f}" == ratio
    assert sorted(test["cause"] for test in said["tests"]) == sorted(CAUSES)
    assert {test["outcome"] for test in said["tests"]} == {"found", "not found", "cannot tell"}


def test_settings_that_the_numbers_do_not_show_are_said(write, cli):
    path = write("r.jsonl", two_sides(random.Random(3)))
    out = cli.done("mismatch --engine temperature=1,top_p=0.9 --trainer-temperature 1", path)
    assert (
        "  sampling: the engine samples from another distribution than it reports\n    the settings state top_p 0.9, "
        "but no probability" in out
    )
    message = cli.refused("mismatch --engine top_p=2", path)
    assert "--engine top_p=2: top_p=2 is not a number above 0 and at most 1" in message


def test_few_rollouts_leave_causes_that_cannot_be_tested(write, cli):
    rows = two_sides(random.Random(3))
    size = "no cause found: the difference has the size of rounding to bfloat16"
    assert size in cli.done("mismatch", write("all.jsonl", rows))
    path = write("r.jsonl", rows[:4])
    assert "bfloat16; 7 of 14 causes cannot be tested with these data\n" in cli.done("mismatch", path)
    out = cli.done("mismatch --engine temperature=0.7 --trainer-temperature 1", path)
    assert "temperatures 0.7 (engine) and 1 (trainer); the log-probabilities are too few" in out


def groups_found(said: dict) -> list[tuple[str, str]]:
    (finding,) = said["findings"]
    assert finding["cause"] == "group"
    return [(group["factor"], group["group"]) for group in finding["estimate"]["groups"]]


def test_one_file_of_several_is_named(write, cli):
    rng = random.Random(4)
    paths = [
        write(f"rank{i}.jsonl", two_sides(rng, documents=20, temperature=1.3 if i == 2 else 1.0)) for i in range(4)
    ]
    assert groups_found(cli.json("mismatch", *paths)) == [("file", str(paths[2]))]


def test_a_field_of_the_users_own_divides_documents(write, cli):
    rng = random.Random(8)
    rows = [record | {"x_node": f"n{i % 4}"} for i, record in enumerate(two_sides(rng, documents=80))]
    bad = two_sides(rng, documents=80, temperature=1.3)
    rows = [
        record | {name: bad[i][name] for name in ("tokens", "old_logprobs", "rollout_logprobs")}
        if i % 4 == 1
        else record
        for i, record in enumerate(rows)
    ]
    assert groups_found(cli.json("mismatch --by x_node", write("r.jsonl", rows))) == [("x_node", "n1")]


def test_what_a_level_does(write, cli):
    """A level of nearly 0 names nothing; the effect and its evidence are still shown."""
    path = write("r.jsonl", two_sides(random.Random(1), temperature=1.25))
    said = cli.json("mismatch --level 1e-300", path)
    assert (said["findings"], said["verdict"]) == ([], "unexplained")


@pytest.mark.parametrize("change", [{}, {"old_logprobs": [-1.0] * 40, "rollout_logprobs": [-1.0] * 40}])
def test_a_picture(change, write, cli, tmp_path):
    """Sides that are equal have no logarithm of their difference, of which matplotlib warns."""
    pytest.importorskip("matplotlib")
    path = write("r.jsonl", [record | change for record in two_sides(random.Random(5), documents=14)])
    cli.done("mismatch", path, "--output", tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000


CRITIC = {"old_logprobs": None, "advantage": None, "values": [0.0] * 40, "returns": [0.0] * 40}


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ({"rollout_logprobs": None}, "", "has no rollout_logprobs to compare old_logprobs with"),
        ({"loss_mask": [0] * 40}, "", "no token is trained"),
        ({"term": "sft"}, "", "no sample is of the objective"),
        (CRITIC, "", "r.jsonl: sample r.jsonl:2 has no old_logprobs to compare. Give samples of a policy."),
        ({"old_logprobs": [-1e300] * 40}, "", "a log-probability is -1e+300, which is below every float32."),
        ({}, "--engine ''", "--engine is empty"),
        ({}, "--engine ,", "--engine ,: '' is not one of temperature=…"),
        ({}, "--trainer-temperature 1", "mismatch: --trainer-temperature and temperature=… of --engine are compared"),
        ({}, "--engine temperature=1 --trainer-temperature nan", "mismatch: --trainer-temperature nan is not a finite"),
        ({}, "--engine temperature=1e-320 --trainer-temperature 1", "its ratio to the engine's 9.99989e-321 is not"),
        ({"worker": "a\nb"}, "", "worker="),
        ({"weight_version": -1}, "", "weight_version=-1 has the wrong type or range"),
        ({}, "--level 0", "--level 0 is not a probability"),
        ({}, "--level nan", "--level nan is not a probability"),
        ({}, "--by x_node", "no sample has the field x_node"),
        ({}, "r.jsonl", "is given twice"),
        ({}, "--output p.gif", "p.gif: the suffix is not one of .png, .svg, .pdf"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_exit_code_2(change, words, message, write, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = [record | change for record in two_sides(random.Random(6), documents=2)]
    write("r.jsonl", [{k: v for k, v in record.items() if v is not None} for record in records])
    assert message in cli.refused("mismatch r.jsonl", words)
