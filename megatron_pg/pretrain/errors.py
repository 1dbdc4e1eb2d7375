"""Errors that every rank has: rank 0 shows them once, without a traceback, and only then do the other ranks exit."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType

import torch
from torch.distributed import Store, distributed_c10d, group

from megatron_pg.args import ArgumentError
from megatron_pg.metrics.reporting import CallbackError
from megatron_pg.plan.collectives import gathered_texts
from megatron_pg.plan.errors import NonFiniteLossError, StepPlanError, message_of

ON_EVERY_RANK = (ArgumentError, CallbackError, StepPlanError, NonFiniteLossError)
_SHOWN = "megatron_pg: an error has been shown"  # a key of the process group's store


def shown_once(error: ValueError) -> BaseException:
    """What to raise for an error that every rank has.

    A launcher ends all ranks when one of them has exited, so the other ranks wait until rank 0 has shown the error.
    Without a process group they cannot wait, and each rank shows it.
    """
    store = _store()
    if _rank() != 0 and store is not None:
        with suppress(RuntimeError):  # rank 0 has caught the error, or has exited
            store.wait([_SHOWN], timedelta(minutes=2))
        return SystemExit(1)
    report_when_shown(error)
    return error.with_traceback(None)


def report_when_shown(error: Exception) -> None:
    """Have rank 0 tell the waiting ranks when its error has been shown."""
    if _rank() != 0:
        return
    hook, store = sys.excepthook, _store()

    def show(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is error and isinstance(error, ON_EVERY_RANK):
            print(f"{kind.__name__}: {raised}", file=sys.stderr, flush=True)  # noqa: T201
        else:
            hook(kind, raised, trace)
        if raised is error and store is not None:
            with suppress(RuntimeError):  # the launcher has exited
                store.set(_SHOWN, "")

    sys.excepthook = show


def raise_on_every_rank(error: Exception | None, rule: str) -> None:
    """Raise this rank's error, or name the rank that has one; every rank must call."""
    messages = gathered_texts("" if error is None else message_of(error), group.WORLD, error)
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message:
            raise ArgumentError([(rule, f"rank {rank}: {message}")])


@contextmanager
def raised_on_every_rank(rule: str, *, is_last: bool = True) -> Iterator[None]:
    """Raise an error of the block on every rank after it; every rank must run the block.

    If a rank runs several blocks, it compares once, after the `is_last` one, or where it has failed.
    """
    error = None
    try:
        yield
    except Exception as failure:
        error = failure
    if is_last or error is not None:
        raise_on_every_rank(error, rule)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _store() -> Store | None:
    return distributed_c10d._get_default_store() if torch.distributed.is_initialized() else None
