"""The command line of a job, read from a text: what `set -x` or a dry run printed. Nothing of it is run."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from os.path import basename

from megatron_pg.cli.terminal import InputError, opened, show_path, standard_input
from megatron_pg.flags.banner import COMMAND_LINE
from megatron_pg.rollouts.printable import listed, printable

_LAUNCHERS = {"torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed"}
_PYTHON = re.compile(r"python[\d.]*|uv")
_OURS = re.compile(r"--(pg-|loss-aggregation|custom-pg-)")
_BEFORE = re.compile(r"\++$|[A-Za-z_]\w*=")  # what `set -x` prints before a command, and assignments
_MOST_BYTES = 2**24  # of the text
_PART = r"""
    '(?P<single>[^']*)'
    | \$'(?P<ansi>[^'\\]*(?:\\.[^'\\]*)*)'
    | "(?P<double>[^"\\]*(?:\\.[^"\\]*)*)"
    | \\(?!\r?(?:\n|\Z))(?P<escaped>.)
    | (?P<plain>(?:[^ \t\r\n'"\\;&|()<>$]|\$\([^()]*\)?|\$(?!'))+)
    """
_TOKEN = re.compile(
    rf"""
    (?P<blank>[ \t\r]+|\\\r?(?:\n|\Z))
    | (?P<comment>(?<![^\s;&|()])\#[^\n]*)
    | (?P<redirection>\d*(?:<<<|<<-?|>>|>\||<>|[<>])&?|&>>?)
    | (?P<end>[\n;&|()]+)
    | (?P<word>(?:{_PART})+)
    """,
    re.VERBOSE | re.DOTALL,
)
_PARTS = re.compile(_PART, re.VERBOSE | re.DOTALL)
_EXPANSION = re.compile(r"\\.|(?P<variable>\$(?:\{[^}]*\}|\w+|[@*#?!-]))|(?P<substitution>\$\(|`)", re.DOTALL)


@dataclass(slots=True)
class Command:
    """One command of the text."""

    line: int
    words: list[str] = field(default_factory=list)
    unexpanded: str | None = None  # the first part that a shell would have replaced

    @property
    def has_our_flags(self) -> bool:
        """Whether a flag of megatron_pg is among its words."""
        return any(map(_OURS.match, self.words))

    @property
    def starts_script(self) -> bool:
        """Whether a launcher, Python or a Python script is among its words; assignments of arrays have none."""
        names = {basename(word) for word in self.words}
        return bool(names & _LAUNCHERS) or any(_PYTHON.fullmatch(name) or name.endswith(".py") for name in names)


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The command line of the job."""

    source: str  # file and line, for messages
    launcher_words: Sequence[str]  # the options of torchrun
    words: Sequence[str]  # the flags of the training script

    @property
    def world_size(self) -> int | None:
        """Number of ranks, from torchrun's options; None if they do not give it."""
        sizes: dict[str, int | None] = {"nproc-per-node": None, "nnodes": 1}
        parts = [part for word in self.launcher_words for part in word.split("=", 1)]
        for flag, value in itertools.pairwise(parts):
            option = flag[2:].replace("_", "-")
            for name in sizes if flag.startswith("--n") else ():
                if name.startswith(option):  # argparse completes abbreviations
                    sizes[name] = int(value) if value.isdecimal() and len(value) < 10 else None
        ranks, nodes = sizes.values()
        return None if ranks is None or nodes is None else ranks * nodes


def read_command_line(path: str) -> CommandLine:
    """The one command line of the job in file `path`, or in standard input if `path` is `-`."""
    name = "standard input" if path == "-" else show_path(path)
    with standard_input() if path == "-" else opened(path) as file:
        content = file.read(_MOST_BYTES + 1)
    try:
        text = _decoded(content)
        command = _choose(list(_printed_by_dry_run(text)) or list(_commands(text)))
        if command.unexpanded:
            raise InputError(
                f"line {command.line} has the unexpanded {command.unexpanded}. Use the line that `set -x` prints."
            )
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    launcher_words, words = _split(command.words)
    return CommandLine(f"{name}, line {command.line}", launcher_words, words)


def _decoded(content: bytes) -> str:
    if len(content) > _MOST_BYTES:
        raise InputError(f"is larger than {_MOST_BYTES} bytes. Keep only the command line of the job.")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 text (byte {error.start}). Give another file.") from error


def _printed_by_dry_run(text: str) -> Iterator[Command]:
    """The commands that a dry run has printed, within any other text."""
    start, line = 0, 1
    while (position := text.find(COMMAND_LINE, start)) >= 0:
        line += text.count("\n", start, position)
        start = position + len(COMMAND_LINE)
        yield next(_commands(text, start, line), Command(line))


def _choose(commands: Sequence[Command]) -> Command:
    """The command of the job: the only one, or the only one that starts a script with flags of megatron_pg."""
    if not commands:
        raise InputError("has no command line. Give the line that `set -x` or the dry run of the job prints.")
    different: dict[tuple[str, ...], Command] = {}
    for command in commands:
        different.setdefault(tuple(command.words), command)
    every = [*different.values()]
    starts = [command for command in every if command.starts_script]
    chosen = (
        [command for command in starts if command.has_our_flags]
        or [command for command in starts if command.unexpanded]  # its flags are in a variable
        or [command for command in every if command.has_our_flags]
        or starts
        or every
    )
    if len(chosen) == 1:
        return chosen[0]
    which = "with" if chosen[0].has_our_flags else "without"
    lines = listed(command.line for command in chosen)
    raise InputError(
        f"has several command lines {which} flags of megatron_pg: lines {lines}. Keep only the line of the job."
    )


def _split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """What the launcher reads, and what the training script reads."""
    names = [basename(word) for word in words]
    launcher = next((i for i, name in enumerate(names) if name in _LAUNCHERS), None)
    python = next((i for i, name in enumerate(names) if _PYTHON.fullmatch(name)), None)
    start = python if launcher is None else launcher
    if start is None and words[:1] and words[0].startswith("-"):  # flags alone
        return (), words
    begin = 0 if start is None else start + 1
    for i, word in enumerate(words[begin:], start=begin):
        if word in ("-m", "--module"):
            return words[begin:i], words[i + 2 :]
        if word.endswith(".py"):
            return words[begin:i], words[i + 1 :]
    flags = next((i for i, word in enumerate(words[begin:], start=begin) if word.startswith("-")), len(words))
    return words[begin:], words[flags:]


def _commands(text: str, start: int = 0, line: int = 1) -> Iterator[Command]:
    """The commands of a text as a shell splits it, from position `start`, which is in line `line`."""
    command, is_redirected = Command(line), False
    while start < len(text):
        token = _TOKEN.match(text, start)
        if token is None:
            raise InputError(f"line {line} opens a quote {text[start]} that is not closed. Close it.")
        if token.lastgroup == "word":
            word, unexpanded = _unquoted(token["word"])
            if not is_redirected and (command.words or not _BEFORE.match(word)):
                command.line = command.line if command.words else line
                command.words.append(word)
                command.unexpanded = command.unexpanded or unexpanded
            is_redirected = False
        elif token.lastgroup == "redirection":  # the next word names a file
            is_redirected = True
        elif token.lastgroup == "end":
            if command.words:
                yield command
            command, is_redirected = Command(line), False
        line += text.count("\n", start, token.end())
        start = token.end()
    if command.words:
        yield command


def _unquoted(word: str) -> tuple[str, str | None]:
    """The word that a shell passes, and the first part of it that a shell would have replaced."""
    text, unexpanded = "", None
    for part in _PARTS.finditer(word):
        kind = str(part.lastgroup)
        text += re.sub(r'\\(["\\$`\n])', r"\1", part[kind]) if kind == "double" else part[kind]
        for match in _EXPANSION.finditer(part[kind]) if kind in ("plain", "double") else ():
            name = "variable" if match["variable"] else "command substitution"
            if match.lastgroup and unexpanded is None:
                unexpanded = f"{name} {printable(match[match.lastgroup])}"
    return text, unexpanded
