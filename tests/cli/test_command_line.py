"""`--args-file`: the command line of a job, from what `set -x` or a dry run prints. Nothing is run."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_pg.cli import main
from megatron_pg.cli.command_line import read_command_line
from megatron_pg.flags.banner import command_line

EXAMPLES = Path(__file__).parents[2] / "examples"
EXTERNAL = "--dataloader-type external"


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    """Exit code, standard output and standard error of a command that reads this text from a file or standard input."""
    monkeypatch.chdir(tmp_path)

    def run(command: str, text: str | bytes, *words: str, path: str = "job.txt") -> tuple[int, str, str]:
        content = text if isinstance(text, bytes) else text.encode()
        Path("job.txt").write_bytes(content)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        code = main([command, *words, "--args-file", path])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def explained(call):
    def run(text: str, *words: str, path: str = "job.txt") -> dict:
        code, out, err = call("explain", text, "--json", *words, path=path)
        assert (code, err) == (0, "")
        return json.loads(out)

    return run


LINES = {  # a command line: (world size, further arguments)
    "torchrun --nproc-per-node 8 --nnode 2 t.py": (16, []),
    "torchrun --nproc_per_node=4 t.py conf.py": (4, ["conf.py"]),
    "torchrun -m my.train --config conf.py": (None, ["--config", "conf.py"]),
    "exec python3 -u -m torch.distributed.run --nproc-per-node 2 t.py": (2, []),
    "accelerate launch --num_processes 8 train.py": (None, []),
    'ray job submit --runtime-env-json=\'{"a": "b.py"}\' -- python3 train.py': (None, []),
    "uv run train.py": (None, []),
    "python -m my.train": (None, []),
    "/a/train.py": (None, []),
    "": (None, []),
    "A=1 B='$x' torchrun --nproc-per-node 2 t.py": (2, []),
    "+ A=1 torchrun --nproc-per-node 2 t.py": (2, []),
    "++ torchrun t.py --name 'a b' \"c\\\"d\" $'e\\'f' g\\ h ''": (None, ["--name", "a b", 'c"d', "e\\'f", "g h", ""]),
    "torchrun t.py --dollar '$HOME' \"\\$HOME\" a\\$b": (None, ["--dollar", "$HOME", "$HOME", "a$b"]),
    "torchrun --nproc-per-node 2 \\\n    t.py \\\r\n": (2, []),
    "torchrun t.py --hash a#b '#c' ": (None, ["--hash", "a#b", "#c"]),
}


@pytest.mark.parametrize("line", LINES)
def test_the_words_are_those_that_a_shell_passes(explained, line):
    world, others = LINES[line]
    said = explained(f"{line} {EXTERNAL}\n")
    assert (said["sizes"]["world"], said["other_arguments"]) == (world, others)
    assert said["megatron_arguments"]["dataloader_type"] == "external"


@pytest.mark.parametrize("more", ["2>&1 | tee log", "> log 2>&1 &", "&>> log", "# note", "< in; echo b", "&& echo $X"])
def test_what_follows_a_command_is_not_read(explained, more):
    assert explained(f"torchrun t.py {EXTERNAL} --pg-temperature 2 {more}")["other_arguments"] == []


def test_a_file_and_standard_input_are_named_with_the_line(explained, call):
    text = f"\n# the job\ntorchrun t.py {EXTERNAL}\n"
    assert explained(text)["source"] == "job.txt, line 3"
    assert explained(text, path="-")["source"] == "standard input, line 3"
    assert call("validate", text)[1].startswith("valid: job.txt, line 3\n")
    assert "arguments  job.txt, line 3" in call("explain", text)[1]


def test_flags_on_the_command_line_are_added(explained):
    said = explained(f"t.py {EXTERNAL} --pg-temperature 2 --pg-grad-divisor 3", "--pg-temperature", "0.5")
    assert (said["arguments"]["pg_temperature"], said["arguments"]["pg_grad_divisor"]) == (0.5, 3.0)
    assert explained(f"torchrun --nproc-per-node 4 t.py {EXTERNAL}", "--world-size", "2")["sizes"]["world"] == 2


def test_numbers_of_ranks_that_no_job_has_are_unknown(explained, call):
    for size in ("9" * 400, "9" * 5000, "²", "x"):
        assert explained(f"torchrun --nproc-per-node {size} t.py {EXTERNAL}")["sizes"]["world"] is None
    code, _, err = call("validate", f"torchrun --nproc-per-node 0 t.py {EXTERNAL}")
    assert (code, "[layout] 0 ranks are not a multiple of TP·PP·CP = 1" in err) == (2, True)


def test_of_several_commands_the_one_with_our_flags_is_read(explained):
    text = (
        f"python prepare.py --x 1\n+ ARGS=(--pg-temperature 3)\ntorchrun t.py {EXTERNAL} --pg-temperature 2\nsleep 1\n"
    )
    said = explained(text)
    assert (said["source"], said["arguments"]["pg_temperature"]) == ("job.txt, line 3", 2.0)
    assert explained(f"mkdir a\ntorchrun t.py {EXTERNAL}")["source"] == "job.txt, line 2"


def test_the_same_line_of_every_rank_is_one(explained):
    assert explained(f"torchrun t.py {EXTERNAL} --pg-temperature 2\n" * 8)["source"] == "job.txt, line 1"


def test_the_line_of_a_dry_run_is_found_in_its_log(explained):
    argv = ["/a b/train.py", *EXTERNAL.split(), "--pg-dry-run", "--pg-temperature", "2", "--text", 'it\'s "a" $HOME\n']
    log = f"W0101 don't panic\n[default0]:{command_line(argv)}\ndry run: 8 ranks agree\n--pg-temperature 3\n"
    assert command_line(argv).isprintable()
    said = explained(log, "--world-size", "8")
    assert said["source"] == "job.txt, line 2"
    assert said["arguments"]["pg_temperature"] == 2.0
    assert said["other_arguments"] == ["--text", 'it\'s "a" $HOME\\n']


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("launch_*.sh")), ids=lambda path: path.name)
def test_what_set_x_prints_of_an_example_is_read(script, tmp_path):
    environment = os.environ | {"PYTHON": "echo", "PROCESSES": "2", "RUN_DIR": str(tmp_path)}
    command = ["bash", "-x", script, "--pg-temperature", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (tmp_path / "trace").write_text(done.stderr)
    line = read_command_line(str(tmp_path / "trace"))
    assert list(line.words) == done.stdout.split()[-len(line.words) :]
    assert line.words[-2:] == ["--pg-temperature", "2"]
    assert main(["validate", "--args-file", str(tmp_path / "trace")]) == 0


TWO = f"torchrun t.py {EXTERNAL} --pg-temperature 1\n\ntorchrun t.py {EXTERNAL} --pg-temperature 2"
REFUSED = {
    "": "job.txt: has no command line. Give the line that `set -x` or the dry run of the job prints.",
    "\n # a\n\\\n": "job.txt: has no command line.",
    TWO: "has several command lines with flags of megatron_pg: lines 1, 3. Keep only the line of the job.",
    "mkdir a\nrm b": "has several command lines without flags of megatron_pg: lines 1, 2.",
    "a\n" * 5 + "torchrun 'a": "line 6 opens a quote ' that is not closed. Close it.",
    'torchrun t.py --name "a': 'line 1 opens a quote " that is not closed.',
    "torchrun t.py --save $DIR": "line 1 has the unexpanded variable $DIR. Use the line that `set -x` prints.",
    'torchrun t.py "${ARGS[@]}"': "has the unexpanded variable ${ARGS[@]}.",
    "torchrun t.py $@": "has the unexpanded variable $@.",
    'torchrun t.py "\\\\$A"': "has the unexpanded variable $A.",
    "torchrun --nproc-per-node $(nproc) t.py --pg-temperature 2": "has the unexpanded command substitution $(.",
    "torchrun --nnodes `nproc` t.py": "has the unexpanded command substitution `.",
    "torchrun t.py \u2014fp16": "begins with a dash that is not a hyphen",
    "torchrun t.py --loss-agregation x": "job.txt, line 1: --loss-agregation is not a flag of megatron_pg",
    "torchrun t.py --loss-aggregation\n": "job.txt, line 1: --loss-aggregation has no value, expected one argument",
    "torchrun t.py --yaml-cfg x\n": "--yaml-cfg replaces all flags",
    "torchrun t.py": "[E29] --dataloader-type single",  # Megatron's defaults apply
    f"t.py {EXTERNAL} --tensor-model-parallel-size 2 --tensor-parallel-num-weight-shards 4": "[E28]",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: ascii(text[:30]))
def test_a_text_without_a_usable_line_is_one_line_and_exit_code_two(call, text):
    for command in ("explain", "validate"):
        code, out, err = call(command, text)
        assert (code, out) == (2, "")
        assert REFUSED[text] in err, err
        assert err.count("\n") == 1


def test_a_file_that_is_not_a_text_is_named(call, tmp_path, monkeypatch):
    assert "job.txt: is not UTF-8 text (byte 1)" in call("explain", b"a\xff")[2]
    assert "standard input: is not UTF-8 text (byte 1)" in call("explain", b"a\xff", path="-")[2]
    assert ".: cannot be read (Is a directory)" in call("explain", "", path=".")[2]
    assert "a\\x00b: cannot be read" in call("validate", "", path="a\0b")[2]
    assert "job.txt: is larger than 16777216 bytes. Keep only" in call("validate", " " * (2**24 + 1))[2]
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["explain", "--args-file", "-"]) == 2


ARRAYS = f"M=(--calculate-per-token-loss)\nG=({EXTERNAL} --pg-temperature 2)\ntorchrun t.py "


def test_flags_of_an_array_are_not_taken_for_those_of_the_job(call, explained):
    """The array is a part of the job's flags, so a verdict on it alone would be about another job."""
    code, out, err = call("validate", ARRAYS + '"${M[@]}" "${G[@]}"')
    assert (code, out) == (2, "")
    assert "job.txt: line 3 has the unexpanded variable ${M[@]}. Use the line that `set -x` prints." in err
    said = explained(f"{ARRAYS}{EXTERNAL} --pg-temperature 3")
    assert (said["source"], said["arguments"]["pg_temperature"]) == ("job.txt, line 3", 3.0)
    assert explained(f"G=({EXTERNAL} --pg-temperature 2)\nmkdir $X")["arguments"]["pg_temperature"] == 2.0
