"""The errors of a step, and the error for a lost rank."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb

import torch

from megatron_pg.rollouts.printable import printable

_TORCH = str(Path(torch.__file__).parent)
_LOST = re.compile(r"clos|reset|refused|broken pipe|time(d )?out|abort|remote|unreachable", re.IGNORECASE)


class StepPlanError(ValueError):
    """The step cannot be planned; the same message is raised on every data-parallel rank."""


class NonFiniteLossError(ValueError):
    """A trained token's loss is NaN or inf; raised on every rank, in training before the optimizer moves."""


class ScheduleError(ValueError):
    """Megatron's settings, model, data or counts do not meet the requirements of the step."""


class LostPeerError(RuntimeError):
    """Another rank was killed, failed or hangs, so a collective or transfer of this rank failed."""


def message_of(error: BaseException) -> str:
    """The text of any error, printable, for other ranks and a terminal."""
    try:
        text = str(error)
    except Exception as failure:
        text = f"its text cannot be formatted ({type(failure).__name__})"
    lines = [printable(line, limit=None) for line in text.splitlines()]
    shown = "\n".join(lines) or "no text"
    return shown if isinstance(error, ValueError) and lines else f"{type(error).__name__}: {shown}"


@contextmanager
def lost_peer_named(where: Callable[[], str]) -> Iterator[None]:
    """Replace the backend's error about a closed connection or a timeout by a LostPeerError.

    `where` returns this rank's progress at the time of the error, for the message.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error).strip()
        if isinstance(error, LostPeerError) or not _is_about_a_lost_peer(error, text):
            raise
        rank, size = _rank_and_size()
        raise LostPeerError(
            f"rank {rank} of {size} lost another rank {where()}, in {_broken_call(error)}, and cannot continue. "
            "Another rank was killed, failed with its own error, or hangs: see the end of its log. Resume from the "
            "last checkpoint; --distributed-timeout-minutes sets how long a rank waits for a silent one. "
            f"({(text.splitlines() or [text])[0][:300]})"
        ) from error


def _is_about_a_lost_peer(error: RuntimeError, text: str) -> bool:
    """Not about a port in use, or two ranks on one GPU."""
    return "gloo" in text or (isinstance(error, torch.distributed.DistError) and bool(_LOST.search(text)))


def _rank_and_size() -> tuple[object, object]:
    """Of the default group; before it exists, of the launcher."""
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return os.environ.get("RANK", "?"), os.environ.get("WORLD_SIZE", "?")


def _broken_call(error: RuntimeError) -> str:
    """The collective or transfer that failed, and the code that called it."""
    frames = [frame for frame in extract_tb(error.__traceback__) if frame.name != "__torch_function__"]
    caller = [frame for frame in frames if not frame.filename.startswith(_TORCH)][-1]
    call = "a transfer" if frames[-1] is caller else frames[-1].name
    return f"{call}, called by {caller.name} ({'/'.join(Path(caller.filename).parts[-3:])}:{caller.lineno})"
