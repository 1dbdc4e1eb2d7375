"""Processes, most of them real ranks, that run in the background of the other tests: they start slowly and wait much.

    @launches.launch
    def results(folder, full):
        ...
        return folder

is a fixture of its module: what the function returns. The launches that the selected tests ask for begin with the first
test, a few at a time, and those tests run last. If pytest-xdist spreads the tests over processes, one process runs all
tests that ask for launches, and nothing else.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import processes
import pytest

AT_A_TIME = 2
Job = Callable[[Path, bool], object]
JOBS: dict[tuple[str, str], Job] = {}  # by module and fixture


def launch(function: Job):
    """A module's fixture: the result of `function(folder, full)`, which runs in its own thread."""
    JOBS[function.__module__, function.__name__] = function

    @pytest.fixture(scope="module", name=function.__name__)
    def result(background):
        return background.result(function)

    return result


def jobs_of(item: pytest.Item) -> list[Job]:
    """What a test waits for."""
    keys = [(item.module.__name__, name) for name in item.fixturenames]
    return [JOBS[key] for key in keys if key in JOBS]


class Background:
    """The session's launches."""

    def __init__(self, new_folder: Callable[[str], Path], full: bool, jobs: Iterable[Job]) -> None:
        self._new_folder, self._full, self._jobs = new_folder, full, list(jobs)
        self._pool = ThreadPoolExecutor(AT_A_TIME)
        self._running: dict[Job, Future] = {}
        self.seconds = 0.0  # that launches took and no test has waited for

    def begin(self) -> None:
        """Only the first call has an effect."""
        for job in self._jobs:
            if job not in self._running:
                self._running[job] = self._pool.submit(self._timed, job, self._new_folder(job.__name__))

    def result(self, job: Job) -> object:
        """What the job returned, or its error."""
        started = time.monotonic()
        self.begin()
        found, seconds = self._running[job].result()
        self.seconds += seconds - (time.monotonic() - started)
        return found

    def end(self) -> None:
        """Nothing is left running, when a session is broken off too."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        processes.end_all()
        self._pool.shutdown()

    def _timed(self, job: Job, folder: Path) -> tuple[object, float]:
        started = time.monotonic()
        return job(folder, self._full), time.monotonic() - started
