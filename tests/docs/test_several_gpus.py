"""The benchmarks on several GPUs without any: which rows there are, what a second call repeats, and the tables."""

import json
import math

import gpu_layouts
import layout_open
import layout_samples
import lost_jobs
import pytest
import records
import several_gpus
import throughput
import torch
from layouts import ENGINE, LAYOUTS, PLACES, SAMPLED, Layout
from records import FAILED, NOT_RUN, OUT_OF_TIME, Deadline, Machine

from megatron_pg import RolloutWriter, Sample, read_rollouts

MACHINE = Machine("Card 80GB", 2, "2.11.0+cu130")


@pytest.fixture
def launched(monkeypatch):
    """The words of each launch, which prints a row for every word up to the first of `fails`, and then an error."""
    calls = []

    def run(command, gpus, seconds, output):
        words = command[command.index("--words") + 1 :]
        calls.append(words)
        done = words[: next((i for i, word in enumerate(words) if word in run.fails), len(words))]
        lines = [json.dumps({"case": word, "copies": 1.25}) for word in done]
        output.write_text("\n".join([*lines, *([] if done == words else ["ValueError: this row fails"])]))
        return run.has_time

    run.fails, run.has_time = (), True
    monkeypatch.setattr(several_gpus, "run", run)
    return run, calls


def launch(gpus=2, rows=3):
    return several_gpus.Launch({f"row {i}": f"w{i}" for i in range(rows)}, gpus, ["python", "--words"])


def rows_of(out, part="kernels"):
    return json.loads((out / f"{part}.json").read_text())["rows"]


def test_a_second_call_measures_only_what_the_first_has_not(launched, tmp_path, capsys):
    run, calls = launched
    run.fails = ("w1",)
    several_gpus.run_launches("kernels", [launch(), launch(8, 1)], MACHINE, tmp_path, Deadline(60))
    assert calls == [["w0", "w1", "w2"], ["w2"]]  # after the row that failed, a new launch
    assert rows_of(tmp_path)["row 1"] == {FAILED: "ValueError: this row fails"}
    assert "| row 1 | failed: ValueError: this row fails |" in capsys.readouterr().out
    run.fails = ()
    several_gpus.run_launches("kernels", [launch()], MACHINE, tmp_path, Deadline(60))
    assert calls[2:] == [["w1"]]
    assert rows_of(tmp_path) == {f"row {i}": {"copies": 1.25} for i in range(3)}
    several_gpus.run_launches("kernels", [launch()], MACHINE, tmp_path, Deadline(60))
    assert len(calls) == 3


@pytest.mark.parametrize("change", [{"card": "Card 40GB"}, {"gpus": 4}, {"torch": "2.12.0"}])
def test_rows_of_another_machine_are_measured_again(launched, tmp_path, change):
    _, calls = launched
    several_gpus.run_launches("kernels", [launch()], MACHINE, tmp_path, Deadline(60))
    several_gpus.run_launches("kernels", [launch()], MACHINE._replace(**change), tmp_path, Deadline(60))
    assert calls == 2 * [["w0", "w1", "w2"]]
    assert several_gpus.folder_of(tmp_path, MACHINE) != several_gpus.folder_of(tmp_path, MACHINE._replace(**change))


def test_rows_without_gpus_or_time_are_listed_with_the_reason(launched, tmp_path, monkeypatch):
    run, calls = launched
    several_gpus.run_launches("kernels", [launch(4)], MACHINE, tmp_path / "..", Deadline(60))
    assert not calls
    found = several_gpus.measure(launch(4, 1), {}, 2, Deadline(60), tmp_path / "out")
    assert found == {"row 0": {NOT_RUN: "needs 4 GPUs"}}
    found = several_gpus.measure(launch(2, 1), {}, 2, Deadline(0), tmp_path / "out")
    assert found == {"row 0": {NOT_RUN: OUT_OF_TIME}}
    assert not calls
    run.has_time, run.fails = False, ("w1",)  # ended in the middle of the second row

    class OneLaunch(Deadline):
        def left(self):
            return 0 if calls else 100

    found = several_gpus.measure(launch(), {}, 2, OneLaunch(None), tmp_path / "out")
    assert found == {"row 0": {"copies": 1.25}, "row 1": {NOT_RUN: OUT_OF_TIME}, "row 2": {NOT_RUN: OUT_OF_TIME}}


def test_scripts_get_the_minutes_that_are_left_and_the_selected_rows(monkeypatch, tmp_path, capsys):
    calls, left = [], [500.0, 400.0, 20.0]

    class Left(Deadline):
        def left(self):
            return left[len(calls) // 2]

    monkeypatch.setattr(several_gpus, "run", lambda *words: calls.extend(words[:2]))
    commands = several_gpus.scripts("throughput", MACHINE, tmp_path, "fused")
    several_gpus.run_scripts(commands, MACHINE, Left(None))
    given = [throughput_flags(command) for command in calls[::2]]
    assert given == [
        ("dense", "^DP.*(fused)", "7.67"),
        ("experts", "^EP.*(fused)", "6.00"),
        ("dense", "^.*(fused)", "0.00"),
    ]
    assert calls[1::2] == [2, 2, 2]
    assert capsys.readouterr().out.count(OUT_OF_TIME) == 3  # the stand-in returns nothing
    (command,) = several_gpus.scripts("layouts", MACHINE, tmp_path, "KL")
    assert command[-2:] == ["--only", "KL"]


def throughput_flags(command):
    return tuple(command[command.index(flag) + 1] for flag in ("--model", "--only", "--minutes"))


def test_a_launch_that_takes_too_long_is_ended(tmp_path):
    code = "import os, sys, time; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(float(sys.argv[1]))"
    command = [several_gpus.sys.executable, "-S", "-c", code]
    assert several_gpus.run([*command, "0"], 2, 600, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "0,1\n"
    assert not several_gpus.run([*command, "600"], 2, 0.0, tmp_path / "out")


def test_a_table_has_figures_errors_and_what_did_not_run():
    rows = {
        "a": {"copies": 1.2345, "text": "x|y"},
        "b": {FAILED: "RuntimeError: no"},
        "c": {NOT_RUN: "needs 4 GPUs"},
        "d": {"copies": 0.00123, "more": 7},
    }
    assert records.table(rows).splitlines() == [
        "| row | copies | text | more |", "|---|---:|---:|---:|", "| a | 1.23 | x\\|y |  |",
        "| b | failed: RuntimeError: no |  |  |", "| d | 0.00123 |  | 7 |", "", "| not run | why |", "|---|---|",
        "| c | needs 4 GPUs |",
    ]  # fmt: skip


def test_the_last_error_is_that_of_a_rank_and_not_the_launchers():
    text = (
        "[rank0]: Traceback (most recent call last):\n[rank0]: torch.OutOfMemoryError: CUDA out of memory.\n"
        "E1126 api.py:869] failed\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====\nexit 1\n"
    )
    assert records.last_error(text) == "torch.OutOfMemoryError: CUDA out of memory."
    assert records.last_error("terminated by the watchdog\n\n") == "terminated by the watchdog"
    assert records.last_error("") == "no output"


@pytest.mark.parametrize(("gpus", "cases"), [(2, 27), (4, 18), (8, 18)])
def test_lost_ranks_cover_every_fault_on_all_gpus(gpus, cases, tmp_path):
    (launch,) = several_gpus.lost_ranks(gpus, tmp_path, 7)
    parsed = [lost_jobs.Case.parse(word) for word in launch.rows.values()]
    assert len(set(parsed)) == cases
    assert {case.size for case in parsed} == {gpus}
    assert len({(case.kind, case.point) for case in parsed}) == 9
    assert {case.victim for case in parsed} == set(range(gpus))


def test_heads_and_kernels_have_every_row_for_each_number_of_gpus():
    assert [(launch.gpus, len(launch.rows)) for launch in several_gpus.heads()] == [(2, 4), (4, 4), (8, 4)]
    launches = several_gpus.kernels()
    assert [(launch.gpus, len(launch.rows)) for launch in launches] == [(2, 8), (4, 8), (8, 8)]
    assert launches[0].rows["TP2, gspo, float32, entropy"] == "gspo,float32,entropy"


def test_how_a_surviving_rank_ended(tmp_path):
    (tmp_path / "err").write_text("Traceback\nmegatron_pg.plan.errors.LostPeerError: rank 0 of 2 lost another\nmore\n")
    assert lost_jobs.end_of(tmp_path / "err", 1) == "LostPeerError: rank 0 of 2 lost another"
    (tmp_path / "err").write_text("terminate called after throwing an instance\n")
    assert lost_jobs.end_of(tmp_path / "err", -6) == "SIGABRT, terminate called after throwing an instance"
    assert lost_jobs.end_of(tmp_path / "err", None) == "still running"


def test_a_result_counts_named_errors_and_reports_a_fault_that_did_not_happen(tmp_path):
    case = lost_jobs.Case.parse("pretrain-dp4-kill-forward-1")
    for rank in range(4):
        (tmp_path / f"{rank}.err").write_text("LostPeerError: gone\n" if rank < 3 else "ValueError: other\n")
    assert FAILED in lost_jobs.result_of(case, tmp_path, {0: 1, 2: 1, 3: 1}, 5.0)
    (tmp_path / "lost_at").write_text("2.0")
    found = lost_jobs.result_of(case, tmp_path, {0: 1, 2: 1, 3: 1}, 5.0)
    assert (found["named error"], found["seconds"]) == ("2 of 3", 3.0)
    assert lost_jobs.result_of(case, tmp_path, {0: 1, 2: 1}, 5.0)["seconds"] == ""  # rank 3 has not ended


def test_layouts_divide_and_have_a_reference_with_the_same_rollouts(tmp_path):
    for name, layout in LAYOUTS.items():
        parts = {key: int(layout.environment.get(key, 1)) for key in ("TP", "PP", "CP")}
        assert layout.processes % (parts["TP"] * parts["PP"] * parts["CP"]) == 0, name
        assert LAYOUTS[layout.reference].rollouts == layout.rollouts, name
        assert layout.rollouts in (*SAMPLED, "scored"), name
    assert {layout.processes for layout in LAYOUTS.values()} == set(gpu_layouts.SIZES)
    assert len({gpu_layouts.folder_of(name, tmp_path) for name in LAYOUTS}) == len(LAYOUTS)


@pytest.mark.parametrize("place", PLACES)
def test_open_steps_and_critics_run_at_every_place(place):
    opened, critic = LAYOUTS[f"{place}, open step"], LAYOUTS[f"{place}, critic"]
    assert {"OPEN_STEP": "1", **critic.environment} == opened.environment
    assert opened.flags == LAYOUTS[opened.reference].flags == ()
    assert "OPEN_STEP" not in LAYOUTS[opened.reference].environment
    assert critic.reference == "1 GPU, critic"


@pytest.mark.parametrize(("rank", "sizes"), [(0, [1, 2, 1]), (1, [2, 1, 1])])
def test_an_open_step_trains_every_microbatch_in_adds_that_differ_by_rank(rank, sizes, monkeypatch):
    parts = []

    class Opened:
        add = close = staticmethod(parts.append)

    class Step:
        def open_step(self, model, **given):
            assert model == "model"
            assert given == {"expected": layout_open.EXPECTED, "weight_version": 7, "seq_length": 12}
            return Opened()

    monkeypatch.setattr(layout_open.mpu, "get_data_parallel_rank", lambda: rank)
    call = {"model": "model", "data_iterator": iter(range(9)), "num_microbatches": 4, "seq_length": 12}
    assert layout_open.in_open_step(Step(), None, weight_version=7, **call) == [{}]
    assert list(map(len, parts)) == sizes
    assert [batch for part in parts for batch in part] == [0, 1, 2, 3]


def test_the_loss_of_a_critic_is_read(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"value_loss": 0.5, "grad_norm": 2.0}\n')
    (tmp_path / "peak.0").write_text("0")
    assert gpu_layouts.read(tmp_path) == {"loss": [0.5], "grad_norm": [2.0], "gib": 0.0}


@pytest.fixture
def ran(monkeypatch):
    """The folders in which a layout was launched; each run succeeds and leaves its files."""
    folders = []

    def run(folder, script, flags, environment, gpus=None, seconds=0.0):
        folders.append(folder.name)
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(json.dumps({"pg_loss": -0.5, "grad_norm": 2.0}) + "\n")
        for rank in range(int(environment["PROCESSES"])):
            (folder / f"peak.{rank}").write_text(str(2**30))

    monkeypatch.setattr(gpu_layouts, "run", run)
    return folders


def test_a_layout_runs_once_and_only_with_time_and_rollouts(ran, tmp_path):
    files = {"plain": tmp_path / "rollouts.jsonl"}
    gpu_layouts.launch("DP2", tmp_path, files, Deadline(0), "0,1")
    gpu_layouts.launch("DP2, top-p masks", tmp_path, files, Deadline(60), "0,1")
    assert ran == []
    gpu_layouts.launch("DP2", tmp_path, files, Deadline(60), "0,1")
    gpu_layouts.launch("DP2", tmp_path, files, Deadline(60), "0,1")
    assert ran == ["dp2"]
    (tmp_path / "dp2" / "peak.1").unlink()  # a rank has not ended
    assert not gpu_layouts.is_complete(tmp_path / "dp2", 2)


def test_a_layout_that_the_deadline_ends_did_not_run(ran, tmp_path, monkeypatch):
    class OneRun(Deadline):
        def left(self):
            return 0 if ran else 100

    monkeypatch.setattr(gpu_layouts, "is_complete", lambda folder, processes: False)
    gpu_layouts.launch("DP2", tmp_path, {"plain": tmp_path / "rollouts.jsonl"}, OneRun(None), "0,1")
    assert ran == ["dp2"]
    assert gpu_layouts.row_of("DP2", tmp_path, 2) == {NOT_RUN: OUT_OF_TIME}


def test_the_table_of_layouts_compares_and_gives_reasons(ran, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_layouts.importlib.util, "find_spec", lambda name: None)
    for name in ("1 GPU", "DP2"):
        gpu_layouts.launch(name, tmp_path, {"plain": tmp_path}, Deadline(60), "0,1")
    (tmp_path / "pp2").mkdir()
    (tmp_path / "pp2" / "output.txt").write_text("RuntimeError: no\n")
    names = ["1 GPU", "DP2", "PP2", "TP2", "TP4 + SP", "CP2, Transformer Engine"]
    lines = gpu_layouts.table({name: gpu_layouts.row_of(name, tmp_path, 2) for name in names}).splitlines()
    assert "| DP2 | -0.500000 | 0.0e+00 | 2.00000 | 0.0e+00 | 1.00 |" in lines
    assert "| PP2 | failed: RuntimeError: no | | | | |" in lines
    assert f"| TP2 | {OUT_OF_TIME} |" in lines
    assert "| TP4 + SP | needs 4 GPUs |" in lines
    assert "| CP2, Transformer Engine | needs Transformer Engine |" in lines


def test_layouts_of_transformer_engine_run_where_it_is_installed(monkeypatch):
    layout = Layout(2, {}, ENGINE, "1 GPU")
    monkeypatch.setattr(gpu_layouts.importlib.util, "find_spec", lambda name: object())
    assert gpu_layouts.cannot_run(layout, 2) is None


def test_scored_samples_are_the_same_in_every_call_and_can_be_read(tmp_path):
    common = {"tokens": [1, 2, 3], "response_length": 2, "loss_mask": [1, 1], "old_logprobs": [-1.0, -2.0]}
    with RolloutWriter(tmp_path / "plain.jsonl") as writer:
        writer.write(
            [Sample.build(**common, advantage=1.0, reward=1.0, prompt_id=0, rollout_id=i, step=0) for i in range(2)]
        )
    files = [layout_samples.write_scored(tmp_path / "plain.jsonl", tmp_path / f"{i}.jsonl") for i in range(2)]
    assert files[0].read_bytes() == files[1].read_bytes()
    for sample in read_rollouts(files[0]):
        assert sample.teacher_topk.ids.shape == (2, layout_samples.TOP_K)
        assert (sample.old_logprobs < torch.tensor([-1.0, -2.0])).all()
        assert sample.ref_logprobs.shape == sample.rollout_logprobs.shape == (2,)
        assert sample.values.shape == sample.returns.shape == (2,)


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("model", throughput.MODELS)
def test_throughput_has_a_baseline_of_each_layout_and_whole_microbatches(model, gpus):
    wanted = throughput.chosen(model, "", gpus)
    assert wanted
    for name, (processes, environment, flags) in wanted.items():
        flags = [*throughput.flags_of(model, "local"), *flags]
        rows, micro = (
            int(flags[len(flags) - 1 - flags[::-1].index(flag) + 1])
            for flag in ("--global-batch-size", "--micro-batch-size")
        )
        ranks = processes // math.prod(int(environment.get(key, 1)) for key in ("TP", "PP", "CP"))
        assert rows % (micro * ranks) == 0, name
    expressions = [only for of, only in several_gpus.THROUGHPUT if of == model]
    assert set().union(*(throughput.chosen(model, only, gpus) for only in expressions)) <= set(wanted)
    assert any(name.endswith(throughput.BASELINE) for name in throughput.chosen(model, expressions[0], gpus))


def test_the_table_of_throughput_compares_and_gives_reasons(tmp_path):
    results = {
        "DP2" + throughput.BASELINE: throughput.Result(2, 200.0, 3.0, [], []),
        "DP2": throughput.Result(2, 100.0, 2.0, [1.0, -2.0], [3.0, 3.0]),
        "TP2 + SP": {FAILED: "RuntimeError: no"},
        "CP2": {NOT_RUN: OUT_OF_TIME},
    }
    lines = throughput.table(results, 1000).splitlines()
    assert "| DP2 | 100 | 10,000 | 5,000 | 2.0 | 2.000 | 0.0e+00 | 0.0e+00 |" in lines
    assert "| TP2 + SP | failed: RuntimeError: no | | | | | | |" in lines
    assert f"| CP2 | {OUT_OF_TIME} |" in lines
    assert throughput.result_of(tmp_path, 4, [], 2) == {NOT_RUN: "needs 4 GPUs"}
    (tmp_path / "output.txt").write_text("RuntimeError: no\n")
    assert throughput.result_of(tmp_path, 2, [], 2) == {FAILED: "RuntimeError: no"}


def test_the_command_line_refuses_a_machine_without_several_gpus(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(several_gpus.sys, "argv", ["several_gpus.py", "heads"])
    with pytest.raises(SystemExit, match="2"):
        several_gpus.main()
    assert "--gpus 0 is not 2, 4 or 8" in capsys.readouterr().err
