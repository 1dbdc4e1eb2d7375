"""One device for all of gloo's groups in a process.

Every device has a thread that wakes up a hundred times a second, and every group makes its own. Megatron makes about twenty groups
for each layout, and Megatron-FSDP keeps them alive: after fifty cases a process had 650 such threads, which took half of its time.
"""

from datetime import timedelta

from torch.distributed import Store, distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroupGloo


class _WithSharedDevice(ProcessGroupGloo):
    """A group as torch makes it, on the process's one device."""

    device = None

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta):
        if _WithSharedDevice.device is None:
            _WithSharedDevice.device = ProcessGroupGloo.create_default_device()
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [_WithSharedDevice.device], timeout
        super().__init__(store, rank, size, options)


def share() -> None:
    """Before the first group is made."""
    distributed_c10d.ProcessGroupGloo = _WithSharedDevice
