import functools
import gc
import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined, so before any test imports one

import interpreter
import launches  # what they launch has the environment of now
import proof
from namespaces import rank_zero, user_code, user_folder  # noqa: F401, fixtures

EVIDENCE = pytest.StashKey[proof.Evidence]()
BACKGROUND = pytest.StashKey[launches.Background]()


def pytest_addoption(parser):
    parser.addoption(
        "--tier", choices=["fast", "full"], default="fast", help="full: every case that docs/proof.md counts"
    )
    parser.addoption("--proof-rows", type=Path, help="write the rows of the marked tests to this file, as JSON")


def pytest_configure(config):
    config.addinivalue_line("markers", "proof(row): the test's cases are counted in this row of docs/proof.md")
    config.addinivalue_line(
        "markers", "full_tier(reason): the test runs in the full tier only, which `make prove` runs"
    )
    config.stash[EVIDENCE] = proof.Evidence()
    interpreter.make_faster()
    gc.disable()  # until all tests are imported, which leaves next to no garbage


@pytest.fixture(scope="session")
def full(pytestconfig):
    """True in the full tier, where tests run all the cases that docs/proof.md counts."""
    return is_full(pytestconfig)


def is_full(config):
    return config.getoption("--tier") == "full"


@pytest.hookimpl(tryfirst=True)  # before fixtures, which may launch processes
def pytest_runtest_setup(item):
    if (marker := item.get_closest_marker("full_tier")) and not is_full(item.config):
        pytest.skip(marker.args[0])


def jobs_of(item):
    """The launches that a test waits for, none if it is left out."""
    is_left_out = item.get_closest_marker("full_tier") and not is_full(item.config)
    return [] if is_left_out else launches.jobs_of(item)


@pytest.fixture
def evidence(request):
    """Counts cases in the row that the test is marked with.

    `evidence(cases=n)`, with `worst=` and `tolerance=` where there is a relative error, which must be within it, and
    with `slowest=`, the seconds of the slowest case, where the row is about time.
    """
    row = request.node.get_closest_marker("proof").args[0]
    return lambda **figures: request.config.stash[EVIDENCE].add(row, **figures)


@pytest.fixture
def on_the_device():
    """Tensors are made on a GPU where there is one."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


@pytest.fixture
def poisoned_memory():
    """`torch.empty` returns NaN, so that a value that nobody wrote is seen."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_tiles(monkeypatch):
    """Kernels walk over a row in tiles of 8 threads: the interpreter merges the statistics of threads one by one."""
    if not torch.cuda.is_available():
        from megatron_pg.kernels.triton import sampling_masks, vocab_parallel

        monkeypatch.setattr(vocab_parallel.Walk, "threads", 8)
        monkeypatch.setattr(sampling_masks, "BLOCK", 64)


@pytest.fixture(scope="session", autouse=True)
def background(request, tmp_path_factory, full):
    """Launches of real ranks, begun before the first test that runs."""
    jobs = (job for item in request.session.items for job in jobs_of(item))
    background = request.config.stash[BACKGROUND] = launches.Background(tmp_path_factory.mktemp, full, jobs)
    if not is_one_of_several(request.config):
        background.begin()
    yield background
    background.end()


def is_one_of_several(config):
    """Whether pytest-xdist has started this process, which then runs a part of the tests."""
    return hasattr(config, "workerinput")


@functools.cache
def launches_in(file):
    return "@launches.launch" in file.read_text("utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        """Every file of tests runs in one process, all files with launches in the same one."""

        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return "launches" if launches_in(config.rootpath / file) else file

    return Files(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Tests that wait for launches come last, or first where a process has nothing else to do."""
    first = {item.path for item in items if jobs_of(item)} if is_one_of_several(config) else set()
    items.sort(key=lambda item: (item.path not in first, bool(jobs_of(item))))


def pytest_collection_finish(session):
    for item in session.items:
        if marker := item.get_closest_marker("proof"):
            session.config.stash[EVIDENCE].expect(marker.args[0], item.nodeid.partition("::")[0].removeprefix("tests/"))
    gc.enable()
    gc.collect()
    gc.freeze()  # torch and Megatron are a million objects, which every collection would go over


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    marker = item.get_closest_marker("proof")
    if marker:  # setup too: launches of real ranks are fixtures
        behind = 0.0
        if background := item.config.stash.get(BACKGROUND, None):
            behind, background.seconds = background.seconds, 0.0
        skipped = report.longrepr[2].removeprefix("Skipped: ") if report.skipped else None
        seconds = report.duration + behind
        item.config.stash[EVIDENCE].finish(marker.args[0], passed=report.passed, seconds=seconds, skipped=skipped)
    return report


def pytest_sessionfinish(session):
    if (path := session.config.getoption("--proof-rows")) is not None:
        session.config.stash[EVIDENCE].write(path)


@pytest.fixture(autouse=True)
def seed():
    # without a GPU torch.manual_seed would note for each kind of it who has called, which takes longer than most tests
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)  # tests run at the same time; tiny tensors gain nothing from more
