"""Which launches a computation makes: every kernel of ours by name, and every torch operation that is not a view, no
empty tensor and no number."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megatron_pg.kernels.triton import (
    loss,
    sampling_masks,
    segments,
    single_pass,
    surrogate,
    teacher,
    topk,
    topk_loss,
    vocab_parallel,
)
from megatron_pg.lm_head import tiled_product, tiled_reader
from megatron_pg.lm_head.scaled_exp import kernels as scaled_exp

MODULES = (single_pass, segments, surrogate, topk_loss, topk, loss, vocab_parallel)
MODULES += (sampling_masks, teacher, scaled_exp, tiled_product, tiled_reader)
NOTHING = ("empty", "empty_like", "new_empty", "detach", "alias", "scalar_tensor")


class _Counting(TorchDispatchMode):
    def __init__(self, found: Counter):
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if not function.is_view and name not in NOTHING:
            self._found[name] += 1
        return function(*args, **kwargs or {})


class _Counted:
    """In a kernel's place; one runs at a time, as the interpreter asks for where ranks are threads."""

    def __init__(self, kernel, name: str, found: Counter, lock: threading.Lock):
        self._kernel, self._name, self._found, self._lock = kernel, name, found, lock

    def __getitem__(self, grid):
        def launch(*given, **named):
            with self._lock, _disable_current_modes():  # the interpreter's own operations
                self._found[self._name] += 1
                return self._kernel[grid](*given, **named)

        return launch


def count_kernels(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Of what is launched from now on, by any thread."""
    found, lock = Counter(), threading.Lock()
    for module in MODULES:
        for name in [each for each in vars(module) if each.endswith("_kernel")]:
            monkeypatch.setattr(module, name, _Counted(getattr(module, name), name, found, lock))
    return found


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """Of what is computed inside."""
    with monkeypatch.context() as context:
        found = count_kernels(context)
        with _Counting(found):
            yield found
