"""The errors of a step, and the error for a lost rank."""

from megatron_pg.rollouts.printable import printable

_LONGEST = 8192  # characters of a text for the other ranks, which may quote a user's data


class StepPlanError(ValueError):
    """The step cannot be planned; the same message is raised on every data-parallel rank."""


class NonFiniteLossError(ValueError):
    """A trained token's loss is NaN or inf; raised on every rank, in training before the optimizer moves."""


class ScheduleError(ValueError):
    """Megatron's settings, model, data or counts do not meet the requirements of the step."""


class LostPeerError(RuntimeError):
    """Another rank was killed, failed or hangs, so a collective or transfer of this rank failed."""


def message_of(error: BaseException) -> str:
    """The text of any error, printable and not endless, for other ranks and a terminal."""
    try:
        text = str(error)
    except Exception as failure:
        text = f"its text cannot be formatted ({type(failure).__name__})"
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    lines = [printable(line, limit=None) for line in text.splitlines()]
    shown = "\n".join(lines) or "no text"
    return shown if isinstance(error, ValueError) and lines else f"{type(error).__name__}: {shown}"
