"""`megatron-pg compare` against plain loops in float64; what it refuses of a file is in tests/fuzz."""

import json
import math
import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import processes
import pytest
from rollout_files import HEADER, RECORD, write_lines
from step_oracle import Document, denominators

from megatron_pg.cli.rollouts.compare import digest_rollouts


def random_records(rng: random.Random, *, steps: int = 3) -> list[dict]:
    """Steps with uneven groups, fan-out, holes in masks, masked samples, numbers and lists as advantages."""
    records = []
    for step in range(steps):
        for prompt in range(rng.randint(2, 4)):
            for rollout in range(rng.randint(1, 4)):
                for _ in range(rng.choice([1, 1, 2])):
                    length = rng.choice([1, 2, rng.randint(1, 40)])
                    mask = [int(rng.random() < 0.8) for _ in range(length)]
                    records.append(
                        {
                            "step": step,
                            "prompt_id": f"{step}.{prompt}",
                            "rollout_id": 100 * step + 10 * prompt + rollout,
                            "tokens": [rng.randrange(150_000) for _ in range(length + rng.randint(1, 5))],
                            "response_length": length,
                            "loss_mask": mask,
                            "old_logprobs": [-rng.expovariate(1) for _ in range(length)],
                            "reward": rng.choice([0, 1, 0.5]),
                            "advantage": rng.gauss(0, 1)
                            if rng.random() < 0.7
                            else [rng.gauss(0, 1) for _ in range(length)],
                        }
                    )
    records[0]["loss_mask"][0] = 1  # no step without a trained token
    return records


def write(path: Path, records: list[dict], header: object = HEADER) -> Path:
    return write_lines(path, [header, *records])


def oracle(records: list[dict], mode: str, divisor: float) -> dict:
    """Loss, effective share and gradient mass by plain loops over tokens."""
    losses, ess, mass = [], [], defaultdict(float)
    for step in dict.fromkeys(r["step"] for r in records):
        rows = [r for r in records if r["step"] == step]
        ids = [{name: r[name] for name in ("rollout_id", "prompt_id")} for r in rows]
        documents, counts = [Document(None, None, None, **own) for own in ids], [sum(r["loss_mask"]) for r in rows]
        total, weights, loss = sum(counts), [], []
        for r, delta in zip(rows, denominators(documents, counts, mode, divisor), strict=True):
            for t, bit in enumerate(r["loss_mask"]):
                if bit:
                    a = r["advantage"][t] if isinstance(r["advantage"], list) else r["advantage"]
                    weights.append(1 / delta)
                    loss.append(-a / delta)
                    mass[id(r)] += abs(a) / delta
        losses.append(math.fsum(loss))
        ess.append(math.fsum(weights) ** 2 / (total * math.fsum(w * w for w in weights)))
    return {"loss": math.fsum(losses) / len(losses), "ess": math.fsum(ess) / len(ess), "mass": mass}


def close(a, b) -> bool:
    return a == pytest.approx(b, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("seed", range(5))
def test_every_aggregation_agrees_with_plain_loops(seed, tmp_path, cli):
    records = random_records(random.Random(seed))
    said = cli.json("compare --divisor 32 --top 99", write(tmp_path / "r.jsonl", records))
    assert said["trained_tokens"] == sum(sum(r["loss_mask"]) for r in records)
    for mode, result in said["aggregations"].items():
        expected = oracle(records, mode, 32.0)
        total = math.fsum(expected["mass"].values())
        assert close(result["loss"], expected["loss"])
        assert close(result["aggregation_ess"], expected["ess"])
        assert close(result["gradient_mass"], total)
        for row in said["by_prompt"]:
            mass = math.fsum(expected["mass"][id(r)] for r in records if r["prompt_id"] == row["prompt_id"])
            assert close(row["share"][mode], mass / total)
        for row in said["by_length"]:
            low, _, high = row["length"].partition("-")
            inside = [r for r in records if int(low) <= r["response_length"] <= int(high or low)]
            assert row["samples"] == len(inside)
            assert close(row["share"][mode], math.fsum(expected["mass"][id(r)] for r in inside) / total)
        assert sum(row["share"][mode] for row in said["by_length"]) == pytest.approx(1)


def test_lengths_of_ten_a_thousand_a_hundred_and_four_hundred(tmp_path, cli):
    """The published figures: sample_mean has 141 effective tokens of 1510, and one token has 37.75 times the mean."""
    records = [
        RECORD
        | {"prompt_id": i, "rollout_id": i, "tokens": [1] * (n + 1), "response_length": n, "loss_mask": [1] * n}
        | {"old_logprobs": [-1.0] * n, "advantage": 1.0}
        for i, n in enumerate((10, 1000, 100, 400))
    ]
    said = cli.json("compare", write(tmp_path / "r.jsonl", records))["aggregations"]
    assert said["sample_mean"]["aggregation_ess"] * 1510 == pytest.approx(140.97, abs=0.01)
    assert said["sample_mean"]["heaviest_token"] == pytest.approx(37.75)
    assert said["token_mean"]["aggregation_ess"] == pytest.approx(1)
    assert said["sample_mean"]["effective_prompts"] == pytest.approx(4)


def test_without_a_divisor_constant_has_shares_and_no_loss(tmp_path, cli):
    path = write(tmp_path / "r.jsonl", random_records(random.Random(0)))
    constant = cli.json("compare", path)["aggregations"]["constant"]
    assert (constant["loss"], constant["gradient_mass"]) == (None, None)
    assert constant["aggregation_ess"] == pytest.approx(1)
    assert "needs --divisor" in cli.done("compare", path)


def test_the_text_shows_every_aggregation_and_the_heaviest_prompts(tmp_path, cli):
    out = cli.done("compare --top 2", write(tmp_path / "r.jsonl", random_records(random.Random(0))))
    modes = ["sample_mean", "prompt_mean", "token_mean", "constant"]
    first_words = [line.split()[0] for line in out.splitlines() if line.split()]
    assert [word for word in first_words if word in modes] == modes
    assert sum(word.startswith(("0.", "1.", "2.")) for word in first_words) == 2


def test_no_advantage_means_no_shares(tmp_path, cli):
    path = write(tmp_path / "r.jsonl", [RECORD | {"advantage": 0}])
    assert cli.json("compare", path)["by_prompt"][0]["share"]["sample_mean"] is None
    assert "–" in cli.done("compare", path)


def test_terms_are_counted_and_the_objective_is_compared_alone(tmp_path, cli):
    supervised = {k: v for k, v in RECORD.items() if k not in ("old_logprobs", "advantage", "reward")}
    of_term = [supervised | {"rollout_id": i, "term": "sft", "loss_mask": [1, 1]} for i in (7, 8)]
    header = HEADER | {"version": 3}
    path = write(tmp_path / "mixed.jsonl", [RECORD | {"masks": {"echo": [0, 1]}}, *of_term], header)
    document = cli.json("compare", path)
    assert (document["samples"], document["trained_tokens"]) == (1, 1)
    counted = [(s["term"], s["samples"], s["rollouts"], s["trained_tokens"]) for s in document["terms"]]
    assert counted == [("rl", 1, 1, 1), ("echo", 1, 1, 1), ("sft", 2, 2, 4)]
    assert "scales the objective by its share, 16.7%" in cli.done("compare", path)
    message = cli.refused("compare", write(path, of_term, header))
    assert "no sample is of the objective's loss term rl, only of " in message


# --- refusals ---


def two_steps(*changes: dict) -> list[dict]:
    return [RECORD | {"step": i, "prompt_id": i, "rollout_id": i} | change for i, change in enumerate(changes)]


BAD_FILES = {
    "empty": (b"", "contains no sample"),
    "a header only": (json.dumps(HEADER).encode() + b"\n", "contains no sample"),
    "another format": (b'{"a": 1}\n', "header has format None"),
    "cut short": (json.dumps(HEADER).encode() + b'\n{"step": 1, "tok', "The line has no end"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_line_and_nothing_is_written(name, tmp_path, cli):
    content, message = BAD_FILES[name]
    path, picture = tmp_path / "r.jsonl", tmp_path / "out.png"
    path.write_bytes(content)
    assert message in cli.refused("compare", path, "--output", picture)


@pytest.mark.parametrize("name", ["absent.jsonl", ".", "a\0b", "\x1b[31m.jsonl"])
def test_an_unreadable_path_is_named(name, tmp_path, cli):
    assert cli.refused("compare", tmp_path / name).rstrip("\n").isprintable()


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (two_steps({}, {"prompt_id": 0}), "prompt group 0 has samples in steps 0 and 1"),
        (two_steps({}, {"rollout_id": 0}), "rollout 0 has samples in steps 0 and 1"),
        (two_steps({}, {"loss_mask": [0, 0]}), "step 1: the step has no trained token"),
        (two_steps({}, {"step": 0, "rollout_id": 0}), "belongs to prompt groups"),
    ],
)
def test_units_that_cannot_be_counted_are_named(records, message, tmp_path, cli):
    assert message in cli.refused("compare", write(tmp_path / "r.jsonl", records))


def test_samples_of_a_critic_and_weights_of_tokens_are_refused(tmp_path, cli):
    critics = {"values": [0.0, 0.0], "returns": [0.0, 0.0], "rollout_id": "c"}
    records = [{name: RECORD[name] for name in RECORD if name not in ("advantage", "old_logprobs")} | critics, RECORD]
    message = cli.refused("compare", write(tmp_path / "r.jsonl", records, HEADER | {"version": 3}))
    assert "r.jsonl: sample r.jsonl:2 has no advantage, and gradient mass is w·|A|." in message
    weighted = [RECORD | {"token_weights": [1.0, 2.0]}]
    message = cli.refused("compare", write(tmp_path / "r.jsonl", weighted, HEADER | {"version": 3}))
    assert "r.jsonl: sample r.jsonl:2 has token_weights, and the comparison counts tokens." in message


def test_samples_of_other_terms_are_not_the_objectives(tmp_path):
    """No aggregation of the objective counts them, even if they have advantages."""
    header = HEADER | {"version": 3}
    records = random_records(random.Random(5))
    of_term = [
        {name: value for name, value in record.items() if name not in ("old_logprobs", "reward")}
        | {"term": "sft", "prompt_id": f"sft {i}", "rollout_id": f"sft {i}"}
        for i, record in enumerate(records[:4])
    ]
    alone, mixed = (
        digest_rollouts(write(tmp_path / f"{len(rows)}.jsonl", rows, header)) for rows in (records, of_term + records)
    )
    assert mixed[0] == alone[0]


@pytest.mark.parametrize("advantage", [1e308, -1e308, [1e38, 3e38]])
def test_an_advantage_beyond_float32_is_named(advantage, tmp_path, cli):
    """Sums of it overflow; training would compute its loss in float32."""
    big = RECORD | {"rollout_id": "big", "loss_mask": [1, 1], "advantage": advantage}
    message = cli.refused("compare --json", write(tmp_path / "r.jsonl", [RECORD, big]))
    assert "r.jsonl: the advantages of rollout big in step 0 add up to " in message
    cli.done("compare", write(tmp_path / "r.jsonl", [RECORD | {"advantage": 1e38}]))


BAD_OPTIONS = {
    "--divisor 0": "not finite and > 0",
    "--divisor inf": "not finite and > 0",
    "--divisor x": "--divisor 'x' is not a number.",
    "--divisor 1e300": "--divisor 1e+300 is not finite and > 0, or 1/L is not a normal float32",
    "--top -1": "--top -1 is negative",
    "--output out.gif": "the suffix is not one of .png, .svg, .pdf",
    "--output nowhere/out.png": "its folder does not exist",
    "--output taken.png": "already exists",
}


@pytest.mark.parametrize("words", BAD_OPTIONS)
def test_bad_options_are_refused_before_anything_is_read(words, tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.png").write_bytes(b"mine")
    assert BAD_OPTIONS[words] in cli.refused("compare absent.jsonl", words)


# --- pictures ---


def test_the_picture_is_drawn_and_replaced_only_when_asked(tmp_path, cli):
    pytest.importorskip("matplotlib")
    path, picture = write(tmp_path / "r.jsonl", random_records(random.Random(0))), tmp_path / "out.png"
    picture.write_text("mine")
    assert "already exists" in cli.refused("compare", path, "--output", picture)
    cli.done("compare", path, "--overwrite --output", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.png", "r.jsonl"]


def test_the_picture_has_whole_prompts_and_shows_coinciding_curves(tmp_path, cli, monkeypatch):
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(plt, "close", lambda figure: None)
    path = write(tmp_path / "r.jsonl", [RECORD, RECORD | {"prompt_id": "other", "rollout_id": "other"}])  # all equal
    cli.done("compare", path, "--output", tmp_path / "out.png")
    _, axes = plt.gcf().axes
    assert all(tick == int(tick) for tick in axes.get_xticks())
    assert [list(line.get_ydata()) for line in axes.lines] == [[0, 50.0, 100.0]] * 4
    assert len({(line.get_linewidth(), line.get_linestyle()) for line in axes.lines}) == 4
    widths = [line.get_linewidth() for line in axes.lines]
    assert widths == sorted(widths, reverse=True)  # the later one lies on top
    monkeypatch.undo()
    plt.close("all")


def test_without_matplotlib_there_is_a_message(tmp_path, cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = write(tmp_path / "r.jsonl", [RECORD])
    message = cli.refused("compare", path, "--output", tmp_path / "out.svg")
    assert "matplotlib cannot be imported" in message
    assert "pip install matplotlib" in message
    cli.done("compare", path)


def without_packages(command: str) -> subprocess.CompletedProcess:
    """The command line without numpy and torch, in a separate process, where nothing is imported yet."""
    code = (
        "import sys; sys.modules |= {'numpy': None, 'torch': None}; from megatron_pg.cli import main; "
        f"sys.exit(main({command.split()!r}))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=processes.PACKAGE)


def test_without_a_package_there_is_a_message_and_the_help(tmp_path):
    done = without_packages("compare x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("megatron-pg compare: compare needs torch, which is not installed")
    assert done.stderr.count("\n") == 1
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    command = [sys.executable, "-m", "megatron_pg", "compare", "x"]
    done = subprocess.run(command, env=processes.environment(tmp_path), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "megatron-pg compare: compare needs torch, which cannot be imported (OSError: libcudart.so.12: cannot open "
        "shared object file). Repair the installation; megatron-pg doctor checks it.\n"
    )
    done = without_packages("compare --help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--divisor L" in done.stdout


# --- size ---

GIBIBYTES = 2.0  # 0.3 GiB are needed


def test_a_large_file_is_compared_in_little_memory(tmp_path, full):
    """100,000 samples of 200 response tokens."""
    if not full:
        pytest.skip("runs in the full tier")
    samples = 100_000
    path, rng = tmp_path / "r.jsonl", random.Random(0)
    with path.open("w") as file:
        file.write(json.dumps(HEADER) + "\n")
        for i in range(samples):
            n = rng.randint(1, 400)
            record = RECORD | {"prompt_id": i // 8, "rollout_id": i, "tokens": rng.choices(range(150_000), k=n + 20)}
            record |= {"response_length": n, "loss_mask": [1] * n, "old_logprobs": [-rng.random() for _ in range(n)]}
            file.write(json.dumps(record) + "\n")
    (tmp_path / "measured.py").write_text(
        "import resource, sys\n"
        "from megatron_pg.cli import main\n"
        "if __name__ == '__main__':\n"
        f"    assert main(['compare', {str(path)!r}, '--json']) == 0\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)\n"
    )
    command = [sys.executable, str(tmp_path / "measured.py")]
    done = subprocess.run(command, env=processes.environment(), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["samples"] == samples
    assert int(done.stderr.splitlines()[-1]) < GIBIBYTES * 2**20  # KiB
