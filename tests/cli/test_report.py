"""`megatron-pg report`: what the page holds, which red flags it names, and what it refuses."""

import json
import math
import re
import sys
from datetime import datetime
from pathlib import Path

import pytest

from megatron_pg.cli.runs.curves import typical_range

pytest.importorskip("plotly")
from megatron_pg.cli.runs.report_page import MOST_POINTS, figure_of, thinned


def steps(*values: float, name: str = "reward", **rest) -> list[dict]:
    return [
        {name: value, "num_tokens": 10 + i, "objective": {"weight": "δ = N_r"}} | rest for i, value in enumerate(values)
    ]


def page_of(path: Path) -> tuple[str, dict]:
    """The page without plotly's script, and its figures."""
    text = re.sub(
        r"<script>.*?</script>\n</head>", "</head>", path.read_text(encoding="utf-8"), count=1, flags=re.DOTALL
    )
    (figures,) = re.findall(r"Object\.entries\((\{.*\})\)\)\n", text)
    return text, json.loads(figures)


def test_the_page_holds_curves_objective_and_script(make_run, cli, tmp_path):
    runs = make_run("a", steps(0.0, 1.0, 0.5)), make_run("b", steps(2.0, weather=3.0))
    said = cli.done("report", *runs, "--output", tmp_path / "r.html")
    assert said == f"{tmp_path}/r.html: 2 runs, 2 metrics, 0 red flags\n"
    text, figures = page_of(tmp_path / "r.html")
    assert "Plotly" in (tmp_path / "r.html").read_text(encoding="utf-8").partition("</head>")[0]
    assert not re.findall(r'(?:src|href)="', text)  # nothing is fetched
    assert re.findall(r"<h3>(.*?)</h3>", text) == ["reward", "weather"]
    assert '<td>weight</td><td colspan="2">δ = N_r</td>' in text
    assert "<td>T = 10–12</td><td>T = 10</td>" in text
    written = datetime.fromtimestamp((Path(runs[0]) / "metrics.jsonl").stat().st_mtime)
    assert f"{runs[0]}/metrics.jsonl, steps 1 to 3, written {written:%Y-%m-%d %H:%M}" in text
    raw, smooth, *_ = figures["f0"]["data"]
    assert (raw["x"], raw["y"], raw["name"]) == ([1, 2, 3], [0.0, 1.0, 0.5], "a")
    weights = [0.36, 0.6, 1.0]  # of 0.6
    expected = [0.0, 1 / 1.6, (0.6 * 1.0 + 0.5) / sum(weights)]
    assert smooth["y"] == raw["customdata"] == pytest.approx(expected)
    assert figures["f1"]["data"][0]["mode"] == "lines+markers"  # one step is visible


def test_red_flags_are_listed_with_their_steps(make_run, cli, tmp_path):
    records = [
        {"kl_new_old": 0.5, "ess": 0.9, "ratio_new_old": 2.0},
        {"kl_new_old": 0.5, "ess": 0.4},
        {"ess": 0.3},
        {"ess": math.nan},
    ]
    words = "report", make_run("a", records), "--output", tmp_path / "r.html"
    flags = cli.json(*words)
    assert [(f["metric"], f["red_flag"], f["steps"], f["of"], f["worst"]) for f in flags] == [
        ("ratio_new_old", "< 0.95 or > 1.05 in step 1", [1], 1, 2.0),
        ("ess", "< 0.5", [2, 3], 3, 0.3),
        ("kl_new_old", "> 0.01 in step 1", [1], 2, 0.5),
        ("ess", "not finite", [4], 4, None),
    ]
    row = cli.done(*words, "--overwrite").splitlines()[3]
    assert " ".join(row.split()) == "a ess < 0.5 2 of 3, from 2 to 3 0.3"
    text, figures = page_of(tmp_path / "r.html")
    assert "<td>ess</td><td>&lt; 0.5</td><td>2 of 3, from 2 to 3</td><td>0.3</td><td>few tokens" in text
    shapes = [[shape["y0"] for shape in figure["layout"].get("shapes", [])] for figure in figures.values()]
    assert shapes == [[], [0.5], []]  # kl_new_old: a limit of step 1 is not a line; ess; what a flag names is drawn
    assert re.findall(r"<h3>(.*?)</h3>", text)[-1] == "ratio_new_old"


def test_a_metric_that_was_never_finite_is_flagged_and_has_a_panel(make_run, cli, tmp_path):
    path = make_run("a", [{"reward": 1.0, "mine": math.inf, "num_tokens": math.nan, "objective": {}}] * 2)
    words = "report", path, "--output", tmp_path / "r.html"
    flags = cli.json(*words)
    assert [(f["metric"], f["red_flag"], f["steps"], f["of"]) for f in flags] == [
        ("mine", "not finite", [1, 2], 2),
        ("num_tokens", "not finite", [1, 2], 2),
    ]
    text, figures = page_of(tmp_path / "r.html")
    assert re.findall(r"<h3>(.*?)</h3>", text) == ["reward", "mine", "num_tokens"]
    assert figures["f1"]["data"][0]["y"] == []
    cli.done(*words, "--overwrite --metrics mine")


def test_a_null_that_stands_for_no_value_is_not_flagged(make_run, cli, tmp_path):
    """As `length_of_right` is in a step without a correct answer; nonfinite lists what was NaN or inf."""
    records = {"length_of_right": 5.0}, {"length_of_right": None, "ess": math.nan}, {"length_of_right": 7.0}
    flags = cli.json("report", make_run("a", records), "--output", tmp_path / "r.html")
    assert [(flag["metric"], flag["steps"]) for flag in flags] == [("ess", [2])]


def test_red_flags_as_json_need_no_page(make_run, cli):
    path = make_run("a", [{"truncated_fraction": 0.9}])
    (flag,) = cli.json("report", path)
    assert (flag["metric"], flag["steps"]) == ("truncated_fraction", [1])
    assert "--output is not given. Give a file for the page, or --json" in cli.refused("report", path)
    assert "--metrics reward selects curves of the page." in cli.refused("report --json --metrics reward", path)


def test_phases_of_the_script_are_named_and_marked(make_run, cli, tmp_path):
    path = make_run("a", [{"reward": 1.0, "phase": phase} for phase in ("warm-up", "warm-up", "rl", "rl", "warm-up")])
    cli.done("report --output", tmp_path / "r.html", path)
    text, figures = page_of(tmp_path / "r.html")
    assert "warm-up from step 1, rl from step 3, warm-up from step 5" in text
    assert [line["x0"] for line in figures["f0"]["layout"]["shapes"]] == [3, 5]


def test_a_changed_objective_is_a_column_of_its_own(make_run, cli, tmp_path):
    path = make_run("a", [*steps(1.0, 2.0), {"reward": 3.0, "objective": {"weight": "δ = T"}}])
    cli.done("report", path, make_run("old", [{"reward": 1.0}]), "--output", tmp_path / "r.html")
    text, figures = page_of(tmp_path / "r.html")
    assert [(line["x0"], line["line"]["dash"]) for line in figures["f0"]["layout"]["shapes"]] == [(3, "dash")]
    assert "<th>a, from step 1</th><th>a, from step 3</th><th>old</th>" in text
    assert "<td>weight</td><td>δ = N_r</td><td>δ = T</td><td>–</td>" in text
    assert "not in the file" in text


def test_a_limit_near_the_values_is_a_line_and_one_far_away_a_note():
    style = {"a": ("solid", "#000")}
    near = figure_of("ess", {"a": {1: 0.9, 2: 0.6}}, style, 0.6).layout
    assert [shape.y0 for shape in near.shapes] == [0.5]
    assert not near.annotations
    far = figure_of("ess", {"a": {1: 0.99, 2: 0.98}}, style, 0.6).layout
    assert not far.shapes
    assert [note.text for note in far.annotations] == ["red flag: < 0.5"]
    (first_step,) = figure_of("kl_new_old", {"a": {1: 0.001, 2: 0.02}}, style, 0.6).layout.annotations
    assert first_step.text == "red flag: > 0.01 in step 1"


def test_warm_up_steps_do_not_flatten_the_curve():
    warm_up, trained = [3.0 / (1 + i) for i in range(15)], [0.01 * math.sin(i) for i in range(85)]
    low, high = typical_range([*warm_up, *trained])
    assert -0.05 < low < min(trained) < max(trained) < high < 0.05
    assert typical_range(trained) is None
    assert typical_range([1.0, 2.0]) is None
    assert typical_range([1.0] * 50) is None


def test_names_of_a_file_are_text_on_the_page(make_run, cli, tmp_path):
    name = "</script><script>alert(1)</script>\ud800"
    path = make_run("<b>a", [{name: 1.0, "objective": {name: name}}, {name: 2.0}])
    cli.done("report", path, make_run("b", [{name: 1.0}]), "--output", tmp_path / "r.html")
    text, figures = page_of(tmp_path / "r.html")
    assert "<script>alert" not in text
    assert text.count("</script>") == 1
    assert figures["f0"]["data"][0]["name"] == "&lt;b&gt;a"


def test_the_first_and_the_last_prompt_of_the_conversations_are_shown(make_run, cli, tmp_path):
    folder = make_run("a", steps(0.0, 1.0))
    texts = [f"\n=== step {k}, prompt {k}\nWhat is <{k}>?\n--- reward 1, 2 tokens\n{k}\n" for k in range(3)]
    (Path(folder) / "conversations.txt").write_text("".join(texts) + "x" * 9000, encoding="utf-8")
    cli.done("report", folder, make_run("b", steps(0.0)), "--output", tmp_path / "r.html")
    shown = re.findall(r"<pre>(.*?)</pre>", page_of(tmp_path / "r.html")[0], flags=re.DOTALL)
    assert [text.splitlines()[1] for text in shown] == ["What is &lt;0&gt;?", "What is &lt;2&gt;?"]
    assert len(shown[1]) < 3100


def test_conversations_that_cannot_be_read_are_not_a_page_that_cannot_be_written(make_run, cli, tmp_path, monkeypatch):
    folder = make_run("a", steps(0.0, 1.0))
    (folder / "conversations.txt").write_text("x")

    def refused(path, **_):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(Path, "read_text", refused)
    message = cli.refused("report", folder, "--output", tmp_path / "r.html")
    assert f"report: {folder}/conversations.txt: Permission denied." in message


def test_noise_is_no_signal_and_long_runs_keep_their_extremes():
    flat = figure_of("kl_new_old", {"a": {1: 1e-17, 2: 3e-17}}, {"a": ("solid", "#000")}, 0.6)
    low, high = flat.layout.yaxis.range
    assert high - low > 1e6 * 2e-17
    rate = figure_of("learning_rate", {"a": {1: 1e-6, 2: 1e-6}}, {"a": ("solid", "#000")}, 0.6)
    assert rate.layout.yaxis.range == pytest.approx((0.5e-6, 1.5e-6))
    curve = {step: math.sin(step) for step in range(1, 50_001)} | {31_415: 9.0}
    assert len(thinned(curve)) <= MOST_POINTS
    assert 31_415 in thinned(curve)
    assert thinned({1: 1.0, 2: 2.0}) == [1, 2]


def test_without_plotly_the_extra_is_named(make_run, cli, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "megatron_pg.cli.runs.report_page", raising=False)
    for module in [name for name in sys.modules if name.partition(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "plotly", None)
    message = cli.refused("report", make_run("a", [{"reward": 1.0}]), "--output", tmp_path / "r.html")
    assert "pip install 'megatron-pg[report]'" in message


def test_what_cannot_be_reported_is_refused(make_run, cli, tmp_path):
    path = make_run("a", [{"reward": 1.0}])
    for words, message in [
        ((path, "--smooth 1"), "--smooth '1' is not a weight of the past"),
        ((path, "--metrics ''"), "--metrics is empty"),
        ((path, "--overwrite --output", path / "metrics.jsonl"), "metrics.jsonl: the suffix is not .html."),
        ((path, "--metrics rewards"), "Did you mean reward?"),
        ((tmp_path / "none",), "cannot be read"),
        (("/dev/null",), "/dev/null: has no step yet"),
    ]:
        assert message in cli.refused("report --output", tmp_path / "r.html", *words)
