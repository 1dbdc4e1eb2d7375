"""Lines of rollout files, good ones, bad ones and damaged ones."""

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path

from megatron_pg.rollouts.lines import FORMAT

HEADER = {"format": FORMAT, "version": 1}
RECORD = {
    "step": 0,
    "prompt_id": "p0",
    "rollout_id": 0,
    "tokens": [5, 6, 7, 8],
    "response_length": 2,
    "loss_mask": [1, 0],
    "old_logprobs": [-1.5, -2.0],
    "reward": 1.0,
    "advantage": 0.5,
}


def write_lines(path: Path, records: Iterable[object]) -> Path:
    """A file of JSON, one record a line; bytes are written as they are."""
    lines = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


class Loud:
    """Leaves a file when it is unpickled."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self):
        return Path.touch, (self.flag,)


# --- rollout files ---

CONTROL = ["a\nb", "\x1b[31mred", "a\0b", "\x7f", "\u202eabc", "a\u2028b", "\ud800", "tab\t"]
BAD_ANYWHERE = [
    *(None, True, {}, {"a": 1}, [[]], [None], ["1"], [True], [1, [2]], 10**400, [10**400], "\x1b[2J", "\ud800")
]
BAD_IN = {
    "step": [-1, 1.5, "x", [0]],
    "prompt_id": [1.5, 2**63, -(10**30), [0]],
    "rollout_id": [1.5, 2**63, -(10**30), [0]],
    "tokens": [-1, "5678", [], [5], [1.5] * 4, [-1] * 4, [2**31] * 4, [10**30] * 4, ["a" * 100_000]],
    "response_length": [0, -1, 3, 4, 1.5, "2", 10**30, [2]],
    "loss_mask": [1, "11", [], [1], [1, 2], [0.5, 1], [1, -1], [1, 10**30], [1] * 100_000],
    "old_logprobs": [-1.0, "x", [], [-1.0], [0.7, -1.0], [10**30, -1.0], [-1.0] * 100_000],
    "reward": ["x", "a" * 100_000, [1.0]],
    "advantage": ["x", [], [1.0], [1.0] * 3, ["1", "2"]],
}
DEEP = ["[" * 100_000, '{"x_a":' * 100_000, '{"step": ' + "[" * 5000 + "]" * 5000 + "}"]


def malformed_lines() -> list[bytes]:
    """Second lines of a file, each bad in one way."""
    text = json.dumps(RECORD)
    fields = [RECORD | {name: bad} for name, own in BAD_IN.items() for bad in [*BAD_ANYWHERE, *own]]
    missing = [{k: v for k, v in RECORD.items() if k != name} for name in RECORD]
    ids = [RECORD | {name: value} for name in ("prompt_id", "rollout_id") for value in CONTROL]
    names = [RECORD | {name: 1} for name in [*CONTROL, "y" * 100_000, "__class__", "advantages"]]
    constants = [text.replace("-1.5", word) for word in ("NaN", "Infinity", "-Infinity", "-1e999", "nan", "0x1", "1_0")]
    repeated = [text[:-1] + f', "{name}": 0}}' for name in [*RECORD, "x" * 100_000] for _ in range(2)]
    repeated = [line.replace('"' + "x" * 100_000 + '": 0}', '"xx": 0, "xx": 1}') for line in repeated]
    cut = [text[:i] for i in range(0, len(text), 7)]
    other = ["", "null", "1", '"a"', "[]", "{}", text + text, "// no", f"'{text}'", f"\ufeff{text}", "9" * 5000, *DEEP]
    lines = [json.dumps(record) for record in [*fields, *missing, *ids, *names]]
    lines += [*constants, *repeated, *cut, *other]
    return [line.encode() for line in lines] + [b"\xff\xfe", b"\x80\x04\x95", b"\0" * 100, b"PK\x03\x04", b"\x93NUMPY"]


def damaged(content: bytes, rng: random.Random) -> bytes:
    """The content with a few bytes replaced, inserted or removed."""
    found = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found))
        found[at : at + rng.choice([0, 1, 1, 5])] = rng.randbytes(rng.choice([0, 1, 1, 3]))
    return bytes(found)


def two_sides(rng: random.Random, *, documents: int = 30, temperature: float = 1.0, **rest) -> list[dict]:
    """Samples over a few tokens of known logits, drawn by the engine; the trainer divides them by `temperature`."""
    found = []
    for number in range(documents):
        engine, trainer, tokens = [], [], [7]
        for _ in range(40):
            logits = [rng.gauss(0, 2) for _ in range(12)]
            weights = [math.exp(each) for each in logits]
            token = rng.choices(range(12), weights)[0]
            scaled = [each / temperature for each in logits]
            engine.append(math.log(weights[token] / sum(weights)))
            of_trainer = scaled[token] - math.log(sum(map(math.exp, scaled))) + rng.gauss(0, 0.005)
            trainer.append(min(of_trainer, 0.0))
            tokens.append(token)
        ids = {"step": number % 3, "prompt_id": number, "rollout_id": number, "tokens": tokens}
        response = {"response_length": 40, "loss_mask": [1] * 40, "reward": 0.0, "advantage": 0.0}
        found.append(ids | response | {"old_logprobs": trainer, "rollout_logprobs": engine} | rest)
    return found
