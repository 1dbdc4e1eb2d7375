"""Which Triton the kernels need, and where the single-pass kernel runs: GPUs and releases of its tests, and others."""

from dataclasses import dataclass
from functools import lru_cache

_TRIED_CAPABILITY, _TRIED_TRITONS = 9, ((3, 6), (3, 7), (3, 8), (3, 9))  # of the figures in docs/benchmarks.md
TRIED_TRITONS = "Triton {}.{} to {}.{}".format(*_TRIED_TRITONS[0], *_TRIED_TRITONS[-1])
_LEAST_CAPABILITY = 8  # asynchronous copies
_LEAST_TRITON = (3, 4)  # of every kernel: the fields of a constant are read in it


@dataclass(frozen=True, slots=True)
class Path:
    """How losses with a row over a whole vocabulary are computed."""

    takes: bool  # the single-pass kernel, wherever a row fits
    is_tried: bool  # without a test at its first use
    text: str  # for banner and doctor


@lru_cache  # asked at every loss
def too_old(triton: str) -> str | None:
    """What the kernels need instead of this release of Triton; None if they compile with it."""
    needs = "Triton 3.4 or later (torch 2.8 or later brings it)"
    return f"{needs}, and this is {triton}" if _release(triton) < _LEAST_TRITON else None


def _release(triton: str) -> tuple[int, ...]:
    return tuple(int(part) for part in triton.split(".")[:2])


def path_of(capability: tuple[int, int], triton: str) -> Path:
    """The path on a GPU of this compute capability with this release of Triton."""
    release = _release(triton)
    chip = ".".join(map(str, capability))
    needs = "multi-pass kernels: the single-pass kernel needs"
    if release < _TRIED_TRITONS[0]:
        return Path(False, False, f"{needs} Triton 3.6 or later, and this is {triton}")
    if capability[0] < _LEAST_CAPABILITY:
        return Path(False, False, f"{needs} compute capability 8.0 or later, and this is {chip}")
    if capability[0] == _TRIED_CAPABILITY and release in _TRIED_TRITONS:
        return Path(True, True, "a single pass where a row fits")
    tried = f"tried with {TRIED_TRITONS} on compute capability {_TRIED_CAPABILITY}, not {triton} on {chip}"
    return Path(True, False, f"a single pass where a row fits and a test at its first use agrees ({tried})")
