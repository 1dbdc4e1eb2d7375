"""How a host's steps are numbered: in metrics.jsonl from 1, one by one, regardless of the host counts."""

import json
from dataclasses import replace
from pathlib import Path

import host_cases as hosts
import pytest
import threads
import torch

from megatron_pg.hosts.log import HostLog
from megatron_pg.hosts.startup import check
from megatron_pg.hosts.step import HostStep
from megatron_pg.plan.settings import LossSettings
from megatron_pg.step.findings import StepReport
from megatron_pg.step.loss import microbatch_loss

SETTINGS = LossSettings.from_args(check("host", {}, megatron={}).args)


@pytest.fixture(scope="module")
def report() -> StepReport:
    """Of one step."""

    def work(rank: int) -> StepReport | None:
        samples = hosts.samples()[:2]
        embedding, head = hosts.parameters()
        step = HostStep(SETTINGS, lambda: samples, data=torch.distributed.group.WORLD)
        local = step.slice(range(2), [len(sample.tokens) for sample in samples])
        logits = torch.cat([embedding[s.tokens] @ head.T for s in samples])
        step.keep(local, microbatch_loss(logits, local.fields, SETTINGS, None))
        return step.finish(reports=True)

    return threads.run(1, work)[0]


def run(path: Path | None, report: StepReport, rounds: dict[int, int], *, is_numbered: bool = True) -> list[int | None]:
    """A process that trains so many steps in each round; returns what the host's logger was given as their numbers."""
    seen: list[int | None] = []
    log = HostLog(SETTINGS, {}, None if path is None else str(path), lambda metrics, number: seen.append(number))
    for host_round, steps in rounds.items():
        for number in range(steps):
            own = host_round * steps + number if is_numbered else None  # as slime and miles number their steps
            log.write(host_round, own, report, grad_norm=1.0, learning_rate=0.1, skipped=False)
    if log._file is not None:
        log._file.close()
    return seen


def lines(path: Path) -> list[tuple[int, int]]:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(record["host_round"], record["iteration"]) for record in records]


def test_the_first_step_is_number_1_and_the_hosts_logger_has_the_hosts_own_number(tmp_path, report):
    assert run(tmp_path / "m.jsonl", report, {0: 2, 1: 2}) == [0, 1, 2, 3]
    assert lines(tmp_path / "m.jsonl") == [(0, 1), (0, 2), (1, 3), (1, 4)]


def test_red_flags_of_the_first_step_are_printed_at_the_first_step_alone(report, capsys):
    def printed(log: HostLog, number: int, **metrics: float) -> str:
        moved = replace(report, metrics=report.metrics | metrics)
        log.write(0, number, moved, grad_norm=1.0, learning_rate=0.1, skipped=False)
        return capsys.readouterr().out

    off_policy = {"kl_new_old": 0.5, "ratio_new_old": 1.3}
    assert "kl_new_old" in printed(HostLog(SETTINGS, {}, None), 0, **off_policy).partition("red flag")[2]
    log = HostLog(SETTINGS, {}, None)
    printed(log, 0, kl_new_old=0.0, ratio_new_old=1.0)
    assert "red flag" not in printed(log, 1, **off_policy)  # as the second step is


def test_rounds_of_different_numbers_of_steps_lose_no_line(tmp_path, report):
    run(tmp_path / "m.jsonl", report, {0: 3, 1: 1, 2: 2})
    assert lines(tmp_path / "m.jsonl") == [(0, 1), (0, 2), (0, 3), (1, 4), (2, 5), (2, 6)]
    assert not (tmp_path / "m.jsonl.1").exists()


@pytest.mark.parametrize("is_numbered", [True, False])
def test_steps_after_the_checkpoint_are_superseded(tmp_path, report, is_numbered):
    path = tmp_path / "m.jsonl"
    run(path, report, {0: 3, 1: 1, 2: 2}, is_numbered=is_numbered)
    run(path, report, {1: 2, 2: 1}, is_numbered=is_numbered)
    assert lines(path) == [(0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (2, 6)]
    assert lines(tmp_path / "m.jsonl.1") == [(1, 4), (2, 5), (2, 6)]


def test_a_gap_in_the_file_is_a_gap_in_the_numbers(tmp_path, report):
    """Rounds 1 and 2 ran without the file; the host's own number tells how many steps they had."""
    path = tmp_path / "m.jsonl"
    run(path, report, {0: 2})
    run(path, report, {3: 2})
    assert lines(path) == [(0, 1), (0, 2), (3, 7), (3, 8)]


def test_without_a_file_the_hosts_own_number_decides(report):
    log = HostLog(SETTINGS, {}, None)
    log.write(4, 8, report, grad_norm=1.0, learning_rate=0.1, skipped=False)
    assert log._iteration == 9


def test_a_line_that_is_not_valid_is_named(tmp_path, report):
    path = tmp_path / "m.jsonl"
    run(path, report, {1: 1})
    with path.open("a", encoding="utf-8") as file:
        file.write("{not json}\n")
    with pytest.raises(ValueError, match=r"m\.jsonl:2 is not a line of a metrics file"):
        HostLog(SETTINGS, {}, str(path))
