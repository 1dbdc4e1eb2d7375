"""The collectives of the plugin, on the device that a group needs: tables and whole texts, never pickled objects."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import AllgatherOptions, BroadcastOptions

LAST_WORDS = timedelta(minutes=1)  # that a failed rank waits for the others to receive its error


def device_of(group: ProcessGroup | None) -> torch.device:
    """The device of tensors in a collective of `group` (None: the default group)."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def all_gather_rows(values: Tensor, group: ProcessGroup | None = None, *, error: Exception | None = None) -> Tensor:
    """[n, …] on the CPU from [same shape] on each of the n ranks, in rank order: one collective, one host read.

    `error` is this rank's error, which its values report to the others. It is raised here if they do not answer within
    `LAST_WORDS`: they may be in a collective of the user's code, which this rank never reaches.
    """
    values = values.to(device_of(group))
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    if error is None:
        dist.all_gather(rows, values, group=group)
    else:
        options = AllgatherOptions()
        options.timeout = LAST_WORDS  # also of the operation, which otherwise delays the end of the process
        target: Any = group or dist.group.WORLD
        try:
            target.allgather([rows], [values], options).wait(LAST_WORDS)
        except RuntimeError as lost:
            raise error from lost
    return torch.stack(rows).cpu()


def gathered(values: Tensor, group: ProcessGroup | None, error: Exception | None = None) -> Tensor:
    """[ranks, ...] in rank order, as `all_gather_rows`; without a group those of this process alone."""
    return values[None] if group is None else all_gather_rows(values, group, error=error)


def gathered_parts(
    values: Tensor, sizes: Sequence[int], group: ProcessGroup | None, error: Exception | None = None
) -> list[Tensor]:
    """The values of each rank, [sizes[rank]], in rank order; one collective, none where no rank has a value."""
    if not (longest := max(sizes)):
        return [values] * len(sizes)
    rows = gathered(torch.nn.functional.pad(values, (0, longest - len(values))), group, error)
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def gathered_texts(text: str, group: ProcessGroup | None, error: Exception | None = None) -> list[str]:
    """The text of each rank, in rank order, as `gathered`; two collectives, one where no rank has a text."""
    data = encode(text)
    sizes = gathered(torch.tensor([len(data)]), group, error)[:, 0].tolist()
    return [decode(part) for part in gathered_parts(data, sizes, group, error)]


def rank_of(group: ProcessGroup | None) -> int:
    """This rank's number in `group`; without a group, 0: this process alone."""
    return 0 if group is None else dist.get_rank(group)


def all_to_all_rows(values: Tensor, sent: Tensor, received: Tensor, group: ProcessGroup) -> Tensor:
    """The received rows, on the CPU, in the order of the sending ranks.

    `values` has [sum of sent, ...] rows in the order of the receiving ranks; `sent` and `received` are the numbers of
    rows to and from each of the n ranks, [n].
    """
    values = values.to(device_of(group)).contiguous()
    rows = values.new_empty(int(received.sum()), *values.shape[1:])
    dist.all_to_all_single(rows, values, received.tolist(), sent.tolist(), group=group)
    return rows.cpu()


def all_reduced(values: Tensor, operation: dist.ReduceOp.RedOpType, group: ProcessGroup) -> Tensor:
    """The values combined over the ranks of `group`, on the CPU."""
    combined = values.to(device_of(group), copy=True)
    dist.all_reduce(combined, operation, group=group)
    return combined.cpu()


def broadcast_text(text: str, source: int, group: ProcessGroup | None = None) -> str:
    """The text of rank `source` of `group` (None: the default group); two collectives, one for an empty text."""
    first = source if group is None else dist.get_global_rank(group, source)
    data = encode(text).to(device_of(group))
    size = torch.tensor([len(data)], device=data.device)
    dist.broadcast(size, src=first, group=group)
    return _text_of(data, int(size), first, group)


def text_of_failed(text: str, error: Exception | None) -> tuple[int | None, str]:
    """The first rank with an `error` and its text, or None and the text of rank 0, on every rank of the job.

    As many collectives as `broadcast_text`. `error` is this rank's, as in `all_gather_rows`, and is raised here.
    """
    data = encode(text).to(device_of(None))
    given = all_gather_rows(torch.tensor([len(data), error is not None]), error=error).tolist()
    failed = next((rank for rank, (_, has_failed) in enumerate(given) if has_failed), None)
    first, size = failed or 0, given[failed or 0][0]
    if error is None:
        return failed, _text_of(data, size, first, None)
    options: Any = BroadcastOptions()
    options.rootRank, options.timeout = first, LAST_WORDS
    with suppress(RuntimeError):  # the others are elsewhere, and these were numbers of the user's collective
        world: Any = dist.group.WORLD
        data = data if len(data) == size else data.new_empty(size)
        if size:
            world.broadcast([data], options).wait(LAST_WORDS)
    raise error


def _text_of(data: Tensor, size: int, first: int, group: ProcessGroup | None) -> str:
    """The text of global rank `first`, whose `data` have this size; no collective for an empty one."""
    data = data if len(data) == size else data.new_empty(size)
    if size:
        dist.broadcast(data, src=first, group=group)
    return decode(data.cpu())


def encode(text: str) -> Tensor:
    """[bytes] uint8: the text as UTF-8."""
    return torch.tensor([*text.encode(errors="backslashreplace")], dtype=torch.uint8)


def decode(data: Tensor) -> str:
    """The text in the bytes of `encode`."""
    return data.numpy().tobytes().decode()
