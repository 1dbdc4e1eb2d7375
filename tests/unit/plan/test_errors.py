"""The name that a lost rank is given, and what keeps its own."""

import re

import pytest
from torch.distributed import DistNetworkError, DistStoreError

from megatron_pg.plan.errors import LostPeerError, lost_peer_named

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
    place = r"in a transfer, called by send_weights \(unit/plan/test_errors.py:\d+\), and cannot continue"
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
