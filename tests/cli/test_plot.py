"""`megatron-pg plot`: curves of metrics files, whole or still being written, and what it refuses."""

import os

import pytest

from megatron_pg.cli.runs.curves import smoothed
from megatron_pg.cli.runs.plot import small_curve


def losses(*values: float, **more) -> list[dict]:
    """The steps of a run with these values of pg_loss."""
    return [{"pg_loss": value, "grad_norm": 1.0, "skipped": False} | more for value in values]


def test_curves_of_several_runs(make_run, cli):
    first, second = make_run("a", losses(-1.0, 2.0, 0.5)), make_run("b", losses(3.0))
    said = cli.json("plot", first, second / "metrics.jsonl")
    assert said["a"] == {
        "pg_loss": {"iterations": [1, 2, 3], "values": [-1.0, 2.0, 0.5]},
        "grad_norm": {"iterations": [1, 2, 3], "values": [1.0] * 3},
    }
    assert said["b"]["pg_loss"] == {"iterations": [1], "values": [3.0]}
    out = cli.done("plot", first, second)
    row = next(line.split() for line in out.splitlines() if line.split()[:1] == ["a"])
    assert row == ["a", "3", "-1", "0.5", "-1", "2", "▁█▅"]


def test_values_that_were_not_finite_are_left_out(make_run, cli):
    path = make_run("a", losses(1.0, float("nan"), 3.0))
    assert cli.json("plot", path)["a"]["pg_loss"] == {"iterations": [1, 3], "values": [1.0, 3.0]}
    cli.done("plot", make_run("b", losses(1.7e308, 1.7e308, 1.0)))  # nor those whose sums are not


def test_a_metric_that_was_never_finite_is_shown_without_values(make_run, tmp_path, cli):
    path = make_run("a", losses(1.0, 2.0, mine=float("nan")))
    assert cli.json("plot --metrics mine", path)["a"]["mine"]["values"] == []
    assert cli.done("plot --metrics mine", path).splitlines()[2].split() == ["a", "0", "–", "–", "–", "–"]
    pytest.importorskip("matplotlib")
    cli.done("plot --metrics mine", path, "--output", tmp_path / "mine.png")


def test_a_file_that_is_being_written_is_read_up_to_its_last_whole_line(make_run, cli):
    path = make_run("a", losses(1.0, 2.0)) / "metrics.jsonl"
    path.write_text(path.read_text() + '{"iteration": 3, "pg_l')
    assert cli.json("plot", path)["a"]["pg_loss"]["iterations"] == [1, 2]


def test_metrics_are_chosen_and_misspelled_ones_named(make_run, cli):
    path = make_run("a", losses(1.0, reward=0.5))
    assert list(cli.json("plot --metrics reward", path)["a"]) == ["reward"]
    assert "no run has this metric. Did you mean reward?" in cli.refused("plot --metrics rewad", path)
    assert "Available: pg_loss, grad_norm, reward" in cli.refused("plot --metrics zzz", path)
    assert "Did you mean grad_norm?" in cli.refused("plot --metrics norm", path)  # a part of it
    assert list(cli.json("plot --metrics ' reward, pg_loss,'", path)["a"]) == ["reward", "pg_loss"]
    assert "--metrics ,: no run has" in cli.refused("plot --metrics ,", path)
    for flag in ("--metrics", "--output"):
        assert f"plot: {flag} is empty. Give a value" in cli.refused(f"plot {flag} ''", path)
    assert "plot: RUNS is empty. Give a value" in cli.refused("plot ''", path)


def test_a_metric_of_one_run_only_is_shown_for_both(make_run, cli):
    out = cli.done("plot --metrics reward", make_run("a", losses(1.0, reward=0.5)), make_run("b", losses(1.0)))
    assert [line.split()[:2] for line in out.splitlines()[2:]] == [["a", "1"], ["b", "0"]]


def test_a_picture(make_run, tmp_path, cli):
    pytest.importorskip("matplotlib")
    paths = [make_run("a", losses(1.0, 2.0, reward=0.5)), make_run("b", losses(2.0))]
    for suffix, magic in ((".svg", b"<?xml"), (".png", b"\x89PNG")):
        cli.done("plot", *paths, "--output", tmp_path / f"curves{suffix}")
        assert (tmp_path / f"curves{suffix}").read_bytes().startswith(magic)
    assert "already exists" in cli.refused("plot", *paths, "--output", tmp_path / "curves.png")
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]


BAD_FILES = {
    "empty": (b"", "has no step yet"),
    "only the beginning of a line": (b'{"iteration": 1', "has no step yet"),
    "a rollout file": (b'{"format": "megatron_pg.rollouts", "version": 1}\n', ":1: is not a line of a metrics file"),
    "no JSON": (b"step 1\n", ":1: is not a line of a metrics file"),
    "a step in words": (b'{"iteration": "1"}\n', ":1: is not a line of a metrics file"),
    "a second line": (b'{"iteration": 1, "a": 1}\n{"a": 1}\n', ":2: is not a line of a metrics file"),
    "noise": (b"\xff\xfe\x00\n", ":1: is not a line of a metrics file"),
    "deep": (b"[" * 100_000 + b"\n", ":1: is not a line of a metrics file"),
    "huge": (b'{"iteration": 1, "a": "' + b"x" * 2**20 + b'"}\n', ":1: is not a line of a metrics file"),
    "a step below 0": (b'{"iteration": -1, "a": 1}\n', ":1: is not a line of a metrics file"),
    "no metric": (b'{"iteration": 1, "note": "x"}\n', "has no metric with a finite number yet"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_line_and_nothing_is_written(name, tmp_path, cli):
    content, message = BAD_FILES[name]
    (tmp_path / "metrics.jsonl").write_bytes(content)
    assert message in cli.refused("plot", tmp_path, "--output", tmp_path / "out.png")


def test_a_path_that_cannot_be_read_is_named(tmp_path, cli):
    assert "cannot be read (No such file or directory)" in cli.refused("plot", tmp_path)
    assert "cannot be read" in cli.refused("plot", tmp_path / "a\0b")
    assert cli.refused("plot", tmp_path / "\x1b[31m").rstrip("\n").isprintable()


def test_one_run_given_twice_is_refused(make_run, cli):
    path = make_run("a", losses(1.0))
    assert "is given twice" in cli.refused("plot", path, path)
    assert "is given twice" in cli.refused("plot", path, path / "metrics.jsonl")


def test_runs_of_one_name_are_told_apart_by_their_paths(make_run, cli):
    paths = [make_run("x/run", losses(1.0)), make_run("y/run", losses(2.0))]
    assert list(cli.json("plot", *paths)) == [str(path) for path in paths]


def curve_of(*values: float, name: str = "") -> str:
    return small_curve(range(len(values)), values, name)


def test_a_small_curve():
    assert curve_of(0, 1, 2, 3, 4, 5, 6, 7) == "▁▂▃▄▅▆▇█"
    assert curve_of(2.0, 2.0) == "▄▄"
    assert curve_of(1.0) == "▄"
    assert len(curve_of(*range(1000))) == 40
    assert small_curve(range(4), [0, 0, 1, 1], width=2) == "▁█"
    assert small_curve([1, 2, 3, 100], [0, 0, 0, 1]) == "▁█"  # stretches of the axis, not of the list


def test_what_rounding_leaves_is_no_curve():
    assert curve_of(1.0, 1 - 2**-24, 1.0) == "▄▄▄"  # ratio_new_old on-policy
    assert curve_of(3e-9, -2e-9, 1e-9) == "▄▄▄"  # pg_loss of advantages that add up to 0
    assert curve_of(1e5, 1e5 + 0.05) == "▄▄"
    assert curve_of(0.0, 3e-14, name="kl_new_old") == "▄▄"  # k3 of a log-ratio of 2e-7
    assert curve_of(0.0, 5e-11, name="kl_new_old") == "▁█"  # and of 1e-5
    assert curve_of(0.0, 5e-8, 1e-7, name="learning_rate") == "▁▅█"  # a warm-up
    assert curve_of(0.5, 0.50001) == "▁█"


def test_smoothing_is_the_debiased_moving_average():
    """By its definition: weights w^(n-i), which add up to 1."""
    values, w = [1.0, 5.0, 2.0, -3.0], 0.7
    for n in range(1, 5):
        weights = [w ** (n - i) for i in range(1, n + 1)]
        expected = sum(a * b for a, b in zip(weights, values, strict=False)) / sum(weights)
        assert smoothed(values, w)[n - 1] == pytest.approx(expected, rel=1e-12)
    assert smoothed(values, 0.0) == values


def test_smoothing_and_tokens_are_shown_and_listed(make_run, cli):
    path = make_run("a", losses(0.0, 4.0, num_tokens=300))
    said = cli.json("plot --metrics pg_loss --smooth 0.5 --x tokens", path)
    assert said["a"]["pg_loss"] == {
        "iterations": [1, 2],
        "values": [0.0, 4.0],
        "tokens": [300, 600],
        "smoothed": [0.0, pytest.approx(4 / 1.5)],
    }
    assert "▁█" in cli.done("plot --metrics pg_loss --smooth 0.5 --x tokens", path)
    without = cli.refused("plot --x tokens", make_run("b", losses(1.0)))
    assert "--x tokens: b has no num_tokens at step 1" in without
    assert "(--pg-metrics none leaves it out). Use --x step." in without
    sft = make_run("c", losses(1.0, **{"sft/num_tokens": 7, "sft/loss": 1.0}))
    without = cli.refused("plot --x tokens", sft)
    assert "c has no num_tokens at step 1 (the run does not train the policy loss). Use --x step." in without
    for weight in ("1", "-0.1", "nan"):
        assert f"--smooth '{weight}' is not a weight of the past" in cli.refused(f"plot --smooth={weight}", path)


def test_the_reward_comes_first(make_run, cli):
    path = make_run("a", losses(1.0, reward=0.5, kl_new_old=0.1))
    assert list(cli.json("plot", path)["a"]) == ["reward", "pg_loss", "kl_new_old", "grad_norm"]


def test_a_run_is_read_from_a_pipe(make_run, cli):
    lines = (make_run("a", losses(1.0, 2.0)) / "metrics.jsonl").read_bytes()
    reading, writing = os.pipe()
    os.write(writing, lines)
    os.close(writing)
    stdin = os.dup(0)
    try:
        os.dup2(reading, 0)
        said = cli.json("plot -")
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)
        os.close(reading)
    assert said["stdin"]["pg_loss"]["values"] == [1.0, 2.0]


# --- pictures: what is on the axes ---


@pytest.fixture
def drawn(monkeypatch, tmp_path, cli):
    """The axes of a picture, by title."""
    pytest.importorskip("matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "close", lambda figure: None)

    def draw(*words) -> dict:
        cli.done("plot", *words, "--overwrite --output", tmp_path / "out.PNG")
        assert (tmp_path / "out.PNG").read_bytes().startswith(b"\x89PNG")
        return {axes.get_title(): axes for axes in plt.gcf().axes}

    yield draw
    monkeypatch.undo()
    plt.close("all")


def test_a_run_of_one_step_is_a_point(make_run, drawn):
    one, two = drawn(make_run("a", losses(1.0)), make_run("b", losses(1.0, 2.0)))["pg_loss"].lines
    assert one.get_marker() == "."
    assert (one.get_markersize() > 0, two.get_markersize()) == (True, 0)


def test_rounding_is_drawn_as_a_constant(make_run, drawn):
    axes = drawn(make_run("a", losses(1e-9, -2e-9, 0.0, ratio_new_old=1.0)), "--metrics pg_loss,ratio_new_old")
    low, high = axes["pg_loss"].get_ylim()
    assert high - low > 1e5 * 3e-9
    assert axes["ratio_new_old"].get_ylim() == pytest.approx((0.95, 1.05))


def test_a_smoothed_curve_has_its_values_behind_it(make_run, drawn):
    front, back = drawn(make_run("a", losses(0.0, 4.0, num_tokens=300)), "--smooth 0.5 --x tokens")["pg_loss"].lines
    assert list(back.get_xdata()) == list(front.get_xdata()) == [300, 600]
    assert list(back.get_ydata()) == [0.0, 4.0]
    assert front.get_ydata()[1] == pytest.approx(4 / 1.5)
    assert back.get_alpha() < 1
