"""What a step raises, and the name that a lost rank is given."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_pg.rollouts.printable import printable


class StepPlanError(ValueError):
    """The step cannot be planned; the same message is raised on every data-parallel rank."""


class NonFiniteLossError(ValueError):
    """A trained token's loss is NaN or inf; raised on every rank, in training before the optimizer moves."""


class ContractError(ValueError):
    """Megatron's settings or counts are not what the plan relies on."""


class LostPeerError(RuntimeError):
    """Another rank was killed, failed or hangs, so a collective or transfer of the step broke off on this one."""


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
def lost_peer_named(call: int) -> Iterator[None]:
    """Give the backend's error about a closed connection or a timeout a name and a way on."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not (isinstance(error, torch.distributed.DistError) or "gloo" in text):
            raise
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        raise LostPeerError(
            f"rank {rank} of {size} lost another rank in its step {call}, which therefore cannot finish; the optimizer has not moved. "
            "Another rank was killed, failed with an error of its own, or hangs: see the end of its log. Resume from the last "
            f"checkpoint; --distributed-timeout-minutes sets how long a silent rank is waited for. ({(text.strip().splitlines() or [text])[0][:300]})"
        ) from error
