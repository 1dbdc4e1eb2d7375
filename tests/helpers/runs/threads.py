"""Several ranks in one process: threads over torch's threaded process group, which starts in milliseconds.

The group is private to torch's own tests; it is wrapped here, and only here.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.testing._internal.distributed import multi_threaded_pg

from megatron_pg.plan import collectives

HANG = 900.0  # seconds: a loaded machine is slow


def run(world_size: int, function: Callable[[int], object]) -> list[object]:
    """Results of `function(rank)` on every rank, in order; a rank's error is raised again, with its rank."""
    world = multi_threaded_pg._install_threaded_pg()
    type(world).comms = []  # torch 2.11 asks for them, and its threaded world has none
    _set_thread_isolation_mode(True)
    store = dist.HashStore()
    results: list[object] = [None] * world_size
    errors: list[tuple[int, BaseException]] = []

    def work(rank: int) -> None:
        try:
            dist.init_process_group(backend="threaded", rank=rank, world_size=world_size, store=store)
            results[rank] = function(rank)
        except BaseException as error:
            errors.append((rank, error))
            group = multi_threaded_pg.ProcessLocalGroup
            with group._coll_lock:  # it goes over the collectives in progress, and the other ranks begin and end some
                group.exception_handle(error)
        finally:
            if world.default_pg is not None:
                dist.destroy_process_group()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world_size)]
    try:
        with mock.patch.object(collectives, "LAST_WORDS", timedelta()):  # this group cannot wait for a limited time
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(HANG)
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError(f"a rank hangs; errors so far: {errors}")
    finally:
        _set_thread_isolation_mode(False)
        multi_threaded_pg.ProcessLocalGroup.reset()
        multi_threaded_pg._uninstall_threaded_pg()
    if errors:
        rank, error = next(((r, e) for r, e in errors if not _is_echo(e)), errors[0])
        raise type(error)(*error.args) from RuntimeError(f"rank {rank}")
    return results


def _is_echo(error: BaseException) -> bool:
    """A rank that was only told of another one's error."""
    return isinstance(error, SystemExit)


def subgroup(members_of: Callable[[int], object], world_size: int, rank: int) -> dist.ProcessGroup:
    """The group of the ranks that `members_of` maps to the same key as `rank`; all of them must call."""
    members = [r for r in range(world_size) if members_of(r) == members_of(rank)]
    return dist.new_group(members, use_local_synchronization=True)
