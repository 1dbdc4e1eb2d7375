"""`megatron-pg convert` of several files: advantages over whole prompt groups, names, steps and the version."""

import io
import json
import random
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from dumps_of_others import slime_sample

from megatron_pg import read_rollouts
from megatron_pg.cli import main


@pytest.fixture
def convert(tmp_path, capsys):
    """Exit code and what is said of a conversion."""

    def run(paths: list, *words: str) -> tuple[int, str]:
        code = main(["convert", *map(str, paths), "--output", str(tmp_path / "out.jsonl"), "--overwrite", *words])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


@pytest.fixture
def files(tmp_path):
    """The paths of text files with these lines."""

    def write(*parts: list[dict], name: str = "part{}.jsonl") -> list[Path]:
        paths = [tmp_path / name.format(i) for i in range(len(parts))]
        for path, lines in zip(paths, parts, strict=True):
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return paths

    return write


def line(prompt, reward: float, step: int = 0, **more) -> dict:
    fields = {"prompt_id": prompt, "reward": reward, "step": step, "tokens": [1, 2, 3], "response_length": 2}
    return fields | {"loss_mask": [1, 1], "old_logprobs": [-0.5, -1.0]} | more


def advantages(tmp_path) -> list[float]:
    return [float(sample.advantages[0]) for sample in read_rollouts(tmp_path / "out.jsonl")]


def test_a_prompt_group_in_two_files_has_one_mean(convert, files, tmp_path):
    first, *others = (line("q", reward, rollout_id=i) for i, reward in enumerate([1.0, 0.0, 0.0, 0.0]))
    paths = files([first, others[0]], others[1:])
    code, said = convert(paths, "--format", "jsonl", "--advantage", "group_mean")
    assert code == 0, said
    assert advantages(tmp_path) == [0.75, -0.25, -0.25, -0.25]
    assert "gradient" not in said


def test_equal_inputs_in_two_files_of_a_step_are_one_prompt_for_verl(convert, files, tmp_path):
    def row(text: str, reward: float, step: int = 5) -> dict:
        return {name: value for name, value in line(None, reward, step).items() if name != "prompt_id"} | {
            "input": text
        }

    parts = [row("a", 1.0), row("b", 1.0), row("a", 0.0)], [row("b", 0.0), row("a", 0.0), row("a", 0.0)]
    paths = files(*parts, [row("a", 1.0, 6), row("a", 0.0, 6)])
    code, said = convert(paths, "--format", "verl", "--advantage", "group_mean")
    assert code == 0, said
    assert advantages(tmp_path) == [0.75, 0.5, -0.25, -0.5, -0.25, -0.25, 0.5, -0.5]
    samples = read_rollouts(tmp_path / "out.jsonl")
    assert [sample.prompt_id for sample in samples] == ["5/0", "5/1", "5/0", "5/1", "5/0", "5/0", "6/0", "6/0"]
    assert len({sample.rollout_id for sample in samples}) == 8


def test_two_dumps_of_slime_of_one_rollout_batch_are_one_step(convert, tmp_path):
    rewards, paths = [1.0, 0.0, 0.0, 0.0], [tmp_path / "a.pt", tmp_path / "b.pt"]
    samples = [slime_sample(i, 0, reward) for i, reward in enumerate(rewards)]
    for path, part in zip(paths, (samples[:2], samples[2:]), strict=True):
        torch.save({"rollout_id": 12, "samples": part}, path)
    code, said = convert(paths, "--format", "slime", "--old-logprobs", "rollout", "--advantage", "group_mean")
    assert code == 0, said
    assert advantages(tmp_path) == [0.75, -0.25, -0.25, -0.25]


def exact(rule: str, rewards: list[Fraction]) -> list[Fraction]:
    """The rules without a root, by their definition."""
    size, total = len(rewards), sum(rewards)
    if rule == "rloo":
        return [reward - (total - reward) / (size - 1) for reward in rewards]
    centered = [reward - total / size for reward in rewards]
    return centered if rule == "group_mean" or not total else [value / (total / size) for value in centered]


@pytest.mark.proof("Advantages: convert over random splits of steps into files, against exact fractions")
def test_advantages_do_not_depend_on_how_steps_are_split_into_files(convert, files, tmp_path, full, evidence):
    count, worst = 400 if full else 12, 0.0
    for seed in range(count):
        rng = random.Random(seed)
        rule = rng.choice(["group_mean", "rloo", "max_rl"])
        lines, expected = [], {}
        for prompt in range(rng.randint(1, 6)):
            step = rng.randrange(3)
            rewards = [
                Fraction(rng.randrange(2) if rule == "max_rl" else rng.randint(-9, 9)) for _ in range(rng.randint(2, 5))
            ]
            for turn, (reward, wanted) in enumerate(zip(rewards, exact(rule, rewards), strict=True)):
                name = f"{prompt}/{turn}"
                expected[name] = wanted
                turns = rng.choice([1, 1, 2])  # samples of a rollout
                lines.append([line(prompt, float(reward), step, rollout_id=name, x_part=i) for i in range(turns)])
        rng.shuffle(lines)
        cuts = sorted(rng.sample(range(1, len(lines)), min(rng.randrange(4), len(lines) - 1)))
        bounds = zip([0, *cuts], [*cuts, len(lines)], strict=True)
        parts = [[record for rollout in lines[low:high] for record in rollout] for low, high in bounds]
        code, said = convert(files(*parts), "--format", "jsonl", "--advantage", rule)
        assert code == 0, said
        for sample in read_rollouts(tmp_path / "out.jsonl"):
            wanted = float(expected[sample.rollout_id])
            worst = max(worst, abs(float(sample.advantages[0]) - wanted) / max(abs(wanted), 1.0))
    evidence(cases=count, worst=worst, tolerance=1e-15)


def test_a_prompt_in_two_steps_is_refused(convert, files):
    paths = files([line("q", 1.0), line("q", 0.0)], [line("q", 0.0, 1), line("q", 0.0, 1)])
    code, said = convert(paths, "--format", "jsonl", "--advantage", "group_mean")
    assert code == 2
    assert "part1.jsonl:1: prompt_id 'q' is also in step 0, but must be in one step." in said


def test_an_undefined_advantage_names_the_option(convert, files):
    code, said = convert(files([line("q", 1.0)], [line("p", 0.0)]), "--format", "jsonl", "--advantage", "rloo")
    assert code == 2
    assert said.startswith("megatron-pg convert: --advantage rloo: prompt 'q' has one rollout")


def test_one_step_for_all_files_is_an_option(convert, files, tmp_path):
    def row(first: int, reward: float) -> dict:
        record = line(None, reward, tokens=[first, 2, 3])
        return {name: value for name, value in record.items() if name not in ("step", "prompt_id")}

    paths = files([row(1, 1.0), row(1, 0.0)], [row(1, 0.0), row(1, 0.5)])
    words = ("--format", "jsonl", "--step", "7", "--group-size", "2", "--advantage", "group_mean")
    code, said = convert(paths, *words)
    assert code == 0, said
    samples = read_rollouts(tmp_path / "out.jsonl")
    assert [(sample.step, sample.prompt_id) for sample in samples] == [(7, "7/0"), (7, "7/0"), (7, "7/1"), (7, "7/1")]
    assert [sample.rollout_id for sample in samples] == ["7/0", "7/1", "7/2", "7/3"]
    assert advantages(tmp_path) == [0.5, -0.5, -0.25, 0.25]  # a group of consecutive lines lies in one file


def test_a_group_of_lines_lies_in_one_step(convert, files):
    rows = [{name: value for name, value in line(None, 1.0, step).items() if name != "prompt_id"} for step in (0, 1)]
    code, said = convert(files(rows), "--format", "jsonl", "--group-size", "2", "--advantage", "reward")
    assert code == 2
    assert "part0.jsonl:2: its step differs from the first row of its group. Correct --group-size 2." in said


def test_one_file_given_twice_is_refused(convert, files, tmp_path):
    (path,) = files([line("q", 1.0), line("q", 0.0)])
    (tmp_path / "copy.jsonl").write_bytes(path.read_bytes())
    for again in (path, tmp_path / "copy.jsonl"):
        code, said = convert([path, again], "--format", "jsonl", "--advantage", "group_mean")
        assert code == 2
        assert f"{again}: is equal to {path}, so its rollouts would count twice. Give every file once." in said


def test_a_file_and_the_standard_input_are_read_together(convert, files, tmp_path, monkeypatch):
    first, second = files([line("q", 1.0), line("q", 0.0)], [line("q", 0.0), line("q", 0.0)])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(second.read_bytes())))
    code, said = convert([first, "-"], "--format", "jsonl", "--advantage", "group_mean")
    assert code == 0, said
    assert advantages(tmp_path) == [0.75, -0.25, -0.25, -0.25]


def test_a_dump_that_changes_while_it_is_read_is_refused(convert, files, monkeypatch):
    from megatron_pg.cli.rollouts import dumps

    first, second = files([line("q", 1.0), line("q", 0.0)], [line("q", 0.0)])
    read, calls = dumps.READERS["jsonl"], []

    def growing(path, options, names):
        calls.append(path)
        if len(calls) == 3:  # the second time
            second.write_text(second.read_text() + json.dumps(line("q", 1.0)) + "\n")
        return read(path, options, names)

    monkeypatch.setitem(dumps.READERS, "jsonl", growing)
    code, said = convert([first, second], "--format", "jsonl", "--advantage", "group_mean")
    assert code == 2
    assert "part1.jsonl:2: was added after the rewards were read. Convert files that are complete." in said


def test_the_version_is_the_highest_that_a_dump_needs(convert, files, tmp_path):
    plain, other = (line("q", 1.0, advantage=0.5, rollout_id=i) for i in range(2))
    taught = line("q", 0.0, advantage=-0.5, rollout_id=2, teacher_logprobs=[-0.1, -0.2])
    for parts, version in (([plain], [taught]), 2), (([taught], [plain]), 2), (([plain], [other]), 1):
        code, said = convert(files(*parts), "--format", "jsonl")
        assert code == 0, said
        header, *lines = (tmp_path / "out.jsonl").read_text().splitlines()
        assert json.loads(header) == {"format": "megatron_pg.rollouts", "version": version}
        assert (len(lines), len(read_rollouts(tmp_path / "out.jsonl"))) == (2, 2)
