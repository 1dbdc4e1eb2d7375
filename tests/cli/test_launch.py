"""`megatron-pg explain` and `validate`: what they say, what they refuse, and that they need no torch."""

import json
import re
import resource
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import launches
import processes
import pytest

from megatron_pg.args import add_arguments, own_arguments
from megatron_pg.cli import main, recorder
from megatron_pg.flags.megatron import MEGATRON_FLAGS, RULE_ARGUMENTS

ROOT = Path(__file__).parents[2]
SCRIPT = """#!/bin/bash
set -euo pipefail
GPUS_PER_NODE=4
NUM_NODES=2

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
TRAINING_ARGS=(
    --num-layers 2
    --tensor-model-parallel-size 2 # as many as fit
    --context-parallel-size 2
    --micro-batch-size 2
    --global-batch-size $((GPUS_PER_NODE * NUM_NODES * 8))
    --dataloader-type external
    --save "${1:-/checkpoints}"
)
GRPO_ARGS=(
    --loss-aggregation ${AGGREGATION:-constant}
    --loss-aggregation-divisor 4096
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${TRAINING_ARGS[@]} \\
    "${GRPO_ARGS[@]}" "${@:2}"
"""
MINIMAL = "--dataloader-type external"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("AGGREGATION", "PROCESSES", "PYTHON", "RANK", "RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(recorder, "_NAMESPACES", ("--no-such-namespace",))  # faster; test_recorder has both ways


@pytest.fixture
def script(tmp_path):
    def write(text: str = SCRIPT) -> str:
        path = tmp_path / "launch.sh"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def call(capsys):
    """Exit code, standard output and standard error of a command line."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def explained(call, *words: str) -> dict:
    code, out, err = call("explain", "--json", *words)
    assert (code, err) == (0, "")
    return json.loads(out)


EXAMPLE = "--loss-aggregation constant --loss-aggregation-divisor 8192 --global-batch-size 512 --micro-batch-size 2"


def test_the_numbers_of_a_constant_divisor(call):
    """Worked by hand: N_r·L = 512·8192; D = 8/2 = 4, K = 512/(2·4) = 64, K·D = 256."""
    said = explained(
        call, *EXAMPLE.split(), "--context-parallel-size", "2", "--world-size", "8", "--lengths", "10,1000"
    )
    assert said["sizes"] == {"world": 8, "D": 4, "C": 2, "K": 64, "N_r": 512}
    assert "= 4194304, the same at every step" in said["factors"]["denominator"]
    assert "= 256·S" in said["factors"]["returned"]
    assert said["factors"]["schedule"] == "× C = 2, ÷ K = 64"
    assert said["factors"]["DDP"].startswith("÷ (D·C) = 8,")
    short, long = said["weights"]
    assert short["token"] == long["token"] == pytest.approx(2.384185791015625e-07, rel=1e-12)
    assert short["answer"] == pytest.approx(2.384185791015625e-06, rel=1e-12)
    assert long["answer"] == pytest.approx(2.384185791015625e-04, rel=1e-12)
    assert (short["share"], long["share"]) == pytest.approx((1 / 101, 100 / 101))


# weight of a token of 10 and of 1000, in units of 1/N_r, in a step of both in equal numbers (mean 505)
TOKEN_WEIGHTS = {
    "sample_mean": (1 / 10, 1 / 1000),
    "prompt_mean": (1 / 10, 1 / 1000),
    "token_mean": (1 / 505, 1 / 505),
    "constant": (1 / 4096, 1 / 4096),
}


@pytest.mark.parametrize("mode", TOKEN_WEIGHTS)
def test_weights_of_every_aggregation(call, mode):
    flags = ["--loss-aggregation", mode, *(["--loss-aggregation-divisor", "4096"] if mode == "constant" else [])]
    said = explained(call, *flags, "--lengths", "10,1000")
    assert said["weights_unit"] == "1/N_r"
    assert tuple(row["token"] for row in said["weights"]) == pytest.approx(TOKEN_WEIGHTS[mode], rel=1e-12)
    assert sum(row["share"] for row in said["weights"]) == pytest.approx(1)
    per_token = mode == "token_mean"
    assert ("finalize" in said["factors"]) == per_token
    assert said["arguments"]["loss_aggregation"] == mode


REJECTIONS = {
    "sample_mean": ("N_r·M, M kept tokens of the rollout", (1 / 10, 1 / 1000)),
    "prompt_mean": ("P·M, P prompts of the step with a kept token, M kept tokens of the group", (1 / 10, 1 / 1000)),
    "token_mean": ("T, the kept tokens of the step", (1 / 505, 1 / 505)),
    "constant": ("N_r·L = N_r·4096, N_r rollouts of the step with a kept token", (1 / 4096, 1 / 4096)),
}


@pytest.mark.parametrize("mode", REJECTIONS)
def test_what_a_rejection_does_to_the_denominators_is_in_the_numbers(call, mode):
    """The number of rollouts that count is not known before the step, so nothing is divided by the 512 that are sampled."""
    flags = ["--loss-aggregation", mode, *(["--loss-aggregation-divisor", "4096"] if mode == "constant" else [])]
    flags += ["--pg-correction", "icepop", "--pg-denominator", "kept", "--global-batch-size", "512"]
    flags += ["--micro-batch-size", "2", "--world-size", "8", "--lengths", "10,1000"]
    said = explained(call, *flags)
    denominator, tokens = REJECTIONS[mode]
    assert said["factors"]["denominator"] == denominator
    assert said["factors"]["N_r"].startswith("those of 512 rollouts with a kept token")
    assert (said["sizes"]["N_r"], said["sizes"]["K"], said["weights_unit"]) == (None, 32, "1/N_r")
    assert tuple(row["token"] for row in said["weights"]) == pytest.approx(tokens, rel=1e-12)
    assert "no token of them rejected" in call("explain", *flags)[1]


def test_only_units_with_a_trained_token_count_under_live(call):
    flags = [*EXAMPLE.split(), "--world-size", "8", "--pg-denominator", "live"]
    said = explained(call, *flags)
    assert said["factors"]["denominator"] == "N_r·L = N_r·8192, N_r rollouts of the step with a trained token"
    assert said["objective"]["weight"] == "1/δ, δ = N_r · L: rollouts of the step with a trained token · 8192"
    assert "in units of 1/N_r" in call("explain", *flags)[1]


def test_the_text_holds_formula_factors_and_weights(call):
    code, out, err = call("explain", *EXAMPLE.split(), "--world-size", "8")
    assert (code, err) == (0, "")
    for text in ("(Σ m·ℓ)/(N_r·L)", "N_r·L = 512·8192", "returned     K·D·S = 32·8·S", "10 tokens", "Dr. GRPO; verl"):
        assert text in out


def test_every_flag_of_the_plugin_is_shown(call):
    said = explained(call, "--pg-clip-eps-high", "0.28")
    assert tuple(said["arguments"]) == own_arguments()


def test_what_is_given_and_what_is_a_default_are_told_apart(call):
    words = ["--calculate-per-token-loss", "--pg-clip-eps-high", "0.28", "--pg-kl-coef", "0"]
    assert explained(call, *words)["given"] == ["calculate_per_token_loss", "pg_clip_eps_high", "pg_kl_coef"]
    rows = dict(line.split(maxsplit=1) for line in call("explain", *words)[1].splitlines())
    assert rows["given"] == "--calculate-per-token-loss, --pg-clip-eps-high 0.28, --pg-kl-coef 0.0"
    assert rows["default"].startswith("--loss-aggregation token_mean, --pg-temperature 1.0, ")
    assert rows["note"].endswith("--loss-aggregation is token_mean, not sample_mean")


def test_a_given_aggregation_is_never_changed_by_a_sourced_flag(call, script):
    """The default is, and that is said."""
    sourced = "FLAGS=(--dataloader-type external --calculate-per-token-loss)\n"
    code, out, err = call(
        "validate", "--run", script(f"{sourced}torchrun t.py ${{FLAGS[@]}} --loss-aggregation sample_mean")
    )
    assert (code, out) == (2, "")
    assert (
        "[E11] --calculate-per-token-loss is the older spelling of --loss-aggregation token_mean and contradicts" in err
    )
    assert call("validate", "--run", script(f"{sourced}torchrun t.py ${{FLAGS[@]}}"))[0] == 0


def test_evaluation_without_an_interval_is_said(call):
    assert "  note: --eval-iters without --eval-interval: " in call("validate", "--eval-iters", "0")[1]
    assert "note" not in call("validate", "--eval-iters", "0", "--eval-interval", "9")[1]


# --- launch scripts ---


def test_a_whole_launch_script_is_explained(call, script):
    said = explained(call, "--run", script())
    assert said["source"].endswith("launch.sh, line 23")
    assert said["sizes"] == {"world": 8, "D": 2, "C": 2, "K": 16, "N_r": 64}
    assert said["arguments"]["loss_aggregation_divisor"] == 4096.0
    assert said["megatron_arguments"]["tensor_model_parallel_size"] == 2
    assert said["other_arguments"] == ["--num-layers", "2", "--save", "/checkpoints"]
    assert (said["remarks"], said["notes"]) == ([], [])
    first = call("explain", "--run", script())[1].splitlines()[0]
    assert first == said["run"]
    assert first.endswith("only for a script that you would run")
    assert ("scratch layer" in first) != ("NOT isolated" in first)


def test_words_behind_the_script_are_the_scripts(call, script):
    said = explained(call, "--run", script(), "/data", "--pg-clip-eps-high", "0.3", "--json")
    assert said["arguments"]["pg_clip_eps_high"] == 0.3
    assert said["other_arguments"] == ["--num-layers", "2", "--save", "/data", "--json"]
    (note,) = said["notes"]
    assert note.startswith("--json stands behind the script and went to it")


def test_the_environment_is_the_callers(call, script, monkeypatch):
    monkeypatch.setenv("AGGREGATION", "prompt_mean")
    code, _, err = call("validate", "--run", script())
    assert code == 2
    assert "[E9] --loss-aggregation-divisor has no effect with --loss-aggregation prompt_mean" in err


STARTING = {  # what starts the training: (world size, further arguments)
    "torchrun --nproc-per-node 8 --nnode 2 t.py": (16, []),
    "torchrun --nproc_per_node=4 t.py conf.py": (4, ["conf.py"]),
    "torchrun -m my.train --config conf.py": (None, ["--config", "conf.py"]),
    "exec python3 -u -m torch.distributed.run --nproc-per-node 2 t.py": (2, []),
    "srun --ntasks 4 bash -c 'python train.py \"$@\"' -- ": (None, []),
    "accelerate launch --num_processes 8 train.py": (None, []),
    'ray job submit --runtime-env-json=\'{"a": "b.py"}\' -- python3 train.py': (None, []),
    "uv run train.py": (None, []),
    "python -m my.train --loss-aggregation token_mean": (None, []),
}


@pytest.mark.parametrize("text", STARTING)
def test_what_starts_a_training_gives_its_arguments(call, script, text):
    world, others = STARTING[text]
    said = explained(call, "--run", script(f"{text} {MINIMAL}"))
    assert (said["sizes"]["world"], said["other_arguments"]) == (world, others)
    assert said["megatron_arguments"]["dataloader_type"] == "external"


SWEEP = f"""python tools/preprocess.py --x 1
for MODE in sample_mean prompt_mean token_mean token_mean; do
    torchrun t.py {MINIMAL} --loss-aggregation $MODE
done
torchrun u.py {MINIMAL} --pg-temperature 2
"""


def test_several_trainings_are_listed_and_chosen(call, script):
    path = script(SWEEP)
    said = explained(call, "--run", path)
    assert said["arguments"]["loss_aggregation"] == "sample_mean"
    assert said["notes"][0].startswith(
        "4 different trainings are started (1: line 3, 2: line 3, 3: line 3, 4: line 5); this is number 1."
    )
    assert explained(call, "--nth", "2", "--run", path)["arguments"]["loss_aggregation"] == "prompt_mean"
    assert explained(call, "--line", "5", "--run", path)["arguments"]["pg_temperature"] == 2
    assert explained(call, "--line", "3", "--nth", "3", "--run", path)["arguments"]["loss_aggregation"] == "token_mean"
    assert "--nth 5 is not one of the 4 trainings" in call("explain", "--nth", "5", "--run", path)[2]
    assert (
        "line 1 starts no training. These are started: 1: line 3," in call("validate", "--line", "1", "--run", path)[2]
    )


def test_a_tool_is_taken_where_there_is_nothing_else(call, script):
    assert (
        explained(call, "--run", script(f"python train.py {MINIMAL} --pg-temperature 2"))["arguments"]["pg_temperature"]
        == 2
    )


def test_what_was_not_run_is_said(call, script):
    text = (
        f"pkill ray; sleep 3; sleep 3\nN=$(python -c 'print(8)')\ntorchrun --nproc-per-node $N t.py {MINIMAL}\nexit 3"
    )
    code, out, err = call("validate", "--run", script(text))
    assert (code, err) == (0, "")
    assert "note: not run, only recorded: pkill, sleep ×2, python\n" in out
    assert "launch.sh, line 2: a pipe or $(…) got nothing from `python -c print(8)`, which was not run\n" in out
    assert "note: the script ended with exit code 3\n" in out


def test_the_output_of_a_script_is_hidden_unless_it_is_asked_for(call, script):
    path = script(f"echo to be seen\ntorchrun t.py {MINIMAL}")
    assert "to be seen" not in "".join(call("explain", "--run", path)[1:])
    code, _, err = call("explain", "--show-output", "--run", path)
    assert (code, err) == (0, "to be seen\n")


def test_a_script_without_run_is_told_both_ways(call, script):
    for command in ("explain", "validate"):
        code, out, err = call(command, path := script())
        assert (code, out) == (2, "")
        assert f"{path} is no flag" in err
        assert "MEGATRON_PG_DRY_RUN=1" in err
        assert "--pg-dry-run" in err
        assert "--run" in err


BAD_LAUNCHES = {
    "": "neither flags nor --run SCRIPT",
    "--nth 2 --loss-aggregation token_mean": "--nth is for a script, and none is given",
    "--loss-aggregation token_mean --show-output": "--show-output is for a script",
    "--run": "--run takes a script",
    "--pg-temperature 2 --run launch.sh": "nothing else stands before it: --pg-temperature",
    "--time-limit 0 --run examples/launch_cpu.sh": "--time-limit 0 leaves no time to run",
    "--loss-agregation token_mean": "--loss-agregation is no flag of megatron_pg, .*Did you mean --loss-aggregation?",
    "--pg-clip 0.2": "--pg-clip is no flag of megatron_pg, .*Did you mean --pg-clip-eps-low or --pg-clip-eps-high?",
    "--pg-kl 0.1": r"--pg-kl is no flag of megatron_pg, .*Did you mean --pg-kl-coef\?",
    "--loss-agg=token_mean": "--loss-agg is no flag of megatron_pg, .*Did you mean --loss-aggregation or",
    "-loss-aggregation token_mean": r"-loss-aggregation is no flag of megatron_pg, .*Did you mean --loss-aggregation\?",
    "--calculate-per-token --lr 1": r"--calculate-per-token is no flag .*Did you mean --calculate-per-token-loss\?",
    "--pg_clip_eps_low 0.2": "--pg_clip_eps_low is no flag of megatron_pg, .*Did you mean --pg-clip-eps-low?",
    "--loss-aggregation dr_grpo": r"\[E3\] --loss-aggregation 'dr_grpo' is not one of .*; did you mean constant\?",
    "--pg-metrics all": "invalid choice: 'all'",
    "--loss-aggregation": "expected one argument",
    "--pg-temperature hot": "invalid float value: 'hot'",
    "--loss-aggregation constant": r"\[E5\] --loss-aggregation constant needs",
    "--loss-aggregation constant --loss-aggregation-divisor 8 --calculate-per-token-loss": r"\[E11\]",
    "--pg-clip-eps-low 2 --pg-temperature 0": r"\[E24\] --pg-.*\[E24\] --pg-",
    "--global-batch-size 10 --micro-batch-size 3 --world-size 2": "10 is no multiple of --micro-batch-size 3 times 2",
    "--context-parallel-size -1 --world-size 6": "--context-parallel-size -1 must be at least 1",
    "--micro-batch-size 0 --global-batch-size 6": "--micro-batch-size 0 must be at least 1",
    "--world-size 0 --loss-aggregation token_mean": "--world-size 0 is no number of ranks",
    "--tensor-model-parallel-size 4 --world-size 6": "6 ranks are no multiple of TP·PP·CP = 4",
    "--world-size two --loss-aggregation token_mean": "invalid int value: 'two'",
    "--loss-aggregation token_mean --lengths 10,x": "no list of positive lengths",
    "--loss-aggregation token_mean --lengths 0": "no list of positive lengths",
    "--yaml-cfg a.yaml": "--yaml-cfg replaces all flags",
    "--run absent.sh": "absent.sh: is not a file",
    "--custom-pg-loss-reducer-function-path nowhere.at:all": r"\[E14\].*cannot be imported",
}


@pytest.mark.parametrize("words", BAD_LAUNCHES)
def test_a_bad_launch_is_one_line_and_exit_code_two(call, words):
    code, out, err = call("explain", *words.split())
    assert (code, out) == (2, "")
    assert re.search(BAD_LAUNCHES[words], err), err
    assert err.startswith("megatron-pg explain: ")
    assert err.count("\n") == 1


LAYOUTS = [
    "--global-batch-size 15 --micro-batch-size 4 --world-size 2",
    "--tensor-model-parallel-size 4 --world-size 6",
    "--context-parallel-size 0 --world-size 6",
    "--micro-batch-size 0 --global-batch-size 6",
    "--global-batch-size 15 --micro-batch-size 4 --world-size 2 --pg-temperature 0",
]


@pytest.mark.parametrize("words", LAYOUTS)
def test_validate_refuses_the_sizes_that_explain_refuses(call, words):
    (code, out, said), explained = call("validate", *words.split()), call("explain", *words.split())
    assert (code, out) == (explained[0], explained[1]) == (2, "")
    messages = [line.removeprefix("megatron-pg validate: ") for line in said.splitlines()]
    assert explained[2] == f"megatron-pg explain: {'; '.join(messages)}\n"
    assert "[layout] --" in said or "[layout] 6 ranks" in said
    found = json.loads(call("validate", *words.split(), "--json")[1])
    assert (found["valid"], [f"[{each['rule']}] {each['message']}" for each in found["violations"]]) == (
        False,
        messages,
    )


def test_validate_refuses_a_script_whose_global_batch_is_not_divisible(call, script):
    path = script(
        SCRIPT.replace("$((GPUS_PER_NODE * NUM_NODES * 8))", "15").replace(
            "--micro-batch-size 2", "--micro-batch-size 4"
        )
    )
    for command in ("validate", "explain"):
        code, out, said = call(command, "--run", path)
        assert (code, out) == (2, "")
        assert (
            "[layout] --global-batch-size 15 is no multiple of --micro-batch-size 4 times 2 data-parallel ranks" in said
        )


BAD_SCRIPTS = {
    "": "no command starts a training: neither torchrun nor python with a .py file. Give the flags",
    "echo torchrun t.py; pip install x; pip list": "Recorded: pip ×2. Give the flags",
    "torchrun 'a": 'ended with exit code 2 before it started a training, and printed last: "launch.sh: line',
    "set -x; exit 3": "ended with exit code 3 before it started a training. Give it the arguments",
    "set -u; torchrun $MISSING_NAME": "MISSING_NAME: unbound variable",
    "set -eo pipefail\npip list | grep x\ntorchrun": "Recorded: pip. launch.sh, line 2: a pipe or $(…) got nothing from `pip list`",
    "while :; do :; done": "it was ended after 1 s, before it started a training",
    "torchrun t.py \u2014fp16": "begins with a dash that is no hyphen",
    "torchrun t.py --loss-agregation x": "launch.sh: --loss-agregation is no flag of megatron_pg",
    "torchrun t.py --loss-aggregation\n": "launch.sh: argument --loss-aggregation: expected one argument",
    "cd /; exec /usr/bin/python3 t.py": "`exec` starts an interpreter by its path, which would really run",
    'exec "$VENV"/bin/python3 t.py': "`exec` starts an interpreter by its path",
    "torchrun t.py --yaml-cfg x\n": "--yaml-cfg replaces all flags",
    "torchrun t.py\r\n": "has CRLF line ends",
}


@pytest.mark.parametrize("content", BAD_SCRIPTS, ids=lambda c: repr(c[:20]))
def test_a_bad_script_is_one_line_and_exit_code_two(call, script, monkeypatch, content):
    monkeypatch.chdir(Path(script(content)).parent)
    Path("launch.sh").write_bytes(content.encode())
    limit = ["--time-limit", "1"] if "while" in content else []
    code, out, err = call("explain", *limit, "--run", "launch.sh")
    assert (code, out) == (2, "")
    assert BAD_SCRIPTS[content] in err, err
    assert err.count("\n") == 1


def test_an_unreadable_script_is_named(call, tmp_path):
    (tmp_path / "folder.sh").mkdir()
    assert "is not a file" in call("explain", "--run", tmp_path / "folder.sh")[2]
    code, _, err = call("validate", "--run", "a\0b.sh")
    assert code == 2
    assert "a\\x00b.sh" in err


def test_a_step_of_documents_has_their_number_of_rollouts(call):
    documents = ["--docs-per-step", "256", "--micro-batch-size", "1", "--world-size", "8"]
    said = explained(call, *documents)
    assert (said["sizes"]["N_r"], said["sizes"]["K"]) == (256, None)
    assert said["factors"]["K"] == "as many micro-batches as the step's documents take"
    assert explained(call, *documents, "--docs-per-step-policy", "at_least")["sizes"]["N_r"] is None


def test_the_divisor_of_the_gradient_is_one_of_the_factors(call):
    said = explained(call, "--pg-grad-divisor", "256")
    assert said["factors"]["DDP"].endswith("∇Σ w·ℓ / 256  (--pg-grad-divisor)")


# --- validate ---


def test_ranks_that_a_recorded_command_would_count_are_not_known(call, script):
    counted = "N=$(nvidia-smi --list-gpus | wc -l)\ntorchrun --nproc-per-node $N t.py --dataloader-type external"
    assert explained(call, "--run", script(counted))["sizes"]["world"] is None
    code, _, said = call("validate", "--run", script("torchrun --nproc-per-node 0 t.py --dataloader-type external"))
    assert (code, "[layout] 0 ranks are no multiple of TP·PP·CP = 1" in said) == (2, True)


def test_validate_accepts_the_examples(call):
    for path in sorted((ROOT / "examples").glob("launch_*.sh")):
        code, out, err = call("validate", "--run", path)
        assert (code, err) == (0, "")
        assert "\nvalid: " in out


def test_validate_prints_every_violation_on_its_line(call, script):
    text = SCRIPT.replace("external", "cyclic").replace("--num-layers 2", "--use-torch-fsdp2 --sft")
    code, out, err = call("validate", "--run", script(text))
    assert (code, out) == (2, "")
    rules = [line.split("[")[1].split("]")[0] for line in err.splitlines()]
    assert sorted(rules) == ["E19", "E29", "E30"]


def test_validate_as_json(call, script):
    code, out, _ = call("validate", "--json", "--run", script(SCRIPT.replace("4096", "0")))
    said = json.loads(out)
    assert code == 2
    assert (said["valid"], [v["rule"] for v in said["violations"]]) == (False, ["E8"])
    code, out, _ = call("validate", "--json", "--calculate-per-token-loss")
    said = json.loads(out)
    assert code == 0
    assert said["valid"]
    assert said["arguments"]["loss_aggregation"] == "token_mean"
    assert said["remarks"] == ["--calculate-per-token-loss: --loss-aggregation is token_mean, not sample_mean"]


def test_megatrons_defaults_apply_to_a_script_and_not_to_single_flags(call, script):
    """Megatron makes dataloader_type `single` where the flag is missing, which rule E29 refuses."""
    code, _, err = call("validate", "--run", script("torchrun t.py --loss-aggregation token_mean"))
    assert code == 2
    assert "[E29] --dataloader-type single" in err
    assert call("validate", "--loss-aggregation", "token_mean")[0] == 0


def test_weight_shards_are_what_megatron_derives_from_them(call, script):
    base = (
        "torchrun t.py --dataloader-type external --tensor-model-parallel-size 2 --tensor-parallel-num-weight-shards "
    )
    assert call("validate", "--run", script(base + "2"))[0] == 0
    assert "[E28]" in call("validate", "--run", script(base + "4"))[2]


@pytest.mark.parametrize(("pattern", "depths"), [("M*M*/MM/MM", 2), ("*-|*-", None)])
@pytest.mark.parametrize("flag", ["--hybrid-layer-pattern", "--hybrid-override-pattern"])
def test_the_depths_of_a_pattern_are_what_megatron_derives_from_it(call, flag, pattern, depths):
    assert explained(call, flag, pattern)["megatron_arguments"].get("mtp_num_layers") == depths


def test_validate_probes_a_custom_reducer(call, tmp_path, monkeypatch):
    (tmp_path / "cli_reducers.py").write_text(
        "def local_mean(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):\n"
        "    return lambda x: x.mean()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    code, _, err = call("validate", "--custom-pg-loss-reducer-function-path", "cli_reducers:local_mean")
    assert code == 2
    assert "[E16] custom reducer 'cli_reducers:local_mean'" in err


def test_a_reducer_that_asks_megatron_for_its_layout_is_answered_as_in_training(call, tmp_path, monkeypatch):
    """In the form of the file of miles, which refuses context parallelism."""
    pytest.importorskip("megatron.core")
    (tmp_path / "asking_reducers.py").write_text(
        "from megatron.core import mpu\n\n\n"
        "def constant(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):\n"
        "    assert mpu.get_context_parallel_world_size() == 1, 'only without context parallelism'\n"
        "    parts = lambda x: zip(x.split(response_lengths), loss_masks, strict=True)\n"
        "    return lambda x: sum((part * mask).sum() / 1000.0 for part, mask in parts(x))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--custom-pg-loss-reducer-function-path", "asking_reducers.constant", "--tensor-model-parallel-size", "2"]
    code, out, err = call("explain", *words)
    assert (code, err) == (0, "")
    assert "  elsewhere  slime, miles: the same flag and the same function; " in out
    assert call("validate", *words)[0] == 0
    code, _, err = call("validate", *words, "--context-parallel-size", "2")
    assert code == 2
    assert "[E16] custom reducer 'asking_reducers.constant' fails on a tiny step of whole samples" in err
    assert "only without context parallelism" in err


def test_validate_tries_an_objective_of_the_users_own(call, tmp_path, monkeypatch):
    (tmp_path / "cli_objectives.py").write_text(
        "def mean(tokens, parameters):\n    return (tokens.ratios * tokens.advantages).mean()\n\n\n"
        "def sequences(tokens, parameters):\n    return -tokens.sequence_ratios * tokens.advantages\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    code, _, err = call("validate", "--pg-custom-objective-path", "cli_objectives:mean")
    assert code == 2
    assert "[E16] custom objective 'cli_objectives:mean' gives shape ()" in err
    words = ["validate", "--pg-custom-objective-path", "cli_objectives:sequences", "--pg-fused-head"]
    code, _, err = call(*words)
    assert code == 2
    assert "[E55] --pg-fused-head forward makes" in err
    assert call(*words, "recompute")[0] == 0


# --- the command itself ---


@pytest.mark.parametrize("words", [["explain", *EXAMPLE.split()], ["validate", *EXAMPLE.split()], ["--help"]])
def test_torch_is_not_imported_and_it_is_fast(words):
    code = (
        "import sys\nfrom megatron_pg.cli import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'numpy', 'megatron', 'matplotlib'} & set(sys.modules)\n"
    )
    seconds = []
    for _ in range(3):  # processor time: the tests share their machine
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, cwd=processes.PACKAGE, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.6  # torch alone takes longer


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "megatron_pg", "--version"]
    done = subprocess.run(command, cwd=processes.PACKAGE, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("megatron-pg 0.")


@pytest.mark.parametrize("words", [[], ["explode"], ["plot"], ["--jsn"], ["compare", "a", "--bogus"]])
def test_a_bad_command_line_is_one_line(call, words):
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "--help shows the options" in err


@pytest.mark.parametrize("command", ["explain", "validate", "compare", "plot", "convert", "doctor"])
def test_every_subcommand_has_help(capsys, command):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert f"megatron-pg {command}" in out
    assert "--json" in out


def test_the_help_of_explain_lists_every_flag_of_the_plugin(capsys):
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    out = capsys.readouterr().out
    for action in add_arguments(ArgumentParser(add_help=False))._actions:
        assert action.option_strings[0] in out


# --- Megatron's flags ---


def test_every_megatron_argument_of_the_rules_is_read():
    derived = {
        "data_parallel_size",
        "gtp_weight_remat_size",
        "padded_vocab_size",
        "params_dtype",
    }  # Megatron makes them of others
    assert set(RULE_ARGUMENTS) - MEGATRON_FLAGS.keys() == derived


@launches.launch
def megatrons_flags(folder, full):
    """How Megatron parses its own; in a process of its own: megatron.training takes seconds to import and warns."""
    code = (
        "import argparse, json\n"
        "from megatron.training.arguments import add_megatron_arguments\n"
        "parser = argparse.ArgumentParser(allow_abbrev=False)\n"
        "add_megatron_arguments(parser)\n"
        "print(json.dumps({s: [a.dest, str(a.nargs), type(a).__name__] for a in parser._actions for s in a.option_strings}))\n"
    )
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)


def test_megatrons_flags_are_parsed_as_megatron_parses_them(megatrons_flags):
    pytest.importorskip("megatron.core")
    if megatrons_flags.returncode:
        pytest.skip(f"no megatron.training: {megatrons_flags.stderr.splitlines()[-1]}")
    theirs = json.loads(megatrons_flags.stdout.splitlines()[-1])
    parser = ArgumentParser()
    for name, keywords in MEGATRON_FLAGS.items():
        flag = f"--{name.replace('_', '-')}"
        action = parser.add_argument(flag, **keywords)
        if flag in theirs:
            assert theirs[flag] == [name, str(action.nargs), type(action).__name__], flag
    assert len(theirs.keys() & {f"--{name.replace('_', '-')}" for name in MEGATRON_FLAGS}) > 20
    from megatron_pg.cli.launch import _check_spelling

    own = {s for a in add_arguments(ArgumentParser(add_help=False))._actions for s in a.option_strings}
    _check_spelling(list(theirs), own)  # none of Megatron's is taken for a misspelt one of ours
