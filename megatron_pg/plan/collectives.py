"""The few collectives of the plugin, on whatever device a group needs: tables and texts, never a pickle."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import AllgatherOptions

LAST_WORDS = timedelta(minutes=1)  # that a rank which has failed waits for the others to hear of it


def device_of(group: ProcessGroup | None) -> torch.device:
    """Where tensors must live for a collective of `group` (None: the default group)."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def all_gather_rows(values: Tensor, group: ProcessGroup | None = None, *, error: Exception | None = None) -> Tensor:
    """[n, …] on the CPU from [same shape] on each of the n ranks, in rank order: one collective, one host read.

    `error` is what has failed on this rank, of which its values tell the others. It is raised where they cannot be told: they may
    be in a collective of the user's, which this rank never reaches.
    """
    values = values.to(device_of(group))
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    if error is None:
        dist.all_gather(gathered, values, group=group)
    else:
        options = AllgatherOptions()
        options.timeout = LAST_WORDS  # the operation's, which would keep the process from its end
        try:
            (group or dist.group.WORLD).allgather([gathered], [values], options).wait(LAST_WORDS)
        except RuntimeError as lost:
            raise error from lost
    return torch.stack(gathered).cpu()


def all_to_all_rows(values: Tensor, sent: Tensor, received: Tensor, group: ProcessGroup) -> Tensor:
    """[sum of received, ...] on the CPU, in the order of the ranks that sent them, from rows in the order of those that get them.

    `sent`, `received`: [n] rows to and from each rank of `group`.
    """
    values = values.to(device_of(group)).contiguous()
    found = values.new_empty(int(received.sum()), *values.shape[1:])
    dist.all_to_all_single(found, values, received.tolist(), sent.tolist(), group=group)
    return found.cpu()


def all_reduced(values: Tensor, operation: dist.ReduceOp.RedOpType, group: ProcessGroup) -> Tensor:
    """On the CPU, combined over the ranks of `group`, the same on all of them."""
    found = values.to(device_of(group), copy=True)
    dist.all_reduce(found, operation, group=group)
    return found.cpu()


def broadcast_text(text: str, source: int, *, size: int = 1024) -> str:
    """The text of rank `source` of the default group, cut to `size` bytes."""
    data = encode(text, size).to(device_of(None))
    dist.broadcast(data, src=source)
    return decode(data.cpu())


def encode(text: str, size: int) -> Tensor:
    """[size] uint8: the text as UTF-8, cut or filled up."""
    return torch.frombuffer(
        bytearray(text.encode(errors="backslashreplace")[:size].ljust(size, b"\0")), dtype=torch.uint8
    )


def decode(data: Tensor) -> str:
    """The text in bytes that `encode` made."""
    return bytes(data.numpy().tobytes()).rstrip(b"\0").decode(errors="ignore")
