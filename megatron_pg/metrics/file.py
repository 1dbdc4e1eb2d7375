"""metrics.jsonl: one object per optimizer step, which no later run erases and no second job writes at the same time."""

import errno
import fcntl
import itertools
import json
import math
import os
import shutil
import socket
import warnings
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from megatron_pg.rollouts.lines import append_whole
from megatron_pg.rollouts.printable import printable, show_path

_PROBE_BYTES = 2**12  # written and taken back, so that a full disk shows before the model is built
_NO_LOCKS = errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK  # of file systems, such as Lustre, mounted without flock


class MetricsFile:
    """metrics.jsonl, whole lines only, so that a run that dies leaves complete steps.

    The first line that is written determines where the run resumes: earlier lines stay. Lines of its iteration and of
    later ones, which are trained again, move to `metrics.jsonl.1` (or the next free number). If the disk is
    full, writing stops with a warning, and training continues.

    Args:
        path: the file, or a symbolic link to it; its folder is made. A relative path is resolved here, once.

    Raises:
        ValueError: the file is something else, cannot be written, or another process writes it.
    """

    def __init__(self, path: str | Path):
        self.path = Path(os.path.realpath(path))
        self.num_missing = 0  # lines that could not be written
        self._file: IO[bytes] | None = None  # from the first line on
        self._objective: object = None  # that was in force last, according to the file
        self._lock: IO[bytes] | None = None
        _OPEN.add(self)
        shown = show_path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.path)
            if self.path.exists():
                self.path.open("ab").close()
            _lines(self.path)
        except OSError as error:
            self.close()
            raise ValueError(
                f"{shown} cannot be written ({error.strerror}). Make room, or choose another metrics_file."
            ) from error
        except ValueError:
            self.close()
            raise

    def before(self, iteration: int) -> Iterator[dict[str, Any]]:
        """The records of the steps before `iteration`."""
        return (json.loads(line) for number, line in _lines(self.path) if number < iteration)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one step; a value that is not finite becomes null and is listed under "nonfinite".

        "objective" is written only if it changes: in the first step, and after a resume with other arguments.
        """
        if self.num_missing:
            self.num_missing += 1
            return
        try:
            if self._file is None:
                self._file, self._objective = _continued(self.path, before=record["iteration"])
            append_whole(self._file, self._line(record))
        except OSError as error:
            self.num_missing = 1
            warnings.warn(
                f"{show_path(self.path)} can no longer be written ({error.strerror}), so it ends "
                f"before step {record['iteration']}; training continues. Make room before the next run, or choose "
                "another metrics_file.",
                stacklevel=2,
            )

    def _line(self, record: Mapping[str, Any]) -> bytes:
        if record.get("objective") == self._objective:
            record = {name: value for name, value in record.items() if name != "objective"}
        self._objective = record.get("objective", self._objective)
        bad = [name for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)]
        known = list(record.get("nonfinite", []))
        listed = known + [{"metric": name} for name in bad if name not in {entry["metric"] for entry in known}]
        clean = {name: None if name in bad else value for name, value in record.items() if name != "nonfinite"}
        return json.dumps(clean | ({"nonfinite": listed} if listed else {}), allow_nan=False).encode() + b"\n"

    def close(self) -> None:
        """Close the file and release its lock."""
        if self._file is not None:
            self._file.close()
        if self._lock is not None:
            Path(self._lock.name).unlink(missing_ok=True)  # while it is held
            self._lock.close()
        self._file = self._lock = None


_OPEN: weakref.WeakSet[MetricsFile] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close this forked process's copies of the locks, which would outlive the process that writes the files."""
    for file in _OPEN:
        if file._lock is not None:
            file._lock.close()
            file._lock = None


os.register_at_fork(after_in_child=_leave_to_parent)


def _locked(path: Path) -> IO[bytes]:
    """The lock file, locked; the system releases it when the process ends."""
    name, shown = path.with_name(path.name + ".lock"), show_path(path)
    while True:
        lock = name.open("a+b", buffering=0)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = _holder(lock.read(200).decode(errors="replace").strip("\n\0"))
            lock.close()
            raise ValueError(
                f"{shown} is being written by {holder}; two jobs would overwrite each other. End that one, or choose "
                "another metrics_file."
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                lock.close()
                raise
            warnings.warn(
                f"{shown} is on a file system without file locks ({error.strerror}), so a second job with this "
                "metrics_file is not noticed. Make sure that only one job writes it.",
                stacklevel=3,
            )
        if name.exists() and os.path.samestat(os.fstat(lock.fileno()), name.stat()):
            break
        lock.close()  # its holder has ended in between and taken the name away
    try:
        lock.truncate(0)
        append_whole(lock, b"\0" * _PROBE_BYTES)
        os.fsync(lock.fileno())
        lock.truncate(0)
        append_whole(lock, f"pid {os.getpid()} on host {socket.gethostname()}\n".encode())
    except OSError:
        name.unlink()
        lock.close()
        raise
    return lock


def _holder(text: str) -> str:
    """The holder of a lock, from its file; a process that has ended may have passed it to a fork."""
    words = text.split()
    if len(words) == 5 and words[0] == "pid" and words[1].isdecimal() and words[-1] == socket.gethostname():
        try:
            os.kill(int(words[1]), 0)
        except (ProcessLookupError, OverflowError):
            return "a process that another run started"
        except PermissionError:  # somebody else's
            pass
    return printable(text) or "another process"


def _lines(path: Path) -> list[tuple[int, bytes]]:
    """Iteration and text of each whole line."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()  # torn by a crash
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append((int(json.loads(line.decode("utf-8"))["iteration"]), line))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{show_path(path)}:{number} is not a line of a metrics file. Choose another path."
            ) from error
    return found


def _continued(path: Path, *, before: int) -> tuple[IO[bytes], object]:
    """The file, open after the lines of earlier iterations, and their last objective; other lines move away."""
    lines = _lines(path)
    kept = [line for iteration, line in lines if iteration < before]
    if len(kept) < len(lines):
        free_name(path).write_bytes(b"".join(line for iteration, line in lines if iteration >= before))
    scratch = path.with_name(path.name + ".part")
    scratch.write_bytes(b"".join(kept))
    if path.exists():
        shutil.copymode(path, scratch)
    os.replace(scratch, path)  # never half a file
    said = (json.loads(line).get("objective") for line in reversed(kept) if b'"objective"' in line)
    return path.open("ab", buffering=0), next(filter(None, said), None)


def free_name(path: Path) -> Path:
    """The first of `path`.1, .2, … that no file has."""
    names = (path.with_name(f"{path.name}.{n}") for n in itertools.count(1))
    return next(name for name in names if not name.exists())
