import os
import time
from pathlib import Path

import proof
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined, so before any test imports one

EVIDENCE = pytest.StashKey[proof.Evidence]()
START = pytest.StashKey[float]()


def pytest_addoption(parser):
    parser.addoption(
        "--tier", choices=["fast", "full"], default="fast", help="full: every case that docs/proof.md counts"
    )
    parser.addoption("--proof-page", type=Path, help="write the table of the marked tests to this page")


def pytest_configure(config):
    config.addinivalue_line("markers", "proof(row): the test's cases are counted in this row of docs/proof.md")
    config.stash[EVIDENCE], config.stash[START] = proof.Evidence(), time.monotonic()


@pytest.fixture(scope="session")
def full(pytestconfig):
    """True in the full tier, where tests run all the cases that docs/proof.md counts."""
    return pytestconfig.getoption("--tier") == "full"


@pytest.fixture
def evidence(request):
    """`evidence(cases=..., worst=...)` counts cases that passed, in the row that the test is marked with."""
    row = request.node.get_closest_marker("proof").args[0]
    return lambda **figures: request.config.stash[EVIDENCE].add(row, **figures)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    marker = item.get_closest_marker("proof")
    if marker:  # setup too: launches of real ranks are fixtures
        item.config.stash[EVIDENCE].finish(marker.args[0], passed=report.passed, seconds=report.duration)
    return report


def pytest_sessionfinish(session):
    path, evidence = session.config.getoption("--proof-page"), session.config.stash[EVIDENCE]
    if path is not None:
        path.write_text(proof.page(evidence, "make prove", time.monotonic() - session.config.stash[START]))
        if not evidence.holds():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--proof-page") is not None:
        terminalreporter.write_line("\n" + config.stash[EVIDENCE].table())


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)  # tests run beside each other; tiny tensors gain nothing from more
