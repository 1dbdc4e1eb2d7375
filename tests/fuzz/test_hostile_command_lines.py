"""Any command line: it runs, or prints one line with the mistake, and never raw control characters."""

import io
import random
import shlex
import sys
from pathlib import Path

import hostile
import pytest
from hostile import actions_of, command_line
from rollout_files import HEADER, RECORD

from megatron_pg.args import add_arguments
from megatron_pg.cli import SUBCOMMANDS, doctor, launch, module_of
from megatron_pg.flags.megatron import MEGATRON_FLAGS

LINES = "Fuzz: command lines of every subcommand: done or one line of an error"


def add_megatron(parser) -> None:
    for name, keywords in MEGATRON_FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **keywords)


TRAINING = [*actions_of(add_arguments), *actions_of(add_megatron)]
LAUNCH = actions_of(launch.add_launch_options)
BOUNDED = ("--docs-per-step", "--global-batch-size", "--moe-aux-loss-coeff", "--context-parallel-size", "--world-size")
BEFORE_WORDS = (
    "torchrun python python3.11 ray accelerate srun env uv -m -c t.py --nnodes 2 --nproc-per-node 8 --n=4 A=1"
)
BEFORE = [*BEFORE_WORDS.split(), *"+;", "$X", "x" * 9000, "9" * 5000]


@pytest.fixture
def files(tmp_path, monkeypatch) -> list[str]:
    """Good files of every kind, in the folder where the commands run; standard input is empty."""
    monkeypatch.chdir(tmp_path)
    verl = {"prompt_ids": [1, 2], "response_ids": [3], "uid": "u", "old_logprobs": [-1.0], "score": 1.0, "step": 1}
    texts = {
        "rollouts.jsonl": [HEADER, RECORD],
        "metrics.jsonl": [{"iteration": step, "reward": step / 3, "num_tokens": 7} for step in range(1, 4)],
        "dump.jsonl": [verl | {"rollout_id": i, "loss_mask": [1], "advantage": 0.5} for i in range(2)],
    }
    for name, records in texts.items():
        Path(name).write_bytes(hostile.Mutator(random.Random(0)).text(records, changes=0))
    Path("job.txt").write_text("torchrun t.py\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    return [*texts, "job.txt", "-", "absent", "out.png", "out.html", "out.jsonl", "."]


def any_command_lines(rng: random.Random, files: list[str]) -> str:
    """The text of --args-file: up to three command lines, some words of which are not quoted."""
    lines = []
    for _ in range(rng.randint(0, 3)):
        before = [
            hostile.any_value(rng, files) if rng.random() < 0.1 else rng.choice(BEFORE)
            for _ in range(rng.randint(0, 6))
        ]
        words = [*before, *rng.choice([["t.py"], []]), *command_line(rng, TRAINING, files)]
        lines.append(" ".join(word if rng.random() < 0.1 else shlex.quote(word) for word in words))
    return rng.choice(["", "\n", "megatron_pg command line: "]) + "\n".join(lines)


JOBS = ("validate", "explain")
LONG, NINES = "x" * 300, "9" * 5000
CONVERT = ["convert", "dump.jsonl", "--format", "jsonl", "--output"]
REFUSED = [  # command lines that random words have found, and similar ones
    *([command, LONG] for command in ("compare", "plot")),
    *([command, f"{name}\ud800"] for command in ("compare", "plot") for name in ("rollouts.jsonl", "metrics.jsonl")),
    *(["report", LONG, "--output", "a.html"], ["report", "metrics.jsonl", "--output", LONG]),
    *([*CONVERT, name] for name in (LONG, "a\ud800", "a\0b", "/dev/null")),
    [*CONVERT, "/dev/null", "--overwrite"],
    ["convert", f"train_data_step{NINES}.jsonl", "--format", "nemo_rl", "--output", "a", "--group-size", "1"],
    *([command, "--args-file", LONG] for command in JOBS),
    *([command, flag, "9" * size] for command in JOBS for flag in BOUNDED for size in (400, 5000)),
    *([command, flag, "-inf"] for command in JOBS for flag in ("--loss-scale", "--moe-z-loss-coeff")),
    *([command, "--context-parallel-size=--"] for command in JOBS),
    *(["validate", "--dataloader-type", text] for text in ("\x1b[31m", "a\nb", "\u202e")),
    shlex.split(
        "validate --tensor-model-parallel-size 1000000000 --custom-pg-loss-reducer-function-path own_reducer:mean"
    ),
]


@pytest.mark.parametrize("words", REFUSED, ids=hostile.shown)
def test_what_was_found_is_refused(words, files):
    Path("own_reducer.py").write_text("def mean(totals, responses, masks, per_token): return lambda loss: loss.mean()")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path.cwd())
        assert hostile.check(words).code == 2


def test_a_name_in_letters_that_a_font_lacks_is_drawn(files):
    Path("metrics.jsonl").write_text('{"iteration": 1, "日本": 1}\n', encoding="utf-8")
    assert hostile.check(["plot", "metrics.jsonl", "--output", "out.png"]).code == 0


def test_what_a_flag_names_does_not_drive_the_terminal(files):
    for text in ("\x1b[31m", "\x9b31m", "a\tb", "\u202e", "\x7f"):
        for more in ([], ["--json"]):
            assert hostile.check(["explain", "--output-logit-dtype", text, *more]).code == 0


@pytest.mark.proof(LINES)
@pytest.mark.parametrize("command", ["validate", "explain"])
def test_a_launch(command, files, full, evidence):
    def words(rng: random.Random) -> list[str]:
        options = command_line(rng, LAUNCH, files, most=rng.choice([0, 0, 1, 2]))
        if rng.random() < 0.3:
            text = any_command_lines(rng, files)
            Path("job.txt").write_text(text, encoding="utf-8", errors="surrogatepass")
            path = rng.choice([*files, "job.txt"])
            return [command, *options, "--args-file", path, *command_line(rng, TRAINING, most=1)]
        flags = [*options, *command_line(rng, TRAINING, files)]
        return [command, *flags] if rng.random() < 0.95 else [*flags, command]

    evidence(cases=hostile.cases(command, 12_000 if full else 60, words))


GIVEN = {
    "compare": ["rollouts.jsonl"],
    "plot": ["metrics.jsonl"],
    "mismatch": ["rollouts.jsonl"],
    "report": ["metrics.jsonl", "--output", "out.html", "--overwrite"],
    "convert": ["dump.jsonl", "--format", "jsonl", "--output", "out.jsonl", "--overwrite"],
    "doctor": [],
}


@pytest.mark.proof(LINES)
@pytest.mark.parametrize("command", GIVEN)
def test_a_tool(command, files, full, evidence, monkeypatch):
    monkeypatch.setattr(doctor, "_probe_all", lambda: {})
    monkeypatch.setattr(doctor, "examine", lambda probes: [doctor.Finding("x", "ok", "y")])
    add = module_of(command).add_options
    hostile.outcome_of([command, *GIVEN[command]])  # the first time pays for the imports of plotly and matplotlib
    actions = [*actions_of(add), *actions_of(lambda parser: parser.add_argument("--json", action="store_true"))]

    def words(rng: random.Random) -> list[str]:
        given = [hostile.any_value(rng, files) if rng.random() < 0.05 else word for word in GIVEN[command]]
        flags = command_line(rng, actions, files, most=4)
        return [command, *given, *flags] if rng.random() < 0.5 else [command, *flags, *given]

    few = {"report": 400, "plot": 1_500}  # pictures and pages take their time
    evidence(cases=hostile.cases(command, few.get(command, 4_000) if full else 10, words))


def test_no_subcommand_is_forgotten():
    assert {"validate", "explain", *GIVEN} == set(SUBCOMMANDS)
