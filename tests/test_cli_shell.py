"""The reading of launch scripts against bash itself: what is known must be what bash passes, the rest must be named."""

import random
import subprocess
from pathlib import Path

import pytest

from megatron_pg.cli.shell import read_commands
from megatron_pg.cli.shell_tokens import HOLE
from megatron_pg.cli.terminal import InputError

ROOT = Path(__file__).parents[1]
STUB = '#!/bin/bash\nprintf "%s\\0" "$@" > "$ARGV_FILE"\n'


def read(path: Path, *arguments: str, overrides=None):
    return read_commands(path, arguments=arguments, overrides=overrides or {})


def torchrun_of(path: Path, *arguments: str, overrides=None):
    """The words behind torchrun, as they are read."""
    (command,) = [c for c in read(path, *arguments, overrides=overrides).commands if c.words[0].text == "torchrun"]
    return command.words[1:]


def run_bash(path: Path, folder: Path, *arguments: str) -> list[str]:
    """What bash passes to torchrun."""
    (folder / "bin").mkdir(exist_ok=True)
    stub, argv = folder / "bin" / "torchrun", folder / "argv"
    stub.write_text(STUB)
    stub.chmod(0o755)
    environment = {"PATH": f"{stub.parent}:/usr/bin:/bin", "ARGV_FILE": str(argv), "FROM_OUTSIDE": "outer value"}
    subprocess.run(["bash", str(path), *arguments], check=True, env=environment, capture_output=True, cwd=folder)
    return argv.read_bytes().decode().split("\0")[:-1]


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setenv("FROM_OUTSIDE", "outer value")
    for name in ("UNSET", "X", "Y"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def make(text: str) -> Path:
        path = tmp_path / "launch.sh"
        path.write_text(text)
        return path

    return make


EXACT = {
    "arrays over lines, with comments": "A=(\n  --a 1 # one\n  # none\n  --b 'x y'\n)\ntorchrun t.py \"${A[@]}\"\n",
    "an array without quotes": 'A=(--a "x  y")\ntorchrun ${A[@]} t.py\n',
    "an array as one word": 'A=(--a "x  y")\ntorchrun "${A[*]}" t.py\n',
    "an empty array": 'A=()\ntorchrun "${A[@]}" "" t.py\n',
    "additions": 'A=(1)\nA+=(2 "3 4")\nS=x\nS+=" y"\ntorchrun "${A[@]}" $S "$S" t.py\n',
    "continuations": "torchrun \\\n  --a \\\n  1 t.py # the end\n",
    "single quotes": "X='a $B \"c\" \\'\ntorchrun \"$X\" 'it'\\''s' t.py\n",
    "double quotes": 'X="a \\"b\\" \\$c \\\\ \'d\'"\ntorchrun "$X" t.py\n',
    "defaults": 'torchrun ${UNSET:-3} "${UNSET-a b}" ${FROM_OUTSIDE:-no} "${UNSET:-}" ${UNSET:-"q r"} t.py\n',
    "alternatives": 'X=1; E=\ntorchrun ${X:+yes} ${E:+no} "${E+set}" ${UNSET:+no} t.py\n',
    "nested defaults": "N=4\ntorchrun ${UNSET:-${N}} --n=${UNSET:-$((N*2))} t.py\n",
    "arithmetic": "G=8; N=3\ntorchrun $((G*N)) $(( $G * ${N} - 1 )) $((7/2)) $((-7/2)) $((7 % 4)) $((-7 % 4)) t.py\n",
    "array elements": 'A=(a b c)\ntorchrun ${A[1]} $A "${#A[@]}" t.py\n',
    "splitting": "X='--a 1   --b  2'\ntorchrun $X pre$X t.py\n",
    "exports": 'export A=1 B="2 3"\ndeclare -r C=4\nreadonly D=5\ntorchrun $A "$B" $C $D t.py\n',
    "prefix assignments": "A=1 B=2 torchrun t.py ${UNSET:-u}\n",
    "arguments": 'torchrun t.py "$@" $1 ${2:-two} "${3:-three}"\n',
    "redirections": "torchrun t.py --a 2>&1 > /dev/null < /dev/null\n",
    "separators": "true; torchrun t.py --a || true\n",
    "a here document": "cat <<EOF > /dev/null\ntorchrun no.py 'x\nEOF\ntorchrun t.py\n",
    "a here string": "cat <<< 'torchrun no.py' > /dev/null\ntorchrun t.py\n",
    "a folder of the script": 'D="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\ntorchrun "$D/t.py"\n',
    "a folder above": 'D=$(cd "$(dirname "$0")/.." && pwd)\ntorchrun "$D/t.py" $(dirname "$0")/u\n',
    "inside a branch": "X=1\nif true; then\n  torchrun t.py $X\nfi\n",
    "inside a group": "X=1\n{ Y=2; torchrun t.py $X $Y; }\n",
    "inside a function": 'X=1\nmain() {\n  torchrun t.py "$X"\n}\nmain\n',
    "behind a function": 'f() { local X=2; }\nX=1\ntorchrun t.py "$X"\n',
    "behind a case": 'X=1\ncase "$X" in\n  1) true ;;\n  *) exit 1 ;;\nesac\ntorchrun t.py $X\n',
    "words beside quotes": "X=b\ntorchrun a\"$X\"'c'$X\\ d t.py\n",
    "windows line ends in a comment": "X=1 # x\ntorchrun t.py $X\n",
    "a default that is kept": ': "${X:=4}" ${Y:=5}\ntorchrun t.py $X $Y ${X:=6}\n',
    "patterns that no file has": "X='[9]*7'\ntorchrun t.py --f [0]*3+[1] $X 'what?'\n",
    "loops and tests of arithmetic": "X=1\nfor ((i = 0; i < 2; i++)); do true; done\nif ((1 < 2)); then true; fi\ntorchrun t.py $X\n",
    "an own IFS and quotes": 'IFS=,\nX="a,b c"\nA=(1 2)\ntorchrun "$X" "${A[@]}" ${A[@]} t.py\n',
    "a changed folder": "cd /tmp || exit\nX=1\ntorchrun t.py $X\n",
    "a default inside double quotes": 'torchrun "${UNSET:-"a  b"}" t.py\n',
    "a dollar alone": "torchrun t.py 'a$' \"$\" a$\n",
    "ansi quotes": "torchrun t.py $'plain'\n",
}


@pytest.mark.parametrize("name", EXACT)
def test_known_words_are_those_of_bash(name, write, tmp_path):
    path = write(EXACT[name])
    words = torchrun_of(path, "--x", "a b")
    assert [word.text for word in words] == run_bash(path, tmp_path, "--x", "a b")
    assert not any(word.unknown for word in words)


UNKNOWN = {  # the line and the reason of the word that cannot be known
    "N=$(nproc)\ntorchrun t.py --n $N": ("line 1", "$(nproc) is the output of a command"),
    "N=`nproc`\ntorchrun t.py --n $N": ("line 1", "$(nproc) is the output of a command"),
    "X=1\nif true; then X=2; fi\ntorchrun t.py $X": ("line 2", "X is assigned inside a branch"),
    "X=1\ntrue && X=2\ntorchrun t.py $X": ("line 2", "X is assigned inside a branch"),
    "X=1\nfalse || { X=2; }\ntorchrun t.py $X": ("line 2", "X is assigned inside a branch"),
    "for X in 1 2; do torchrun t.py $X; done": ("line 1", "X changes in the `for` loop"),
    "while true; do X=1; break; done\ntorchrun t.py $X": ("line 1", "X is assigned inside"),
    "f() { X=2; }\nX=1\nf\nY=1\nf2() {\n X=3\n}\ntorchrun t.py $X": ("line 6", "X is assigned inside"),
    "f() { torchrun t.py $1; }\nf a": ("line 1", "$1 is an argument of a function"),
    "torchrun t.py $UNSET": ("line 1", "UNSET is set neither in the script nor in the environment"),
    'torchrun t.py "${UNSET[@]}"': ("line 1", "UNSET is set neither"),
    "X=abc\ntorchrun t.py ${X%c}": ("line 2", "${X%c} is a form that is not read here"),
    "torchrun t.py *.sh": ("line 1", "'*.sh' may be a pattern of file names"),
    "X='*.sh'\ntorchrun t.py $X": ("line 2", "'*.sh' may be a pattern of file names"),
    "cd $(x)\ntorchrun t.py [0]*3": ("line 2", "may be a pattern of file names"),
    "torchrun t.py {a,b}": ("line 1", "has braces, which the shell expands"),
    "IFS=,\nX=a,b\ntorchrun t.py $X": ("line 3", "the script sets IFS"),
    "torchrun t.py $'a\\tb'": ("line 1", "is a form that is not read here"),
    "f() { X=2; }\nX=1\nf\ntorchrun t.py $X": ("line 3", "X is set by the function f"),
    "function f { X=2; }\nX=1\nf\ntorchrun t.py $X": ("line 3", "X is set by the function f"),
    "declare -i X=1+1\ntorchrun t.py $X": ("line 1", "X is assigned inside a branch"),
    "if true; then : ${X:=1}; fi\ntorchrun t.py $X": ("line 1", "X is assigned inside a branch"),
    "cd /\nsource launch.sh\ntorchrun t.py $X": ("line 3", "line 2: `source` reads launch.sh"),
    "source /nowhere/env.sh\ntorchrun t.py $X": ("line 2", "line 1: `source` reads /nowhere/env.sh"),
    "eval 'X=1'\ntorchrun t.py $X": ("line 2", "line 1: `eval` may have set it"),
    "X=1\nread X < /dev/null\ntorchrun t.py $X": ("line 2", "X is set by `read`"),
    "X=1\n((X++))\ntorchrun t.py $X": ("line 2", "X is changed by arithmetic"),
    "X=1\nlet X=X+1\ntorchrun t.py $X": ("line 2", "X is changed by arithmetic"),
    "X=1\nprintf -v X 2\ntorchrun t.py $X": ("line 2", "X is set by `printf`"),
    'set -- a b\ntorchrun t.py "$@"': ("line 1", "`set` changes the script's arguments"),
    'shift\ntorchrun t.py "$@"': ("line 1", "`shift` changes the script's arguments"),
    "X=a\ntorchrun t.py $((X+1))": ("line 2", "X is no integer"),
    "torchrun t.py $((1<<2))": ("line 1", "is arithmetic that is not read here"),
}


@pytest.mark.parametrize("text", UNKNOWN)
def test_what_cannot_be_known_is_named_with_its_line(text, write):
    (word,) = [word for word in torchrun_of(write(text)) if word.unknown]
    line, reason = UNKNOWN[text]
    assert word.unknown.where == line
    assert reason in word.unknown.reason
    assert HOLE in word.text


def test_an_unknown_word_may_be_several_unless_it_is_quoted(write):
    words = torchrun_of(write('A=$(x)\nif true; then B=(1 2); fi\ntorchrun $A "$A" "${B[@]}" "a$A" t.py'))
    assert [(word.many, word.text) for word in words] == [
        (True, HOLE),
        (False, HOLE),
        (True, HOLE),
        (False, "a" + HOLE),
        (False, "t.py"),
    ]


def test_an_element_that_a_branch_adds_may_be_there(write):
    path = write(
        'A=(--a 1)\nif [ "$UNSET" ]; then A+=(--b 2); fi\ntorchrun t.py "${A[@]}" "${A[*]}" ${#A[@]} "${A[1]}" "${A[2]}"\n'
    )
    words = torchrun_of(path)
    assert [(word.text, word.maybe and word.maybe.where) for word in words[:5]] == [
        ("t.py", None),
        ("--a", None),
        ("1", None),
        ("--b", "line 2"),
        ("2", "line 2"),
    ]
    assert [bool(word.unknown) for word in words[5:]] == [True, True, False, True]
    (word,) = [
        word for word in torchrun_of(write("if true; then A=(1); A+=($(x)); fi\ntorchrun t.py ${A[@]}")) if word.unknown
    ]
    assert word.unknown.where == "line 1"


def test_a_sourced_file_is_read_and_named(write, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.sh").write_text("MODEL=(\n  --layers 2\n)\nBAD=$(x)\n")
    path = write(
        'D="$(cd "$(dirname "$0")" && pwd)"\nsource "$D/models/small.sh"\ntorchrun t.py "${MODEL[@]}" "$BAD"\n'
    )
    words = torchrun_of(path)
    assert [word.text for word in words[:3]] == ["t.py", "--layers", "2"]
    assert words[3].unknown.where.endswith("small.sh line 4")


def test_a_file_that_sources_itself_is_refused(write, tmp_path):
    with pytest.raises(InputError, match="more than 50 sourced files"):
        read(write(f"source {tmp_path}/launch.sh\n"))


def test_a_function_that_reads_a_variable_before_it_changes_is_not_trusted(write):
    path = write("X=0\nmain() {\n  torchrun t.py $X\n}\nX=1\nmain\n")
    (command,) = [c for c in read(path).commands if c.words[0].text == "torchrun"]
    assert command.stale.where == "line 3"
    assert not command.is_certain
    assert read(write("main() {\n  torchrun t.py\n}\nX=1\n")).commands[0].stale is None


def test_a_sourced_file_is_looked_for_where_cd_has_led(write, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "env.sh").write_text("X=3\n")
    path = write(f"cd {tmp_path}\ncd sub\nsource env.sh\ntorchrun t.py $X\n")
    assert [word.text for word in torchrun_of(path)] == ["t.py", "3"]


def test_overrides_hold_whatever_the_script_assigns(write):
    path = write("N=$(nproc)\nif true; then N=3; fi\ntorchrun t.py $N\n")
    assert [word.text for word in torchrun_of(path, overrides={"N": "8"})] == ["t.py", "8"]


def test_the_environment_that_was_used_is_known(write):
    assert read(write('torchrun t.py "$FROM_OUTSIDE" ${UNSET:-1}')).environment == {"FROM_OUTSIDE"}


@pytest.mark.parametrize(
    "text", ["torchrun 'a", 'X="a', "A=(1\n", "X=${A", "X=$(a", "X=`a", "A=(1 ; 2)\n", "A=(\n$((1)"]
)
def test_a_script_that_is_cut_short_is_refused_with_its_line(text, write):
    with pytest.raises(InputError, match=r"line \d: an? .*is the file cut short|line \d: an? .*Is the file cut short"):
        read(write(text))


ATOMS = ["a", "--x", "1", "'q r'", '"d q"', "$S", '"$S"', "${A[@]}", '"${A[@]}"', '"${A[*]}"', "${S:-z}", "${U:-z w}"]
ATOMS += [
    '"${U:-z w}"',
    "$((N+1))",
    "b$S",
    '"$S"c',
    '""',
    "\\ ",
    '"\\""',
    "${A[1]}",
    "${#A[@]}",
    "$N",
    "''x",
    '${E:-"a  b"}',
]


def random_script(rng: random.Random) -> str:
    """Assignments in random order, then a command of random words."""
    lines = ["S='s  t'", "N=3", "A=(1 '2 3' \"\")", "E="]
    for _ in range(rng.randint(0, 6)):
        word = "".join(rng.choice(ATOMS) for _ in range(rng.randint(1, 3)))
        kinds = ["S={}", "S+={}", "A+=({})", "A=({})", "A=(\n  {} # c\n)", "export E={}"]
        plain = word if word not in ("\\ ",) else "a"
        lines.append(rng.choice(kinds).format(plain))
    words = [rng.choice(ATOMS) for _ in range(rng.randint(1, 8))]
    return "\n".join([*lines, "torchrun " + rng.choice([" ", " \\\n  "]).join(words), ""])


def test_random_scripts_are_read_as_bash_runs_them(write, tmp_path):
    rng, known = random.Random(0), 0
    for _ in range(150):
        text = random_script(rng)
        path = write(text)
        words = torchrun_of(path)
        if not any(word.unknown for word in words):
            assert [word.text for word in words] == run_bash(path, tmp_path), text
            known += 1
    assert known > 120


def test_the_launch_scripts_of_the_examples_are_read_whole():
    for script in sorted((ROOT / "examples").glob("launch_*.sh")):
        (command,) = [c for c in read(script, "--extra").commands if c.words[0].text == "python"]
        texts = [word.text for word in command.words]
        assert texts[1:3] == ["-m", "torch.distributed.run"]
        assert texts[-1] == "--extra"
        assert "--loss-aggregation" in texts
