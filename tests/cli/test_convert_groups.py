"""`megatron-pg convert` of several files: advantages over whole prompt groups, names, steps and the version."""

import io
import json
import random
from fractions import Fraction

import pytest
import torch
from dumps_of_others import slime_sample
from rollout_files import write_lines


@pytest.fixture
def files(tmp_path):
    """The paths of text files with these lines."""
    return lambda *parts: [write_lines(tmp_path / f"part{i}.jsonl", part) for i, part in enumerate(parts)]


def line(prompt, reward: float, step: int = 0, **more) -> dict:
    fields = {"prompt_id": prompt, "reward": reward, "step": step, "tokens": [1, 2, 3], "response_length": 2}
    return fields | {"loss_mask": [1, 1], "old_logprobs": [-0.5, -1.0]} | more


def without_prompt(reward: float, step: int = 0, **more) -> dict:
    return {name: value for name, value in line(None, reward, step, **more).items() if name != "prompt_id"}


def advantages(samples) -> list[float]:
    return [float(sample.advantages[0]) for sample in samples]


def test_a_prompt_group_in_two_files_has_one_mean(convert, files):
    first, *others = (line("q", reward, rollout_id=i) for i, reward in enumerate([1.0, 0.0, 0.0, 0.0]))
    samples, _, _, said = convert("--format jsonl --advantage group_mean", *files([first, others[0]], others[1:]))
    assert advantages(samples) == [0.75, -0.25, -0.25, -0.25]
    assert "gradient" not in said


def test_equal_inputs_in_two_files_of_a_step_are_one_prompt_for_verl(convert, files):
    parts = [[("a", 1.0), ("b", 1.0), ("a", 0.0)], [("b", 0.0), ("a", 0.0), ("a", 0.0)]]
    rows = [[without_prompt(reward, 5) | {"input": text} for text, reward in part] for part in parts]
    later = [without_prompt(reward, 6) | {"input": "a"} for reward in (1.0, 0.0)]
    samples = convert("--format verl --advantage group_mean", *files(*rows, later)).samples
    assert advantages(samples) == [0.75, 0.5, -0.25, -0.5, -0.25, -0.25, 0.5, -0.5]
    assert [sample.prompt_id for sample in samples] == ["5/0", "5/1", "5/0", "5/1", "5/0", "5/0", "6/0", "6/0"]
    assert len({sample.rollout_id for sample in samples}) == 8


def test_two_dumps_of_slime_of_one_rollout_batch_are_one_step(convert, tmp_path):
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    samples = [slime_sample(i, 0, reward) for i, reward in enumerate([1.0, 0.0, 0.0, 0.0])]
    for path, part in zip(paths, (samples[:2], samples[2:]), strict=True):
        torch.save({"rollout_id": 12, "samples": part}, path)
    found = convert("--format slime --old-logprobs rollout --advantage group_mean", *paths).samples
    assert advantages(found) == [0.75, -0.25, -0.25, -0.25]


def exact(rule: str, rewards: list[Fraction]) -> list[Fraction]:
    """The rules without a root, by their definition."""
    size, total = len(rewards), sum(rewards)
    if rule == "rloo":
        return [reward - (total - reward) / (size - 1) for reward in rewards]
    centered = [reward - total / size for reward in rewards]
    return centered if rule == "group_mean" or not total else [value / (total / size) for value in centered]


@pytest.mark.proof("Advantages: convert over random splits of steps into files, against exact fractions")
def test_advantages_do_not_depend_on_how_steps_are_split_into_files(convert, files, full, evidence):
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
        for sample in convert(f"--format jsonl --advantage {rule}", *files(*parts)).samples:
            wanted = float(expected[sample.rollout_id])
            worst = max(worst, abs(float(sample.advantages[0]) - wanted) / max(abs(wanted), 1.0))
    evidence(cases=count, worst=worst, tolerance=1e-15)


def test_an_undefined_advantage_names_the_option(refused, files):
    message = refused("--format jsonl --advantage rloo", *files([line("q", 1.0)], [line("p", 0.0)]))
    assert message.startswith("megatron-pg convert: --advantage rloo: prompt 'q' has one rollout")


def test_one_step_for_all_files_is_an_option(convert, files):
    rows = [without_prompt(reward, tokens=[first, 2, 3]) for first, reward in ((1, 1.0), (1, 0.0), (1, 0.0), (1, 0.5))]
    for row in rows:
        del row["step"]
    words = "--format jsonl --step 7 --group-size 2 --advantage group_mean"
    samples = convert(words, *files(rows[:2], rows[2:])).samples
    assert [(sample.step, sample.prompt_id) for sample in samples] == [(7, "7/0"), (7, "7/0"), (7, "7/1"), (7, "7/1")]
    assert [sample.rollout_id for sample in samples] == ["7/0", "7/1", "7/2", "7/3"]
    assert advantages(samples) == [0.5, -0.5, -0.25, 0.25]  # a group of consecutive lines lies in one file


def test_a_group_of_lines_lies_in_one_step(refused, files):
    paths = files([without_prompt(1.0, step) for step in (0, 1)])
    message = refused("--format jsonl --group-size 2 --advantage reward", *paths)
    assert "part0.jsonl:2: its step differs from the first row of its group. Correct --group-size 2." in message


def test_one_file_given_twice_is_refused(refused, files, tmp_path):
    (path,) = files([line("q", 1.0), line("q", 0.0)])
    (tmp_path / "copy.jsonl").write_bytes(path.read_bytes())
    for again in (path, tmp_path / "copy.jsonl"):
        message = refused("--format jsonl --advantage group_mean", path, again)
        assert f"{again}: is equal to {path}. Give every file once." in message


def test_a_file_and_the_standard_input_are_read_together(convert, files, monkeypatch):
    first, second = files([line("q", 1.0), line("q", 0.0)], [line("q", 0.0), line("q", 0.0)])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(second.read_bytes())))
    samples = convert("--format jsonl --advantage group_mean", first, "-").samples
    assert advantages(samples) == [0.75, -0.25, -0.25, -0.25]


def test_a_dump_that_changes_while_it_is_read_is_refused(cli, files, tmp_path, monkeypatch):
    from megatron_pg.cli.rollouts import dumps

    first, second = files([line("q", 1.0), line("q", 0.0)], [line("q", 0.0)])
    read, calls = dumps.READERS["jsonl"], []

    def growing(path, options, names):
        calls.append(path)
        if len(calls) == 3:  # the second time
            second.write_text(second.read_text() + json.dumps(line("q", 1.0)) + "\n")
        return read(path, options, names)

    monkeypatch.setitem(dumps.READERS, "jsonl", growing)
    words = "--format jsonl --advantage group_mean --output", tmp_path / "out.jsonl"
    code, _, err = cli("convert", first, second, *words)
    assert code == 2
    assert "part1.jsonl:2: was added after the rewards were read. Convert files that are complete." in err


def test_the_version_is_the_highest_that_a_dump_needs(convert, files):
    plain, other = (line("q", 1.0, advantage=0.5, rollout_id=i) for i in range(2))
    taught = line("q", 0.0, advantage=-0.5, rollout_id=2, teacher_logprobs=[-0.1, -0.2])
    for parts, version in (([plain], [taught]), 2), (([taught], [plain]), 2), (([plain], [other]), 1):
        samples, _, header, _ = convert("--format jsonl", *files(*parts))
        assert (header, len(samples)) == ({"format": "megatron_pg.rollouts", "version": version}, 2)
