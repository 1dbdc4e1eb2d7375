"""A launch script run by bash with recorders: exact words, nothing done, nothing left behind."""

import os
import re
import sys
import time
from pathlib import Path

import pytest

from megatron_pg.cli import recorder
from megatron_pg.cli.recorder import record
from megatron_pg.cli.terminal import InputError

ROOT = Path(__file__).parents[2]
LIMIT = 120  # far above what any of these scripts takes, except the one that hangs


@pytest.fixture(params=["isolated", "open"])
def way(request):
    """Both ways to run a script: on a scratch layer, and where the system makes no namespaces, which is faster."""
    return request.param


@pytest.fixture
def run(tmp_path, monkeypatch, request):
    """Record a script in an empty folder, without namespaces unless the test asks for them."""
    if "way" not in request.fixturenames or request.getfixturevalue("way") == "open":
        monkeypatch.setattr(recorder, "_NAMESPACES", ("--no-such-namespace",))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHON", raising=False)

    def call(text: str, *arguments: str, limit: float = LIMIT) -> recorder.Recording:
        (tmp_path / "launch.sh").write_text(text, encoding="utf-8")
        return record("launch.sh", arguments, limit=limit)

    return call


@pytest.fixture
def recorded(run, way):
    """The same in both ways, with the way checked."""

    def call(text: str, *arguments: str) -> recorder.Recording:
        recording = run(text, *arguments)
        if way == "isolated" and not recording.is_isolated:
            pytest.skip("this system makes no namespaces")
        assert recording.is_isolated == (way == "isolated")
        return recording

    return call


def words_of(recording: recorder.Recording, name: str = "torchrun") -> list[tuple[str, ...]]:
    return [command.words[1:] for command in recording.commands if Path(command.words[0]).name == name]


EXACT = {  # what bash passes, worked by hand
    "quotes": (
        """torchrun 'a b' "c  d" '' e\\ f $'g\\nh' '*' "it's" """,
        ["a b", "c  d", "", "e f", "g\nh", "*", "it's"],
    ),
    "an array over lines": (
        "A=(\n --a 1 # one\n # none\n --b 'x y'\n)\ntorchrun \"${A[@]}\"",
        ["--a", "1", "--b", "x y"],
    ),
    "an array without quotes": ("A=('x  y' z)\ntorchrun ${A[@]}", ["x", "y", "z"]),
    "eval": ("eval \"torchrun 'a b' \\$HOME_X\"", ["a b"]),
    "a here document": ("read -r -d '' X <<'EOF' || :\na $b\nEOF\ntorchrun \"$X\"", ["a $b"]),
    "a here string": ("read -r A B <<< '1 2 3'\ntorchrun $A \"$B\"", ["1", "2 3"]),
    "exec": ("set -euo pipefail\nexec torchrun a 'b c'\nnever", ["a", "b c"]),
    "a trap": ("trap 'torchrun at end' EXIT\nexit 3", ["at", "end"]),
    "a background job": ("torchrun one &\nwait", ["one"]),
    "a background job that nobody waits for": ("(read -r -t 0.1 < <(:); torchrun late) &\nexit 0", ["late"]),
    "strict settings": ("set -Eeuxo pipefail -C -f\nIFS=,\nX=a,b\ntorchrun $X *", ["a", "b", "*"]),
    "a function and its arguments": ('f() { local n=$1; shift; torchrun "$n" "$@"; }\nf 1 "2 3"', ["1", "2 3"]),
    "a shell around it": ("bash -lc 'torchrun \"$0\" \"$@\"' zero 'o ne'", ["zero", "o ne"]),
    "a shell on the standard input": ("bash -s x <<< 'torchrun \"$1\"'", ["x"]),
    "a shell with options": ("bash -eu -o pipefail -c 'torchrun $SHELLOPTS' | cat", None),
    "srun around a shell": ("srun -N 2 --label sh -c 'torchrun $1' -- 4", ["4"]),
    "env around a shell": ("env A='1 2' nohup bash -c 'torchrun \"$A\"'", ["1 2"]),
    "sbatch and a text": ("sbatch --wrap='torchrun a'", ["a"]),
    "sbatch and a job": ("sbatch <<< $'#!/bin/bash\\ntorchrun job'", ["job"]),
    "another PATH": ("export PATH=/usr/bin:/bin\ntorchrun a", ["a"]),
    "xargs": ("printf '%s\\n' a b | xargs torchrun -x", ["-x", "a", "b"]),
    "command": ("command torchrun a", ["a"]),
}


@pytest.mark.parametrize("case", EXACT)
def test_the_words_are_those_that_bash_passes(run, case):
    text, expected = EXACT[case]
    (words,) = words_of(run(text))
    assert expected is None or list(words) == expected


def test_sourced_files_other_scripts_and_folders(run, tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "model.sh").write_text("MODEL=(--layers 2)\n")
    (tmp_path / "more" / "inner.sh").write_text('source ./model.sh\ntorchrun "${MODEL[@]}" $1\n')
    (tmp_path / "more" / "plain.sh").write_text("#!/bin/bash\ntorchrun plain\n")
    (tmp_path / "more" / "plain.sh").chmod(0o755)
    recording = run(
        "cd more\nbash inner.sh 7\n./plain.sh\ncd - > /dev/null\nsource more/model.sh\ntorchrun ${MODEL[*]}"
    )
    assert words_of(recording) == [("--layers", "2", "7"), ("plain",), ("--layers", "2")]
    inner, plain, own = [command for command in recording.commands if command.words[0] == "torchrun"]
    assert (inner.file, inner.line, inner.folder) == ("inner.sh", 2, str(tmp_path / "more"))
    assert (plain.file, plain.line) == ("./plain.sh", 2)
    assert (own.file, own.line, own.folder) == ("launch.sh", 6, str(tmp_path))


def test_a_line_is_known_however_a_command_is_started(run):
    text = "torchrun a\nbash -c '\n\ntorchrun b'\n\nnot-installed-anywhere c\nX=$(python d)\ncommand torchrun e\nexec torchrun f"
    recording = run(text)
    lines = {command.words[1]: command.line for command in recording.commands if command.words[0] != "bash"}
    assert lines == {"a": 1, "b": 2, "c": 6, "d": 7, "e": None, "f": 9}


def test_what_reads_an_answer_that_is_not_given_is_marked(run):
    recording = run("A=$(python -c 'x')\nnvidia-smi | wc -l\ntorchrun $A > log\ntorchrun 2>&1 | tee log")
    assert [(c.words[0], c.is_read) for c in recording.commands if c.words[0] in ("python", "nvidia-smi")] == [
        ("python", True),
        ("nvidia-smi", True),
    ]
    assert [command.is_read for command in recording.commands if command.words[0] == "torchrun"] == [False, True]


def test_the_callers_variables_count(run, monkeypatch):
    monkeypatch.setenv("NUM_GPUS", "8 9")
    assert words_of(run('torchrun "$NUM_GPUS" ${MISSING-none}')) == [("8 9", "none")]


# --- nothing is done ---


DESTRUCTIVE = """
rm -rf keep
export PATH=/usr/local/bin:/usr/bin:/bin
rm -rf keep
xargs rm -rf <<< keep
sed -i s/kept/lost/ keep/file
sort -o keep/file /dev/null
tail -f keep/file
torchrun
"""


def test_what_a_script_would_delete_is_kept(recorded, tmp_path):
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "file").write_text("kept")
    recording = recorded(DESTRUCTIVE)
    assert words_of(recording) == [()]
    assert (tmp_path / "keep" / "file").read_text() == "kept"
    assert words_of(recording, "rm") == [("-rf", "keep")] * 3
    assert [len(words_of(recording, name)) for name in ("sed", "sort", "tail")] == [1, 1, 1]


def test_tools_that_only_read_are_real(recorded, tmp_path):
    (tmp_path / "config").write_text("b 2\na 1\n")
    text = "torchrun $(sort config | awk '{print $2}' | tr '\\n' ,) $(basename /x/y.sh .sh) $(sed -n s/b//p config)"
    assert words_of(recorded(text)) == [("1,2,", "y", "2")]


@pytest.mark.parametrize("way", ["isolated"], indirect=True)
def test_redirections_succeed_and_leave_nothing_on_a_scratch_layer(run, way, tmp_path):
    (tmp_path / "old").write_text("kept")
    new = tmp_path / "elsewhere" / "new"
    recording = run(f"mkdir -p {new.parent} logs\ntorchrun > {new} 2>&1\necho lost > old\ntorchrun $(cat old) > logs/x")
    if not recording.is_isolated:
        pytest.skip("this system makes no namespaces")
    assert words_of(recording) == [(), ("lost",)]
    assert (tmp_path / "old").read_text() == "kept"
    assert not new.parent.exists()
    assert not (tmp_path / "logs").exists()


def test_redirections_are_real_where_nothing_isolates(run, tmp_path):
    recording = run("echo new > file\ntorchrun > log")
    assert not recording.is_isolated
    assert (tmp_path / "file").read_text() == "new\n"
    assert words_of(recording) == [()]


PYTHONS = [
    '"$PYTHON" -m m',
    'exec "$PYTHON" -m m',
    "{path} -m m",
    "./venv/bin/python -m m",
    'exec "$VENV/bin/python" -m m',
]


@pytest.mark.parametrize("text", PYTHONS)
def test_an_interpreter_called_by_its_path_does_not_run(recorded, tmp_path, monkeypatch, text, way):
    if way == "open" and text.startswith('exec "$VENV'):
        pytest.skip("refused there: tests/cli/test_launch.py")
    path = tmp_path / "venv" / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n: > {tmp_path}/ran\n")
    path.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(path))
    monkeypatch.setenv("VENV", str(path.parents[1]))
    recording = recorded(text.format(path=path))
    assert words_of(recording, "python") == [("-m", "m")]
    assert not (tmp_path / "ran").exists()


def alive(mark: str) -> list[str]:
    """Processes that were given the mark as an argument; the environment is also that of other tests' ranks."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_a_script_that_hangs_is_ended_with_all_that_it_started(run, way, monkeypatch, tmp_path):
    mark = f"mark-of-{tmp_path.name}-{way}"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(recorder.tempfile, "tempdir", str(scratch))
    recording = run("torchrun before\nset -m\n(while :; do :; done) &\nwhile :; do :; done\n", mark, limit=1)
    assert recording.is_cut
    assert recording.code is None
    assert alive(mark) == []
    assert list(scratch.iterdir()) == []


def test_an_exit_in_the_middle_and_what_was_printed(run):
    recording = run("echo one\necho two >&2\nexit 7\ntorchrun never")
    assert (recording.code, recording.output, recording.commands) == (7, "one\ntwo\n", ())


def test_there_is_no_standard_input(run):
    assert words_of(run("read -r X || X=none\ntorchrun $X")) == [("none",)]


def test_a_loop_that_waits_for_an_answer_does_not_fill_the_disk(run):
    recording = run("for ((i = 0; i < 3000; i++)); do sleep 1; done\ntorchrun late")
    assert len(recording.commands) == 2000


def test_a_bash_that_is_missing_or_too_old_is_named(run, monkeypatch, tmp_path):
    (tmp_path / "bash").write_text("#!/bin/sh\necho 4\necho\n")
    (tmp_path / "bash").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="bash 4 is older than 5"):
        run("torchrun")
    (tmp_path / "bash").unlink()
    with pytest.raises(InputError, match="bash is not installed"):
        run("torchrun")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("launch_*.sh")), ids=lambda path: path.name)
def test_the_examples_start_their_training(monkeypatch, path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHON", sys.executable)
    recording = record(str(path), ["plain_after.py", "--loss-aggregation", "token_mean"], limit=LIMIT)
    launches = [
        c for c in recording.commands if "torch.distributed.run" in c.words or Path(c.words[0]).name == "torchrun"
    ]
    assert [command.words[-2:] for command in launches] == [("--loss-aggregation", "token_mean")]
    text = path.read_text(encoding="utf-8").splitlines()
    assert re.search(r"torchrun|torch\.distributed\.run", text[launches[0].line - 1])


HOSTILE = ["a", "\n", "; ", "/", "(exec ", "exec /", "then ", "/python1", "~/python+", "x/python3 ", "{\n", "exec \\\n"]


def test_a_long_script_is_searched_in_the_time_of_its_length():
    begin = time.thread_time()
    for text in HOSTILE:
        for end in ("", "x", "\n"):
            recorder._launchers(text * (100_000 // len(text)) + end)
            recorder._replaces_itself(text * (100_000 // len(text)) + end)
    assert time.thread_time() - begin < 5.0  # a search for each letter takes minutes
