"""The single-pass kernel's work in torch: on a CPU, where Gluon cannot run, it tests all that is around the kernel."""

import math
from types import SimpleNamespace

import pytest
import torch

from megatron_pg.objectives.interface.token_kernel import in_torch as kernel_in_torch


class Launches(list):
    """In the kernel's place: takes its arguments by their names, does its work, and keeps them."""

    def __init__(self, names: list[str]):
        super().__init__()
        self._names = names

    def __getitem__(self, grid: tuple[int]):
        def launch(
            *positional: object,
            num_warps: int,
            num_ctas: int,
            maxnreg: int,
            enable_fp_fusion: bool,
            **constants: object,
        ) -> SimpleNamespace:
            arguments = dict(zip(self._names, positional, strict=False)) | constants
            arguments["c"] = float(torch.tensor(arguments["c"]))  # as kernels have it
            assert list(arguments) == self._names
            assert enable_fp_fusion
            assert 0 < grid[0] <= arguments["rows"]
            assert 32 * num_warps * num_ctas == arguments["ROW"].threads
            self.append(arguments)
            _compute(SimpleNamespace(**arguments))
            return SimpleNamespace(n_spills=0)

        return launch


def in_torch(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Every loss that the single-pass kernel could compute goes its way, which ends in torch."""
    from megatron_pg.kernels.triton import loss as triton_loss
    from megatron_pg.kernels.triton import single_pass

    launches = Launches(single_pass.single_pass_kernel.arg_names)
    monkeypatch.setattr(single_pass, "single_pass_kernel", launches)
    monkeypatch.setattr(triton_loss, "fits_single_pass", lambda logits, *_, **__: len(logits) > 0)
    return launches


def _compute(k: SimpleNamespace) -> None:
    """What `single_pass.single_pass_kernel` does to `results` and `gradients`, of what it would read."""
    mask = k.fields.mask
    read = [values for values in (k.targets, *k.fields) if values is not None]
    assert all(values.shape == (k.rows,) and values.is_contiguous() for values in read)
    assert (k.targets.dtype, mask.dtype, k.results.dtype) == (torch.int64, torch.bool, torch.float32)
    assert (k.results.shape, k.zero) == ((5 + (k.KL is not None), k.rows), 0)
    assert (k.logits_stride, k.gradients_stride) == (k.logits.stride(0), k.gradients.stride(0))
    assert k.ROW.entropy or not k.ROW.bonus
    targets = k.targets[mask]
    old, advantages, weights, _, other, kl_weights, bonus_weights = (
        None if values is None else values[mask].float() for values in k.fields
    )
    kl_coef, entropy_coef = k.coefficients
    assert k.ROW.kind.is_pair == (k.logits.dtype == torch.bfloat16)
    x = k.logits[mask, : k.columns].float()
    z, cap_slope = (
        (x, 1.0)
        if k.ROW.kind.cap is None
        else (k.ROW.kind.cap * (x / k.ROW.kind.cap).tanh(), (x / k.ROW.kind.cap).cosh() ** -2)
    )
    log_p = (z * (k.c * math.log(2))).log_softmax(1)
    exists = (targets >= 0) & (targets < k.columns)
    at = torch.where(exists, targets, 0)[:, None]
    logprobs = torch.where(exists, log_p.gather(1, at)[:, 0], torch.nan)
    entropy = torch.special.entr(log_p.exp()).sum(1)
    policy, slope = kernel_in_torch(k.TOKEN_KERNEL, torch.float32)(logprobs, old, advantages, k.numbers)
    loss, slope = weights * policy, weights * slope
    results = [policy, loss, logprobs, logprobs - old, entropy if k.ROW.entropy else torch.zeros_like(entropy)]
    if k.KL is not None:
        kl, kl_slope = kernel_in_torch(k.KL, torch.float32)(logprobs, old, other)
        results[1], slope = loss + kl_coef * kl_weights * kl, slope + kl_coef * kl_weights * kl_slope
        results.append(kl)
    slope = torch.where(logprobs.isnan(), torch.nan, slope)
    if k.ROW.bonus:
        results[1] = results[1] - entropy_coef * bonus_weights * entropy
    k.results.zero_()
    k.results[:, mask] = torch.stack(results)
    slope = slope[:, None] * k.grad_scale
    gradient = (-slope * log_p.exp()).scatter_add_(1, at, slope)
    if k.ROW.bonus:
        bonus = entropy_coef * bonus_weights * k.grad_scale
        gradient += bonus[:, None] * torch.where(log_p > -math.inf, log_p.exp() * (log_p + entropy[:, None]), 0)
    k.gradients[:, : k.columns] = 0
    k.gradients[mask, : k.columns] = (gradient * cap_slope).to(k.gradients.dtype)
