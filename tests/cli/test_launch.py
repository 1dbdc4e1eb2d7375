"""`megatron-pg explain` and `validate`: what they say, what they refuse, and that they need no torch."""

import json
import re
import resource
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from megatron_pg.args import MEGATRON_ARGUMENTS, add_arguments, own_arguments
from megatron_pg.cli import main
from megatron_pg.cli.launch import MEGATRON_FLAGS, ONE_VALUE

ROOT = Path(__file__).parents[2]
SCRIPT = """#!/bin/bash
GPUS_PER_NODE=4
NUM_NODES=2
CHECKPOINT=$1 # may stay open: --save takes one value

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --node_rank $SLURM_NODEID
)
MODEL_ARGS=(
    --num-layers 2
    --tensor-model-parallel-size 2
    --context-parallel-size 2
)
TRAINING_ARGS=(
    --micro-batch-size 2
    --global-batch-size $((GPUS_PER_NODE * NUM_NODES * 8))
    --dataloader-type external
    --save "$CHECKPOINT"
)
GRPO_ARGS=(
    --loss-aggregation ${AGGREGATION:-constant}
    --loss-aggregation-divisor 4096
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} \\
    ${GRPO_ARGS[@]} "$@"
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("AGGREGATION", "SLURM_NODEID", "PROCESSES", "RANK"):
        monkeypatch.delenv(name, raising=False)


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
    code, out, err = call("explain", *words, "--json")
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
    assert ("kept or not, Q = Σ n" in said["factors"]["returned"]) == (mode == "token_mean")
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
    assert "  set        --pg-clip-eps-high 0.28\n" in call("explain", "--pg-clip-eps-high", "0.28")[1]


def test_a_whole_launch_script_is_explained(call, script):
    said = explained(call, script())
    assert said["source"].endswith("launch.sh, line 26")
    assert said["sizes"] == {"world": 8, "D": 2, "C": 2, "K": 16, "N_r": 64}
    assert said["arguments"]["loss_aggregation_divisor"] == 4096.0
    assert said["megatron_arguments"]["tensor_model_parallel_size"] == 2
    assert "--num-layers" in said["other_arguments"]
    assert said["remarks"] == [
        "taken as the one value of --save, because it is not known: line 4: $1, an argument of the script, is not given"
    ]


def test_arguments_behind_the_script_are_the_scripts(call, script):
    said = explained(call, script(), "/checkpoints", "--pg-clip-eps-high", "0.3")
    assert said["arguments"]["pg_clip_eps_high"] == 0.3


def test_the_environment_counts_as_it_does_for_bash(call, script, monkeypatch):
    monkeypatch.setenv("AGGREGATION", "prompt_mean")
    code, _, err = call("validate", script())
    assert code == 2
    assert "[E9] --loss-aggregation-divisor has no effect with --loss-aggregation prompt_mean" in err


def test_an_open_value_of_a_flag_that_is_read_stops(call, script):
    text = SCRIPT.replace("4096", "$(cat length.txt)")
    code, out, err = call("explain", script(text))
    assert (code, out) == (2, "")
    assert (
        "line 24: the argument after --loss-aggregation-divisor is not known, and it decides a flag that is read" in err
    )
    assert "line 24: $(cat length.txt) is the output of a command" in err


def test_an_open_variable_can_be_set(call, script):
    text = SCRIPT.replace("4096", "$LENGTH")
    assert call("explain", script(text))[0] == 2
    said = explained(call, "--set", "LENGTH=512", script(text))
    assert said["arguments"]["loss_aggregation_divisor"] == 512.0


def test_an_open_array_can_be_set(call, script):
    text = 'read -r -a MODEL_ARGS < args.txt\ntorchrun t.py --dataloader-type external "${MODEL_ARGS[@]}"\n'
    assert "MODEL_ARGS is set by `read`" in call("validate", script(text))[2]
    said = explained(call, script(text), "--set", "MODEL_ARGS=--loss-aggregation token_mean --x 'a b'")
    assert said["arguments"]["loss_aggregation"] == "token_mean"
    assert said["other_arguments"] == ["--x", "a b"]


HIDING = {  # a word from outside in which a flag could hide
    "torchrun t.py $EXTRA": "the argument is not known",
    'torchrun t.py "$EXTRA"': "the argument is not known",
    'torchrun t.py --bf16 "$EXTRA"': "the argument after --bf16 is not known",
    'torchrun t.py "${EXTRA[@]}"': "the argument is not known",
    "torchrun t.py --x /*": "the argument after --x is not known",
    "torchrun t.py --x $DIR/x": "the argument after --x is not known",
    "torchrun t.py $(seq 2 8)": "the argument is not known",
}


@pytest.mark.parametrize("text", HIDING)
def test_what_comes_from_outside_is_assumed_by_explain_and_refused_by_validate(call, script, text):
    path = script(f"{text} --dataloader-type external")
    (assumed,) = explained(call, path)["assumed"]
    assert assumed.startswith("line 1: ")
    code, out, err = call("explain", path)
    assert (code, err) == (0, "")
    where, _, reason = assumed.partition(": ")
    assert re.search(rf"\n── assumed to hold no flag that is read .*──\n  {where}  {re.escape(reason)}\n$", out)
    code, out, err = call("validate", path)
    assert (code, out) == (2, "")
    assert f"line 1: {HIDING[text]}, and a flag could hide there, because {assumed}" in err
    assert err.count("\n") == 1


WRITTEN = {  # the script itself may have put a flag that is read there
    "if [ -e x ]; then X=--fp16; fi; torchrun t.py $X": "--fp16 may be in it",
    "X=--fp16; torchrun t.py ${X/a/b}": "--fp16 may be in it",
    "X=$(echo --loss-aggregation token_mean); torchrun t.py $X": "--loss-aggregation may be in it",
    "while [ -e x ]; do X=--sft; done; torchrun t.py $X": "--sft may be in it",
    "torchrun t.py {--fp16,--bf16}": "--fp16 may be in it",
    'A=--fp16; eval "$(x)"; torchrun t.py $A': "--fp16 may be in it",
    'A=(--x); A[7]=--fp16; torchrun t.py "${A[@]}"': "--fp16 may be in it",
    "printf --fp16 | while read X; do torchrun t.py $X; done": "--fp16 may be in it",
    'torchrun t.py "--$NAME" 3': "it decides a flag that is read",
    'torchrun t.py --pg-temperature="$T"': "it decides a flag that is read",
    "torchrun t.py --pg-temperature $T": "it decides a flag that is read",
    "torchrun t.py --moe-aux-loss-coeff 1 $T": "it decides a flag that is read",
    "torchrun t.py --pg-fused-head $T": "it decides a flag that is read",
}


@pytest.mark.parametrize("text", WRITTEN)
@pytest.mark.parametrize("command", ["explain", "validate"])
def test_what_the_script_writes_is_never_assumed_away(call, script, text, command):
    code, out, err = call(command, script(text))
    assert (code, out) == (2, "")
    assert "line 1: the argument" in err
    assert WRITTEN[text] in err
    assert err.count("\n") == 1


CERTAIN = [  # whatever the unknown is, it is no flag that is read
    "if [ -e x ]; then N=1; else N=2; fi; torchrun t.py --x $N",
    "if [ -e x ]; then X='--a 1'; else X=--b; fi; torchrun t.py $X",
    "torchrun t.py --x $(($(nproc) * 2))",
    "X=(1); [ -e x ] && X+=(2); torchrun t.py --n ${#X[@]}",
]


@pytest.mark.parametrize("text", CERTAIN)
def test_an_unknown_that_cannot_be_a_flag_is_no_assumption(call, script, text):
    path = script(f"{text} --dataloader-type external")
    assert explained(call, path)["assumed"] == []
    assert call("validate", path)[0] == 0


@pytest.mark.parametrize(
    "text",
    [
        'torchrun t.py --save "$DIR"',
        'torchrun t.py --load="$DIR"',
        'torchrun t.py --x "a/$DIR"',
        "torchrun $X t.py",
        "N=2; torchrun t.py --f [0]*$N+[1]",
    ],
)
def test_a_word_that_can_hide_no_flag_does_not_stop(call, script, text):
    assert explained(call, script(text + " --dataloader-type external"))["sizes"]["world"] is None


BAD_LAUNCHES = {
    "": "neither flags nor a launch script",
    "--set A=1 --loss-aggregation token_mean": "--set and --line are for a launch script",
    "--loss-agregation token_mean": "--loss-agregation is no flag of megatron_pg, .*Did you mean --loss-aggregation?",
    "--pg-clip 0.2": "--pg-clip is no flag of megatron_pg",
    "--pg_clip_eps_low 0.2": "--pg_clip_eps_low is no flag of megatron_pg, .*Did you mean --pg-clip-eps-low?",
    "--loss-aggregation dr_grpo": r"\[E3\] --loss-aggregation 'dr_grpo' is not one of .*; did you mean constant\?",
    "--pg-metrics all": "invalid choice: 'all'",
    "--loss-aggregation": "expected one argument",
    "--pg-temperature hot": "invalid float value: 'hot'",
    "--loss-aggregation constant": r"\[E5\] --loss-aggregation constant needs",
    "--loss-aggregation constant --loss-aggregation-divisor 8 --calculate-per-token-loss": r"\[E11\]",
    "--pg-clip-eps-low 2 --pg-temperature 0": r"\[E24\] --pg-.*\[E24\] --pg-",
    "--global-batch-size 10 --micro-batch-size 3 --world-size 2": "10 is no multiple of --micro-batch-size 3 times 2",
    "--context-parallel-size -1 --world-size 6": "--context-parallel-size -1 is no size",
    "--micro-batch-size 0 --global-batch-size 6": "--micro-batch-size 0 is no size",
    "--world-size 0 --loss-aggregation token_mean": "0 ranks are no multiple",
    "--tensor-model-parallel-size 4 --world-size 6": "6 ranks are no multiple of TP·PP·CP = 4",
    "--world-size two --loss-aggregation token_mean": "invalid int value: 'two'",
    "--loss-aggregation token_mean --lengths 10,x": "no list of positive lengths",
    "--loss-aggregation token_mean --lengths 0": "no list of positive lengths",
    "--yaml-cfg a.yaml": "--yaml-cfg replaces all flags",
    "absent.sh": "absent.sh: is no file",
    "--custom-pg-loss-reducer-function-path nowhere.at:all": r"\[E14\].*cannot be imported",
}


@pytest.mark.parametrize("words", BAD_LAUNCHES)
def test_a_bad_launch_is_one_line_and_exit_code_two(call, words):
    code, out, err = call("explain", *words.split())
    assert (code, out) == (2, "")
    assert re.search(BAD_LAUNCHES[words], err), err
    assert err.startswith("megatron-pg explain: ")
    assert err.count("\n") == 1


BAD_SCRIPTS = {
    b"": "no command starts a training",
    b"\xff\xfe\x00": "is not UTF-8 text",
    b"torchrun 'a": "a single quote that never ends",
    b"torchrun t.py\ntorchrun t.py\n": "several commands start a training (line 1, line 2). Choose one with --line",
    b"echo torchrun t.py": "no command starts a training",
    b"for S in 1 2; do torchrun t.py $S; done": "line 1 starts a training 2 times, with different arguments",
    b"torchrun convert.py\nray job submit -- python3 train.py": "several commands start a training (line 1, line 2)",
    b"torchrun t.py\nsrun bash -c 'torchrun u.py'": "several commands start a training (line 1, line 2)",
    b"echo --fp16 | xargs torchrun t.py": "`xargs` adds arguments to the training command",
    b"bash inner.sh": "line 1: what `bash inner.sh` starts is not read, and no other command starts a training",
    b"eval torchrun t.py $(x)": "line 1: what `eval torchrun t.py",
    "torchrun t.py \u2014fp16".encode(): "begins with a dash that is no hyphen",
    b"torchrun t.py\r\n": "has CRLF line ends",
    b"a" * (17 * 2**20): "is larger than",
    b"torchrun t.py --loss-aggregation\n": "expected one argument",
}


@pytest.mark.parametrize("content", BAD_SCRIPTS, ids=lambda c: repr(c[:20]))
@pytest.mark.parametrize("command", ["explain", "validate"])
def test_a_bad_script_is_one_line_and_exit_code_two(call, tmp_path, command, content):
    path = tmp_path / "launch.sh"
    path.write_bytes(content)
    code, out, err = call(command, path)
    assert (code, out) == (2, "")
    assert BAD_SCRIPTS[content] in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["explain", "validate"])
def test_an_unreadable_script_is_named(call, tmp_path, command):
    (tmp_path / "folder.sh").mkdir()
    assert "is no file" in call(command, tmp_path / "folder.sh")[2]
    code, _, err = call(command, "a\0b.sh")
    assert code == 2
    assert "a\\x00b.sh" in err


def test_one_of_several_commands_is_chosen_by_its_line(call, script):
    path = script("X='--dataloader-type external'\ntorchrun a.py $X\ntorchrun b.py $X --loss-aggregation prompt_mean\n")
    assert explained(call, path, "--line", "3")["arguments"]["loss_aggregation"] == "prompt_mean"
    assert "no training is started in line 1" in call("explain", path, "--line", "1")[2]


def test_the_training_is_told_from_tools(call, script):
    path = script(
        "python tools/preprocess.py --x 1\npython3 train.py --loss-aggregation prompt_mean --dataloader-type external\n"
    )
    assert explained(call, path)["arguments"]["loss_aggregation"] == "prompt_mean"


def test_what_a_branch_adds_stops_only_where_it_is_a_flag_that_is_read(call, script):
    text = 'A=(--dataloader-type external)\nif [[ $SP == 1 ]]; then A+=({}); fi\ntorchrun t.py "${{A[@]}}"\n'
    said = explained(call, script(text.format("--sequence-parallel --x 2")))
    assert said["remarks"] == [
        f"line 2: {flag} is passed only where a branch is taken" for flag in ("--sequence-parallel", "--x")
    ]
    for words in ("--loss-aggregation token_mean", "--fp16", "--pg-temperature=2"):
        code, _, err = call("explain", script(text.format(words)))
        assert code == 2
        assert f"line 2: {words.split()[0]} is passed only where a branch is taken" in err
    err = call("explain", script(text.format("2")))[2]  # one more value of the flag before it
    assert "line 1: --dataloader-type is passed only where a branch is taken" in err


def test_a_module_is_started_with_all_its_arguments(call, script):
    said = explained(
        call, script("torchrun -m my.train --calculate-per-token-loss --config conf.py --dataloader-type external")
    )
    assert said["other_arguments"] == ["--config", "conf.py"]
    assert said["arguments"]["loss_aggregation"] == "token_mean"


RANKS = {
    "--nproc-per-node 8 --nnode 2": 16,
    "--nproc_per_node=4": 4,
    '--nproc-per-node 8 "${D[@]}"': None,
    '--nnodes 4 --nproc-per-node 8 "${E[@]}"': 32,
}


@pytest.mark.parametrize("words", RANKS)
def test_the_number_of_ranks_is_what_torchrun_reads(call, script, words):
    arrays = "D=()\nE=()\nif [ -e x ]; then D+=(--nnodes 4); E+=(--master-port 1); fi\n"
    path = script(f"{arrays}torchrun {words} t.py --dataloader-type external")
    assert explained(call, path)["sizes"]["world"] == RANKS[words]


def test_another_script_that_is_started_is_noted(call, script):
    said = explained(call, script("bash inner.sh\ntorchrun t.py --dataloader-type external $X"))
    assert said["remarks"] == ["line 1: what `bash inner.sh` starts is not read"]
    assert said["other_arguments"] == ["…"]


def test_a_step_of_documents_has_their_number_of_rollouts(call):
    documents = ["--docs-per-step", "256", "--micro-batch-size", "1", "--world-size", "8"]
    said = explained(call, *documents)
    assert (said["sizes"]["N_r"], said["sizes"]["K"]) == (256, None)
    assert said["factors"]["K"] == "as many micro-batches as the step's documents take"
    assert explained(call, *documents, "--docs-per-step-policy", "at_least")["sizes"]["N_r"] is None


def test_the_divisor_of_the_gradient_is_one_of_the_factors(call):
    said = explained(call, "--pg-grad-divisor", "256")
    assert said["factors"]["DDP"].endswith("∇Σ w·ℓ / 256  (--pg-grad-divisor)")


def test_a_training_inside_a_branch_is_explained_with_a_reservation(call, script):
    said = explained(call, script("main() {\n  torchrun t.py --dataloader-type external\n}\nmain\n"))
    assert said["remarks"] == []
    said = explained(call, script("if [ -e x ]; then\n  torchrun t.py --dataloader-type external\nfi\n"))
    assert said["remarks"] == ["line 2 is inside a branch or a loop; whether and how often it runs is not known"]


def test_a_script_that_ends_itself_asks_for_its_arguments(call, script):
    path = script(
        'if [ $# -lt 1 ]; then\n  echo usage\n  exit 1\nfi\ntorchrun t.py --dataloader-type external --pg-temperature "$1"\n'
    )
    code, _, err = call("explain", path)
    assert code == 2
    assert "line 3: the script ends itself here, before it starts a training. Give its arguments behind it" in err
    assert explained(call, path, "2")["arguments"]["pg_temperature"] == 2


RAY = """#!/bin/bash
set -ex
pkill -9 ray || true
COUNT=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9]' | wc -l)
if [ "$COUNT" -gt 0 ]; then
    LINK=1
else
    LINK=0
fi
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${HERE}/model.sh"
ROOT="$(cd -- "${HERE}/.." && pwd)"
read -ra MORE_ARGS <<< "$(python3 "${ROOT}/more.py")"

GRPO_ARGS=(
    --loss-aggregation constant # Dr. GRPO
    --loss-aggregation-divisor ${LENGTH:-4096}
)
TRAIN_ARGS=(
    --hf-checkpoint ${CHECKPOINTS}/model
    --global-batch-size 64
    --dataloader-type external
)
launch() {
    local rank=$1
    RUNTIME_ENV_JSON="{
      \\"env_vars\\": {\\"NCCL_NVLS_ENABLE\\": \\"${LINK}\\"}
    }"
    if [ "$rank" -eq 0 ]; then
        ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="${RUNTIME_ENV_JSON}" \\
            -- python3 train.py --num-gpus-per-node ${GPUS} ${MODEL_ARGS[@]} ${MORE_ARGS[@]} ${TRAIN_ARGS[@]} ${GRPO_ARGS[@]}
    fi
}
launch 0
"""
MODEL = """LAYERS=4
frequency=()
for ((i = 0; i < LAYERS; i++)); do
    if ((i < 1)); then frequency+=(0); else frequency+=(1); fi
done
printf -v FREQUENCY "[%s]" "$(IFS=', '; echo "${frequency[*]}")"
MODEL_ARGS=(
    --num-layers $LAYERS
    --moe-layer-freq $FREQUENCY
    --context-parallel-size ${CP:-2}
)
"""


def test_a_launch_through_ray_is_explained_with_what_is_assumed(call, script, tmp_path, monkeypatch):
    for name in ("CHECKPOINTS", "GPUS", "LENGTH", "CP", "LINK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "model.sh").write_text(MODEL)
    path = script(RAY)
    said = explained(call, path, "--world-size", "8")
    assert said["sizes"] == {"world": 8, "D": 4, "C": 2, "K": None, "N_r": 64}
    assert said["arguments"]["loss_aggregation_divisor"] == 4096
    assert said["source"].endswith("line 30")
    assert [text.partition(": ")[2] for text in said["assumed"]] == [
        "GPUS is set neither in the script nor in the environment",
        "MORE_ARGS is set by `read`",
        "CHECKPOINTS is set neither in the script nor in the environment",
    ]
    assert "could hide there" in call("validate", path)[2]
    given = ["--set", "GPUS=8", "--set", "MORE_ARGS=", "--set", "CHECKPOINTS=/data"]
    assert call("validate", path, *given)[0] == 0
    assert explained(call, path, *given)["assumed"] == []


# --- validate ---


def test_validate_accepts_the_examples(call):
    for path in sorted((ROOT / "examples").glob("launch_*.sh")):
        code, out, err = call("validate", path)
        assert (code, err) == (0, "")
        assert out.startswith("valid: ")


def test_validate_prints_every_violation_on_its_line(call, script):
    text = SCRIPT.replace("external", "cyclic").replace("--num-layers 2", "--use-torch-fsdp2 --sft")
    code, out, err = call("validate", script(text))
    assert (code, out) == (2, "")
    rules = [line.split("[")[1].split("]")[0] for line in err.splitlines()]
    assert sorted(rules) == ["E19", "E29", "E30"]


def test_validate_as_json(call, script):
    code, out, _ = call("validate", script(SCRIPT.replace("4096", "0")), "--json")
    said = json.loads(out)
    assert code == 2
    assert (said["valid"], [v["rule"] for v in said["violations"]]) == (False, ["E8"])
    code, out, _ = call("validate", "--calculate-per-token-loss", "--json")
    said = json.loads(out)
    assert code == 0
    assert said["valid"]
    assert said["arguments"]["loss_aggregation"] == "token_mean"
    assert said["remarks"] == ["--calculate-per-token-loss: --loss-aggregation is token_mean, not sample_mean"]


def test_megatrons_defaults_apply_to_a_script_and_not_to_single_flags(call, script):
    """Megatron makes dataloader_type `single` where the flag is missing, which rule E29 refuses."""
    code, _, err = call("validate", script("torchrun t.py --loss-aggregation token_mean"))
    assert code == 2
    assert "[E29] --dataloader-type single" in err
    assert call("validate", "--loss-aggregation", "token_mean")[0] == 0


def test_weight_shards_are_what_megatron_derives_from_them(call, script):
    base = (
        "torchrun t.py --dataloader-type external --tensor-model-parallel-size 2 --tensor-parallel-num-weight-shards "
    )
    assert call("validate", script(base + "2"))[0] == 0
    assert "[E28]" in call("validate", script(base + "4"))[2]


def test_validate_probes_a_custom_reducer(call, tmp_path, monkeypatch):
    (tmp_path / "cli_reducers.py").write_text(
        "def local_mean(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):\n"
        "    return lambda x: x.mean()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    code, _, err = call("validate", "--custom-pg-loss-reducer-function-path", "cli_reducers:local_mean")
    assert code == 2
    assert "[E16] custom reducer 'cli_reducers:local_mean'" in err


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


@pytest.mark.parametrize("words", [["explain", *EXAMPLE.split()], ["explain", "examples/launch_cpu.sh"], ["--help"]])
def test_torch_is_not_imported_and_it_is_fast(words):
    code = (
        "import sys\nfrom megatron_pg.cli import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'numpy', 'megatron', 'matplotlib'} & set(sys.modules)\n"
    )
    seconds = []
    for _ in range(3):  # processor time: the tests share their machine
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.3


def test_it_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "megatron_pg", "--version"], cwd=ROOT, capture_output=True, text=True)
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
    derived = {"gtp_weight_remat_size", "padded_vocab_size", "params_dtype"}  # Megatron makes them of others
    assert set(MEGATRON_ARGUMENTS) - derived <= MEGATRON_FLAGS.keys()


def test_megatrons_flags_are_parsed_as_megatron_parses_them():
    """In a process of its own: megatron.training takes seconds to import and warns."""
    pytest.importorskip("megatron.core")
    code = (
        "import argparse, json\n"
        "from megatron.training.arguments import add_megatron_arguments\n"
        "parser = argparse.ArgumentParser(allow_abbrev=False)\n"
        "add_megatron_arguments(parser)\n"
        "print(json.dumps({s: [a.dest, str(a.nargs), type(a).__name__] for a in parser._actions for s in a.option_strings}))\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no megatron.training: {done.stderr.splitlines()[-1]}")
    theirs = json.loads(done.stdout.splitlines()[-1])
    parser = ArgumentParser()
    for name, keywords in MEGATRON_FLAGS.items():
        flag = f"--{name.replace('_', '-')}"
        action = parser.add_argument(flag, **keywords)
        if flag in theirs:
            assert theirs[flag] == [name, str(action.nargs), type(action).__name__], flag
    assert len(theirs.keys() & {f"--{name.replace('_', '-')}" for name in MEGATRON_FLAGS}) > 20
    for flag in ONE_VALUE & theirs.keys():
        assert theirs[flag][1:] == ["None", "_StoreAction"], flag
    from megatron_pg.cli.launch import _check_spelling

    own = {s for a in add_arguments(ArgumentParser(add_help=False))._actions for s in a.option_strings}
    _check_spelling(list(theirs), own)  # none of Megatron's is taken for a misspelt one of ours
