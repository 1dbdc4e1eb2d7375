"""How many [T, V] tables the torch implementation holds: a further copy of the logits is seen here first."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_pg.kernels import grpo_loss, reference

T, V = 64, 512
TABLE = T * V * 4  # bytes in float32


class LiveTables(TorchDispatchMode):
    """Storages of at least half a table that were made while it is active: how many bytes live now, and at most."""

    def __init__(self):
        super().__init__()
        self.peak = 0.0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() >= TABLE // 2:
            self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    @property
    def now(self) -> float:
        """Live float32 tables."""
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        return sum(size for _, size in self._live.values()) / TABLE


def tables(dtype: torch.dtype, *, entropy: bool) -> tuple[float, float, float]:
    """Float32 tables in addition to the logits: at most in the forward, kept for the backward, at most in the
    backward."""
    fields = {name: -torch.rand(T) for name in ("old_logprobs", "advantages", "weights")}
    logits, targets = torch.randn(T, V, dtype=dtype, requires_grad=True), torch.randint(0, V, (T,))
    clip = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}
    with LiveTables() as live:
        out = grpo_loss(logits, targets, **fields, **clip, entropy=entropy, impl="torch")
        forward, kept, live.peak = live.peak, live.now, 0.0
        out.loss.backward()
        return forward, kept, live.peak


@pytest.mark.proof("memory: [T, V] tables as documented")
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_torch_loss_keeps_one_table_and_never_holds_more_than_six(dtype, entropy, evidence):
    forward, kept, backward = tables(dtype, entropy=entropy)
    compute = 2 if dtype == torch.float64 else 1
    assert kept == dtype.itemsize / 4
    assert 0 < forward <= 6 * compute
    assert 0 < backward <= 6 * compute
    evidence(cases=1)


def test_a_further_copy_would_be_seen(monkeypatch):
    original = reference.read
    monkeypatch.setattr(reference, "read", lambda logits, reader: original(logits.exp().log(), reader))
    _, kept, _ = tables(torch.float32, entropy=False)
    assert kept > 1
