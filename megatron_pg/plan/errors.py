"""What a step raises, and the name that a lost rank is given."""

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


class ContractError(ValueError):
    """Megatron's settings or counts are not what the plan relies on."""


class LostPeerError(RuntimeError):
    """Another rank was killed, failed or hangs, so a collective or transfer broke off on this one."""


def message_of(error: BaseException) -> str:
    """The error in words that can be sent to the other ranks and shown on a terminal, whatever the user's code made of it."""
    try:
        text = str(error)
    except Exception as failure:
        text = f"a text that cannot be made ({type(failure).__name__})"
    lines = [printable(line, limit=None) for line in text.splitlines()]
    shown = "\n".join(lines) or "no text"
    return shown if isinstance(error, ValueError) and lines else f"{type(error).__name__}: {shown}"


@contextmanager
def lost_peer_named(where: Callable[[], str]) -> Iterator[None]:
    """Give the backend's error about a closed connection or a timeout a name, a place and a way on.

    `where` says how far this rank is, at the time of the error.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error).strip()
        if isinstance(error, LostPeerError) or not _tells_of_a_lost_peer(error, text):
            raise
        rank, size = _rank_and_size()
        raise LostPeerError(
            f"rank {rank} of {size} lost another rank {where()}, in {_broken_call(error)}, and cannot go on. Another rank was "
            "killed, failed with an error of its own, or hangs: see the end of its log. Resume from the last checkpoint; "
            "--distributed-timeout-minutes sets how long a silent rank is waited for. "
            f"({(text.splitlines() or [text])[0][:300]})"
        ) from error


def _tells_of_a_lost_peer(error: RuntimeError, text: str) -> bool:
    """And not of a port in use, or of two ranks on one GPU."""
    return "gloo" in text or (isinstance(error, torch.distributed.DistError) and bool(_LOST.search(text)))


def _rank_and_size() -> tuple[object, object]:
    """A launcher's, where the ranks have not met."""
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return os.environ.get("RANK", "?"), os.environ.get("WORLD_SIZE", "?")


def _broken_call(error: RuntimeError) -> str:
    """The collective or transfer that broke off, and the code that called it."""
    frames = [frame for frame in extract_tb(error.__traceback__) if frame.name != "__torch_function__"]
    caller = [frame for frame in frames if not frame.filename.startswith(_TORCH)][-1]
    call = "a transfer" if frames[-1] is caller else frames[-1].name
    return f"{call}, called by {caller.name} ({'/'.join(Path(caller.filename).parts[-3:])}:{caller.lineno})"
