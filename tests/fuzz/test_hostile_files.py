"""Any file: it is read, or one line names the mistake, without raw control characters."""

import itertools
import json
import random
from pathlib import Path

import dumps_of_others as dumps
import hostile
import pytest
import rollout_files
import torch
from hostile import Mutator
from rollout_files import HEADER, RECORD

from megatron_pg import RolloutFileError, read_rollouts
from megatron_pg.cli.rollouts.compare import digest_rollouts

FILES = "Fuzz: files that the subcommands read: done or one line of an error"
ROLLOUTS = [
    HEADER,
    RECORD,
    RECORD | {"rollout_id": "r1", "advantage": [0.5, -1.5], "rollout_logprobs": [-1.19e-07, -2.0], "x_note": "1 [2]"},
    RECORD | {"step": 1, "prompt_id": 7, "rollout_id": 2, "truncated": True, "ref_logprobs": [-0.0, -1e-30]},
]
METRICS = [
    {"iteration": 1, "objective": {"pg_loss": "x"}, "reward": 0.5, "num_tokens": 12, "kl_new_old": 1e-9},
    {"iteration": 2, "reward": None, "entropy": 0.9, "num_tokens": 9, "nonfinite": [{"metric": "reward", "rank": 0}]},
    {"iteration": 3, "reward": -2.5, "entropy": 0.1, "num_tokens": 9, "clipped_ratio_fraction": 0.9, "my_own": 3},
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.proof("Fuzz: rollout files: what read_rollouts refuses, compare refuses with its message, and no other")
def test_compare_reads_what_training_reads(full, evidence):
    count, refused = 20_000 if full else 120, 0
    for number in range(count):
        rng = random.Random(number)
        Path("rollouts.jsonl").write_bytes(Mutator(rng).text(ROLLOUTS, changes=rng.choice([0, 1, 1, 2])))
        readings = reading(read_rollouts), reading(lambda path: digest_rollouts(path)[0])
        if isinstance(readings[0], str):
            assert readings[0] == readings[1], number
            assert readings[0].isprintable(), number
            refused += 1
        else:
            assert [tuple(row) for row in readings[1]] == [facts(sample) for sample in readings[0]], number
    assert count / 3 < refused < count
    evidence(cases=count)


def reading(read) -> list | str:
    try:
        return read("rollouts.jsonl")
    except RolloutFileError as error:
        return str(error)


def facts(sample) -> tuple:
    """What `compare` needs of a sample, in plain Python."""
    pairs = zip(sample.advantages.tolist(), sample.loss_mask.tolist(), strict=True)
    trained = [advantage for advantage, is_trained in pairs if is_trained]
    magnitude = sum(map(abs, trained))
    near = [pytest.approx(value, abs=1e-12 * min(magnitude, 1e300)) for value in (sum(trained), magnitude)]
    return (sample.step, sample.prompt_id, sample.rollout_id, len(sample.loss_mask), len(trained), *near)


# --- what each subcommand reads ---


def verl_rows() -> list[dict]:
    rows = [{"input": "2+2=", "output": "4", "score": float(i % 2), "step": 3, "uid": f"u{i // 2}"} for i in range(4)]
    lists = {"prompt_ids": [1, 2], "response_ids": [3, 4], "response_mask": [1, 0], "old_logprobs": [-1.0, -2.0]}
    return [row | lists for row in rows]


def two_sides_rows() -> list[dict]:
    """Samples with everything that `mismatch` reads."""
    topk = {"ids": [[3, 4]] * 12, "logprobs": [[-0.5, -1.5]] * 12}
    origin = {"rollout_topk": topk, "weight_version": [0] * 6 + [1] * 6, "worker": "w", "data_parallel_rank": 0}
    rows = rollout_files.two_sides(random.Random(0), documents=14, x_node="n", **origin)
    lists = ("tokens", "loss_mask", "old_logprobs", "rollout_logprobs")
    short = [row | {name: row[name][: 12 + (name == "tokens")] for name in lists} for row in rows]
    return [HEADER | {"version": 3}, *(row | {"response_length": 12} for row in short)]


NEMO = "convert --format nemo_rl --group-size"
MISMATCH = "mismatch --by x_node --engine temperature=0.7,top_p=0.9 --trainer-temperature"
TEXTS = {  # records, and the commands that read them
    "rollouts.jsonl": (ROLLOUTS, ["compare", "compare --json", "compare --divisor 1e30 --top 1"]),
    "sides.jsonl": (two_sides_rows(), ["mismatch", f"{MISMATCH} 1", f"{MISMATCH} 0.7 --json"]),
    "metrics.jsonl": (METRICS, ["plot", "plot --json --x tokens", "plot --smooth 0.9 --x tokens"]),
    "verl.jsonl": (verl_rows(), [f"convert --format verl --advantage {rule}" for rule in ("rloo", "max_rl", "reward")]),
    "train_data_step7.jsonl": (dumps.NEMO, [f"{NEMO} 2", f"{NEMO} 3 --json"]),
    "lines.jsonl": (
        [{**RECORD, "rollout_id": i} for i in range(3)],
        ["convert --format jsonl", "convert --format jsonl --advantage group_norm --json"],
    ),
}


@pytest.mark.proof(FILES)
@pytest.mark.parametrize("name", TEXTS)
def test_a_file_of_text(name, full, evidence):
    records, commands = TEXTS[name]

    def words(rng: random.Random) -> list[str]:
        Path(name).write_bytes(Mutator(rng).text(records, changes=rng.choice([0, 1, 1, 2, 4])))
        command = rng.choice(commands).split()
        return [*command, name, *(["--output", "out", "--overwrite"] if command[0] == "convert" else [])]

    evidence(cases=hostile.cases(name, 5_000 if full else 20, words))


@pytest.mark.proof(FILES)
def test_a_picture_or_page_of_a_file(full, evidence):
    def words(rng: random.Random) -> list[str]:
        pictures = (
            ("compare", "a.png"),
            ("plot", "a.svg"),
            ("plot", "a.png"),
            ("report", "a.html"),
            ("mismatch", "a.png"),
        )
        command, output = rng.choice(pictures)
        name = {"compare": "rollouts.jsonl", "mismatch": "sides.jsonl"}.get(command, "metrics.jsonl")
        Path(name).write_bytes(Mutator(rng).text(TEXTS[name][0], changes=rng.choice([1, 2])))
        return [command, name, "--output", output, "--overwrite"]

    evidence(cases=hostile.cases("pictures", 1_000 if full else 4, words))


def shared(depth: int) -> list:
    """A list whose text doubles with every level."""
    nested: list = [0]
    for _ in range(depth):
        nested = [nested, nested]
    return nested


def endless() -> list:
    itself: list = []
    itself.append(itself)
    return itself


TENSORS = [
    *(torch.tensor(1), torch.tensor(1.5), torch.tensor(torch.nan), torch.tensor([1, 2]), torch.tensor([[1, 0, 1]])),
    *(torch.eye(2).to_sparse(), torch.zeros(3, device="meta"), torch.tensor(1, device="meta"), torch.zeros(0)),
    *(torch.zeros(1).expand(10**13), torch.zeros(3, dtype=torch.complex64), torch.zeros(3, dtype=torch.bfloat16)),
    *(torch.full((3,), 1e308, dtype=torch.float64), torch.tensor([True, False, True])),
    torch.nn.Parameter(torch.ones(3)),
]
OBJECTS = [
    *(*hostile.VALUES, *TENSORS, float("nan"), float("inf"), shared(50), endless(), (1, 2, 3), {1, 2}, b"bytes", 1j),
    *(10**5000, {"a": shared(50)}, {1: 2}, {None: 1}, torch.float32, torch.Size([1]), {"reward": float("nan")}),
]
MASKED = {"rollout_position": 0, "log_probs": [-1.0, -2.0, -3.0], "advantages": [0.5] * 3}
TRAINED = {
    "format_version": 2,
    "rollout_id": 0,
    "samples": [MASKED | {"rollout_position": i, "tokens": row["tokens"]} for i, row in enumerate(dumps.SLIME)],
    "dp_shards": [
        {"partition": list(range(6)), "num_microbatches": [1, 2], "micro_batch_indices": [[0, 1, 2], [3, 4], [5]]}
    ],
}


UNREADABLE = {
    "sparse": torch.eye(2).to_sparse(),
    "without data": torch.zeros(3, device="meta"),
    "of one number shown 10^13 times": torch.zeros(1).expand(10**13),
    "a list of tensors": [torch.tensor([1, 2])] * 5,
    "a list that holds itself twice": shared(50),
    "a list that holds itself": endless(),
}


@pytest.mark.parametrize("value", UNREADABLE.values(), ids=list(UNREADABLE))
def test_what_was_found_of_tensors_is_refused(value):
    def convert(words: str, **changes: object) -> int:
        torch.save({"rollout_id": 4, "samples": [dumps.SLIME[0] | changes, *dumps.SLIME[1:]]}, "dump.pt")
        return hostile.check(["convert", "dump.pt", "--format", "slime", "--output", "out", *words.split()]).code

    for name in ("tokens", "loss_mask", "reward", "index", "group_index", "rollout_id", "rollout_log_probs"):
        assert convert("--advantage reward --old-logprobs rollout", **{name: value}) == 2, name
    assert convert("--advantage reward --old-logprobs rollout", status=value) == 0
    torch.save(TRAINED, "train.pt")
    for name in ("remove_sample", "tokens"):
        assert convert("--train-data train.pt --overwrite", **{name: value}) == 2, name
    for name in ("format_version", "samples", "dp_shards"):
        torch.save(TRAINED | {name: value}, "train.pt")
        assert convert("--train-data train.pt --overwrite") == 2, name


@pytest.mark.parametrize("keep", [0.0, 1.0, True])
@pytest.mark.parametrize("bit", ["x", [1], 10**400, None, 0.5])
def test_a_mask_of_something_else_is_refused(bit, keep):
    row = dumps.nemo_row(0, [1, 2], [5, 6, 7], [1, bit, 1], sample_loss_mask=[keep])
    Path("a.jsonl").write_text(json.dumps(row) + "\n")
    words = ["convert", "a.jsonl", "--format", "nemo_rl", "--group-size", "1", "--step", "1", "--output", "out"]
    assert hostile.check(words).code == (0 if keep == 0 else 2)


@pytest.mark.proof(FILES)
def test_a_file_of_tensors(full, evidence):
    def words(rng: random.Random) -> list[str]:
        objects, texts = Mutator(rng, OBJECTS), Mutator(rng)
        for name, dump in (("dump.pt", {"rollout_id": 4, "samples": dumps.SLIME}), ("train.pt", TRAINED)):
            for _ in range(rng.choice([0, 1, 1, 2])):
                dump = objects.record(dump)
            torch.save(dump, name, _use_new_zipfile_serialization=rng.random() < 0.8)
            if rng.random() < 0.15:
                Path(name).write_bytes(texts.damaged(Path(name).read_bytes()))
        advantage = ["--advantage", rng.choice(["rloo", "reward"])]
        if rng.random() < 0.4:
            advantage = ["--train-data", "train.pt"]
        more = ["--old-logprobs", "rollout"] if rng.random() < 0.7 else []
        more += ["--reward-key", "a"] if rng.random() < 0.1 else []
        framework = rng.choice(["slime", "miles"])
        return ["convert", "dump.pt", "--format", framework, *advantage, *more, "--output", "out", "--overwrite"]

    evidence(cases=hostile.cases("tensors", 8_000 if full else 30, words))


SYMBOLS = "+ ( ) { ; & | <<EOF > 2>&1 ' \" $' $( ` \\ $ * # $1 ${X:-1} python uv env A=1 -m -- t.py --pg-objective é"
WORDS = [
    *SYMBOLS.split(),
    *("--nnodes", "\n", "\r\n", "\x1b[31m", "\udcff", "x" * 5000, "\n" * 3000, "( exec " * 1000, "/" * 3000),
    *("a" * 50_000, "$((9**99))", "megatron_pg command line: "),
]


@pytest.mark.proof(FILES)
def test_a_command_line(full, evidence):
    good = "+ mkdir -p a\n+ torchrun --nproc-per-node 4 t.py --pg-objective grpo --micro-batch-size 2 'a b'\n"

    def words(rng: random.Random) -> list[str]:
        parts = list(itertools.chain(*([*line.split(" "), "\n"] for line in good.split("\n"))))
        for _ in range(rng.randint(0, 4)):
            at = rng.randrange(len(parts))
            parts[at : at + rng.randint(0, 2)] = rng.choices(WORDS, k=rng.randint(0, 2))
        text = " ".join(parts).encode("utf-8", "surrogateescape")
        Path("job.txt").write_bytes(Mutator(rng).damaged(text) if rng.random() < 0.1 else text)
        return [rng.choice(["validate", "explain"]), "--args-file", "job.txt"]

    evidence(cases=hostile.cases("command lines", 4_000 if full else 25, words))
