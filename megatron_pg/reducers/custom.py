"""A user's own reducer, with the four arguments that slime and miles give it.

It is called on the CPU, once per micro-batch, with whole samples in any context-parallel layout; context
parallelism then slices the weights like any other token field. It must be linear in the per-token loss, add up over
samples, and not read masked slots: its token weights are its derivative, and the probe checks all of that on a tiny
step before training starts.
"""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_pg.cp_utils import whole_sequences
from megatron_pg.declarations.choices import REDUCER_PARAMETERS
from megatron_pg.flags.errors import ArgumentError, ArgumentWarning
from megatron_pg.flags.import_path import load_function

CustomReducer = Callable[..., Callable[[Tensor], Tensor]]

# Lengths and masks of three samples, whose counts are powers of two or three: exact in any cut.
_TINY_STEP = [6, 3, 7], [torch.tensor(m, dtype=torch.bool) for m in ([1, 0, 1, 1], [1, 1], [0, 1, 1, 1])]


def load_custom_reducer(path: str, *, calculate_per_token_loss: bool) -> CustomReducer:
    """Import the reducer at `path` and probe it.

    Raises:
        ArgumentError: rule E16, when the probe finds that its value depends on how the step is cut.
        ImportPathError: it cannot be imported or called.
    """
    reducer = load_function(path, REDUCER_PARAMETERS)
    if reason := _probe(reducer, calculate_per_token_loss):
        raise ArgumentError([("E16", f"custom reducer {path!r} {reason}")])
    weights = reducer_weights(reducer, *_TINY_STEP, calculate_per_token_loss=calculate_per_token_loss)
    if (weights < 0).any():
        warnings.warn(
            f"[W14] custom reducer {path!r} gives a token the negative weight {float(weights.min()):.3g}. Check its "
            "sign; the optimizer minimizes.",
            ArgumentWarning,
            stacklevel=2,
        )
    return reducer


def reducer_weights(
    reducer: CustomReducer,
    total_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    *,
    calculate_per_token_loss: bool,
) -> Tensor:
    """Derivative of the reducer with respect to each response token's loss, samples one after the other.

    Args:
        reducer: the user's function.
        total_lengths: prompt and response tokens of each sample.
        loss_masks: one [response length] bool mask per sample.
        calculate_per_token_loss: the per-token flag, which is passed on.

    Returns:
        [sum of response lengths] float64, without the 1/N_r (flag on: 1/T) that the plugin applies.

    Raises:
        ValueError: the reducer fails on these lengths, is not linear in the loss, or weighs a masked token.
    """
    if not loss_masks:  # an empty micro-batch: nothing to ask the user's code
        return torch.zeros(0, dtype=torch.float64)
    live, masks = torch.cat([mask.bool() for mask in loss_masks]), [mask.to(torch.int32) for mask in loss_masks]
    arguments = list(total_lengths), [len(mask) for mask in loss_masks], masks, calculate_per_token_loss
    point = torch.linspace(-1.0, 2.0, len(live), dtype=torch.float64)
    with whole_sequences(), torch.enable_grad():
        at_zero, weights = _value_and_gradient(reducer(*arguments), 0 * point)
        value, _ = _value_and_gradient(reducer(*arguments), point)
    if not torch.isfinite(weights).all():
        raise ValueError("the custom reducer gives a token a weight that is not finite. Check its divisions.")
    if weights[~live].any():
        raise ValueError("the custom reducer gives a masked token a weight. Multiply by the loss mask.")
    scale = (weights * point).abs().sum().clamp(min=1e-300)
    if at_zero != 0 or (value - weights @ point).abs() > 1e-6 * scale:  # a float32 reducer is fine
        raise ValueError(
            "the custom reducer is not linear in the per-token loss, so it has no token weights. Divide sums by "
            "counts that do not depend on the loss."
        )
    return weights


def _value_and_gradient(reduce: Callable[[Tensor], Tensor], point: Tensor) -> tuple[Tensor, Tensor]:
    x = point.clone().requires_grad_()
    value = reduce(x)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError(
            f"the custom reducer returned {value!r}, not a scalar tensor, so there is no loss. Return one number."
        )
    if not value.requires_grad:
        return value.detach().reshape(()), torch.zeros_like(x)
    (gradient,) = torch.autograd.grad(value.reshape(()), x)
    return value.detach().reshape(()), gradient


def _probe(reducer: CustomReducer, per_token: bool) -> str | None:
    """Why the reducer is refused, or None: the tiny step, whole and cut into single samples."""
    parts = [_TINY_STEP, *(([total], [mask]) for total, mask in zip(*_TINY_STEP, strict=True))]
    try:
        whole, *single = (reducer_weights(reducer, *part, calculate_per_token_loss=per_token) for part in parts)
        cut = torch.cat(single)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        return f"fails on a tiny step of whole samples: {type(error).__name__}: {error}"
    if not whole.any():
        return "has no gradient with respect to the per-token loss, so it trains nothing. Compute with that loss."
    if not torch.allclose(whole, cut, rtol=1e-6, atol=0):
        return (
            f"gives {whole.sum():.6g} in one micro-batch and {cut.sum():.6g} for the same data in three micro-batches. "
            "Divide by per-sample counts of the full sequence only."
        )
    return None
