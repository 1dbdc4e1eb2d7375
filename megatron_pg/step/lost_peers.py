"""Names a lost rank: in the error of a collective over gloo, or by a thread that watches the groups over NCCL.

Over gloo, a collective raises in Python. Over NCCL it does not: the host waits for the GPU, a thread of torch finds the
failed collective, waits a minute for dumps and then ends the process with SIGABRT and a C++ stack. Within that minute,
the thread of this module reports what the error over gloo contains.
"""

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import StackSummary, extract_stack, extract_tb

import torch
from torch.distributed import distributed_c10d

from megatron_pg.plan.errors import LostPeerError

_TORCH = str(Path(torch.__file__).parent)
_LOST = re.compile(r"clos|reset|refused|broken pipe|time(d )?out|abort|remote|unreachable", re.IGNORECASE)
_SECONDS = 1.0  # between two looks at the groups
_places: list[Callable[[], str]] = []  # of the contexts that are open, the outermost first


@contextmanager
def lost_peer_named(where: Callable[[], str]) -> Iterator[None]:
    """Replace the backend's error about a closed connection or a timeout by a LostPeerError.

    Over NCCL, which raises nothing, the text of the LostPeerError is printed before torch ends the process.
    `where` returns this rank's progress at the time of the error, for the message.
    """
    _places.append(where)
    ended = threading.Event()
    arguments = (ended, threading.get_ident())
    watcher = threading.Thread(target=_watch, args=arguments, name="megatron_pg lost ranks", daemon=True)
    if is_outermost := len(_places) == 1:
        watcher.start()
    try:
        yield
    except RuntimeError as error:
        text = str(error).strip()
        # not about a port in use, or two ranks on one GPU
        is_lost = "gloo" in text or (isinstance(error, torch.distributed.DistError) and _LOST.search(text))
        if isinstance(error, LostPeerError) or not is_lost:
            raise
        call = _waiting_call(extract_tb(error.__traceback__))
        raise LostPeerError(_message(where(), call, (text.splitlines() or [text])[0][:300])) from error
    finally:
        _places.pop()
        ended.set()
        if is_outermost:
            watcher.join()  # a step leaves no thread


def _watch(ended: threading.Event, watched: int) -> None:
    """Print the message once, if a group over NCCL fails while thread `watched` is inside the outermost context."""
    while not ended.wait(_SECONDS):
        if (error := _nccl_error()) is not None and _places:
            call = _waiting_call(extract_stack(sys._current_frames()[watched]))
            text = _message(_places[-1](), call, f"NCCL reports {error}; torch ends this process within two minutes")
            print(f"{LostPeerError.__name__}: {text}", file=sys.stderr, flush=True)  # noqa: T201
            return


def _nccl_error() -> str | None:
    """The name of the first error of a group over NCCL: TIMEOUT, COMM_ERROR or REMOTE_ERROR."""
    for group in list(distributed_c10d._world.pg_map):
        for device in group._device_types:
            # absent from gloo and from old releases of torch
            error = getattr(group._get_backend(device), "get_error", lambda: None)()
            if error is not None and error.name != "SUCCESS":
                return error.name
    return None


def _message(place: str, call: str, cause: str) -> str:
    rank, size = os.environ.get("RANK", "?"), os.environ.get("WORLD_SIZE", "?")  # of the launcher
    if torch.distributed.is_initialized():
        rank, size = str(torch.distributed.get_rank()), str(torch.distributed.get_world_size())
    return (
        f"rank {rank} of {size} lost another rank {place}, in {call}, and cannot continue. "
        "Another rank was killed, failed with its own error, or hangs: see the end of its log. Resume from the "
        f"last checkpoint; --distributed-timeout-minutes sets how long a rank waits for a silent one. ({cause})"
    )


def _waiting_call(stack: StackSummary) -> str:
    """The collective, transfer or function in which this rank waits, and the code that called it."""
    frames = [frame for frame in stack if frame.name != "__torch_function__"]
    caller = [frame for frame in frames if not frame.filename.startswith(_TORCH)][-1]
    call = "a transfer" if frames[-1] is caller else frames[-1].name
    return f"{call}, called by {caller.name} ({'/'.join(Path(caller.filename).parts[-3:])}:{caller.lineno})"
