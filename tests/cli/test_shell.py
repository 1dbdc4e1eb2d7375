"""The reading of launch scripts against bash itself: what is known must be what bash passes, the rest must be named."""

import random
import re
import subprocess
from pathlib import Path

import pytest

from megatron_pg.cli.shell import read_commands
from megatron_pg.cli.shell_tokens import HOLE
from megatron_pg.cli.terminal import InputError

ROOT = Path(__file__).parents[2]
STUB = '#!/bin/bash\nprintf "%s\\0" "$@" > "$ARGV_FILE"\n'


def read(path: Path, *arguments: str, overrides=None):
    return read_commands(path, arguments=arguments, overrides=overrides or {})


def torchrun_of(path: Path, *arguments: str, overrides=None):
    """The words behind torchrun, as they are read."""
    (command,) = [c for c in read(path, *arguments, overrides=overrides).commands if c.words[0].text == "torchrun"]
    return command.words[1:]


def run_bash(path: Path, folder: Path, *arguments: str) -> list[str] | None:
    """What bash passes to torchrun; None where it does not start it."""
    (folder / "bin").mkdir(exist_ok=True)
    stub, argv = folder / "bin" / "torchrun", folder / "argv"
    argv.unlink(missing_ok=True)
    stub.write_text(STUB)
    stub.chmod(0o755)
    environment = {"PATH": f"{stub.parent}:/usr/bin:/bin", "ARGV_FILE": str(argv), "FROM_OUTSIDE": "outer value"}
    subprocess.run(["bash", str(path), *arguments], check=True, env=environment, capture_output=True, cwd=folder)
    return argv.read_bytes().decode().split("\0")[:-1] if argv.exists() else None


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
    "a test that decides": 'X=1\nif [ "$X" = 1 ]; then A=(--y); else A=(--n); fi\ntorchrun t.py "${A[@]}"\n',
    "an elif that decides": "X=b\nif [ $X = a ]; then Y=1; elif [[ $X == b ]]; then Y=2; else Y=3; fi\ntorchrun t.py $Y\n",
    "tests of integers": "N=8\nif [ $N -gt 4 ] && ((N <= 8)); then X=big; fi\n! [ $N -eq 8 ] && X=no\ntorchrun t.py $X\n",
    "tests in double brackets": '[[ -n $UNSET || "a b" == "a b" ]] && X=1\n[[ a != b && -z "" ]] && Y=2\ntorchrun t.py $X $Y\n',
    "statuses": "true && X=2\nfalse || Y=3\nfalse && X=4\n! true || Y=5\n{ true; false; } || Z=6\ntorchrun t.py $X $Y $Z\n",
    "a case that decides": "M=7b\ncase $M in 1b|3b) N=1;; 7*) N=2;; *) N=3;; esac\ntorchrun t.py $N\n",
    "a branch that changes nothing it reads": "X=1\nif [ -e nowhere ]; then Y=2; else Z=3; fi\ntorchrun t.py $X\n",
    "branches that agree": "if [ -e nowhere ]; then X=1; Y=2; else Y=3; X=1; fi\ntorchrun t.py $X\n",
    "a branch that ends the script": "X=1\nif [ -e nowhere ]; then X=2; exit 1; fi\ntorchrun t.py $X\n",
    "a chain that ends the script": "X=1\ncd . || { X=2; exit 1; }\ntorchrun t.py $X\n",
    "a loop over words": 'for X in a \'b c\'; do A+=(--x "$X"); done\ntorchrun t.py "${A[@]}" "$X"\n',
    "a loop over the arguments": 'for X; do A+=("<$X>"); done\ntorchrun t.py "${A[@]}"\n',
    "a loop that sets what is not read": "X=1\nwhile [ -e nowhere ]; do Y=1; sleep 1; done\ntorchrun t.py $X\n",
    "options of the script": 'while [[ $# -gt 0 ]]; do case $1 in --x) X=$2; shift 2;; *) shift;; esac; done\ntorchrun t.py $# "$X"\n',
    "arguments that are set": 'set -- "$@" c\nshift 2\ntorchrun t.py "$@" "$1" $#\n',
    "arguments of a function": 'f() { torchrun t.py "$1" "${2:-d}" $# "$3"; }\nf "a b"\n',
    "a function that assigns": "f() { X=$1; }\nX=1\nf 2\ntorchrun t.py $X\n",
    "a function and its local variables": "f() { local X=2 Y; Y=3; Z=$X$Y; }\nX=1 Y=0\nf\ntorchrun t.py $X $Y $Z\n",
    "a function before a variable changes": 'X=0\nfunction main {\n  torchrun t.py "$X"\n}\nX=1\nmain\n',
    "a function that returns": "f() { X=2; if [ -e nowhere ]; then return; fi; Y=3; return; X=4; }\nf\ntorchrun t.py $X\n",
    "an assignment before a function": "f() { torchrun t.py $X; }\nX=1\nX=2 f\n",
    "functions that are never called": "f() { X=2; }\nX=1\ntorchrun t.py $X\n",
    "subshells": "X=1\n(X=2)\n(X=3; torchrun t.py $X)\n",
    "pipes": "X=1\necho 2 | read X\necho | { X=3; }\ntorchrun t.py $X 2>&1 | cat > /dev/null\n",
    "the background": "X=1\n{ X=2; } &\nwait\ntorchrun t.py $X\n",
    "process substitution": "X=1\ncat < <(echo 1) > >(cat)\ntorchrun t.py $X\n",
    "a here document of a loop": "X=1\nwhile [ -e nowhere ]; do read Y; done <<EOF\nX=2\nEOF\ntorchrun t.py $X\n",
    "a folder by way of a variable": 'D="$(cd -- "$(dirname -- "$0")" && pwd)"\nE="$(cd "$D/.." >/dev/null 2>&1 && pwd)"\ntorchrun $E t.py\n',
    "output of the whole script": "X=1\nexec > >(cat) 2>&1\ntorchrun t.py $X\n",
    "a loop in the background": "X=1\nwhile true; do sleep 0.1; done &\ntorchrun t.py $X\nkill $!\n",
    "an exit of a subshell": "X=1\n(exit 1)\ntorchrun t.py $X\n",
    "command and exec": "command true\nX=1\nexec torchrun t.py $X\ntorchrun no.py\n",
    "comparisons in arithmetic": "N=2\ntorchrun t.py $((${N} * 3)) $((N > 1))\n",
    "an array that may be empty": 'A=(--a "b c")\nE=()\ntorchrun t.py ${A[@]+"${A[@]}"} "${A[@]+"${A[@]}"}" "${E[@]+"${E[@]}"}" ${1+"$@"}\n',
    "arithmetic of arguments": "f() { torchrun t.py $(($1 * 16)) $((-$2 + ${1})); }\nf 8 3\n",
    "declarations expand all before they assign": "X=1\nf() { local X=2 Y=$X; export X=3 Z=$X; torchrun t.py $X $Y $Z; }\nf\n",
    "declarations with quotes": 'X=1\nexport "X=2"\nfor P in "Y=a b" Z=3; do export "$P"; done\ntorchrun t.py "$X" "$Y" "$Z"\n',
    "evaluated text": "eval 'X=1; set -- \"a b\"'\nC='torchrun t.py $X \"$1\"'\neval $C\n",
    "arguments without a mark": "set -x\nset t.py --a\ntorchrun $@\n",
    "more to shift than there is": 'set -- a\nshift 2\ntorchrun t.py "$@"\n',
    "a pattern that is denied": "X=qwen3 Y=1\n[[ ! $X == qwen* ]] && Y=2\n[[ ! $X == q ]] && Z=3\ntorchrun t.py $Y $Z\n",
    "an array that is only declared": 'f() { local -a A; A+=(x); torchrun t.py ${#A[@]} "${A[@]}"; }\nf\n',
    "an array of one and its first element": 'A=(a)\nA=b\ntorchrun t.py "${A[@]}" $A\n',
    "a here document whose end is indented": "cat <<EOF >/dev/null\n  EOF\ntorchrun no.py\nEOF\ntorchrun t.py\n",
    "a here document with tabs": "cat <<-EOF >/dev/null\n\tX\n\tEOF\ntorchrun t.py\n",
    "a command that expands to nothing": "${UNSET:+set -x}\nexec ${UNSET:-}\ntorchrun t.py\n",
    "pipes to processes": "torchrun t.py | tee >(cat >/dev/null) >/dev/null\ncat <(echo x) >/dev/null\n",
    "asking for a launcher": "command -v torchrun >/dev/null || exit 1\ntorchrun t.py\n",
    "quotes in a command's comment": "X=$(echo 1 # it's\n)\nY=$(cat <<EOF\nit's )\nEOF\n)\ntorchrun t.py\n",
    "a case in a command": "X=$(case a in a) echo case;; (b) echo 2;; esac; (echo 3))\ntorchrun t.py\n",
    "patterns with alternatives": "shopt -s extglob\ncase a in @(a|b)) X=1;; esac\ntorchrun t.py\n",
    "a descriptor of a name": "exec {FD}>/dev/null\ntorchrun t.py\n",
    "a function named as the command": 'torchrun() { command torchrun "$@"; }\nX=1\ncommand torchrun t.py $X\n',
    "translated text": 'torchrun t.py $"a b"\n',
    "a variable that is unset": 'X=1\nunset X FROM_OUTSIDE\ntorchrun t.py ${X:-d} "$X" $FROM_OUTSIDE\n',
    "strict mode": "set -euo pipefail\nIFS=$'\\n\\t'\nX=a\nA=(--b 'c d')\n[[ $X == b ]] || Y=2\nif [[ $X == b ]]; then :; fi\ntorchrun t.py $X $Y \"${A[@]}\"\n",
    "the folder that cd leads to": 'mkdir -p sub\ncd sub\ntorchrun "$PWD/t.py"\n',
    "an element that is replaced": 'A=(a b c)\nA[1]="d e"\ntorchrun t.py "${A[@]}"\n',
    "an assignment before evaluated text": "X=1\nX=2 eval 'Y=$X'\ntorchrun t.py $X $Y\n",
    "a quote in a command": 'X=1\necho "$(echo "it\'s")" > /dev/null\ntorchrun t.py $X\n',
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
    "X=1\nif [ -e x ]; then X=2; fi\ntorchrun t.py $X": ("line 2", "X is assigned inside a branch"),
    "X=1\n[ -e x ] || { X=2; }\ntorchrun t.py $X": ("line 1", "X is assigned inside a branch"),
    "while true; do X=1; break; done\ntorchrun t.py $X": ("line 1", "X is assigned inside"),
    "torchrun t.py $UNSET": ("line 1", "UNSET is set neither in the script nor in the environment"),
    'torchrun t.py "${UNSET[@]}"': ("line 1", "UNSET is set neither"),
    "X=abc\ntorchrun t.py ${X%c}": ("line 2", "${X%c} is a form that is not read here"),
    "torchrun t.py *.sh": ("line 1", "'*.sh' may be a pattern of file names"),
    "X='*.sh'\ntorchrun t.py $X": ("line 2", "'*.sh' may be a pattern of file names"),
    "cd $(x)\ntorchrun t.py [0]*3": ("line 2", "may be a pattern of file names"),
    "torchrun t.py {a,b}": ("line 1", "has braces, which the shell expands"),
    "IFS=,\nX=a,b\ntorchrun t.py $X": ("line 3", "the script sets IFS"),
    "torchrun t.py $'a\\x41'": ("line 1", "is a form that is not read here"),
    "declare -i X=1+1\ntorchrun t.py $X": ("line 1", "X is declared with an attribute"),
    "A=(1)\nA[2]=2\ntorchrun t.py $A": ("line 2", "A has an element assigned"),
    "for X in 1 $(x); do torchrun t.py $X; done": ("line 1", "X changes in the `for` loop"),
    "for X in 1 2; do break; done\ntorchrun t.py $X": ("line 1", "X is assigned inside a loop"),
    "for ((X = 0; X < 3; X++)); do true; done\ntorchrun t.py $X": ("line 1", "X is assigned inside a loop"),
    "X=0\nwhile [ -e x ]; do if [ -e y ]; then X=1; break; fi; X=0; done\ntorchrun t.py $X": (
        "line 2",
        "X is assigned inside",
    ),
    "X=0\nfor ((;;)); do if [[ $X == 1 ]]; then Y=$X; fi; X=1; done\ntorchrun t.py $Y": (
        "line 2",
        "Y is assigned inside",
    ),
    "case $(x) in a) X=1;; *) X=2;; esac\ntorchrun t.py $X": ("line 1", "X is assigned inside a branch"),
    "case a in a) X=1;& b) X=2;; esac\ntorchrun t.py $X": ("line 1", "X is assigned inside a loop"),
    "if [ -e x ]; then f() { X=1; }; else f() { X=2; }; fi\nf\ntorchrun t.py $X": (
        "line 1",
        "X is assigned inside a branch",
    ),
    "export $(x)\ntorchrun t.py $X": ("line 2", "line 1: a declaration may have set it"),
    "if [ -e x ]; then cd /; fi\nsource launch.sh\ntorchrun t.py $X": ("line 3", "line 2: `source` reads"),
    "X=1\nexport $(x)\ntorchrun t.py $X": ("line 3", "line 2: a declaration may have set it"),
    "X=1\nread $(x)\ntorchrun t.py $X": ("line 3", "line 2: a variable is set by `read`"),
    "N=08\ntorchrun t.py $((10#$N*4))": ("line 2", "N is no decimal integer"),
    "torchrun t.py $((1_000))": ("line 1", "is arithmetic that is not read here"),
    "torchrun t.py $((UID))": ("line 1", "UID is set by bash itself"),
    "X=1\n: $((X *= 2))\ntorchrun t.py $X": ("line 2", "X is changed by arithmetic"),
    "A=(a b)\nunset 'A[1]'\ntorchrun t.py \"${A[@]}\"": ("line 2", "A has an element unset"),
    'A=(a b)\nA+=c\ntorchrun t.py "${A[@]}"': ("line 2", "to whose first element something is added"),
    'A=(a b)\nA=c\ntorchrun t.py "${A[@]}"': ("line 2", "whose first element is assigned"),
    'A=([0]=a [1]=b)\ntorchrun t.py "${A[@]}"': ("line 1", "A is an array with indices"),
    "IFS=$'\\n\\t'\nX='2 3'\ntorchrun t.py $X": ("line 3", "the script sets IFS"),
    'IFS=,\nA=(1 2)\ntorchrun t.py "${A[*]}"': ("line 3", "the script sets IFS, which joins"),
    "torchrun t.py \"${UNSET:-'x'}\"": ("line 1", "has single quotes inside double ones"),
    "torchrun t.py {'a','b'}": ("line 1", "has braces, which the shell expands"),
    "readonly X=1\nX=2\ntorchrun t.py $X": ("line 2", "X is readonly"),
    "X=1\nf() { if [ -e x ]; then local X; fi; X=2; }\nf\ntorchrun t.py $X": ("line 2", "only where a branch is taken"),
    'torchrun t.py ${UNSET:-#"x"}': ("line 1", "is a default of several words"),
    "set -- a\neval $(x)\ntorchrun t.py $1": ("line 2", "`eval` may have set it"),
    "shopt -s nullglob\ntorchrun t.py [x]y": ("line 2", "may be a pattern of file names"),
    "set -- a b\nwhile [ -e x ]; do torchrun t.py $1; shift; done": (
        "line 1",
        "a branch or a loop changes the arguments",
    ),
    "set -- $(x)\nshift\ntorchrun t.py $1": ("line 2", "`shift` changes the arguments"),
    "if [ -e x ]; then : ${X:=1}; fi\ntorchrun t.py $X": ("line 1", "X is assigned inside a branch"),
    "cd /\nsource launch.sh\ntorchrun t.py $X": ("line 3", "line 2: `source` reads launch.sh"),
    "source /nowhere/env.sh\ntorchrun t.py $X": ("line 2", "line 1: `source` reads /nowhere/env.sh"),
    'eval "X=1 $(x)"\ntorchrun t.py $FROM_OUTSIDE': ("line 2", "line 1: `eval` may have set it"),
    "X=1\nread X < /dev/null\ntorchrun t.py $X": ("line 2", "X is set by `read`"),
    "X=1\n((X++))\ntorchrun t.py $X": ("line 2", "X is changed by arithmetic"),
    "X=1\nlet X=X+1\ntorchrun t.py $X": ("line 2", "X is changed by arithmetic"),
    "X=1\nprintf -v X 2\ntorchrun t.py $X": ("line 2", "X is set by `printf`"),
    "X=a\ntorchrun t.py $((X+1))": ("line 2", "X is no decimal integer"),
    "X=010\ntorchrun t.py $((X + 1))": ("line 2", "X is no decimal integer"),
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
    words = torchrun_of(write('A=$(x)\nB=($(y))\ntorchrun $A "$A" "${B[@]}" "a$A" t.py'))
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
    with pytest.raises(InputError, match="30 functions or sourced files are open"):
        read(write(f"source {tmp_path}/launch.sh\n"))


def test_only_a_branch_or_a_loop_makes_a_command_uncertain(write):
    def certain(text):
        return [c.is_certain for c in read(write(text)).commands if c.words[0].text == "torchrun"]

    assert certain("X=0\nmain() {\n  torchrun t.py $X\n}\nX=1\nmain\n") == [True]
    assert certain("if true; then torchrun t.py; fi") == [True]
    assert certain("[ -e x ] && torchrun t.py") == [False]
    assert certain("while [ -e x ]; do torchrun t.py; done") == [False]
    assert certain("exit\ntorchrun t.py") == certain("if false; then torchrun t.py; fi") == []
    assert read(write("if true; then\n  exit\nfi\n")).ended == "line 2"


def test_what_the_script_itself_may_have_put_into_an_unknown_value_is_known(write):
    """So that a reader can tell whether a flag of its own could be there."""
    texts = {
        "if [ -e x ]; then S='--a 1'; else S='--b'; fi\ntorchrun $S t.py": ("--a", "--b"),
        "S=--a\nwhile [ -e x ]; do S='--b'; S='--c'; done\ntorchrun $S t.py": ("--b", "--c"),
        "A=(--a)\nS=$(echo ${A[@]} --b | tr a c)\ntorchrun $S t.py": ("--a", "--b"),
        "read -r S <<EOF\n--a\nEOF\ntorchrun $S t.py": ("--a",),
        'L=--a\nread S <<< "$L"\ntorchrun $S t.py': ("--a",),
        "S=--ab\ntorchrun ${S%b} t.py": ("--ab",),
        "torchrun {--a,--b} t.py": ("--a,--b",),
        "IFS=,\nS='--a,--b'\ntorchrun $S t.py": ("--a,--b",),
        "eval S=--a $(x)\ntorchrun $S t.py": ("--a",),
        "S=--a\neval $(x)\ntorchrun $S t.py": ("--a",),
        "S=--a\nN=S\ntorchrun ${!N} t.py": ("--a",),
        'A=(--a --b)\nA[2]=--c\ntorchrun "${A[@]}" t.py': ("--a", "--b", "--c"),
        "declare -A L\nL[a]=--a; L[b]=--b\ntorchrun ${L[a]} t.py": ("--a", "--b"),
        "while read X; do S=$X; done <<EOF\n--a\nEOF\ntorchrun $S t.py": ("--a",),
        "echo --a | while read X; do torchrun $X t.py; done": ("--a",),
        'mapfile -t A < <(printf %s --a)\ntorchrun "${A[@]}" t.py': ("--a",),
        "cat >f.txt <<EOF\n--a\nEOF\ntorchrun $(cat f.txt) t.py": ("--a",),
        "source <(echo S=--a)\ntorchrun $S t.py": ("--a",),
        "A=(--a)\ntorchrun ${A[@]+${A[@]} --b} t.py": ("--a", "--b"),
        "printf -v S %s --a\ntorchrun $S t.py": ("--a",),
        "f() { S=--a; }\n[ -e x ] && f\ntorchrun $S t.py": ("--a",),
        "g() { echo --b; }\nf() { if true; then A=(--a); g; fi; }\nS=$(f | tail)\ntorchrun $S t.py": ("--a", "--b"),
        "declare -u S=--a\ntorchrun $S t.py": ("--a",),
        "set -- --a\n[ -e x ] && shift\ntorchrun $1 t.py": ("--a",),
    }
    for text, parts in texts.items():
        (word,) = [word for word in torchrun_of(write(text)) if word.holes or word.maybe]
        assert all(part in word.text + "".join(hole.text for hole in word.holes) for part in parts), text


def test_an_integer_and_the_values_of_branches_hold_nothing_from_outside(write):
    words = torchrun_of(
        write(
            "N=$(x)\nif [ -e x ]; then A=1; B=$N; else A=2; B=3; fi\n((M++))\ntorchrun $((N + 1)) $M ${#N[@]} $A $B $N t.py"
        )
    )
    assert [word.holes[0].is_open for word in words[:-1] if word.holes] == [False, False, False, False, True, True]


def test_every_hole_of_a_word_knows_its_reason(write):
    words = torchrun_of(write('S="--a $(x) --b $(y)c --d"\ntorchrun t.py $S'))
    assert [word.text for word in words] == ["t.py", "--a", HOLE, "--b", HOLE + "c", "--d"]
    assert ["$(x)" in words[2].unknown.reason, "$(y)" in words[4].unknown.reason] == [True, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f() { f; }\nf", "f: 30 functions or sourced files are open in each other"),
        ("A=(1 2 3 4 5 6 7 8)\n" + "for X in ${A[@]}; do\n" * 6 + "true\n" + "done\n" * 6, "more than 10000 commands"),
        ("S=0123456789\nfor X in 1 2 3 4 5 6; do S=$S$S$S$S$S$S$S$S; done", "S grows beyond 1000000 characters"),
        ("(" + " (" * 5000 + ")" * 5001, "nested too deeply"),
    ],
)
def test_a_script_without_end_is_refused(write, text, message):
    with pytest.raises(InputError, match=message):
        read(write(text))


STOPS = {
    "shopt -s nocasematch": "line 1: `shopt -s nocasematch` changes what commands mean",
    "shopt -s expand_aliases": "line 1: `shopt -s expand_aliases`",
    "set -o posix": "line 1: `set -o posix`",
    "declare -n R=X": "line 1: `declare -n` makes a second name",
    "echo X=1 > f.sh\nsource ./f.sh": "line 2: `source` reads ./f.sh, which the script itself writes",
    "echo X=1 | tee f.sh\n. f.sh": "line 2: `source` reads f.sh, which the script itself writes",
}


@pytest.mark.parametrize("text", STOPS)
def test_what_is_not_followed_stops_with_its_line_and_the_way_on(text, write):
    with pytest.raises(
        InputError, match=re.escape(STOPS[text]) + ".* put `python -m megatron_pg explain` in the place"
    ):
        read(write(text))


def test_windows_line_ends_are_refused(write):
    with pytest.raises(InputError, match="has CRLF line ends"):
        read(write("X=1\r\ntorchrun t.py $X\r\n"))


@pytest.mark.parametrize("text", ["set -e\n[[ a == b ]]", "set -e\n! true; false", 'E=\n: "${E:?needed}"'])
def test_a_script_that_bash_ends_is_ended(text, write, tmp_path):
    reading = read(write(f"{text}\ntouch ran\n"))
    assert (reading.commands, bool(reading.ended)) == ([], True)
    subprocess.run(["bash", "launch.sh"], capture_output=True)
    assert not (tmp_path / "ran").exists()


def test_a_sourced_file_has_its_own_arguments_and_folder(write, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.sh").write_text('X=$1\nf() { source "$(dirname "${BASH_SOURCE[0]}")/b.sh"; }\n')
    (tmp_path / "lib" / "b.sh").write_text("Y=inner\n")
    (tmp_path / "b.sh").write_text("Y=outer\n")
    path = write('source lib/a.sh given\nf\ntorchrun t.py $X $Y "$1"\n')
    assert [word.text for word in torchrun_of(path, "own")] == run_bash(path, tmp_path, "own")


def test_functions_that_call_each_other_are_read_in_no_time(write):
    layers = "".join(f"f{i}() {{ f{i + 1}; g{i + 1}; }}\ng{i}() {{ f{i + 1}; g{i + 1}; }}\n" for i in range(20))
    (word,) = torchrun_of(write(f"{layers}f20() {{ echo --a; }}\nX=$(f0)\ntorchrun $X"))
    assert "--a" in word.unknown.text


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
    with pytest.raises(InputError, match=r"line \d: an? .*Is the file cut short"):
        read(write(text))


@pytest.mark.parametrize(
    "text",
    [
        *(
            "if true; then",
            "fi",
            "for X in 1; do true",
            "while true\ndone",
            "{ true",
            "(true",
            "true)",
            "case x in a) true",
        ),
        *("f() ", "if true; fi", "a && ;", "a (b)", "case x in a", "for X in", "function"),
    ],
)
def test_what_bash_would_not_accept_is_refused_with_its_line(text, write, tmp_path):
    assert subprocess.run(["bash", "-n", write(text)], capture_output=True).returncode
    with pytest.raises(InputError, match=r"line \d: bash would not expect .* so the script cannot be read"):
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


def random_control_flow(rng: random.Random, depth: int = 0) -> str:
    """Commands that assign S and A in branches, loops and functions; whether a file is there decides what is run."""
    test = rng.choice(
        ["[ -e f1 ]", "[[ -e f2 ]]", '[ "$S" = s1 ]', "! [ -e f3 ]", "true", '[ -z "$S" ]', "((${#A[@]} > 1))"]
    )
    if depth > 2 or rng.random() < 0.45:
        word = rng.choice(["s1", "--f$S", "$(echo o)", '"${A[@]}"', "${S:-d}", "${S:+--i}", "$((${#A[@]} + 1))", "''"])
        return rng.choice(["S={}", "A=({} --g)", "A+=(--h {})", "S+={}", "f {}", "g", "(S={})"]).format(word)

    def block() -> str:
        return "\n".join(random_control_flow(rng, depth + 1) for _ in range(rng.randint(1, 2)))

    return rng.choice(
        [
            f"if {test}; then\n{block()}\nelse\n{block()}\nfi",
            f"if {test}; then\n{block()}\nexit 0\nfi",
            f"{test} && {{ {block()}\n}}",
            f"{test} || S=$S",
            f"case $S in s1) {block()} ;; *d) {block()} ;; esac",
            f"for X in a $S; do\n{block()}\nS=$X\ndone",
            f"for ((I{depth} = 0; I{depth} < 2; I{depth}++)); do\n{block()}\n{test} && break\ndone",
            f'g() {{\nlocal S=l\n{test} && return\nA+=("$S")\n}}',
        ]
    )


def pattern_of(words) -> str:
    """What bash may pass where the words are read so, each argument with its end."""
    pattern = ""
    for word in words:
        inside = ".*" if word.many else "[^\0]*"
        one = re.escape(word.text).replace(re.escape(HOLE), inside) + "\0"
        pattern += f"(?:{one})?" if word.many or word.maybe else one
    return pattern


def test_whatever_bash_does_in_a_branch_is_among_what_is_read(write, tmp_path):
    """Random control flow, run with different files there: the words that are known are those of bash, in each case."""
    rng, known = random.Random(1), 0
    for _ in range(40):
        body = "\n".join(random_control_flow(rng) for _ in range(rng.randint(2, 5)))
        text = f'S=s0 A=(--a)\nf() {{ S+=$1; }}\ng() {{ A+=("$S"); }}\n{body}\ntorchrun t.py $S "${{A[@]}}" --end\n'
        path = write(text)
        commands = [c for c in read(path).commands if c.words[0].text == "torchrun"]
        for there in ("", "1", "23"):
            for i in "123":
                (tmp_path / f"f{i}").unlink(missing_ok=True)
            for i in there:
                (tmp_path / f"f{i}").touch()
            passed = run_bash(path, tmp_path)
            if passed is None:
                assert "exit" in text or not any(command.is_certain for command in commands), text
            else:
                (command,) = commands
                assert re.fullmatch(pattern_of(command.words[1:]), "".join(f"{x}\0" for x in passed), re.DOTALL), text
                known += not any(word.holes or word.maybe for word in command.words)
                seen = "\n".join(text for word in command.words for text in (word.text, *(h.text for h in word.holes)))
                assert all(word[:3] in seen for word in passed if word.startswith("--")), text
    assert known > 20


def test_the_launch_scripts_of_the_examples_are_read_whole():
    for script in sorted((ROOT / "examples").glob("launch_*.sh")):
        (command,) = [c for c in read(script, "--extra").commands if c.words[0].text == "python"]
        texts = [word.text for word in command.words]
        assert texts[1:3] == ["-m", "torch.distributed.run"]
        assert texts[-1] == "--extra"
        assert "--loss-aggregation" in texts
