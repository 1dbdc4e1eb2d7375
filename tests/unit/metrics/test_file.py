"""metrics.jsonl: nothing in it is lost, two jobs do not share it, and a full disk does not end the training."""

import errno
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable

import pytest

from megatron_pg.metrics.file import MetricsFile


def write(path, *steps: int, loss: float = 0.0) -> None:
    write_all(MetricsFile(path), steps, loss)


def write_all(file: MetricsFile, steps: Iterable[int], loss: float = 0.0) -> None:
    for step in steps:
        file.write({"iteration": step, "pg_loss": loss})
    file.close()


def read(path) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(record["iteration"], record["pg_loss"]) for record in records]


def test_a_resumed_run_continues_behind_its_checkpoint_and_keeps_what_it_trains_again(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    write(path, 1, 2, 3, 4, 5)
    with path.open("a", encoding="utf-8") as torn:
        torn.write('{"iteration": 6, "pg_lo')
    write(path, 4, 5, 6, loss=1.0)  # the last checkpoint was at step 3
    assert read(path) == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1)]
    assert read(tmp_path / "run" / "metrics.jsonl.1") == [(4, 0), (5, 0)]
    assert sorted(p.name for p in path.parent.iterdir()) == ["metrics.jsonl", "metrics.jsonl.1"]


def test_a_new_run_moves_the_lines_of_an_earlier_one_aside(tmp_path):
    path = tmp_path / "m.jsonl"
    for loss in (0.0, 1.0, 2.0):
        write(path, 1, 2, loss=loss)
    assert read(path) == [(1, 2), (2, 2)]
    assert read(tmp_path / "m.jsonl.1") == [(1, 0), (2, 0)]
    assert read(tmp_path / "m.jsonl.2") == [(1, 1), (2, 1)]


def test_a_run_that_dies_before_its_first_step_touches_nothing(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, 1, 2)
    MetricsFile(path).close()
    assert read(path) == [(1, 0), (2, 0)]
    MetricsFile(tmp_path / "other.jsonl").close()
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


def test_a_second_job_is_told_who_writes_the_file(tmp_path):
    path = tmp_path / "m.jsonl"
    first = MetricsFile(path)
    with pytest.raises(
        ValueError, match=rf"m.jsonl is being written by pid {os.getpid()} on host .*two jobs would over"
    ):
        MetricsFile(path)
    first.write({"iteration": 1, "pg_loss": 0.0})
    first.close()
    write(path, 2)
    assert read(path) == [(1, 0), (2, 0)]


@pytest.mark.parametrize("name", ["file/m.jsonl", "folder", "m.jsonl"])
def test_a_place_that_cannot_be_written_is_refused_before_the_first_step(tmp_path, name, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    if name == "m.jsonl":  # a full disk shows when what was written is forced out
        monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(ValueError, match=r"cannot be written \(.*\)\. Make room"):
        MetricsFile(tmp_path / name)


def no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullDisk:
    """An unbuffered file with room for 100 bytes."""

    def __init__(self, file):
        self.file = file
        self.seek, self.truncate, self.close = file.seek, file.truncate, file.close

    def write(self, data: bytes) -> int:
        return self.file.write(data[: 100 - self.file.tell()]) or no_space()


def test_a_disk_that_fills_up_ends_the_file_with_one_warning_and_not_the_training(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl")
    file.write({"iteration": 1, "pg_loss": 0.0})
    file._file = FullDisk(file._file)
    message = r"m\.jsonl can no longer be written .* it ends before step 4; training continues"
    with pytest.warns(UserWarning, match=message) as found:
        write_all(file, range(2, 8))
    assert len(found) == 1
    assert read(tmp_path / "m.jsonl") == [(1, 0), (2, 0), (3, 0)]  # whole lines: the fourth was cut and taken back
    assert file.num_missing == 4


def test_values_that_are_not_finite_are_null_with_the_ranks(tmp_path):
    file, known = MetricsFile(tmp_path / "m.jsonl"), [{"metric": "entropy", "ranks": [2]}]
    file.write({"iteration": 1, "entropy": math.nan, "kl_new_old": math.inf, "nonfinite": known})
    file.close()
    record = json.loads((tmp_path / "m.jsonl").read_text())
    assert record["entropy"] is None
    assert record["kl_new_old"] is None
    assert record["nonfinite"] == [{"metric": "entropy", "ranks": [2]}, {"metric": "kl_new_old"}]


def test_the_objective_is_written_where_it_changes(tmp_path):
    def run(steps, clip: str) -> None:
        file = MetricsFile(tmp_path / "m.jsonl")
        for iteration in steps:
            file.write({"iteration": iteration, "objective": {"clip": clip}})
        file.close()

    def written() -> list[str | None]:
        lines = (tmp_path / "m.jsonl").read_text().splitlines()
        return [record.get("objective", {}).get("clip") for record in map(json.loads, lines)]

    run([1, 2, 3], "0.2")
    assert written() == ["0.2", None, None]
    run([3, 4], "0.2")  # a resumed run leaves what the run that was not stopped leaves
    assert written() == ["0.2", None, None, None]
    run([3, 4], "0.3")
    assert written() == ["0.2", None, "0.3", None]
    run([5], "0.2")  # what was in force last counts, not what was in force once
    assert written() == ["0.2", None, "0.3", None, "0.2"]
    run([3, 4], "0.2")
    assert written() == ["0.2", None, None, None]


def test_a_file_that_may_be_written_and_not_read_is_named(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    write(path, 1)
    monkeypatch.setattr(type(path), "read_bytes", lambda self: os.open(tmp_path / "absent" / "x", os.O_RDONLY))
    with pytest.raises(ValueError, match=r"m\.jsonl cannot be written \(No such file"):
        MetricsFile(path)
    assert [each.name for each in tmp_path.iterdir()] == ["m.jsonl"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_named_and_the_metrics_are_written(tmp_path, number, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("megatron_pg.metrics.file.fcntl.flock", no_locks)
    path = tmp_path / "m.jsonl"
    with pytest.warns(UserWarning, match=r"m\.jsonl is on a file system without file locks .* only one job writes it"):
        write(path, 1, 2)
    assert read(path) == [(1, 0), (2, 0)]
    assert [each.name for each in tmp_path.iterdir()] == ["m.jsonl"]


FORKED_WORKER = """
import os, sys
from megatron_pg.metrics.file import MetricsFile
file = MetricsFile(sys.argv[1])
worker = os.fork()
if worker == 0:  # as a worker of a data loader, which outlives a trainer that is killed
    file.close()  # must not take the trainer's lock away
    os.write(1, b"closed\\n")
    os.close(1)
    os.read(0, 1)
    os._exit(0)
os.read(0, 1)
"""


def test_a_forked_worker_does_not_keep_the_file_of_a_killed_trainer(tmp_path):
    path = tmp_path / "m.jsonl"
    command = [sys.executable, "-c", FORKED_WORKER, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout.readline() == "closed\n"  # by the worker, which waits for its standard input
        with pytest.raises(ValueError, match=rf"m\.jsonl is being written by pid {trainer.pid} on host"):
            MetricsFile(path)
        trainer.kill()
        trainer.wait()
        write(path, 1)
    assert read(path) == [(1, 0)]


def test_a_process_that_has_ended_is_not_named_as_the_writer(tmp_path):
    path, lock = tmp_path / "m.jsonl", tmp_path / "m.jsonl.lock"
    first = MetricsFile(path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    lock.write_text(f"pid {ended.pid} on host {os.uname().nodename}\n")
    with pytest.raises(ValueError, match=r"m\.jsonl is being written by a process that another run started; two"):
        MetricsFile(path)
    first.close()


def test_a_symbolic_link_stays_one_and_its_target_keeps_its_mode(tmp_path):
    target, link = tmp_path / "disk" / "m.jsonl", tmp_path / "run.jsonl"
    target.parent.mkdir()
    link.symlink_to(target)
    write(link, 1, 2, 3)
    target.chmod(0o664)
    write(link, 3, 4, loss=1.0)
    assert link.is_symlink()
    assert read(target) == [(1, 0), (2, 0), (3, 1), (4, 1)]
    assert target.stat().st_mode & 0o777 == 0o664


def test_a_relative_path_is_the_one_of_the_folder_where_the_file_was_opened(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    file = MetricsFile("m.jsonl")
    monkeypatch.chdir(tmp_path / "elsewhere")
    file.write({"iteration": 1, "pg_loss": 0.0})
    file.close()
    assert read(tmp_path / "m.jsonl") == [(1, 0)]
    assert list((tmp_path / "elsewhere").iterdir()) == []
