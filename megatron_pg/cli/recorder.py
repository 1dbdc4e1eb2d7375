"""A launch script run by bash itself, with a recorder in the place of every command that could do something.

PATH holds nothing but recorders and a short list of tools that read; every command of the caller's PATH is a function
that records (`recorder.bash`), so that neither another PATH nor a path written out reaches it. Where the system lets
an ordinary user make namespaces, all this runs on a scratch layer over the file system (`sandbox.bash`), and what the
script writes is gone with it. Builtins, redirections and other commands with a path are the script's own.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_pg.cli.terminal import InputError, read_text, show_path

HERE = Path(__file__).parent
# Tools that only read. xargs starts what it is given, which is a recorder.
READING = """
    awk base64 basename bc cat cmp comm cut date df diff dirname du egrep expr fgrep file fold free getconf
    getopt grep groups head hostname id jq join locale ls lscpu md5sum nl nproc numfmt od paste pgrep ps
    readlink realpath rev sed seq sha256sum shuf sort stat tac tail tr tty uname uniq wc which whoami xargs
"""
# Words with which such a tool writes a file or waits for ever; with them it is recorded.
GUARDED = {
    "sed": r" -([[:alpha:]]*i|-in-place)",
    "sort": " -(o|-output)",
    "tail": " -([0-9]*[fF]|-follow)",
    "xargs": "^$",
}
WRITING = ("chmod", "cp", "install", "ln", "mkdir", "mktemp", "mv", "tee", "touch")  # real on a scratch layer only
# Recorded also where they are not installed, and where a script finds them in a PATH of its own.
COMMANDS = """
    accelerate bash conda curl dd deepspeed git hf killall make pip pip3 pkill python python3 ray rm rmdir rsync
    scp sh sleep ssh torchrun truncate uv wandb wget
"""
LAUNCHER = r"(?:python[\d.]*|torchrun|accelerate|deepspeed|ray|srun|sbatch|mpirun|mpiexec)"
_NAME = re.compile(r"\w[\w.+-]*", re.ASCII)
# Begun only where such a path can begin: a long word that is none is looked at once, not once for each of its letters.
_PATH = re.compile(rf"(?<![\w./~+-])[\w./~+-]*/{LAUNCHER}(?![\w./-])", re.ASCII)
_EXEC = re.compile(r"(?:^|[({]|\b(?:then|do|else)\b)\s*exec\s")  # in a simple command, in which no later one tells more
_OF_PATH = re.compile(rf"/{LAUNCHER}(?![\w./-])")
_STUB = """#!{bash} -p
# Stands for a command that is found by PATH or by its path.
file=${{__PG_FILE-}} shell=${{__PG_SHELL-}} line='' name=$0
[[ $name != {scratch}/bin/* ]] || name=${{name##*/}}
while IFS= read -r -d '' word; do
    [[ $word != LINENO=* || $shell != "$$" ]] || line=${{word#LINENO=}}
done </proc/self/environ
export __PG={scratch} __PG_BASH={bash} BASH_ENV={scratch}/recorder.bash
. {scratch}/recorder.bash
__pg_stub "$file" "$line" "$name" "$@"
"""


@dataclass(frozen=True, slots=True)
class Command:
    """A command that the script called and a recorder answered."""

    words: tuple[str, ...]
    folder: str
    file: str
    line: int | None
    is_read: bool  # a pipe or $(…) takes its output
    is_followed: bool  # the shell that it starts is run and recorded


@dataclass(frozen=True, slots=True)
class Recording:
    """What a script did."""

    commands: tuple[Command, ...]  # in their order
    is_isolated: bool
    is_cut: bool  # the time limit ended it
    code: int | None
    output: str


def record(script: str, arguments: Sequence[str], *, limit: float) -> Recording:
    """Run `bash script arguments…` in this folder and environment, at most `limit` seconds.

    Raises:
        InputError: bash is missing or too old, or the script cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-pg-") as folder:
        scratch = Path(folder).resolve()
        text = read_text(script)
        launchers = _launchers(text)
        bash, environment = _furnish(scratch, launchers), _environment()
        call = [str(scratch), os.getcwd(), script, *arguments]
        is_cut = _run(["unshare", *_NAMESPACES, bash, HERE / "sandbox.bash", "isolated", *call], environment, limit)
        is_isolated = (scratch / "isolated").exists()
        if not is_isolated:
            if _replaces_itself(text):
                raise InputError(
                    f"{show_path(script)}: `exec` starts an interpreter by its path, which would really run, because this system makes no "
                    "namespaces. Start the job with MEGATRON_PG_DRY_RUN=1, or take the `exec` out."
                )
            _withdraw_writing(scratch)
            for name, value in environment.items():
                if value in launchers:  # for `exec "$PYTHON"`
                    environment[name] = str(scratch / "bin" / Path(value).name)
            is_cut = _run([bash, HERE / "sandbox.bash", "open", *call], environment, limit)
        code = _text(scratch / "code").strip()
        commands = tuple(_commands(scratch))
        return Recording(commands, is_isolated, is_cut, int(code) if code else None, _text(scratch / "output"))


def _replaces_itself(text: str) -> bool:
    """Whether a script may `exec` an interpreter by its path, which no recorder stands before."""
    found = ((command, _EXEC.search(command)) for command in re.split(r"[\n;&|]", text))
    return any(match and _OF_PATH.search(command, match.end()) for command, match in found)


_NAMESPACES = ("--user", "--map-root-user", "--mount", "--pid", "--net", "--fork", "--kill-child")


def _furnish(scratch: Path, launchers: set[str]) -> str:
    """Write what the bash files read; the path of bash."""
    if (bash := shutil.which("bash")) is None:
        raise InputError("bash is not installed, so it cannot run the script. Give the flags themselves.")
    asked = "echo $BASH_VERSINFO; compgen -bk | tr '\\n' ' '; echo; compgen -c"
    version, own, *known = subprocess.run([bash, "-c", asked], capture_output=True, text=True).stdout.splitlines()
    if int(version) < 5:
        raise InputError(f"bash {version} is older than 5, which recording needs. Give the flags themselves.")
    for name in ("bin", "records", "layers"):
        (scratch / name).mkdir()
    shutil.copy(HERE / "recorder.bash", scratch)
    stub = scratch / "stub"
    stub.write_text(_STUB.format(bash=bash, scratch=shlex.quote(str(scratch))))
    stub.chmod(0o755)
    recorded = COMMANDS.split()
    tools = {name: path for name in (*READING.split(), *WRITING) if (path := shutil.which(name))}
    names = {name for name in (*known, *recorded) if _NAME.fullmatch(name)} - {*tools, *own.split()}
    stubs = {name for name in names if name in recorded or re.fullmatch(LAUNCHER, name)}
    for name in stubs | tools.keys():  # what `exec`, xargs and `command` find; functions stand before them
        (scratch / "bin" / name).symlink_to(tools.get(name, stub))
    answers = dict.fromkeys((*names, *launchers, "command_not_found_handle"), "__pg_stub")
    _write_functions(scratch, answers | {name: f"__pg_tool '{words}'" for name, words in GUARDED.items()})
    real = {os.path.realpath(path) for path in launchers if os.path.isfile(path)}
    (scratch / "launchers").write_text("".join(f"{path}\0" for path in sorted(real)))
    return bash


def _write_functions(scratch: Path, answers: Mapping[str, str]) -> None:
    """Functions that pass their place and words on, quietly and whatever `set` says in the script."""
    begin, place = "{ local - && set +eux; } 2>/dev/null", '"${BASH_SOURCE[1]-}" "${BASH_LINENO[0]-}"'
    with open(scratch / "functions", "a") as file:
        for name, answer in answers.items():
            own_name = "" if name == "command_not_found_handle" else name
            file.write(f'{name}() {{ {begin}; {answer} {place} {own_name} "$@"; }}\n')


def _withdraw_writing(scratch: Path) -> None:
    """Without a scratch layer the tools that write are recorded too."""
    for name in WRITING:
        (scratch / "bin" / name).unlink(missing_ok=True)
        (scratch / "bin" / name).symlink_to(scratch / "stub")
    _write_functions(scratch, dict.fromkeys(WRITING, "__pg_stub"))


def _launchers(text: str) -> set[str]:
    """Paths of interpreters and launchers that the script or the environment may name."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder.startswith("/")]
    for value in os.environ.values():
        if value.startswith("/") and os.path.isdir(f"{value}/bin"):
            folders.append(Path(value, "bin"))
    found = set()
    for folder in set(folders):
        with suppress(OSError):
            found |= {str(path) for path in folder.iterdir() if re.fullmatch(LAUNCHER, path.name)}
    return {*found, *_PATH.findall(text), *filter(_PATH.fullmatch, os.environ.values())}


def _environment() -> dict[str, str]:
    """The caller's, without what changes bash itself."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BASH_")}
    return kept | {"PATH": f"{kept.get('PATH', '')}:/usr/sbin:/usr/bin:/sbin:/bin"}


def _run(command: Sequence[str | Path], environment: Mapping[str, str], limit: float) -> bool:
    """Run it in a session of its own, of which nothing is left; whether the time limit ended it."""
    null = subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            command, env=environment, stdin=null, stdout=null, stderr=null, start_new_session=True
        )
    except FileNotFoundError:  # no unshare
        return False
    try:
        process.wait(limit)
        return False
    except subprocess.TimeoutExpired:
        return True
    finally:
        while members := _session(process.pid):
            for member in members:
                with suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
            process.wait()


def _session(leader: int) -> list[int]:
    """The live processes of a session; background jobs of `set -m` leave the group, not the session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, session, *_ = path.read_text().rpartition(")")[2].split()
            if int(session) == leader and state not in "ZX":
                found.append(int(path.parent.name))
    return found


def _commands(scratch: Path) -> Iterator[Command]:
    for path in sorted((scratch / "records").iterdir()):
        text = path.read_bytes().decode("utf-8", "surrogateescape")
        folder, file, line, read, followed, name, *words = text.split("\0")[:-1]
        if name.startswith(f"{scratch}/bin/"):
            name = Path(name).name
        yield Command((name, *words), folder, file, int(line) if line else None, bool(read), bool(followed))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
