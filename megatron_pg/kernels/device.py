"""The device and the kernel of the loss, and why it is these."""

import os
from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True)
class Choice:
    """What `chosen` answers; the same on every rank of a machine."""

    device: torch.device
    kernel: str  # "triton" or "torch"
    why: str

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.why}: {'CPU' if self.device.type == 'cpu' else self.device}, --pg-kernel {self.kernel}"


def chosen(asked: str | None = None) -> Choice:
    """Choose the kernel: `asked`, or by default triton on a GPU that exists and torch elsewhere.

    Args:
        asked: --pg-kernel, "triton", "torch" or None.

    Raises:
        ValueError: triton is asked for, and there is neither a GPU nor Triton's interpreter (TRITON_INTERPRET=1).
    """
    device, why = _device()
    if asked == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"--pg-kernel triton cannot run here: {why}. Use --pg-kernel torch or leave the flag out; to test the "
            "kernels on a CPU, set TRITON_INTERPRET=1."
        )
    return Choice(device, asked or ("torch" if device.type == "cpu" else "triton"), why)


def _device() -> tuple[torch.device, str]:
    """The device of tensors that are made on "cuda", or the CPU, and why.

    A tensor is made because neither `torch.version.cuda` nor `torch.cuda.is_available()` shows that there is a GPU: the
    first is a property of the build, and code that runs Megatron on a CPU replaces the second.
    """
    cpu, version, cuda = torch.device("cpu"), f"torch {torch.__version__}", torch.version.cuda
    if cuda is None:
        return cpu, f"{version} was built without CUDA"
    try:
        found = torch.empty(0, device="cuda").device
    except (RuntimeError, AssertionError) as error:  # no driver, no visible GPU
        reason = str(error).split(". ")[0].split("\n")[0]
        return cpu, f"{version} was built for CUDA {cuda}, but no GPU can be used ({reason})"
    if found.type != "cuda":
        return cpu, f"{version} was built for CUDA {cuda}, but tensors made on cuda are on the {found.type} here"
    return found, f"{version}, CUDA {cuda}, {torch.cuda.get_device_name(found)}"


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors, cached: the query costs more host time than a small launch.

    For Triton's interpreter, the number is small, so that programs take several tiles.
    """
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
