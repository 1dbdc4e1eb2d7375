"""The one-launch kernel's work in torch: on a CPU, where Gluon cannot run, it tests all that is around the kernel."""

import math
from types import SimpleNamespace

import pytest
import torch


class Launches(list):
    """In the kernel's place: takes its arguments by their names, does its work, and keeps them."""

    def __init__(self, names: list[str]):
        super().__init__()
        self._names = names

    def __getitem__(self, grid: tuple[int]):
        def launch(*positional: object, num_warps: int, maxnreg: int, **constants: object) -> None:
            arguments = dict(zip(self._names, positional, strict=False)) | constants
            assert list(arguments) == self._names
            assert 0 < grid[0] <= arguments["rows"]
            assert 32 * num_warps == arguments["THREADS"]
            self.append(arguments)
            _compute(SimpleNamespace(**arguments))

        return launch


def in_torch(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Every loss that the one-launch kernel could compute goes its way, which ends in torch."""
    from megatron_pg.kernels import one_launch, triton_loss

    launches = Launches(one_launch.grpo_kernel.arg_names)
    monkeypatch.setattr(one_launch, "grpo_kernel", launches)
    monkeypatch.setattr(triton_loss, "fits_one_launch", lambda logits, vocab_size: len(logits) > 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=2))
    return launches


def _compute(k: SimpleNamespace) -> None:
    """What `one_launch.grpo_kernel` does to `results` and `gradients`, of what it would read."""
    fields = k.targets, k.old_logprobs, k.advantages, k.weights, k.mask
    assert all(values.shape == (k.rows,) and values.is_contiguous() for values in fields)
    assert (k.targets.dtype, k.mask.dtype, k.results.dtype) == (torch.int64, torch.bool, torch.float32)
    assert (k.results.shape, k.zero) == ((5, k.rows), 0)
    assert (k.logits_stride, k.gradients_stride) == (k.logits.stride(0), k.gradients.stride(0))
    targets = k.targets[k.mask]
    old, advantages, weights = (values[k.mask].float() for values in fields[1:4])
    log_p = (k.logits[k.mask, : k.columns].float() * (k.c * math.log(2))).log_softmax(1)
    exists = (targets >= 0) & (targets < k.columns)
    at = torch.where(exists, targets, 0)[:, None]
    logprobs = torch.where(exists, log_p.gather(1, at)[:, 0], torch.nan)
    ratio = (logprobs - old).clamp(-20, 20).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(k.clip_low, k.clip_high) * advantages)
    moves = torch.where(advantages >= 0, ratio <= k.clip_high, ratio >= k.clip_low) & ((logprobs - old).abs() <= 20)
    slope = torch.where(moves, ratio * advantages * weights, 0)[:, None] * k.grad_scale
    entropy = torch.special.entr(log_p.exp()).sum(1) if k.ENTROPY else torch.zeros_like(loss)
    k.results.zero_()
    k.results[:, k.mask] = torch.stack([loss, weights * loss, logprobs, logprobs - old, entropy])
    gradient = (slope * log_p.exp()).scatter_add_(1, at, -slope)
    k.gradients[:, : k.columns] = 0
    k.gradients[k.mask, : k.columns] = gradient.to(k.gradients.dtype)
