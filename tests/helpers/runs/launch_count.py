"""Which launches a computation makes: every kernel of ours by name, and every torch operation that is not a view, no
empty tensor and no number."""

import contextlib
from collections import Counter
from collections.abc import Iterator

import pytest
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megatron_pg.kernels.triton import loss as triton_loss
from megatron_pg.kernels.triton import segments, single_pass, surrogate, topk_loss, topk_rows, vocab_parallel
from megatron_pg.kernels.triton import topk as topk_triton

MODULES = (single_pass, segments, surrogate, topk_loss, topk_rows, topk_triton, triton_loss, vocab_parallel)
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
    """In a kernel's place."""

    def __init__(self, kernel, name: str, found: Counter):
        self._kernel, self._name, self._found = kernel, name, found

    def __getitem__(self, grid):
        def launch(*given, **named):
            self._found[self._name] += 1
            with _disable_current_modes():  # the interpreter's own operations
                return self._kernel[grid](*given, **named)

        return launch


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """Of what is computed inside."""
    found: Counter = Counter()
    with monkeypatch.context() as context:
        for module in MODULES:
            for name in [each for each in vars(module) if each.endswith("_kernel")]:
                context.setattr(module, name, _Counted(getattr(module, name), name, found))
        with _Counting(found):
            yield found
