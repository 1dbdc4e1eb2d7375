"""Vocabulary-parallel logits to log-probabilities and entropy, without gathering the vocabulary.

Each tensor-parallel rank reduces its slice of the vocabulary to four numbers per token; one all-gather of [T, 4]
combines them in rank order, so every rank ends with the same bits. The backward needs no collective.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

_FLOOR = -1000.0  # exp(_FLOOR) is 0 in every dtype, and _FLOOR * 0 is not NaN as -inf * 0 would be


def logprobs_and_entropy(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, tp_group: ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, both differentiable.

        p = softmax(z / tau),   logp_t = log p[target_t],   H_t = -sum_v p_v log p_v

    Computed in float32 (float64 for float64 logits).

    Args:
        logits: [T, V / tp] this rank's slice of the vocabulary, in rank order. Left unchanged.
        targets: [T] int64 in [0, V), global ids, equal on every rank of `tp_group`.
        temperature: tau > 0.
        tp_group: the tensor-parallel group; every rank of it must call. None: the vocabulary is whole.

    Returns:
        [T] log-probabilities in nats and [T] entropies in nats, equal on every rank; gradients reach the local slice.

    Raises:
        ValueError: shapes or dtypes differ from the above, or the temperature is not > 0.
    """
    check_logits(logits, targets, temperature)
    return _LogprobsAndEntropy.apply(logits, targets, temperature, tp_group)


class _LogprobsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature, tp_group):
        rank, size = (tp_group.rank(), tp_group.size()) if tp_group is not None else (0, 1)
        first = rank * logits.shape[1]
        local = targets - first
        owned = (local >= 0) & (local < logits.shape[1])
        local = torch.where(owned, local, 0)
        scaled = _compute_dtype(logits) / temperature
        stats = _combine(_statistics(scaled, local, owned), tp_group, size)
        log_sum = stats.sum.log()
        logprobs = stats.target - stats.max - log_sum
        entropy = log_sum - stats.shifted / stats.sum
        ctx.save_for_backward(logits, local, owned, stats.max, stats.sum, entropy)
        ctx.temperature = temperature
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        logits, local, owned, peak, total, entropy = ctx.saved_tensors
        shifted = _compute_dtype(logits) / ctx.temperature - peak[:, None]
        p = shifted.exp() / total[:, None]
        # dH/dz_j = -p_j (log p_j + H), with log p_j kept finite where p_j is 0
        log_p_plus_entropy = (shifted - (total.log() - entropy)[:, None]).clamp(min=_FLOOR)
        grad = p * (-grad_logprobs[:, None] - grad_entropy[:, None] * log_p_plus_entropy)
        at_target = grad.gather(1, local[:, None]) + torch.where(owned, grad_logprobs, 0)[:, None]
        grad.scatter_(1, local[:, None], at_target)
        return (grad / ctx.temperature).to(logits.dtype), None, None, None


class _Statistics(NamedTuple):
    """Per token, [T] each."""

    max: Tensor  # m = max z/tau
    sum: Tensor  # S = sum e^(z/tau - m)
    shifted: Tensor  # U = sum (z/tau - m) e^(z/tau - m)
    target: Tensor  # z/tau of the target, 0 where another rank owns it


def _statistics(scaled: Tensor, local: Tensor, owned: Tensor) -> _Statistics:
    finite = torch.finfo(scaled.dtype).min  # a slice of -inf only must not give -inf - -inf
    peak = scaled.amax(dim=1).clamp(min=finite)
    shifted = scaled - peak[:, None]
    weights = shifted.exp()
    # where, not a product: the target of another rank is none of this slice's business, NaN included
    target = torch.where(owned, scaled.gather(1, local[:, None])[:, 0], 0)
    return _Statistics(peak, weights.sum(dim=1), (weights * shifted.clamp(min=_FLOOR)).sum(dim=1), target)


def _combine(stats: _Statistics, tp_group: ProcessGroup | None, size: int) -> _Statistics:
    if tp_group is None or size == 1:
        return stats
    packed = torch.stack([stats.max, stats.sum, stats.shifted, stats.target], dim=1).contiguous()
    gathered = [torch.empty_like(packed) for _ in range(size)]
    torch.distributed.all_gather(gathered, packed, group=tp_group)
    peaks, totals, shifted, targets = torch.stack(gathered).unbind(dim=2)  # [tp, T] each
    peak = peaks.amax(dim=0)
    offset = peaks - peak
    scale = offset.exp()
    moved = (shifted + totals * offset.clamp(min=_FLOOR)) * scale
    return _Statistics(peak, (totals * scale).sum(dim=0), moved.sum(dim=0), targets.sum(dim=0))


def _compute_dtype(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def check_logits(logits: Tensor, targets: Tensor, temperature: float) -> None:
    """Refuse shapes, dtypes and temperatures that no log-probability can be made of."""
    if logits.dim() != 2 or not logits.dtype.is_floating_point:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)} and dtype {logits.dtype}, not [T, V / tp] floating point. Flatten them."
        )
    if targets.shape != logits.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets have shape {tuple(targets.shape)} and dtype {targets.dtype}, the logits need {tuple(logits.shape[:1])} "
            "int64, so tokens and logits would not align. Give one token id per row."
        )
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} is not > 0, so the distribution is undefined. Use the rollouts'.")
