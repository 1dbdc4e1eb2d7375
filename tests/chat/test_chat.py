"""The chat example: a Llama model in Megatron, its engine, its tasks and its steps, on a CPU over gloo.

What runs a model is in the full tier. It needs transformers, in `.venv/chat` (`make .venv/chat`) or the folder CHAT.
What runs the pretrained model needs its file too, which `make prove PART=chat` downloads.
"""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import launches
import pytest
from chat import evidence as experiments
from chat.tasks import TASKS, calculate, last_number
from processes import ROOT, environment, on_ranks, run, wait_for

PROGRAMS = Path(__file__).parent / "programs"
FOLDER = Path(os.environ.get("CHAT", ROOT / ".venv" / "chat"))
MODEL = Path(os.environ.get("MODEL", ROOT / ".venv/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
LAYOUTS = ((1, 1), (2, 2))  # tensor- and pipeline-parallel ranks of the tiny models
needs_transformers = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs transformers: make .venv/chat, or CHAT=")
needs_model = pytest.mark.skipif(
    not MODEL.exists(), reason="needs the pretrained model: make prove PART=chat, or MODEL="
)
in_full_tier = pytest.mark.full_tier("a model for transformers belongs to `make prove`")
FLOATS = ("torch.float32", "torch.bfloat16")


def _environment() -> dict[str, str]:
    env = environment()
    path = os.pathsep.join([env["PYTHONPATH"], str(PROGRAMS), str(FOLDER)])
    return env | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _on_ranks(model: Path, out: Path, tp: int, pp: int) -> dict:
    words = [str(PROGRAMS / "chat_ranks.py"), str(model), str(out), str(tp), str(pp)]
    wait_for(on_ranks(tp * pp, _environment(), *words))
    return json.loads(out.read_text(encoding="utf-8"))


def _tiny(folder: Path, *, tied: bool) -> Path:
    code = f"import sys, pathlib, tiny_llama; tiny_llama.make(pathlib.Path(sys.argv[1]), tied={tied})"
    run([sys.executable, "-c", code, str(folder)], _environment())
    return folder


@launches.launch
def tiny(folder, full):
    """What the ranks of the layouts found, of tied and untied embeddings."""
    if not FOLDER.is_dir():
        return None
    return {
        (tied, layout): _on_ranks(model, folder / f"{tied}-{layout}.json", *layout)
        for tied in (True, False)
        for model in [_tiny(folder / f"tied-{tied}", tied=tied)]
        for layout in LAYOUTS
    }


@launches.launch
def pretrained(folder, full):
    """What one rank found of the pretrained model, and two GRPO steps of the launch script with eight prompts."""
    if not (full and FOLDER.is_dir() and MODEL.exists()):
        return None
    out = folder / "run"
    env = _environment() | {"MODEL": str(MODEL), "RUN_DIR": str(out), "PROCESSES": "1"}
    sizes = {"train-iters": 2, "global-batch-size": 16, "micro-batch-size": 8, "group-size": 2, "max-new-tokens": 16}
    words = [word for name, value in (sizes | {"evaluation-prompts": 4}).items() for word in (f"--{name}", str(value))]
    done = run(["bash", str(ROOT / "examples/chat/launch.sh"), *words], env)
    return out, done.stdout, _on_ranks(MODEL.with_suffix(""), folder / "pretrained.json", 1, 1)


@launches.launch
def experiment(folder, full):
    """Arms of experiments on a tiny model: trained, trained again and shown."""
    if not FOLDER.is_dir():
        return None
    model, runs = _tiny(folder / "model", tied=True), folder / "runs"
    sizes = "--train-iters 2 --global-batch-size 8 --micro-batch-size 4 --group-size 2 --max-new-tokens 8"

    def evidence(what, *names, arms=(), flags=""):
        words = [what, *names, "--runs", str(runs), "--seeds", "1", "--model", str(model), "--minutes", "120"]
        words += ["--arms", *arms] if arms else []
        further = f"--flags={sizes} --evaluation-prompts 4 {flags}"
        return run([sys.executable, "-m", "chat.evidence", *words, further], _environment()).stdout

    arms = ("int8, tis", "int4, rejection", "top-p, mask", "top-p, no mask", "means of 4", "both")
    names = ("quantized", "sampling", "microbatches", "distillation")
    printed = [
        evidence("start", "times_table", "word_problems"),
        evidence("run", *names, arms=arms),
        evidence("run", *names, arms=arms),
    ]
    printed.append(evidence("run", "sft", arms=("sft + rl",), flags="--demonstrations 4"))
    table = evidence("show", *names, "sft")
    found = {name: json.loads((runs / f"{name}.json").read_text(encoding="utf-8")) for name in (*names, "sft")}
    summaries = {arm: of_seeds["1"] for arms in found.values() for arm, of_seeds in arms.items() if of_seeds}
    return printed, table, summaries, (runs / "sft/sft-+-rl-1/conversations.txt").read_text(encoding="utf-8")


@launches.launch
def layouts(folder, full):
    """metrics.jsonl of two steps on a tiny model that imitate, by the layout in the launch script's environment."""
    if not FOLDER.is_dir():
        return None
    model, found = _tiny(folder / "model", tied=True), {}
    sizes = "--train-iters 2 --global-batch-size 8 --micro-batch-size 2 --group-size 2 --max-new-tokens 8"
    words = f"{sizes} --evaluation-prompts 4 --imitate --task calculator --lr 1e-2".split()
    for k, layout in enumerate(({}, {"TP": "2", "SP": "1"}, {"PP": "2"}, {"PROCESSES": "2"})):
        env = _environment() | {"MODEL": str(model), "RUN_DIR": str(folder / str(k))} | layout
        run(["bash", str(ROOT / "examples/chat/launch.sh"), *words], env)
        lines = (folder / str(k) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        found[str(layout)] = [json.loads(line) for line in lines]
    return found


@pytest.fixture
def everywhere(tiny, pretrained):
    """What all launches of ranks found."""
    return [*tiny.values(), *([pretrained[2]] if pretrained else [])]


@in_full_tier
@needs_transformers
@pytest.mark.proof(
    "Chat: weights of a Llama model into Megatron and back under TP and PP, tensor by tensor, bit for bit"
)
def test_the_round_trip_of_weights_is_bit_equal(everywhere, evidence):
    compared = [found[dtype] for found in everywhere for dtype in FLOATS]
    assert [found["changed"] for found in compared] == [0] * len(compared)
    evidence(cases=sum(found["tensors"] for found in compared))


@in_full_tier
@needs_transformers
@pytest.mark.proof(
    "Chat: log-probabilities of packed rows in Megatron equal transformers' one by one, float32, in nats"
)
def test_logprobs_of_packed_rows_equal_those_of_transformers(everywhere, evidence):
    worst = [found["torch.float32"]["logprobs"][0] for found in everywhere]
    evidence(cases=len(worst), worst=max(worst), tolerance=1e-4)


@in_full_tier
@needs_transformers
def test_in_bfloat16_neither_implementation_is_further_from_float32(everywhere):
    for found in everywhere:
        ours, theirs = found["torch.bfloat16"]["logprobs_of_both"]
        assert 0 < ours <= 1.5 * theirs


@in_full_tier
@needs_transformers
@needs_model
@pytest.mark.proof("Chat: logits of SmolLM2 on 200 tokens of text, Megatron's and transformers', absolute")
def test_logits_of_the_pretrained_model_agree(pretrained, evidence):
    found = pretrained[2]
    assert found["torch.float32"]["length"] == 200
    assert found["torch.float32"]["cross_entropy"] < 5  # a broken model has log(49152) = 10.8
    ours, theirs = found["torch.bfloat16"]["logits_of_both"]
    assert 0 < ours <= 1.5 * theirs
    evidence(cases=200, worst=found["torch.float32"]["logits"][0], tolerance=1e-4)


@in_full_tier
@needs_transformers
@pytest.mark.proof("Chat: the engine's log-probabilities of its samples equal the trainer's after a refresh, in nats")
def test_the_engine_samples_from_the_trainers_weights(everywhere, evidence):
    worst = [found["engine"]["equal"][0] for found in everywhere]
    evidence(cases=10 * len(worst), worst=max(worst), tolerance=1e-4)


@in_full_tier
@needs_transformers
def test_a_quantized_engine_samples_from_other_weights(everywhere):
    for found in everywhere:
        equal, int8, int4 = (found["engine"][name][1] for name in ("equal", "int8", "int4"))
        assert 100 * equal < 1e-3
        assert int8 > 20 * equal
        assert int4 > 3 * int8
        assert found["engine"]["levels"] == 15
        assert all(found["engine"][f"texts_{name}"] > 5 for name in ("equal", "int8", "int4"))


@in_full_tier
@needs_transformers
def test_conversations_of_several_turns_are_those_of_the_chat_template(everywhere):
    for found in everywhere:
        assert found["turns"] == {"conversations": 7, "wrong": 0}


@in_full_tier
@needs_transformers
@needs_model
@pytest.mark.proof("Chat: GRPO steps of SmolLM2 with eight prompts, with transformers as rollout engine")
def test_two_steps_of_the_pretrained_model_run(pretrained, evidence):
    out, printed, _ = pretrained
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["iteration"] for record in records] == [1, 2]
    for each in records:
        assert each["num_prompts"] == 8
        assert each["num_rollouts"] == 16
        assert each["ratio_new_old"] == pytest.approx(1, abs=1e-4)  # a step is one rollout batch
        assert 0 < each["sampling_seconds"] < each["step_seconds"]
        assert f"step_seconds {each['step_seconds']:.1f}" in printed
    samples = [json.loads(line) for line in (out / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()[1:]]
    gaps = [abs(a - b) for s in samples for a, b in zip(s["old_logprobs"], s["rollout_logprobs"], strict=True)]
    assert len(samples) == 32
    assert max(gaps) < 1e-3
    text = (out / "conversations.txt").read_text(encoding="utf-8")
    assert text.count("--- reward") == 32
    assert len(re.findall(r"What is \d+ times \d+\?", text)) == 16
    evidence(cases=len(records))


@in_full_tier
@needs_transformers
@pytest.mark.proof(
    "Chat: log-probabilities and gradient norms of two steps under TP with SP, PP and DP equal one process"
)
def test_steps_do_not_depend_on_the_layout(layouts, evidence):
    (first, *others), errors = layouts.values(), []
    for records in others:
        for name in ("grad_norm", "old_logprobs", "pg_loss"):
            errors += [abs(a[name] / b[name] - 1) for a, b in zip(records, first, strict=True)]
    assert first[1]["old_logprobs"] > first[0]["old_logprobs"]  # it learns
    evidence(cases=2 * len(others), worst=max(errors), tolerance=1e-5)


@in_full_tier
@needs_transformers
def test_an_experiment_trains_what_is_missing_and_keeps_the_log_ratios(experiment):
    (start, first, again, _), table, found, _ = experiment
    assert start == "times_table: done\nword_problems: done\n"
    assert first.count(": done\n") == 6
    assert again.count(": done before\n") == 6
    assert "| int8, tis | 1 |" in table
    int8, int4 = found["int8, tis"], found["int4, rejection"]
    for summary in (int8, int4):
        assert [step["tokens"] > 0 for step in summary["log_ratios"]] == [True, True]
        assert len(summary["curves"]["reward"]) == 2
        assert set(summary["final"]) == {"exact_match", "exact_match_of_trainer"}
    assert int4["log_ratios"][0]["mean_abs"] > 3 * int8["log_ratios"][0]["mean_abs"] > 0
    assert int8["curves"]["rejected_fraction"] == [0, 0]


@in_full_tier
@needs_transformers
def test_a_sampling_mask_makes_the_log_ratios_of_truncated_sampling_zero(experiment):
    _, _, found, _ = experiment
    assert found["top-p, mask"]["log_ratios"][0]["max"] < 1e-4
    assert found["top-p, no mask"]["log_ratios"][0]["mean"] < -0.05  # log 0.9 and less


@in_full_tier
@needs_transformers
def test_demonstrations_are_a_term_of_the_step_and_a_teacher_scores_the_answers(experiment):
    _, _, found, conversations = experiment
    assert conversations.count("--- demonstration") == 8
    assert conversations.count("--- reward") == 8
    assert all(loss > 0 for loss in found["sft + rl"]["curves"]["sft/mean"])
    assert found["both"]["curves"]["opd/mean"][0] >= 0


def test_published_runs_count_as_done(tmp_path, monkeypatch, capsys):
    run_of = {"curves": {"reward": [0.0, 1.0], "response_length": [3.0, 2.0]}, "log_ratios": []}
    (tmp_path / "published").mkdir()
    path = tmp_path / "published/sft.json"
    path.write_text(json.dumps({"rl": {"2": run_of}, "sft": {}, "sft + rl": {}}), encoding="utf-8")
    words = ["run", "sft", "--runs", tmp_path / "runs", "--published", path.parent, "--model", tmp_path, "--seeds", "2"]
    monkeypatch.setattr("sys.argv", ["evidence", *map(str, words), "--arms", "rl"])
    experiments.main()
    monkeypatch.setattr("sys.argv", ["evidence", "show", *map(str, words[1:-4])])
    experiments.main()
    printed = capsys.readouterr().out
    assert printed.startswith("sft, rl, seed 2: done before\n")
    assert "| rl | 1 | 0.5 ± 0 |" in printed
    assert json.loads((tmp_path / "runs/sft.json").read_text(encoding="utf-8"))["rl"] == {"2": run_of}


@pytest.mark.parametrize("name", TASKS)
def test_demonstrations_are_right_and_other_answers_are_wrong(name):
    generator, task = random.Random(1), TASKS[name]
    for _ in range(200):
        problem = task.problem(generator)
        turns = problem.demonstration
        assert problem.is_right(turns)
        assert len(turns) <= task.max_turns
        assert not problem.is_right([*turns[:-1], "No 123456789."])
        replies = [problem.reply(turn) for turn in turns]
        assert replies[-1] is None
        assert None not in replies[:-1]


def test_the_calculator_only_answers_calls():
    assert calculate("CALCULATE: 12 * -3") == "RESULT: -36"
    assert calculate("CALCULATE: 7-9") == "RESULT: -2"
    for text in ("CALCULATE: 2 ** 9", "CALCULATE: 1 + 1 + 1", "CALCULATE: " + "9" * 10 + " * 2", "12 * 3", ""):
        assert calculate(text) is None


def test_the_last_number_of_a_text():
    assert last_number("7 times 8 is 1,056.") == 1056
    assert last_number("from 3 to -4") == -4
    assert last_number("none") is None


def test_the_launch_script_says_how_to_get_the_model(tmp_path):
    env = {**os.environ, "MODEL": str(tmp_path / "none.gguf"), "PYTHON": "echo"}
    done = subprocess.run(
        ["bash", ROOT / "examples/chat/launch.sh"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "none.gguf does not exist. Run make chat" in done.stderr
