"""The one-launch kernel's work in torch: on a CPU, where Gluon cannot run, it tests all that is around the kernel."""

import math
from types import SimpleNamespace

import pytest
import torch

from megatron_pg.kernels.triton import tiles, topk_terms
from megatron_pg.objectives.interface.row import in_torch as row_in_torch


class Launches(list):
    """In the kernel's place: takes its arguments by their names, does its work, and keeps them."""

    def __init__(self, names: list[str]):
        super().__init__()
        self._names = names

    def __getitem__(self, grid: tuple[int]):
        def launch(
            *positional: object, num_warps: int, maxnreg: int, enable_fp_fusion: bool, **constants: object
        ) -> SimpleNamespace:
            arguments = dict(zip(self._names, positional, strict=False)) | constants
            arguments["c"] = float(torch.tensor(arguments["c"]))  # as kernels have it
            assert list(arguments) == self._names
            assert enable_fp_fusion
            assert 0 < grid[0] <= arguments["rows"]
            assert 32 * num_warps == arguments["THREADS"]
            self.append(arguments)
            _compute(SimpleNamespace(**arguments))
            return SimpleNamespace(n_spills=0)

        return launch


def in_torch(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Every loss that the one-launch kernel could compute goes its way, which ends in torch."""
    from megatron_pg.kernels.triton import loss as triton_loss
    from megatron_pg.kernels.triton import one_launch

    launches = Launches(one_launch.one_launch_kernel.arg_names)
    monkeypatch.setattr(one_launch, "one_launch_kernel", launches)
    monkeypatch.setattr(triton_loss, "fits_one_launch", lambda logits, *_, **__: len(logits) > 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=2))
    return launches


def _compute(k: SimpleNamespace) -> None:
    """What `one_launch.one_launch_kernel` does to `results` and `gradients`, of what it would read."""
    fields = k.targets, k.old_logprobs, k.advantages, k.weights, k.other_logprobs, k.kl_weights, k.bonus_weights, k.mask
    assert all(values.shape == (k.rows,) and values.is_contiguous() for values in fields)
    assert (k.targets.dtype, k.mask.dtype, k.results.dtype) == (torch.int64, torch.bool, torch.float32)
    assert (k.results.shape, k.zero) == ((5 + (k.KL is not None) + 2 * (k.FORM is not None), k.rows), 0)
    assert (k.logits_stride, k.gradients_stride) == (k.logits.stride(0), k.gradients.stride(0))
    assert k.ENTROPY or not k.BONUS
    targets = k.targets[k.mask]
    old, advantages, weights, other, kl_weights, bonus_weights = (values[k.mask].float() for values in fields[1:7])
    log_p = (_whole(k)[k.mask, : k.columns].float() * (k.c * math.log(2))).log_softmax(1)
    exists = (targets >= 0) & (targets < k.columns)
    at = torch.where(exists, targets, 0)[:, None]
    logprobs = torch.where(exists, log_p.gather(1, at)[:, 0], torch.nan)
    entropy = torch.special.entr(log_p.exp()).sum(1)
    policy, slope = row_in_torch(k.ROW, torch.float32)(logprobs, old, advantages, (k.p0, k.p1, k.p2, k.p3))
    loss, slope = weights * policy, weights * slope
    results = [policy, loss, logprobs, logprobs - old, entropy if k.ENTROPY else torch.zeros_like(entropy)]
    if k.KL is not None:
        kl, kl_slope = row_in_torch(k.KL, torch.float32)(logprobs, old, other)
        results[1], slope = loss + k.kl_coef * kl_weights * kl, slope + k.kl_coef * kl_weights * kl_slope
        results.append(kl)
    slope = torch.where(logprobs.isnan(), torch.nan, slope)
    if k.BONUS:
        results[1] = results[1] - k.entropy_coef * bonus_weights * entropy
    k.results.zero_()
    if k.FORM is not None:
        bend = k.entropy_coef * bonus_weights * k.grad_scale
        losses, gradient = _taught(k, slope * -k.grad_scale, bend, logprobs, entropy)
        results[1] = results[1] + k.teacher_coef * k.teacher_weights[k.mask].float() * losses[0]
        results += losses
    k.results[:, k.mask] = torch.stack(results)
    if k.RESTORED:
        assert k.logits.data_ptr() != k.gradients.data_ptr()
        k.logits.copy_(_whole(k))
    if k.FORM is not None:
        k.gradients[:, : k.columns] = 0
        k.gradients[k.mask, : k.columns] = gradient.to(k.gradients.dtype)
        return
    slope = slope[:, None] * k.grad_scale
    gradient = (-slope * log_p.exp()).scatter_add_(1, at, slope)
    if k.BONUS:
        bonus = k.entropy_coef * bonus_weights * k.grad_scale
        gradient += bonus[:, None] * torch.where(log_p > -math.inf, log_p.exp() * (log_p + entropy[:, None]), 0)
    k.gradients[:, : k.columns] = 0
    k.gradients[k.mask, : k.columns] = gradient.to(k.gradients.dtype)


def _whole(k: SimpleNamespace) -> torch.Tensor:
    """The logits, with those that are hidden in their places."""
    if k.FORM is None:
        return k.logits
    assert (k.ids.shape, k.ids.dtype) == ((k.rows, k.names), torch.int32)
    assert (k.teacher_logprobs.shape, k.teacher_tails.shape) == ((k.rows, k.names), (k.rows,))
    assert k.names <= k.NAMES < 2 * max(k.names, 2)
    logits = k.logits.clone()
    for t in k.mask.nonzero()[:, 0].tolist():
        named = k.ids[t][k.ids[t] >= 0].long()
        assert (logits[t, named] == -math.inf).all()
        logits[t, named] = k.named_logits[t, 4:][k.ids[t] >= 0].to(logits.dtype)
    return logits


def _taught(
    k: SimpleNamespace, slope: torch.Tensor, bend: torch.Tensor, logprobs: torch.Tensor, entropy: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Divergence and mass, and the gradient, by the kernel's own functions in float32."""
    of = lambda function: row_in_torch(function, torch.float32)  # noqa: E731
    z = k.logits[k.mask, : k.columns].float()
    tail_peak = (z.amax(1, keepdim=True) * k.c).clamp(min=tiles.FLOOR.value)
    x = (z.double() * k.c - tail_peak).float()  # as fused
    power = x.exp2()
    shifted = (power * x.clamp(min=-1000)).sum(1, keepdim=True)
    tail = tail_peak, power.sum(1, keepdim=True), shifted
    found, token, target = k.named_logits[k.mask], k.ids[k.mask], k.targets[k.mask, None]
    peak, total, shifted = of(tiles.merge)(*tail, *(found[:, i : i + 1] for i in range(3)))
    target_logit = torch.where((target >= 0) & (target < k.columns), found[:, 3:4], torch.nan)
    own = of(tiles.logprob_and_entropy)(peak, total, shifted, target_logit, k.c)
    for values, expected in zip(own, (logprobs, entropy), strict=True):
        assert torch.allclose(values[:, 0], expected, atol=1e-5, rtol=1e-5, equal_nan=True)
    form, log_total = of(k.FORM), total.log2()
    log_p = torch.where(token >= 0, k.teacher_logprobs[k.mask].float(), 0)
    head, sums = of(topk_terms.named_terms)(
        token, target, found[:, 4:], log_p, peak, log_total, k.columns, k.c, form, k.NUMBERS
    )
    divergence, by_heads, mass, count, is_named = (each.sum(1, keepdim=True) for each in sums)
    by_tail = torch.zeros_like(divergence)
    if k.TAIL_FLOOR is not None:
        teacher = k.teacher_tails[k.mask, None].float()
        known = teacher, peak, log_total, *tail[:2], count, k.columns, form, k.NUMBERS, k.TAIL_FLOOR
        value, by_tail = of(topk_terms.tail_terms)(*known)
        divergence = divergence + value
    by = k.teacher_coef * k.teacher_weights[k.mask, None].float() * k.grad_scale
    slope, bend = slope[:, None], bend[:, None]
    rest = slope, bend, own[1], peak, total, *tail[:2], k.BONUS
    named, factor, bend = of(topk_terms.gradient_terms)(
        head, sums[2], by * sums[1], by * by_heads, by * by_tail, sums[4], *rest
    )
    gradient = power * (factor + (bend * x.clamp(min=-1000) if k.BONUS else 0))
    at = torch.where((target >= 0) & (target < k.columns), target, 0)
    gradient.scatter_add_(1, at, torch.where(is_named == 0, -slope, 0))
    for row, ids, values in zip(gradient, token, named, strict=True):
        row[ids[ids >= 0].long()] = values[ids >= 0]
    return [divergence[:, 0], mass[:, 0]], gradient
