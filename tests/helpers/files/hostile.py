"""Hostile command lines and files from a seed, and the law that the command keeps with all of them."""

import argparse
import io
import json
import random
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

from megatron_pg.cli import main

HUGE = ["9" * 400, "9" * 5000, "-" + "9" * 5000, "0." + "3" * 5000, str(2**62), str(-(2**63)), "1" + "0" * 308]
PLAIN_NUMBERS = "0 -0 -1 1 2 3 0.5 1e-9 1e-320 1e308 -1e308 1e400 -1e400 nan inf -inf 0x10 1_0 ٣ ² 1e +1 1. 4294967296"
NUMBERS = [*PLAIN_NUMBERS.split(), *(" 7 ", "1,2", "10,100,1000", "1,,2", *HUGE)]
SYMBOLS = "- -- --- = a=b a= % %s%n %(prog)s {} {0.__class__} $(x) \\ ' \" \ud800 é true None null [] . / ~ -h -1"
NAMES = "a.b:c json:loads no.such:thing __main__:f a.b. /dev/null step=a tokens=tokens reward pg_loss single"
TEXTS = [
    *("", " ", "x" * 300, "x" * 10_000, "\x1b" * 5000, "a" * 5000 + ":b", "prompt_id=\x1b", "日本", "\U0001f426"),
    *("\n", "\r", "\t", "a\nb", "\x00", "a\x00b", "\x1b[31m", "\x1b]0;x\x07", "\x7f", "\x9b31m", "\u202ex", "\u2028"),
    *SYMBOLS.split(),
    *NAMES.split(),
    *("full_iteration", "fp32"),
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str


def outcome_of(words: Sequence[str]) -> Outcome:
    """The command in this process, with streams that know no lone surrogate; a warning is an error."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            code = main(words)
        except SystemExit as end:  # --help, --version
            code = end.code
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8"))
    return Outcome(code, *texts)


def check(words: Sequence[str]) -> Outcome:
    """The outcome, which keeps the law; an AssertionError shows the words."""
    try:
        found = outcome_of(words)
    except BaseException as error:
        raise AssertionError(f"{shown(words)} raised {type(error).__name__}: {str(error)[:500]}") from error
    assert broken(words, found) is None, f"{shown(words)} {broken(words, found)}: {found.code}, {found.err[:2000]!r}"
    return found


def broken(words: Sequence[str], found: Outcome) -> str | None:
    """What of the law an outcome breaks."""
    command = next((word for word in words if word in ("doctor", "validate")), None)
    lines = found.err.split("\n")
    laws = {
        "has another exit code": found.code in ((0, 1, 2) if command == "doctor" else (0, 2)),
        "shows a traceback": "Traceback (most" not in found.out + found.err,
        "shows a control character": all(map(is_shown, (found.out, found.err))),
        "leaves a half line": found.out[-1:] in ("", "\n") and lines[-1] == "",
        "says something although it is done": found.code == 2 or found.err == "",
        "has no line of an error": found.code != 2 or all(re.match("megatron-pg[ :]", line) for line in lines[:-1]),
        "has not one line of an error": found.code != 2
        or (len(lines) == 2 or (command == "validate" and len(lines) > 2)),
        "prints together with an error": found.code != 2 or found.out == "" or "--json" in words,
        "is not JSON": found.code == 2 or "--json" not in words or is_json_or_help(found.out),
    }
    return next((name for name, holds in laws.items() if not holds), None)


def is_shown(text: str) -> bool:
    return text.replace("\n", "").isprintable()


def is_json_or_help(text: str) -> bool:
    try:
        json.loads(text, parse_constant=lambda name: 1 / 0)
    except ValueError:
        return text.startswith(("usage:", "megatron-pg "))
    return True


def shown(words: Sequence[str]) -> str:
    return ascii([word if len(word) < 200 else f"{word[:40]}… ({len(word)})" for word in words])


# --- command lines ---


def any_value(rng: random.Random, files: Sequence[str]) -> str:
    """A word of the pools, or two of them glued, or a file."""
    pool = rng.choice([NUMBERS, TEXTS, files or TEXTS])
    value = rng.choice(pool)
    return value + rng.choice(pool) if rng.random() < 0.1 else value


def good_value(action: argparse.Action, rng: random.Random) -> str:
    """A value that the flag may well take."""
    if action.choices:
        return str(rng.choice(list(action.choices)))
    if action.type is int:
        return str(rng.choice([1, 2, 4, 8, 64]))
    if action.type is float:
        return rng.choice(["0.2", "0.5", "1", "2", "4096"])
    return rng.choice(["external", "10,100", "reward", "a.b:c", "step"])


def flag_words(action: argparse.Action, rng: random.Random, files: Sequence[str], hostility: float) -> list[str]:
    """A flag and its values, spelt in one of the ways that people spell flags."""
    name = rng.choice(action.option_strings)
    if rng.random() < hostility / 2:
        name = rng.choice(
            [name[: rng.randint(1, len(name))], name + "x", name.replace("-", "_"), name.upper(), name[1:]]
        )
    least, most = {0: (0, 0), None: (1, 1), "?": (0, 1), "+": (1, 3), "*": (0, 3)}.get(action.nargs, (3, 3))
    count = rng.randint(least, most) if rng.random() > hostility / 2 else rng.randint(0, 4)
    values = [any_value(rng, files) if rng.random() < hostility else good_value(action, rng) for _ in range(count)]
    if values and rng.random() < 0.2:
        return [f"{name}={values[0]}", *values[1:]]
    return [name, *values]


def command_line(
    rng: random.Random, actions: Sequence[argparse.Action], files: Sequence[str] = (), most: int = 6
) -> list[str]:
    """Flags of a subcommand in any order, none to `most` of them, some twice, with words between them."""
    hostility = rng.choice([0.02, 0.1, 0.5])
    words = []
    for action in rng.choices(actions, k=rng.randint(0, most)):
        words += flag_words(action, rng, files, hostility)
        if rng.random() < hostility / 4:
            words.append(any_value(rng, files))
    return words


# --- files ---

RAW_NUMBERS = "NaN Infinity -Infinity 1e400 -1e400 1e308 -1e308 1e-400 1E+5 -0 -0.0 0.1e1 01 +1 .5 1. 0x1 1_0 nan tru"
RAW = {  # JSON-like texts that json.dumps does not write
    *RAW_NUMBERS.split(),
    *("9" * 400, "9" * 5000, "-" + "9" * 5000, "1" * 310 + ".5", "[" * 5000 + "]" * 5000, "[" * 200_000),
    *("[1,2,3,4]e5", "[1,1].5", "[1 2]", "[1,]", "{,}", '{"a": 1, "a": 2}', "'a'", '"\\u0061"', '"\\ud800"', '"\\x"'),
    *('{"a":' * 5000 + "1" + "}" * 5000, '"' + "x" * 50_000 + '"', '"\x01"', ""),
}
VALUES = [
    *(None, True, False, 0, 1, -1, 0.5, -0.5, 2**31, 2**62, 2**63, -(2**63), 10**400, 1e308, -1e308, 1e-320, 1e39),
    *("", "x", "0", "\x1b[31m", "\x9b31m", "a\nb", "\u202e", "\ud800", [], {}, [0], [[]], [None], [1.5], ["1"]),
    *({"a": 1}, [-1.0, -2.0], [1, 0], [1e308, -1e308], [1e308, 1e308], [0] * 3000),
]
MARK = "@raw {}@"
ESCAPED = {"step": "st\\u0065p", "tokens": "\\u0074okens", "advantage": "advantag\\u0065"}


class Mutator:
    """Changes records node by node, and their text line by line and byte by byte."""

    def __init__(self, rng: random.Random, values: Sequence[object] = VALUES):
        self.rng, self.values, self._raw = rng, values, sorted(RAW)

    def value(self) -> object:
        """Something else."""
        if self.values is VALUES and self.rng.random() < 0.35:
            return MARK.format(self.rng.randrange(len(self._raw)))
        return self.rng.choice(self.values)

    def record(self, record: object) -> object:
        """The record with one node replaced, removed, doubled or moved."""
        rng = self.rng
        if isinstance(record, dict) and record and rng.random() < 0.95:
            name = rng.choice(list(record))
            way = rng.random()
            if way < 0.08:
                return {key: value for key, value in record.items() if key != name}
            if way < 0.12:
                return record | {
                    rng.choice(["x_a", "a", "\x1b", "", "\ud800", "iteration", "x_" + "y" * 5000]): self.value()
                }
            if way < 0.16:
                return record | {name: record[rng.choice(list(record))]}
            return record | {name: self.record(record[name])}
        if isinstance(record, list) and record and rng.random() < 0.7:
            at, way = rng.randrange(len(record)), rng.random()
            if way < 0.1:
                return record[:at] + record[at + 1 :]
            if way < 0.2:
                return [*record[:at], record[at], *record[at:]]
            return [*record[:at], self.record(record[at]), *record[at + 1 :]]
        return self.value()

    def text(self, records: Sequence[object], *, changes: int) -> bytes:
        """The records as lines of JSON, after `changes` of them."""
        rng, records = self.rng, list(records)
        for _ in range(changes):
            at = rng.randrange(len(records))
            way = rng.random()
            if way < 0.85:
                records[at] = self.record(records[at])
            elif way < 0.9:
                records[at : at + 1] = [records[at]] * 2
            else:
                records.insert(rng.randrange(len(records) + 1), self.value())
        lines = [json.dumps(record, ensure_ascii=rng.random() < 0.5) for record in records]
        text = "\n".join(re.sub(r'"@raw (\d+)@"', lambda found: self._raw[int(found[1])], line) for line in lines)
        if rng.random() < 0.05:
            name = rng.choice(sorted(ESCAPED))
            text = text.replace(f'"{name}"', f'"{ESCAPED[name]}"', rng.randint(1, 2))
        if rng.random() < 0.05:
            text = text.replace("}", ', "step": 0}', 1)
        content = (text + "\n" * (rng.random() < 0.95)).encode("utf-8", "surrogatepass")
        return self.damaged(content) if rng.random() < 0.1 else content

    def damaged(self, content: bytes) -> bytes:
        """A few bytes replaced, removed, flipped, swapped or cut off."""
        rng, found = self.rng, bytearray(content)
        for _ in range(rng.randint(1, 3)):
            if not found:
                break
            at, way = rng.randrange(len(found)), rng.random()
            if way < 0.4:
                found[at] ^= 1 << rng.randrange(8)
            elif way < 0.6:
                found[at : at + rng.choice([0, 1, 5])] = rng.randbytes(rng.choice([0, 1, 3]))
            elif way < 0.8:
                to = rng.randrange(len(found))
                found[at], found[to] = found[to], found[at]
            else:
                del found[at:]
        return bytes(found)


def cases(subject: str, count: int, make: Callable[[random.Random], Sequence[str]]) -> int:
    """Check `count` command lines that `make` draws, each from its own seed; their number."""
    for number in range(count):
        words = make(random.Random(f"{subject} {number}"))
        try:
            check(words)
        except AssertionError as error:
            raise AssertionError(f"{subject}, case {number}: {error}") from error
    return count


def actions_of(add: Callable[[argparse.ArgumentParser], object]) -> list[argparse.Action]:
    """The flags that `add` gives a parser."""
    parser = argparse.ArgumentParser(add_help=False)
    add(parser)
    return [action for action in parser._actions if action.option_strings]


sys.set_int_max_str_digits(4300)  # Python's own default, regardless of the environment says
