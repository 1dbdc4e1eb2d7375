"""Every command of docs/cli.md prints what the page says."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from dumps_of_others import NEMO, SLIME

from megatron_pg.cli import SUBCOMMANDS, main
from megatron_pg.metrics.file import MetricsFile

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder that looks like a checkout, with the files that the page's reader would have."""
    for name in ("examples", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (line,) = re.findall(r"^    (megatron_pg command line: .*\n)", PAGE, re.MULTILINE)
    (tmp_path / "job.txt").write_text(line)
    for name, top in (("a", 0.625), ("b", 0.8)):
        writer = MetricsFile(tmp_path / "runs" / name / "metrics.jsonl")
        for i in range(8):
            loss = (-0.5) ** (i + 1) * -1 if i < 3 else 0.0625
            writer.write({"iteration": i + 1, "pg_loss": loss, "reward": 0.1 + (top - 0.1) * i / 7})
        writer.close()
    writer = MetricsFile(tmp_path / "runs" / "c" / "metrics.jsonl")
    for i in range(8):
        values = {"pg_loss": 0.0, "reward": 0.5, "kl_new_old": 0.0213 / (i + 1), "clipped_ratio_fraction": 0.1}
        writer.write({"iteration": i + 1, **values} | ({"clipped_ratio_fraction": 0.61} if i in (5, 7) else {}))
    writer.close()
    torch.save({"rollout_id": 12, "samples": SLIME}, tmp_path / "rollout_12.pt")
    (tmp_path / "train_data_step7.jsonl").write_text("".join(json.dumps(row) + "\n" for row in NEMO))
    mine = {"step": 0, "tokens": [1, 2, 3], "response_length": 1, "logprobs": [-0.5]}
    rows = [mine | {"prompt_id": i // 2, "reward": float(i == 1)} for i in range(4)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("PROCESSES", "RUN_DIR", "RANK", "PYTHON", "OMP_NUM_THREADS", "LENGTH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands_of(block: str) -> list[tuple[list[str], str]]:
    """Words of every command, and the text that it must print."""
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [(shlex.split(part.partition("\n")[0]), part.partition("\n")[2]) for part in parts]


def printed(capsys, words: list[str]) -> str:
    assert words[0] == "megatron-pg"
    code = main(words[1:])
    captured = capsys.readouterr()
    return captured.out + captured.err + (f"[exit code {code}]\n" if code else "")


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split()[2])
def test_a_block_prints_what_the_page_says(block, checkout, capsys):
    if block.split()[2] == "report":
        pytest.importorskip("plotly")
    for words, expected in commands_of(block):
        lines = [
            re.escape(line).replace("…;", ".*;") if line != "…" else "(?:.*\n)*?.*" for line in expected.splitlines()
        ]
        said = printed(capsys, words)
        assert re.fullmatch("\n".join(lines) + "\n", said), said


def test_the_page_shows_every_subcommand():
    shown = {words[1] for block in BLOCKS for words, _ in commands_of(block)}
    assert shown == SUBCOMMANDS.keys() - {"doctor"}  # its output is of the machine
