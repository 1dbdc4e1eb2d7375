"""The name that a lost rank is given, and what keeps its own."""

import re
import threading
from types import SimpleNamespace

import pytest
from torch.distributed import DistNetworkError, DistStoreError

from megatron_pg.plan.errors import LostPeerError
from megatron_pg.step import lost_peers
from megatron_pg.step.lost_peers import lost_peer_named

CLOSED = RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1\nmore")
SILENT = DistStoreError("wait timeout after 8000ms, keys: /default_pg/0//cpu//0/0")


def send_weights(error: Exception) -> None:
    """The user's code, in which a collective breaks off."""
    raise error


def raised(error: Exception) -> LostPeerError:
    with pytest.raises(LostPeerError) as found, lost_peer_named(lambda: "after its step 7"):
        send_weights(error)
    return found.value


@pytest.mark.parametrize("error", [CLOSED, SILENT], ids=["closed", "silent"])
def test_a_lost_rank_is_named_with_how_far_this_one_is_and_what_it_waited_in(error, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    text = str(raised(error))
    place = r"in a transfer, called by send_weights \(unit/step/test_lost_peers.py:\d+\), and cannot continue"
    assert re.match(rf"rank 3 of 8 lost another rank after its step 7, {place}", text)
    assert text.endswith(f"({str(error).splitlines()[0]})")
    assert raised(error).__cause__ is error


def test_a_lost_rank_is_named_once():
    step, job = lost_peer_named(lambda: "in its step 8"), lost_peer_named(lambda: "somewhere in the job")
    with pytest.raises(LostPeerError, match="in its step 8"), job, step:
        send_weights(CLOSED)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        DistNetworkError("The server socket has failed to listen on any local network address. EADDRINUSE"),
        ValueError("Connection closed by peer, says gloo"),
    ],
    ids=["shapes", "port in use", "another class"],
)
def test_an_error_of_this_rank_keeps_its_name(error):
    with pytest.raises(type(error)) as found, lost_peer_named(lambda: "in its step 1"):
        send_weights(error)
    assert found.value is error


class Shown:
    """A stream that another thread writes, with an event for its first line."""

    def __init__(self):
        self.text, self.has_line = "", threading.Event()

    def write(self, text: str) -> None:
        self.text += text
        if text.endswith("\n"):
            self.has_line.set()

    def flush(self) -> None:
        """Nothing is kept back."""


def groups_with(state: str, monkeypatch) -> None:
    """One group without an error, over gloo, and one over NCCL whose watchdog has found `state`."""
    backends = {"cpu": object(), "cuda": SimpleNamespace(get_error=lambda: SimpleNamespace(name=state))}
    group = SimpleNamespace(_device_types=list(backends), _get_backend=backends.get)
    monkeypatch.setattr(lost_peers, "distributed_c10d", SimpleNamespace(_world=SimpleNamespace(pg_map=[group])))


def wait_for_the_gpu(shown: Shown) -> None:
    """The user's code, which NCCL raises nothing in."""
    assert shown.has_line.wait(60)


def test_over_nccl_a_lost_rank_is_named_while_this_one_waits(monkeypatch):
    shown = Shown()
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setattr(lost_peers, "_SECONDS", 0.01)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    groups_with("TIMEOUT", monkeypatch)
    with lost_peer_named(lambda: "somewhere in the job"), lost_peer_named(lambda: "in its step 8"):
        wait_for_the_gpu(shown)
    assert re.match(
        r"LostPeerError: rank 3 of 8 lost another rank in its step 8, in [\w ]+, called by \w+ "
        r"\(.+:\d+\), and cannot continue",
        shown.text,
    ), shown.text
    assert "(NCCL reports TIMEOUT; torch ends this process within two minutes)" in shown.text
    assert shown.text.count("\n") == 1


def test_groups_without_an_error_are_not_reported(monkeypatch):
    groups_with("SUCCESS", monkeypatch)
    assert lost_peers._nccl_error() is None
    groups_with("COMM_ERROR", monkeypatch)
    assert lost_peers._nccl_error() == "COMM_ERROR"


def test_the_thread_that_watches_ends_with_the_outermost_context():
    with lost_peer_named(lambda: "in the job"):
        with lost_peer_named(lambda: "in its step 1"):
            pass
        watching = [thread for thread in threading.enumerate() if thread.name == "megatron_pg lost ranks"]
        assert len(watching) == 1
    watching[0].join(60)
    assert not watching[0].is_alive()
